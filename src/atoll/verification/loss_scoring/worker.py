"""An island's side of loss scores: it takes a step along what others show. What it shows itself: `outbox.py`.

The trainer looks at the loss, batch by batch, in a second model and whenever no round wants it; all else is done on
the arithmetic thread. What an update does not say by itself comes from vertices, never from its author.
Never says what a score means: vertices do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import ScoreResult, ScoreUpdate
from atoll.runtime.storage.state_cache import StateCache
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer.protocol import BeginScoring
from atoll.runtime.training_spec import TrainingSpec
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.data import cursor_after
from atoll.training.recipe.schedule import turn_of
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import moved, part_bounds, part_codecs
from atoll.verification.loss_scoring.policy import FALL_MOST, NAT
from atoll.verification.loss_scoring.tensors import SAMPLES, falls_of, fixed_point, moved_along, wires_from_bytes
from atoll.verification.state_validation.worker import looked


@dataclass
class LossScoringWorker:
    learning_in: Callable[[int], TrainingSpec]  # what a round is learned by
    store: PeerStore
    shelf: StateCache
    tended: TrainerSupervisor
    arithmetic: Executor
    ready: Callable[[], Awaitable[None]]  # the trainer runs; to be called in its turn
    name: Callable[[Buffer], Digest]  # what commitments call a wire

    async def score(self, work: ScoreUpdate) -> ScoreResult:
        loop = asyncio.get_running_loop()
        data = await asyncio.to_thread(self.store.read_blob, work.blob)
        learning = self.learning_in(work.round)
        before = await loop.run_in_executor(self.arithmetic, self.shelf.find, work.before, learning.layout)
        if data is None or before is None:
            raise RunFailedError("E-SCO-02", "what this score needs is not on this disk any more")
        try:
            x_F = await loop.run_in_executor(self.arithmetic, self._along, work, data, before)
        except PeerFault as fault:
            return ScoreResult((), fault.what)
        batch = work.batch or learning.recipe.batch
        if work.steps * batch < 2:
            raise RunFailedError("E-SCO-03", "it learned from one sample, whose luck nobody can tell")
        cursor = cursor_after(before.samples, work.shards)
        along = BeginScoring(
            drawn=work.drawn,
            shard=work.shard,
            shards=work.shards,
            cursor=cursor,
            samples=work.steps * batch,
            dealt=(cursor + work.steps_max * batch) * work.shards,
        )
        losses = [(await looked(self.tended, self.ready, along, at_F)).losses for at_F in (before.anchor_F, x_F)]
        falls = falls_of(*losses, own=min(SAMPLES, along.samples))
        return ScoreResult(fixed_point(falls, NAT, FALL_MOST))

    def _along(self, work: ScoreUpdate, data: Buffer, before: SharedState) -> Tensor:
        """The agreed state after a step along the update, if this is the one that was committed to."""
        learning = self.learning_in(work.round)
        lo, hi = turn_of(learning.recipe.schedule, learning.layout, before.round)
        bounds = part_bounds(hi - lo, work.shares)
        wires = wires_from_bytes(data, work.root, bounds, self.name)
        common = learning.common(work.round, before, work.before)
        codecs = part_codecs(learning.recipe_after(before).coding.up, common, moved(bounds, lo))
        return moved_along(before.anchor_F, wires, bounds, codecs, lo)
