"""What one attempt of one round needs to know about its reduce. A pure value, the same at every peer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from atoll.base.ids import PeerId, Seconds
from atoll.protocol.allreduce.topology import ReduceTopology

BEGUN_WINDOWS = 5  # without a clock: an owner that is heard and does not answer is waited for so many windows
BEGUN_SLOWEST_BYTES_S = 250_000  # and an uplink of 2 Mbit/s has a third of a window for a whole update
BEGUN_PACES = 4  # but where members may lie, no more than so many times what all but the liars took


@dataclass(frozen=True)
class ReducePlan:
    round: int
    attempt: int
    trace: str
    topology: ReduceTopology
    listeners: tuple[PeerId, ...]  # who gets the answers: every member and observer, in plan order
    answer_until: tuple[Seconds, ...]  # run time by which owner 0, 1, … must have answered
    statistic: str = "mean"  # what the rows of a part become
    liars: int = 0  # that the statistic withstands
    rows_least: int = 0  # of members whose rows count: with fewer a part has no answer
    witnesses: int = 0  # owners after the first who combine every part too, and sign what they got
    juries: tuple[tuple[PeerId, ...], ...] = ()  # of each part: who makes doubted answers again, for everybody
    verdict: int = 0  # so many of its first owners and its jury who say the same are believed
    weighs: bool = False  # by distances between whole updates: owners compare rows before they combine them
    mixes: bool = False  # rows with their neighbours, by these distances, and sorts what comes of it
    weightless: frozenset[PeerId] = frozenset()  # newcomers: their rows are named and move nothing
    rowless: frozenset[PeerId] = frozenset()  # listeners that only listen: no row is theirs
    window_s: Seconds = 6.0  # of one owner
    has_clock: bool = True  # else rounds begin when their work is there, and `answer_until` only says how long
    influence: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])  # on rows, after distances
    opened: bool = False  # blocks of answers are opened: owners say which commitments they combined, and keep rows
    reserves: tuple[PeerId, ...] = ()  # who takes parts that no owner answers for, the first that is left
    reserves_until: Seconds = 0.0  # run time by which they must have answered; not before the last owner's
    may_lie: bool = False  # members may: nobody stands in for owners that are there
    stretch: float = 1.0  # how many times as long as agreed windows are, once it has begun

    @cached_property
    def givers(self) -> frozenset[PeerId]:
        """Whose rows there can be."""
        return self.hearers - self.rowless

    @cached_property
    def hearers(self) -> frozenset[PeerId]:
        """Who gets the answers, in no order: asked with every word about a row."""
        return frozenset(self.listeners)

    @cached_property
    def place(self) -> Mapping[PeerId, int]:
        """Where each of them stands in plan order."""
        return {peer: index for index, peer in enumerate(self.listeners)}

    @property
    def parts(self) -> int:
        return len(self.topology.parts)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of all parts."""
        return tuple(tree.share for tree in self.topology.parts)

    def enough(self, contributors: Collection[PeerId]) -> bool:
        """Whether an answer made of these rows can be what the statistic promises."""
        return len(self.settled(contributors)) >= self.rows_least

    def settled(self, contributors: Collection[PeerId]) -> list[PeerId]:
        """Those whose rows count, in the order given."""
        return [name for name in contributors if name not in self.weightless]

    def watchers(self, part: int) -> tuple[PeerId, ...]:
        """The owners that combine this part without waiting for their turn."""
        return self.owners(part)[: self.witnesses + 1]

    def owners(self, part: int) -> tuple[PeerId, ...]:
        return self.topology.parts[part].owners

    def takers(self, part: int) -> tuple[PeerId, ...]:
        """Who may answer for it, by their owner index: its owners, and behind them reserves."""
        return with_reserves(self.owners(part), self.reserves)

    def signers(self, part: int) -> tuple[PeerId, ...]:
        """Who may say what its rows make, by their owner index: its takers, and behind them its jury."""
        return self.takers(part) + (self.juries[part] if self.juries else ())

    def signer(self, part: int, index: int) -> PeerId | None:
        """The one with this owner index; nobody if the plan has none."""
        owners = self.owners(part)
        signers = owners if index < len(owners) else self.signers(part)
        return signers[index] if 0 <= index < len(signers) else None

    def stands_in(self, part: int, index: int) -> bool:
        """Is this the index of a reserve?"""
        return len(self.owners(part)) <= index < len(self.takers(part))

    def opens(self, part: int, peer: PeerId) -> bool:
        """Does this voter make doubted answers again itself? Without a jury everybody does."""
        return not self.juries or peer in self.owners(part) or peer in self.juries[part]

    @property
    def distrusts(self) -> bool:
        """Some members may lie."""
        return bool(self.witnesses) or self.weighs or self.opened

    def begun(self, now: Seconds, update_bytes: int = 0, pace_s: Seconds | None = None) -> ReducePlan:
        """Where there is no clock, windows are counted from when the sharing began here, and are longer.

        Long enough for `update_bytes` on slow links: whoever is heard may still be sending, and the dead are
        noticed by their silence. A liar could keep all waiting for all of it. So where some may lie, `pace_s` after
        the beginning, when all but as many had sent me what I combine, says how slow links are.
        """
        if self.has_clock:
            return self
        slow_s = 3 * update_bytes * (1 + self.witnesses) / BEGUN_SLOWEST_BYTES_S  # each row goes to all of them
        if pace_s is not None:
            slow_s = min(slow_s, BEGUN_PACES * pace_s)
        stretch = max(BEGUN_WINDOWS, slow_s / self.window_s)
        first = self.answer_until[0] - self.window_s
        until = [now + stretch * (t - first) for t in (*self.answer_until, self.reserves_until)]
        own = {"answer_until": tuple(until[:-1]), "reserves_until": until[-1]}
        return replace(self, **own, window_s=stretch * self.window_s, stretch=stretch)

    @property
    def others_rows_s(self) -> Seconds:
        """How long an owner that has begun waits for rows that only others hear: words, which need no more time
        where calls give owners more of it."""
        return self.window_s / 12 / self.stretch

    def gather_until(self, owner_index: int, thirds: int) -> Seconds:
        """An owner gathers for two thirds of its window, who hands on for one third; the rest is for the way."""
        return self.until(owner_index) - thirds * self.window_s / 3

    def until(self, owner_index: int) -> Seconds:
        """By when it has answered; whoever stands behind all owners, by the reserves' end."""
        if owner_index < len(self.answer_until):
            return self.answer_until[owner_index]
        return max(self.reserves_until, self.answer_until[-1])


def with_reserves(owners: tuple[PeerId, ...], reserves: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """Whoever may answer for a part, in the order in which it is their turn."""
    return (*owners, *(peer for peer in reserves if peer not in owners)) if reserves else owners
