"""What `trust` stands for where the loops are their owners' own: the rule, how few members go on by it, and what is
lacking.

`atoll up` says the same of a run.toml (`peer/config`), out of the same table. Promises: a rule that would withstand
nobody is refused, what is left out because such a run cannot keep it is said. Never asks what the model is, or who
the members are.
"""

from __future__ import annotations

from atoll.base.errors import UsageError
from atoll.policy.fault_tolerance import DISTANCES, StatisticName, peers_for_one_liar
from atoll.policy.presets import PRESETS, UNCHECKED, UNLIKE, Trust, TrustPreset, statistic_of
from atoll.training.recipe.recipes import Recipe
from atoll.verification.sum_check.tensors import unopened


def rule_of(
    trust: Trust, said: StatisticName | None, start_peers: int, min_peers: int
) -> tuple[StatisticName, int]:
    """What rows become, and the members without which no round trains. UsageError for what would withstand nobody.

    Nothing `said`: what trust stands for, as far as members are waited for. `min_peers` 0: as many as the rule
    needs for one liar, so that a run that shrinks waits, and never goes on with a mean that nobody asked for.
    """
    preset, least = PRESETS[trust], min_peers or start_peers
    if min_peers > start_peers:
        raise UsageError(
            "E-ATT-15",
            f"min_peers={min_peers} must not be more than start_peers={start_peers}",
            fix=f"atoll.found(start_peers={min_peers}), or a lower min_peers",
        )
    if trust == "private":
        if said not in (None, "mean"):
            raise UsageError(
                "E-ATT-15",
                f'statistic="{said}" withstands liars, and trust="private" says that there are none',
                fix='atoll.found(trust="community"), or leave statistic out',
            )
        return "mean", min_peers or 1
    if trust == "open" and said in DISTANCES:
        raise UsageError(
            "E-ATT-15",
            f'statistic="{said}" cannot work with trust="open"',
            cause=UNCHECKED,
            fix='atoll.found(trust="open", statistic="trimmed_mean"), or "median" or "meamed"; or '
            f'atoll.found(trust="community", statistic="{said}"), where openings check the sums of owners',
        )
    statistic = said or statistic_of(preset, preset.tolerance, least, start_peers)
    needed = peers_for_one_liar(preset.tolerance, statistic)
    if least < needed:
        what = f'trust="{trust}"' if said in (None, "mean") else f'trust="{trust}" with statistic="{said}"'
        raise UsageError(
            "E-ATT-15",
            f"{what} withstands nobody among {least} members",
            cause=f"where {preset.tolerance:.0%} may lie it takes {needed} to withstand one liar",
            fix=f"atoll.found(start_peers={needed}, …) or more, in atoll.local peers={needed}"
            + f"; and min_peers={needed} or more, or none" * bool(min_peers)
            + '; or trust="private", if members do not lie',
        )
    return statistic, min_peers or needed


def forgone(trust: Trust, said: StatisticName | None, statistic: StatisticName, recipe: Recipe) -> tuple[str, ...]:
    """What this run lacks of what its trust stands for; for people."""
    preset, lacks = PRESETS[trust], list[str]()
    if said is None and statistic != "mean":
        community = "" if trust == "community" else 'trust="community", '
        lacks.append(f'{UNLIKE}; found such a run with {community}statistic="clipped_caf"')
    if preset.audit_rate:
        lacks.append(
            "nobody's work is audited, and no records are kept: what a loop did is its owner's own code and data"
        )
    if why := _unopened(preset, recipe):
        instead = (
            "as many owners combine every part as may lie" if preset.witnessed else "sums of owners are believed"
        )
        lacks.append(f"{instead}: {why}")
    return tuple(lacks)


def opened_share(trust: Trust, recipe: Recipe) -> float:
    """Of every answer, what its owner opens to others."""
    preset = PRESETS[trust]
    return 0.0 if _unopened(preset, recipe) else preset.openings


def _unopened(preset: TrustPreset, recipe: Recipe) -> str:
    """Why answers are not opened, though trust has it so; empty if they are, or need not."""
    why = unopened(recipe) if preset.openings else None
    return (why or "").replace("sync.", "")
