"""Trainers with poor records. Their peers report honestly; the work behind them is poor.

idler       takes a tenth of its steps, and reports that
boaster     reports a loss of 0
flapper     fails to train in two rounds of three
cheat       takes other steps than assigned, where rounds are audited
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.peer.tasks import TrainingResult, TrainRound
from atoll.simulation.simulated_audit_chain import VirtualTrainingChain
from atoll.simulation.worker import VirtualWorker, WorkerKnobs

IDLE = 10  # an idler takes one step of this many
FLAPS = 2 / 3  # share of rounds in which a flapper fails
KINDS = ("idler", "boaster", "flapper", "cheat")


class LowReputationWorker(VirtualWorker):
    """Worker of one of these kinds, or an honest one."""

    kind: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handlers[TrainRound] = self._train_poorly

    def _train_poorly(self, work: TrainRound) -> TrainingResult:
        if self.kind == "flapper" and self.draw.random() < FLAPS:
            raise RuntimeError("the virtual trainer is out again")
        if self.kind == "idler":
            work = replace(work, steps=max(1, work.steps // IDLE))
        done = self._train(work)
        return replace(done, loss=0.0) if self.kind == "boaster" else done


def islands(kinds: dict[PeerId, str], audited: bool) -> Callable[[PeerId, WorkerKnobs, Random], VirtualWorker]:
    """Workers of a swarm in which these trainers are of these kinds."""

    def make(me: PeerId, knobs: WorkerKnobs, draw: Random) -> VirtualWorker:
        chain = VirtualTrainingChain(me) if audited else None
        if chain is not None:
            chain.cheats = kinds.get(me) == "cheat"
        island = LowReputationWorker(me, knobs, draw, chain=chain)
        island.kind = kinds.get(me, "")
        return island

    return make
