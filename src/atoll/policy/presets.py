"""What `run.trust` stands for: one table, from which whatever a founder leaves open is taken, with its reasons.

Everything in it can be written differently in run.toml. A default is never more than the run can keep: audits of
what cannot be audited are left out and said to be, whereas the same words written by a person are refused with an
error. Among strangers ("open") both are refused: what is left of such a run somebody has to write. Where members
may lie, fewer than withstand one liar are refused. Never looks at a run that was founded: its genesis
says what it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from atoll.base.limits import WEIGHED_ROWS_MAX
from atoll.policy.fault_tolerance import CAPTURED, DISTANCES, StatisticName, peers_for_one_liar
from atoll.policy.plan import QuorumRule
from atoll.verification.state_validation.policy import VALIDATE_EVERY_MAX
from atoll.verification.sum_check.policy import SHARE

LOOKED_STEPS = 100  # a look costs as much as training on 45 samples: 3 % beside 100 steps of 16, for two in three

Trust = Literal["private", "community", "open"]


@dataclass(frozen=True)
class TrustPreset:
    quorum: QuorumRule
    tolerance: float  # share of members that may lie
    witnessed: bool  # owners of parts check each other
    statistics: tuple[StatisticName, ...]  # the first of these that enough members wait for; else a mean
    audit_rate: float  # of rounds of trainers
    reputation: bool
    vote_after_rounds: int  # that counted, before a member votes that came after training began
    sponsor_rounds: int  # that counted, before all of one invitation may vote
    openings: float  # of every answer, that its owner opens to others afterwards
    captured: float  # of all parts, that liars may own by themselves: openings find what they say there
    looked_steps: int  # optimizer steps between two looks at the agreed model; 0: no look
    withstands: str
    does_not: str


PRESETS: dict[Trust, TrustPreset] = {
    # one person's or one company's machines: whatever costs bytes or steps to find liars would find none
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
    # people who invited each other, so names are dear: half of those who cheat are drawn within 34 rounds, or 9 if
    # they are new; owners' comparisons are believed, so whole updates can be weighed, which finds liars in the
    # spread of values; of their sums a few blocks are made again afterwards, which costs hardly any bytes
    "community": TrustPreset(
        quorum="two-thirds",
        tolerance=0.33,
        witnessed=False,
        statistics=("robust", "trimmed_mean"),
        audit_rate=0.02,
        reputation=True,
        vote_after_rounds=10,
        sponsor_rounds=50,
        openings=SHARE,
        captured=0.0,
        looked_steps=LOOKED_STEPS,
        withstands="a third that lies about what was agreed, poisoned updates, work that nobody did; owners "
        "that sum wrongly are found within a few rounds",
        does_not="what a false sum did until then; owners that lie about distances, or leave rows out; strangers "
        "with many names",
    ),
    # strangers: half of those who cheat are drawn within 14 rounds even if they are trusted, within 4 if they are
    # new; owners are not believed, so rows are sorted value by value, which every other owner can do again. As many
    # of them do as leave liars alone with hardly any part: with every witness more, all rows travel once more
    "open": TrustPreset(
        quorum="two-thirds",
        tolerance=0.33,
        witnessed=True,
        statistics=("trimmed_mean",),
        audit_rate=0.05,
        reputation=True,
        vote_after_rounds=10,
        sponsor_rounds=50,
        openings=SHARE,  # of the few parts that only liars made again
        captured=CAPTURED,
        looked_steps=LOOKED_STEPS,
        withstands="all of that, and owners that lie: sums are made again, and whoever is proven a liar is out",
        does_not="a third of all members under one hand, however it came by its names; in a few parts, what owners "
        "that lie together say until they are found out",
    ),
}

# what no statistic of a preset fits, said where members bring data of their own; the fix is the caller's
UNLIKE = (
    "if members' data have little in common, whoever alone knows something is taken for a liar, and what it knows "
    "is not learned"
)

# why trust = "open" has no statistic that weighs rows by distances
UNCHECKED = (
    "it weighs whole updates by the distances that owners report, which no other member checks, and "
    'trust = "open" believes no owner alone'
)


def looked_every(preset: TrustPreset, turn_steps: int) -> int:
    """Training rounds of so many steps after which members look at the agreed model; 0: never."""
    return min(VALIDATE_EVERY_MAX, ceil(preset.looked_steps / max(turn_steps, 1)))


def statistic_of(preset: TrustPreset, tolerance: float, least: int, most: int) -> StatisticName:
    """The rule that a run takes which trains with `least` members and waits for `most`, if nobody says another."""
    for name in preset.statistics:
        if name in DISTANCES and most > WEIGHED_ROWS_MAX:
            continue
        if least >= peers_for_one_liar(tolerance, name):
            return name
    return "mean"
