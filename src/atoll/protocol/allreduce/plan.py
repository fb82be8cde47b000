"""Plan of the all-reduce in one attempt of one round. A pure value, the same at every peer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from atoll.base.ids import PeerId, Seconds
from atoll.protocol.allreduce.topology import ReduceTopology

BEGUN_WINDOWS = 5  # windows to wait, without a clock, for an owner that is heard and does not answer
BEGUN_SLOWEST_BYTES_S = 250_000  # 2 Mbit/s: such an uplink sends a whole update in a third of a window
BEGUN_PACES = 4  # if members may lie: the most times that rows of all but `liars` members took


@dataclass(frozen=True)
class ReducePlan:
    round: int
    attempt: int
    trace: str
    topology: ReduceTopology
    recipients: tuple[PeerId, ...]  # recipients of results: every member and observer, in plan order
    answer_until: tuple[Seconds, ...]  # run time, in seconds, by which owner 0, 1, … must have answered
    statistic: str = "mean"  # name of the statistic that combines the rows of a part
    liars: int = 0  # false rows that the statistic withstands
    rows_least: int = 0  # rows that count: with fewer a part has no result
    witnesses: int = 0  # owners after the first that combine every part too, and sign their result
    juries: tuple[tuple[PeerId, ...], ...] = ()  # by part: voters that recompute disputed results for all
    verdict: int = 0  # first owners and jurors that must agree on a result
    has_distance_weights: bool = False  # rows weigh by distances between whole updates: owners compare rows first
    has_mixtures: bool = False  # each row is mixed with its nearest rows, and the mixtures are sorted
    weightless: frozenset[PeerId] = frozenset()  # newcomers: their rows are listed and weigh nothing
    rowless: frozenset[PeerId] = frozenset()  # listeners without rows
    unsettled: frozenset[PeerId] = frozenset()  # observers and newcomers: they may still download a state
    window_s: Seconds = 6.0  # time of one owner
    has_clock: bool = True  # False: rounds begin with their work, and `answer_until` gives durations only
    influence: Mapping[PeerId, int] = field(
        default_factory=dict[PeerId, int]
    )  # factors of row weights, after distances
    is_audited: bool = False  # blocks of results are audited: owners name commitments and keep rows
    reserves: tuple[PeerId, ...] = ()  # peers that stand in for owners that are all gone, in order
    reserves_until: Seconds = 0.0  # run time, in seconds, by which reserves must have answered
    may_lie: bool = False  # members may lie: no reserve stands in for a live owner
    stretch: float = 1.0  # own windows over agreed windows, after the start without a clock

    @cached_property
    def authors(self) -> frozenset[PeerId]:
        """Possible authors of rows."""
        return self.recipient_set - self.rowless

    @cached_property
    def recipient_set(self) -> frozenset[PeerId]:
        """The listeners as a set, for lookups with every message."""
        return frozenset(self.recipients)

    @cached_property
    def place(self) -> Mapping[PeerId, int]:
        """Position of each listener in plan order."""
        return {peer: index for index, peer in enumerate(self.recipients)}

    @property
    def parts(self) -> int:
        return len(self.topology.parts)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of all parts."""
        return tuple(tree.share for tree in self.topology.parts)

    def is_enough(self, contributors: Collection[PeerId]) -> bool:
        """Whether the statistic keeps its promise with these rows."""
        return len(self.with_weight(contributors)) >= self.rows_least

    def with_weight(self, contributors: Collection[PeerId]) -> list[PeerId]:
        """Contributors with rows that count, in the order given."""
        return [name for name in contributors if name not in self.weightless]

    def parallel_owners(self, part: int) -> tuple[PeerId, ...]:
        """The first owner and its witnesses, which combine the part in parallel."""
        return self.owners(part)[: self.witnesses + 1]

    def owners(self, part: int) -> tuple[PeerId, ...]:
        return self.topology.parts[part].owners

    def owners_and_reserves(self, part: int) -> tuple[PeerId, ...]:
        """Peers that may answer, by owner index: owners, then reserves."""
        return with_reserves(self.owners(part), self.reserves)

    def signers(self, part: int) -> tuple[PeerId, ...]:
        """Peers that may sign a result, by owner index: owners, reserves, then the jury."""
        return self.owners_and_reserves(part) + (self.juries[part] if self.juries else ())

    def signer(self, part: int, index: int) -> PeerId | None:
        """The signer with this owner index; None if the plan has none."""
        owners = self.owners(part)
        signers = owners if index < len(owners) else self.signers(part)
        return signers[index] if 0 <= index < len(signers) else None

    def stands_in(self, part: int, index: int) -> bool:
        """Whether this is the index of a reserve."""
        return len(self.owners(part)) <= index < len(self.owners_and_reserves(part))

    def recomputes_disputes(self, part: int, peer: PeerId) -> bool:
        """Whether this voter recomputes disputed results itself; without a jury every voter does."""
        return not self.juries or peer in self.owners(part) or peer in self.juries[part]

    @property
    def is_distrusting(self) -> bool:
        """Whether some members may lie."""
        return bool(self.witnesses) or self.has_distance_weights or self.is_audited

    def started_at(self, now: Seconds, update_bytes: int = 0, pace_s: Seconds | None = None) -> ReducePlan:
        """Without a clock: the same plan with windows that start at `now`, and are longer.

        They suffice for `update_bytes` on slow links: a peer that is heard may still be sending, and a dead peer is
        noticed by its silence. A liar could make all wait for all of it. So if members may lie, `pace_s` limits the
        windows: the time in which all but `liars` members sent their rows.
        """
        if self.has_clock:
            return self
        slow_s = (
            3 * update_bytes * (1 + self.witnesses) / BEGUN_SLOWEST_BYTES_S
        )  # each row goes to all parallel owners
        if pace_s is not None:
            slow_s = min(slow_s, BEGUN_PACES * pace_s)
        stretch = max(BEGUN_WINDOWS, slow_s / self.window_s)
        first = self.answer_until[0] - self.window_s
        until = [now + stretch * (t - first) for t in (*self.answer_until, self.reserves_until)]
        own = {"answer_until": tuple(until[:-1]), "reserves_until": until[-1]}
        return replace(self, **own, window_s=stretch * self.window_s, stretch=stretch)

    @property
    def others_rows_s(self) -> Seconds:
        """Seconds that an owner waits for rows that only others hear.

        The requests are small, and need no more time in stretched windows.
        """
        return self.window_s / 12 / self.stretch

    def gather_until(self, owner_index: int, thirds: int) -> Seconds:
        """Run time when `thirds` thirds of this owner's window are left.

        An owner gathers for two thirds of its window, a relay for one third; the rest is for the way.
        """
        return self.until(owner_index) - thirds * self.window_s / 3

    def until(self, owner_index: int) -> Seconds:
        """Run time by which this owner must have answered; for a reserve, the reserves' end."""
        if owner_index < len(self.answer_until):
            return self.answer_until[owner_index]
        return max(self.reserves_until, self.answer_until[-1])


def with_reserves(owners: tuple[PeerId, ...], reserves: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """Peers that may answer for a part, in the order of their turns."""
    return (*owners, *(peer for peer in reserves if peer not in owners)) if reserves else owners
