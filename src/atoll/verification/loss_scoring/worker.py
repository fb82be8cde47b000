"""Loss scoring by a worker: the losses before and after a step along another member's update.

The trainer measures losses, batch by batch, in a second model and only while no round needs it. All else runs on
the tensor thread. Every number that the update does not contain comes from vertices, never from its author.
Not responsible for: what a score means (vertices decide), serving own updates (`verification/update_cache.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import ScoreResult, ScoreUpdate
from atoll.training.data import cursor_after
from atoll.training.recipe.schedule import turn_of
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import moved, part_bounds, part_codecs
from atoll.verification.loss_scoring.policy import FALL_MOST, NAT
from atoll.verification.loss_scoring.tensors import SAMPLES, falls_of, fixed_point, moved_along, wires_from_bytes
from atoll.worker.context import Handlers, WorkerContext
from atoll.worker.evaluation import measure_losses
from atoll.worker.trainer_commands import BeginScoring


def handlers(context: WorkerContext) -> Handlers:
    return {ScoreUpdate: LossScoringWorker(context).score}


@dataclass(frozen=True)
class LossScoringWorker:
    context: WorkerContext

    async def score(self, work: ScoreUpdate) -> ScoreResult:
        context, spec = self.context, self.context.spec_of(work.round)
        data = await asyncio.to_thread(context.blobs.read_blob, work.blob)
        before = await context.find_state(work.before, spec)
        if data is None or before is None:
            raise RunFailedError("E-SCO-02", "the update or the state to score is no longer on this disk")
        try:
            x_F = await context.run_tensor_job(self._step_along, work, data, before)
        except PeerFault as fault:
            return ScoreResult((), fault.what)
        batch = work.batch or spec.recipe.batch
        if work.steps * batch < 2:
            raise RunFailedError(
                "E-SCO-03", "the update was trained on a single sample; at least two are needed to estimate noise"
            )
        cursor = cursor_after(before.samples, work.shards)
        along = BeginScoring(
            drawn=work.drawn,
            shard=work.shard,
            shards=work.shards,
            cursor=cursor,
            samples=work.steps * batch,
            dealt=(cursor + work.steps_max * batch) * work.shards,
        )
        losses = [(await measure_losses(context, along, at_F)).losses for at_F in (before.anchor_F, x_F)]
        falls = falls_of(*losses, own=min(SAMPLES, along.samples))
        return ScoreResult(fixed_point(falls, NAT, FALL_MOST))

    def _step_along(self, work: ScoreUpdate, data: Buffer, before: SharedState) -> Tensor:
        """The agreed state after a step along the update, (F,). PeerFault unless it is the committed one."""
        spec = self.context.spec_of(work.round)
        lo, hi = turn_of(spec.recipe.schedule, spec.layout, before.round)
        bounds = part_bounds(hi - lo, work.shares)
        wires = wires_from_bytes(data, work.root, bounds, self.context.wire_digest)
        common = spec.round_inputs(work.round, before, work.before)
        codecs = part_codecs(spec.recipe_after(before).coding.up, common, moved(bounds, lo))
        return moved_along(before.anchor_F, wires, bounds, codecs, lo)
