"""Defaults of `trust` for runs of user loops: combining rule, least number of members, and missing protections.

`atoll up` uses the same table for a run.toml (`peer/config`).

Invariants:
- A rule that would withstand no liar is refused.
- Protections that such a run cannot have are reported.
Not responsible for: the model, or who joins.
"""

from __future__ import annotations

from atoll.base.errors import UsageError
from atoll.base.units import counted_text
from atoll.policy.fault_tolerance import DISTANCES, StatisticName, peers_for_one_liar
from atoll.policy.presets import PRESETS, UNCHECKED, UNLIKE, Trust, TrustPreset, statistic_of
from atoll.training.recipe.recipes import Recipe
from atoll.verification.sum_check.tensors import unopened


def rule_of(
    trust: Trust, chosen: StatisticName | None, start_peers: int, min_peers: int
) -> tuple[StatisticName, int]:
    """Combining rule and least number of members of a round. UsageError for settings that withstand no liar.

    `chosen` None: the default rule of `trust` for this number of members. `min_peers` 0: as many as the rule needs
    to withstand one liar, so that a run that shrinks waits instead of falling back to a mean.
    """
    preset, least = PRESETS[trust], min_peers or start_peers
    if min_peers > start_peers:
        raise UsageError(
            "E-ATT-15",
            f"min_peers={min_peers} must not be more than start_peers={start_peers}",
            fix=f"atoll.found(start_peers={min_peers}), or a lower min_peers",
        )
    if trust == "private":
        if chosen not in (None, "mean"):
            raise UsageError(
                "E-ATT-15",
                f'statistic="{chosen}" withstands liars, but trust="private" assumes that there are none',
                fix='atoll.found(trust="community"), or leave statistic out',
            )
        return "mean", min_peers or 1
    if trust == "open" and chosen in DISTANCES:
        raise UsageError(
            "E-ATT-15",
            f'statistic="{chosen}" cannot work with trust="open"',
            cause=UNCHECKED,
            fix='RunOptions(statistic="trimmed_mean"), or "median" or "meamed"; or atoll.found(trust="community", '
            f'options=RunOptions(statistic="{chosen}")), where openings check the sums of owners',
        )
    statistic = chosen or statistic_of(preset, preset.tolerance, least, start_peers)
    needed = peers_for_one_liar(preset.tolerance, statistic)
    if least < needed:
        what = f'trust="{trust}"' if chosen in (None, "mean") else f'trust="{trust}" with statistic="{chosen}"'
        raise UsageError(
            "E-ATT-15",
            f"{what} withstands no liar among {counted_text(least, 'member')}",
            cause=f"if {preset.tolerance:.0%} of the members may lie, {needed} are needed to withstand one liar",
            fix=f"atoll.found(start_peers={needed}, …) or more, in atoll.local peers={needed}"
            + f"; and min_peers={needed} or more, or none" * bool(min_peers)
            + '; or trust="private", if members do not lie',
        )
    return statistic, min_peers or needed


def forgone(
    trust: Trust, chosen: StatisticName | None, statistic: StatisticName, recipe: Recipe
) -> tuple[str, ...]:
    """Protections of this level of trust that the run lacks, as text for people."""
    preset, lacks = PRESETS[trust], list[str]()
    if chosen is None and statistic != "mean":
        community = "" if trust == "community" else 'trust="community", '
        lacks.append(f'{UNLIKE}; found such a run with {community}RunOptions(statistic="clipped_caf")')
    if preset.audit_rate:
        lacks.append(
            "no training is audited and no records are kept, since a loop runs its user's own code on its own data"
        )
    if why := _unopened(preset, recipe):
        instead = (
            "as many owners combine every part as may lie" if preset.witnessed else "sums of owners are not checked"
        )
        lacks.append(f"{instead}: {why}")
    return tuple(lacks)


def opened_share(trust: Trust, recipe: Recipe) -> float:
    """Share of every result that its owner opens to other members."""
    preset = PRESETS[trust]
    return 0.0 if _unopened(preset, recipe) else preset.openings


def _unopened(preset: TrustPreset, recipe: Recipe) -> str:
    """Reason why results are not opened although trust requires it; else empty."""
    why = unopened(recipe) if preset.openings else None
    return (why or "").replace("sync.", "")
