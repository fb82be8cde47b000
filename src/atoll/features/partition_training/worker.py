"""Offline progress: steps that a partitioned member takes without a quorum, and their way into a later update.

    train      x continues from where it was handed over; that place is remembered
    rejoin     the difference becomes late work, and x is put back, as if it had stood still
    attach     late work rides on the next update with a weight, and is held until a vertex has it

Invariants:
- A step is in x, in late work or in an in-flight update, never in two of them.
Not responsible for: detecting a partition, and which rounds were agreed (the peer reports both, round by round).
"""

from __future__ import annotations

import time

from torch import Tensor

from atoll.features.partition_training.tensors import UpdateWithoutQuorum, carried
from atoll.peer.tasks import TrainingResult, TrainWithoutQuorum
from atoll.training.data import cursor_after
from atoll.training.recipe.lr_position import horizon_of, later, position_of
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState
from atoll.wire.messages.statements import StepsTakenWhilePartitioned
from atoll.worker.context import TrainerAccess
from atoll.worker.trainer_commands import TrainerCommandError


class PartitionedTrainer:
    def __init__(self, tended: TrainerAccess) -> None:
        self._tended = tended
        self.base_F: Tensor | None = None  # x at the begin of the partition; None: not partitioned
        self.since = 0  # round in which the partition began
        self.steps = 0  # steps taken since
        self.batch = 1  # samples per step
        self.merge = False  # whether the steps become late work; else they are dropped
        self.held: UpdateWithoutQuorum | None = None
        self.riding_F: Tensor | None = None  # late work in the in-flight update, (F,)

    async def train(self, work: TrainWithoutQuorum, state: SharedState, recipe: Recipe) -> TrainingResult:
        """More steps from x. The caller holds the turn of a ready trainer. Raises TrainerCommandError."""
        begin, trainer = time.monotonic(), self._tended.trainer
        if self.base_F is None:
            self.base_F, self.since, self.steps = trainer.read_x().clone(), work.round, 0
            self.batch, self.merge = recipe.batch, work.merge
        taken = self.steps + (self.held.steps if self.held is not None else 0)
        steps = max(0, min(work.steps, work.steps_max - taken))
        if not steps:
            return TrainingResult(0, 0, 0.0, 0.0)
        done = await trainer.train(
            steps,
            cursor=cursor_after(state.samples, work.shards) + taken * recipe.batch,
            shard=work.shard,
            shards=work.shards,
            global_step=self._position(state, recipe, work.shards),
            until=begin + work.seconds_max,
            apart=True,
            **self._tended.rates(recipe),
        )
        self.steps += done.steps
        if not done.steps or done.loss is None:
            return TrainingResult(0, 0, 0.0, 0.0)
        return TrainingResult(done.steps, done.samples, done.loss, done.seconds / done.steps)

    def _position(self, state: SharedState, recipe: Recipe, shards: int) -> int:
        """Position in the learning rate schedule: after the abandoned round and the steps since."""
        steps, together = recipe.schedule.turn_steps + self.steps, recipe.batch * recipe.seq_len * shards
        return later(horizon_of(recipe), position_of(recipe, state), steps, together)

    async def rejoin(self) -> bool:
        """Turn offline steps into late work, or drop them, and put x back. True if there were any."""
        if self.base_F is None:
            return False
        if self._tended.ready:
            self._tended.trainer.cancel()
        async with self._tended.turn:
            taken = self.steps > 0
            base_F = self.stash()
            if base_F is None or not self._tended.ready:
                return taken
            try:
                await self._tended.trainer.write_x(base_F)
            except TrainerCommandError as failed:
                await self._tended.failed(failed)
            return taken

    def stash(self) -> Tensor | None:
        """Turn offline steps into late work; returns the x (F,) from which they began, None without any."""
        base_F, self.base_F = self.base_F, None
        self.held = self._with_out(base_F)
        self.steps = 0
        return base_F

    def kept(self) -> UpdateWithoutQuorum | None:
        """Late work to be kept on disk in case of a crash, including current offline steps."""
        return self._with_out(self.base_F)

    def _with_out(self, base_F: Tensor | None) -> UpdateWithoutQuorum | None:
        if base_F is None or not self.steps or not self.merge:
            return self.held
        x_F = self._tended.trainer.read_x()
        return self._plus(UpdateWithoutQuorum(base_F - x_F, self.since, self.steps, self.steps * self.batch))

    def add_uncounted(self, left_F: Tensor, steps: int) -> None:
        """Add uncounted steps of the round in which the partition began; `left_F` (F,) holds their values."""
        self.held = self._plus(UpdateWithoutQuorum(left_F, self.since, steps, steps * self.batch))

    def _plus(self, more: UpdateWithoutQuorum) -> UpdateWithoutQuorum:
        return more if self.held is None else self.held.plus(more)

    def attach(self, fresh_F: Tensor, round: int) -> StepsTakenWhilePartitioned | None:
        """Attach late work of an earlier round to the update of this pseudo-gradient; `riding_F` (F,) is its part.

        Late work of the same round stays: after a crash the abandoned round is resumed.
        """
        held = self.held if self.held is not None and self.held.since < round else None
        self.riding_F = carried(held, fresh_F) if held is not None else None
        return StepsTakenWhilePartitioned(held.since, held.steps, held.samples) if held is not None else None

    def settled(self, left_F: Tensor, given: bool) -> Tensor:
        """Error feedback (F,) after a round, without late work that no vertex took (`given` is false)."""
        riding_F, self.riding_F = self.riding_F, None
        return left_F if given or riding_F is None else left_F - riding_F

    def forget(self) -> None:
        self.held = None
