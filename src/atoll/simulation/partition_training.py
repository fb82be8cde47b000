"""Simulated trainer of a partitioned peer, with exact accounts of its steps.

Steps are numbers here, so that they can be counted: `taken` of them are held, in flight, given, dropped or lost in
a crash, and vertices report how many were given. It never reads a vertex: it only knows what its peer passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.ids import ZERO_DIGEST, Digest
from atoll.peer.tasks import TrainWithoutQuorum
from atoll.wire.messages.statements import StepsTakenWhilePartitioned


@dataclass
class OfflineSteps:
    out: int = 0  # steps since the partition began
    held: int = 0  # late work that waits for a round
    since: int = 0  # round in which that began
    merge: bool = False
    taken: int = 0
    dropped: int = 0
    lost: int = 0  # upper bound of steps lost in crashes: in-flight ones may have been counted
    adopted: int = -2  # last adopted round
    head: Digest = ZERO_DIGEST  # its vertex
    private: tuple[Digest, int, int] = (ZERO_DIGEST, 0, 0)  # on disk: (vertex, steps held, round of their start)

    def may_take(self, work: TrainWithoutQuorum) -> int:
        return max(0, min(work.steps, work.steps_max - self.held - self.out))

    def take(self, work: TrainWithoutQuorum) -> int:
        if work.round <= self.adopted:
            raise RuntimeError("the round is over: it was agreed without this peer")
        steps, self.merge = self.may_take(work), work.merge
        self.since = self.since if self.held or self.out else work.round
        self.out, self.taken = self.out + steps, self.taken + steps
        if self.merge:
            self.kept(self.head)
        return steps

    def late(self, round: int, batch: int) -> StepsTakenWhilePartitioned | None:
        """Late share that rides on the update of this round."""
        return (
            StepsTakenWhilePartitioned(self.since, self.held, self.held * batch)
            if self.held and self.since < round
            else None
        )

    def back(self, round: int, counted: tuple[bool, ...] | None, late: bool, steps: int) -> None:
        """End the round in flight; `steps` of it count as late if it was not counted."""
        self.adopted = round
        if late:
            self.held = 0
        if self.out and self.merge and counted and not any(counted):
            self.out, self.taken = self.out + steps, self.taken + steps
        if self.merge:
            self.held += self.out
        else:
            self.dropped += self.out
        self.out = 0

    def forget(self) -> None:
        self.dropped, self.held = self.dropped + self.held, 0

    def kept(self, vertex: Digest) -> None:
        self.head, self.private = vertex, (vertex, self.held + self.out, self.since)

    def crash(self) -> None:
        self.lost, self.held, self.out = self.lost + self.held + self.out, 0, 0

    def restored(self, round: int, vertex: Digest) -> None:
        self.adopted, self.head = round, vertex
        if self.private[0] == vertex and not self.held:  # after a restart; otherwise the same values are in memory
            _, self.held, self.since = self.private
            self.lost -= self.held
