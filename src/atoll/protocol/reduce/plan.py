"""What one attempt of one round needs to know about its reduce. A pure value, the same at every peer."""

from __future__ import annotations

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

    @property
    def parts(self) -> int:
        return len(self.topology.parts)

    def owners(self, part: int) -> tuple[PeerId, ...]:
        return self.topology.parts[part].owners
