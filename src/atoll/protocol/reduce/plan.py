"""What one attempt of one round needs to know about its reduce. A pure value, the same at every peer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from atoll.base.ids import PeerId, Seconds
from atoll.protocol.reduce.topology import Topology


@dataclass(frozen=True)
class ReducePlan:
    round: int
    attempt: int
    trace: str
    topology: Topology
    listeners: tuple[PeerId, ...]  # who gets the answers: every member and observer, in plan order
    answer_until: tuple[Seconds, ...]  # run time by which owner 0, 1, … must have answered
    statistic: str = "mean"  # what the rows of a part become
    liars: int = 0  # that the statistic withstands
    rows_least: int = 0  # of members whose rows count: with fewer a part has no answer
    witnesses: int = 0  # owners after the first who combine every part too, and sign what they got
    weightless: frozenset[PeerId] = frozenset()  # newcomers: their rows are named and move nothing

    @property
    def parts(self) -> int:
        return len(self.topology.parts)

    def enough(self, contributors: Collection[PeerId]) -> bool:
        """Whether an answer made of these rows can be what the statistic promises."""
        return sum(name not in self.weightless for name in contributors) >= self.rows_least

    def watchers(self, part: int) -> tuple[PeerId, ...]:
        """The owners that combine this part without waiting for their turn."""
        return self.owners(part)[: self.witnesses + 1]

    def owners(self, part: int) -> tuple[PeerId, ...]:
        return self.topology.parts[part].owners
