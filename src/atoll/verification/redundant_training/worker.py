"""Comparison of two updates from the same samples, by a referee that can replay the steps itself.

If the two updates differ by more than the tolerance, the referee's trainer makes the update again, step by step, in
a model of its own and only while no round needs it. Every number that the updates do not contain comes from
vertices, never from their authors.
Not responsible for: deciding which author cheated (vertices decide).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.peer.tasks import CompareRedundantUpdates, RedundantUpdateDistances
from atoll.training.data import cursor_after
from atoll.training.recipe.lr_position import horizon_of, position_of
from atoll.training.recipe.state import SharedState
from atoll.verification.redundant_training.policy import APART_MOST, MILLION, TOLERANCE
from atoll.verification.redundant_training.tensors import distance
from atoll.verification.shown_update import read_shown_update
from atoll.worker.context import Handlers, WorkerContext
from atoll.worker.evaluation import measure_losses
from atoll.worker.trainer_commands import BeginReplay


def handlers(context: WorkerContext) -> Handlers:
    return {CompareRedundantUpdates: RedundancyWorker(context).compare}


@dataclass(frozen=True)
class RedundancyWorker:
    context: WorkerContext

    async def compare(self, work: CompareRedundantUpdates) -> RedundantUpdateDistances:
        """Distances of both updates, in millionths. RunFailedError if a state or an update is gone here."""
        rows_F, before, why = list[Tensor | None](), None, ""
        for row in work.rows:
            shown = read_shown_update(self.context, row.blob, row.root, work.round, work.before, work.shares)
            try:
                before, update = await shown
                rows_F.append(await self.context.run_tensor_job(update.decode))
            except PeerFault as fault:
                rows_F.append(None)
                why = why or fault.what
        guest_F, host_F = rows_F
        if guest_F is None or host_F is None or before is None:
            return RedundantUpdateDistances((_missing(guest_F), _missing(host_F)), why)
        steps = tuple(row.steps for row in work.rows)
        between = _millionths(max(distance(guest_F, host_F), distance(host_F, guest_F)))
        if steps[0] == steps[1] and between <= TOLERANCE:
            return RedundantUpdateDistances((between, between))
        made_F = {count: await self._replay(work, before, count) for count in sorted(set(steps))}
        return RedundantUpdateDistances(
            (
                _millionths(distance(guest_F, made_F[steps[0]])),
                _millionths(distance(host_F, made_F[steps[1]])),
            )
        )

    async def _replay(self, work: CompareRedundantUpdates, before: SharedState, steps: int) -> Tensor:
        """The update (F,) that this number of steps on these samples makes."""
        recipe = self.context.spec_of(work.round).recipe
        wish = BeginReplay(
            work.shard,
            work.shards,
            cursor_after(before.samples, work.shards),
            steps,
            work.batch or recipe.batch,
            position_of(recipe, before),
            recipe.inner,
            horizon_of(recipe),
        )
        made = list[Tensor]()
        trainer = self.context.trainer.trainer
        await measure_losses(self.context, wish, before.anchor_F, lambda: made.append(trainer.made()))
        return made[0]


def _missing(row_F: Tensor | None) -> int:
    """The distance reported if only one of both updates can be read: the readable one is not accused."""
    return APART_MOST if row_F is None else 0


def _millionths(apart: float) -> int:
    return min(round(apart * MILLION), APART_MOST - 1) if isfinite(apart) else APART_MOST - 1
