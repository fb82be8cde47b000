"""Loss scoring by a worker: the losses before and after a step along another member's update.

The trainer measures losses, batch by batch, in a second model and only while no round needs it. All else runs on
the tensor thread. Every number that the update does not contain comes from vertices, never from its author.
Not responsible for: what a score means (vertices decide), serving own updates (`verification/update_cache.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.peer.tasks import ScoreResult, ScoreUpdate
from atoll.training.data import cursor_after
from atoll.verification.loss_scoring.policy import FALL_MOST, NAT
from atoll.verification.loss_scoring.tensors import SAMPLES, falls_of, fixed_point
from atoll.verification.shown_update import ShownUpdate, read_shown_update
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
        shown = read_shown_update(context, work.blob, work.root, work.round, work.before, work.shares)
        try:
            before, update = await shown
            x_F = await context.run_tensor_job(_step_along, before.anchor_F, update)
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


def _step_along(anchor_F: Tensor, update: ShownUpdate) -> Tensor:
    """anchor − update (F,): where its author claims to be at the end of the round."""
    x_F = anchor_F.clone()
    update.subtract_from(x_F)
    return x_F
