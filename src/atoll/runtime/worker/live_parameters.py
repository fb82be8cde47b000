"""Live parameters x and the steps in them: where a trainer begins, which steps it takes, what x takes in.

    train      steps from x; those that no vertex has counted yet are added up
    merge      a round is agreed while x stands still: x becomes the anchor
    take_in    the same while x keeps moving: between two steps, and no round waits for it

Invariants:
- A trainer that starts, however long that takes, begins from the head at the moment when it is ready.
- A step is counted once.
Not responsible for: which state is the head, and which part of a round is the local update.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import UNSET
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer
from atoll.features.partition_training.worker import PartitionedTrainer
from atoll.peer.tasks import TrainingResult, TrainRound, TrainWithoutQuorum
from atoll.runtime.event_log import CLOSED_BEFORE
from atoll.runtime.trainer import ModelEvaluated, TrainerCommandError
from atoll.runtime.trainer.protocol import Taken
from atoll.runtime.worker.head import AgreedHead
from atoll.runtime.worker.local_update import LocalUpdateState, gathers
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.codec.blocks import Room
from atoll.training.data import cursor_after
from atoll.training.recipe.inner import inner_from_bytes
from atoll.training.recipe.local_anchor import EagerUpdateAnchor
from atoll.training.recipe.lr_position import position_of
from atoll.training.recipe.merge import where_moved
from atoll.training.recipe.moments import adopt_moments_bytes, behind
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.schedule import moments_due
from atoll.training.recipe.state import SharedState
from atoll.training.spec import TrainingSpec
from atoll.verification.replay_audit.worker import ReplayAuditWorker

log = logging.getLogger(__name__)


class LiveParameters:
    """Of the local update state only the local anchor is read."""

    def __init__(
        self,
        tended: TrainerSupervisor,
        away: PartitionedTrainer,
        mine: LocalUpdateState,
        agreed: AgreedHead,
        room: Room,
    ) -> None:
        self.inner: Buffer = b""  # moments, as stored in the private file
        self._moments: Buffer = b""  # moments as handed over, if the recipe averages them
        self._left: Buffer | None = None  # moments after this round's steps, once they are read
        self.members = 1  # number of updates in the mean of this round
        self.steps_since = 0  # inner steps in the live parameters that no vertex has counted
        self._samples_since = 0  # samples of these steps
        self._loss_since = 0.0
        self._step_s = 0.0  # seconds per step of the last training
        self._life = 0  # life of the trainer that took the last step
        self._hurried = -1  # last round in which the peer ordered a hand-over
        self._merging: asyncio.Task[None] | None = None  # merge into a trainer that keeps stepping
        self._tended, self._away, self._mine, self._agreed = tended, away, mine, agreed
        self._trainer, self._room = tended.trainer, room

    # ---- steps ---------------------------------------------------------------------------------------------

    async def ready(self, learning: TrainingSpec) -> None:
        """Make the trainer ready. The caller holds its turn. Raises TrainerCommandError."""
        if self._tended.ready:
            return
        agreed = self._agreed
        assert agreed.head is not None
        self._away.stash()  # before another trainer begins from the head
        await self._tended.start(learning)
        written: SharedState | None = None
        inner: Buffer = b""
        while written is not agreed.head or inner is not self.inner:  # vertices may be adopted while it starts
            if inner is not self.inner:
                inner = self.inner  # read before it is written: the run may roll back meanwhile
                await self._trainer.set_inner_state(inner)
            written = agreed.head
            await self._trainer.write_x(self._mine.start_point(written))
        self._reset_counts()
        self._left = None
        self._tended.ready = True

    async def train(
        self, work: TrainRound, learning: TrainingSpec, auditing: ReplayAuditWorker | None
    ) -> TrainingResult:
        begin, agreed = time.monotonic(), self._agreed
        await self._tended.wanted(work.seconds_max)
        async with self._tended.turn:
            if self.runs_on(learning.recipe) and work.round <= agreed.round:
                raise RunFailedError("E-RUN-09", CLOSED_BEFORE)
            self._left = None
            try:
                await self.ready(learning)
                until = begin + work.seconds_max
                if work.limit_s is not None:
                    until = min(until, time.monotonic() + work.limit_s)
                assert agreed.head is not None
                recipe, self.members = learning.recipe, work.shards
                more: dict[str, Any] = {"batch": work.batch} if work.batch else {}
                more |= {"data": work.data} if self._tended.attached and work.data else {}
                more |= self._tended.rates(recipe)
                if recipe.schedule.fragments > 1 and recipe.merge != "swap" and self._mine.own is None:
                    more["span"] = learning.turn(agreed.head)
                if auditing is not None:
                    held = tuple(sorted(auditing.showing))
                    more |= {"assignment": auditing.assignment(work, agreed.head), "held": held}
                done = await self._trainer.train(
                    work.steps if work.round > self._hurried else 0,  # 0: only the steps taken ahead
                    cursor=cursor_after(agreed.head.samples, work.shards),
                    shard=work.shard,
                    shards=work.shards,
                    global_step=position_of(learning.recipe, agreed.head),
                    until=until,
                    # with a local anchor the trainer continues as soon as the anchor has the sent update: `follow`
                    ahead=(recipe.hidden_steps or None) if self._mine.own is None else 0,
                    **more,
                )
                self._life = self._tended.lives
                if done.notice:
                    log.warning("the trainer: %s", done.notice)
                if auditing is not None:
                    auditing.took(done)
                if moments_due(recipe.schedule, agreed.head.round):
                    self._moments = await self._trainer.inner_state()
            except TrainerCommandError as failed:
                await self._tended.failed(failed)
                raise failed
        self._tended.failures = 0
        carried = self.steps_since and learning.recipe.reducer.quorum  # the last round continued without them
        if (done.steps == 0 or done.loss is None) and not carried:
            return TrainingResult(0, 0, 0.0, 0.0)
        if done.steps and done.loss is not None:
            self._loss_since += done.loss * done.steps
            self.steps_since += done.steps
            self._samples_since += done.samples
            self._step_s = done.seconds / done.steps
        return TrainingResult(
            self.steps_since, self._samples_since, self._loss_since / self.steps_since, self._step_s, data=done.data
        )

    def handed_over(self, learning: TrainingSpec, head: SharedState) -> Tensor:
        """The result of the steps of the round after this head, (N,): x, followed by the moments that are due.

        RunFailedError if the trainer was restarted since, for example by an audit or a loss measurement: it begins
        from the head, so its x would make an empty update beside a claim about its training.
        """
        x_F, (_, hi) = self._trainer.read_x(), learning.turn(head)
        if self._tended.lives != self._life:  # compared after x was read: a new life is counted before x changes
            raise RunFailedError(
                "E-TRN-14",
                "the trainer was restarted before its steps were encoded",
                cause="it failed at another command, such as an audit, right after its last step",
                fix="none is needed: the next round trains again; atoll status shows failures that repeat",
            )
        if hi <= len(x_F):
            return x_F
        return behind(x_F, inner_from_bytes(self._moments, learning.layout.parameters), hi)

    async def read_moments(self, recipe: Recipe, undone: bool) -> Buffer:
        """Moments if the new update is counted; if the trainer keeps stepping, those of the last merge.

        `undone`: if the update is not counted, the earlier moments hold again.
        """
        if self.runs_on(recipe) or gathers(recipe) or not self._tended.ready:
            return self.inner
        async with self._tended.turn:
            if not self._tended.ready:
                return self.inner
            try:
                self._left = await self._trainer.inner_state(self._room)
            except TrainerCommandError as failed:
                await self._tended.failed(failed)
                return self.inner
        if not undone:
            self.inner = self._left
        return self._left

    async def restore_moments(self, inner: Buffer, recipe: Recipe) -> None:
        """Restore these moments: a vertex counts the update of an earlier process."""
        if not self._tended.ready:
            self.inner = inner
        if not self._tended.ready or self.runs_on(recipe):
            return  # a trainer that keeps stepping has its own
        async with self._tended.turn:
            self.inner = self._left = inner
            try:
                if self._tended.ready:
                    await self._trainer.set_inner_state(inner)
            except TrainerCommandError as failed:
                await self._tended.failed(failed)

    async def evaluate(self, learning: TrainingSpec, samples: int) -> ModelEvaluated:
        """Validation loss and accuracy of the head. Raises TrainerCommandError."""
        await self._tended.equipped()
        async with self._tended.turn:
            await self.ready(learning)
            return await self._trainer.evaluate(samples, self.head_if_different(learning.recipe))

    async def sample(self, learning: TrainingSpec, prompt: str, count: int, seed: int) -> str:
        """Text of the head. Raises TrainerCommandError."""
        if learning.tokenizer is not UNSET:
            raise TrainerCommandError(
                "refused",
                "this model writes tokens of the run's tokenizer, not bytes",
                fix="atoll checkpoint export ROUND FOLDER --hf writes both for other programs",
                alive=True,
            )
        await self._tended.equipped()
        async with self._tended.turn:
            await self.ready(learning)
            return await self._trainer.sample(prompt, count, seed, self.head_if_different(learning.recipe))

    async def train_apart(
        self, work: TrainWithoutQuorum, learning: TrainingSpec, keep: Callable[[Digest], Awaitable[None]]
    ) -> TrainingResult:
        """Steps without a quorum. `keep` makes the private state for this vertex durable."""
        agreed = self._agreed
        await self._tended.wanted(work.seconds_max)
        async with self._tended.turn:
            try:
                self._left = None
                if work.round > agreed.round and agreed.head is not None:
                    await self.ready(learning)
                if work.round <= agreed.round or agreed.head is None:  # possibly while a trainer started
                    raise RunFailedError("E-RUN-09", CLOSED_BEFORE)
                done = await self._away.train(work, agreed.head, learning.recipe)
            except TrainerCommandError as failed:
                await self._tended.failed(failed)
                raise failed
            self._tended.failures = 0
            if work.merge and done.steps and agreed.vertex is not None:  # so that a crash does not cost all of it
                await keep(agreed.vertex)
            return done

    def hand_over(self, round: int) -> None:
        self._hurried = max(self._hurried, round)  # the training may still wait for its turn
        if self._tended.ready:
            self._trainer.hand_over()

    def _reset_counts(self) -> None:
        self.steps_since = self._samples_since = 0
        self._loss_since = 0.0

    # ---- what was agreed -----------------------------------------------------------------------------------

    def runs_on(self, recipe: Recipe) -> bool:
        """Whether x keeps moving between rounds, so that the trainer merges only the difference."""
        return recipe.merge != "replace" or self._differs_from_head(recipe)

    def _differs_from_head(self, recipe: Recipe) -> bool:
        """Whether x may differ from the head at the begin of a round."""
        if recipe.merge not in ("replace", "delta"):  # members keep a share of their own parameters
            return True
        return recipe.hidden_steps > 0 or recipe.schedule.fragments > 1 or self._mine.own is not None

    def head_if_different(self, recipe: Recipe) -> Tensor | None:
        """The head's parameters (F,), if x may differ from them; else None."""
        others, head = self._differs_from_head(recipe) or self._away.base_F is not None, self._agreed.head
        return head.anchor_F if others and head is not None else None

    async def merge(
        self, learning: TrainingSpec, before: SharedState | None, after: SharedState, sent: bool
    ) -> None:
        """x becomes the new anchor. `sent`: a local update was encoded. The caller holds the turn."""
        recipe = learning.recipe
        if sent or gathers(recipe):  # a late gradient belongs to another anchor
            self._reset_counts()
        if not self._tended.ready or (before is not None and before.anchor_F is after.anchor_F):
            return
        try:
            if not sent and before is not None and self.steps_since:
                # no local update was encoded: keep the local steps on top of the new anchor
                x_F = self._trainer.read_x()
                await asyncio.to_thread(lambda: x_F.sub_(before.anchor_F).add_(after.anchor_F))
                await self._trainer.write_x(x_F)
            else:
                await self._trainer.write_x(after.anchor_F)
            if not gathers(recipe):  # else there are no moments
                left, self._left = self._left, None  # of this round, used once
                self.inner = left or await self._trainer.inner_state(self._room)
            if before is not None and (due := moments_due(recipe.schedule, before.round)):
                self.inner = adopt_moments_bytes(self.inner, after, due)
                await self._trainer.set_inner_state(self.inner)
        except TrainerCommandError as failed:
            await self._tended.failed(failed)

    async def reset(self, anchor_F: Tensor, counts: bool, goes_on: bool) -> None:
        """x becomes this anchor (F,), without steps that its round does not count.

        If the round counts, moments are those after its steps if that trainer still runs (`goes_on`), else fresh.
        If it does not count, they are `inner`, the moments before the round.
        """
        self._reset_counts()
        if counts and not goes_on:
            self.inner = b""  # another trainer took the steps: this one never had their moments
        try:
            if self._tended.ready:
                await self._trainer.write_x(anchor_F)
                if goes_on:
                    self.inner = self._left or await self._trainer.inner_state(self._room)
                else:
                    await self._trainer.set_inner_state(self.inner)
        except TrainerCommandError as failed:
            self.inner = b"" if counts else self.inner
            await self._tended.failed(failed)

    def take_in(
        self,
        learning: TrainingSpec,
        before: SharedState | None,
        after: SharedState,
        sent: bool,
        by_F: Tensor | None,
    ) -> None:
        """The same as `merge` while x keeps moving: between two steps, and the next round does not wait.

        If no local update was encoded, all local steps stay on top of the new anchor: the difference is added.
        Gradient sums are dropped: those of this round are late, and those of later rounds begin again. `by_F`:
        move of the local anchor, if there is one.
        """
        sums = gathers(learning.recipe)
        if sent or sums:
            self._reset_counts()
        if before is None or before.anchor_F is after.anchor_F:
            return
        lo, hi = learning.turn(before)
        how: Taken = "shift"
        if self._mine.own is not None:
            value_N = by_F
        elif learning.recipe.merge == "swap":  # also without a local update: agreed values are never private
            value_N, how = where_moved(before.anchor_F[lo:hi], after.anchor_F[lo:hi]), "swap"
        elif sums and not sent:
            value_N, how = after.anchor_F, "afresh"
        elif sent:
            value_N, how = after.anchor_F[lo:hi], learning.recipe.merge
        else:
            value_N = after.anchor_F[lo:hi] - before.anchor_F[lo:hi]
        self._merging = asyncio.create_task(self._merge_running(self._tended.lives, lo, value_N, how, sums))

    async def _merge_running(
        self, life: int, lo: int, value_N: Tensor | None, how: Taken, sums: bool = False
    ) -> None:
        async with self._tended.turn:
            if not self._tended.ready or life != self._tended.lives:
                return  # a restarted trainer began from a head that includes it
            try:
                if value_N is not None:
                    await self._trainer.merge(lo, value_N, how)
                if not sums:  # else there are no moments
                    self.inner = await self._trainer.inner_state(self._room)
            except TrainerCommandError as failed:
                await self._tended.failed(failed)

    async def wait_merged(self) -> None:
        """Wait for the merge in progress: a paused loop must not pile up states."""
        if self._merging is not None:
            await self._merging

    async def follow(self, own: EagerUpdateAnchor) -> None:
        """The local anchor moved by the sent update: x continues from it, with the steps taken since."""
        async with self._tended.turn:
            try:
                if self._tended.ready:
                    await self._trainer.merge(0, own.anchor_F, "delta")
            except TrainerCommandError as failed:
                await self._tended.failed(failed)

    async def close(self) -> None:
        if self._merging is not None:
            self._merging.cancel()
            await asyncio.gather(self._merging, return_exceptions=True)
