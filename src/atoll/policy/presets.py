"""Trust presets: what `run.trust` stands for, as one table of defaults with reasons.

run.toml can override every entry. A default is never more than the run can keep: impossible audits are left out
with a notice, while an explicit setting for them is refused. With "open" both are refused, so the founder has to
choose. Where members may lie, fewer members than withstand one liar are refused.

Not responsible for: a founded run, which follows its genesis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from atoll.base.limits import WEIGHED_ROWS_MAX
from atoll.policy.capability_terms import OPENED_SHARE, VALIDATE_EVERY_MAX
from atoll.policy.fault_tolerance import CAPTURED, DISTANCES, StatisticName, peers_for_one_liar
from atoll.policy.plan import QuorumRule

# steps per evaluation, which costs as much as training on 45 samples: 3 % beside 100 steps of 16, at 2 of 3
LOOKED_STEPS = 100

Trust = Literal["private", "community", "open"]


@dataclass(frozen=True)
class TrustPreset:
    quorum: QuorumRule
    tolerance: float  # share of members that may lie
    witnessed: bool  # owners of parts check each other
    statistics: tuple[StatisticName, ...]  # the first one with enough members; else a mean
    audit_rate: float  # share of trainers' rounds
    reputation: bool
    vote_after_rounds: int  # counted rounds before a member that came after training began votes
    sponsor_rounds: int  # counted rounds before all members of one invitation may vote
    openings: float  # share of every result that its owner opens afterwards
    captured: float  # share of parts that liars may own alone: openings check them
    looked_steps: int  # optimizer steps between two evaluations of the agreed model; 0: none
    withstands: str
    does_not: str


PRESETS: dict[Trust, TrustPreset] = {
    # machines of one person or company: anything that finds liars would cost bytes or steps and find none
    "private": TrustPreset(
        quorum="majority",
        tolerance=0.0,
        witnessed=False,
        statistics=(),
        audit_rate=0.0,
        reputation=False,
        vote_after_rounds=0,
        sponsor_rounds=0,
        openings=0.0,
        captured=0.0,
        looked_steps=0,
        withstands="members that crash, freeze or lose their links, as long as more than half are there",
        does_not="a single liar",
    ),
    # people who invited each other, so names are dear. Half of the cheaters are drawn within 34 rounds, or 9 if
    # new. Owners' comparisons are trusted, so whole updates are weighted, which finds liars in the spread of
    # values; a few blocks of their sums are recomputed later, which costs few bytes
    "community": TrustPreset(
        quorum="two-thirds",
        tolerance=0.33,
        witnessed=False,
        statistics=("robust", "trimmed_mean"),
        audit_rate=0.02,
        reputation=True,
        vote_after_rounds=10,
        sponsor_rounds=50,
        openings=OPENED_SHARE,
        captured=0.0,
        looked_steps=LOOKED_STEPS,
        withstands="a third that lies about what was agreed, poisoned updates, work that was not done; owners "
        "that sum wrongly are found within a few rounds",
        does_not="what a false sum did until then; owners that lie about distances, or leave rows out; strangers "
        "with many names",
    ),
    # strangers: half of the cheaters are drawn within 14 rounds even if trusted, within 4 if new. Owners are not
    # trusted, so rows are sorted value by value, which every other owner can repeat. Enough owners do so that liars
    # own hardly any part alone; with every further one all rows travel once more
    "open": TrustPreset(
        quorum="two-thirds",
        tolerance=0.33,
        witnessed=True,
        statistics=("trimmed_mean",),
        audit_rate=0.05,
        reputation=True,
        vote_after_rounds=10,
        sponsor_rounds=50,
        openings=OPENED_SHARE,  # for the few parts that only liars computed
        captured=CAPTURED,
        looked_steps=LOOKED_STEPS,
        withstands="all of that, and owners that lie: sums are recomputed, and proven liars are expelled",
        does_not="a third of all members under one hand, however it came by its names; in a few parts, what owners "
        "that lie together say until they are found out",
    ),
}

# warning where members bring their own data, which no preset's statistic fits; the caller adds the fix
UNLIKE = (
    "if members' data have little in common, a member with rare data is taken for a liar, and its data is not "
    "learned"
)

# why trust = "open" has no statistic that weights rows by distances
UNCHECKED = (
    "it weighs whole updates by the distances that owners report, which no other member checks, and "
    'trust = "open" believes no owner alone'
)


def looked_every(preset: TrustPreset, turn_steps: int) -> int:
    """Training rounds of this many steps between evaluations of the agreed model; 0: never."""
    return min(VALIDATE_EVERY_MAX, ceil(preset.looked_steps / max(turn_steps, 1)))


def statistic_of(preset: TrustPreset, tolerance: float, least: int, most: int) -> StatisticName:
    """The default rule of a run that trains with `least` members and waits for `most`."""
    for name in preset.statistics:
        if name in DISTANCES and most > WEIGHED_ROWS_MAX:
            continue
        if least >= peers_for_one_liar(tolerance, name):
            return name
    return "mean"
