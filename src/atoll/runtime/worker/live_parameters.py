"""The live parameters x and the steps in them: where a trainer begins, what it is asked for, what x takes in.

    train      steps from x; what no vertex has counted yet is added up
    merge      a round is agreed and x stands still: it becomes the anchor
    take_in    the same while x runs on: between two steps, for which nobody waits

Promises: a trainer that starts, however long that takes, begins from the head of the moment at which it is ready;
a step is counted once. Never decides what the head is, nor what of a round was mine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer
from atoll.features.partition_training.worker import OfflineProgress
from atoll.peer.tasks import TrainApart, TrainingResult, TrainRound
from atoll.runtime.trainer import TrainerFailed
from atoll.runtime.trainer.protocol import Taken
from atoll.runtime.worker.head import AgreedHead
from atoll.runtime.worker.local_update import LocalUpdateState, gathers
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.codec.blocks import Room
from atoll.training.data import cursor_after
from atoll.training.recipe.inner import inner_from_bytes
from atoll.training.recipe.local_anchor import LocalAnchor
from atoll.training.recipe.lr_position import position_of
from atoll.training.recipe.merge import where_moved
from atoll.training.recipe.moments import behind, taken_in
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.schedule import moments_due
from atoll.training.recipe.state import SharedState
from atoll.training.spec import TrainingSpec
from atoll.verification.replay_audit.worker import ReplayAuditWorker

log = logging.getLogger(__name__)


class LiveParameters:
    """Reads of `mine` only whether there is an anchor of my own, and where that stands."""

    def __init__(
        self,
        tended: TrainerSupervisor,
        away: OfflineProgress,
        mine: LocalUpdateState,
        agreed: AgreedHead,
        room: Room,
    ) -> None:
        self.inner: Buffer = b""  # moments, as they go into the private file
        self._moments: Buffer = b""  # as they were handed over, where they are averaged
        self._left: Buffer | None = None  # as this round's steps left them, once they were read
        self.members = 1  # whose updates make the mean of this round
        self.steps_since = 0  # inner steps in the live parameters that no vertex has counted
        self._samples_since = 0  # that they learned from
        self._loss_since = 0.0
        self._step_s = 0.0  # of the last steps taken
        self._life = 0  # of the trainer that took the last of them
        self._hurried = -1  # the round in which I was last told to hand over what I have
        self._merging: asyncio.Task[None] | None = None  # what the trainer is to take in, where it runs on
        self._tended, self._away, self._mine, self._agreed = tended, away, mine, agreed
        self._trainer, self._room = tended.trainer, room

    # ---- steps ---------------------------------------------------------------------------------------------

    async def ready(self, learning: TrainingSpec) -> None:
        """The trainer runs and holds the live parameters. The caller has its turn. Raises TrainerFailed."""
        if self._tended.ready:
            return
        agreed = self._agreed
        assert agreed.head is not None
        self._away.fold()  # before another trainer begins from the head
        await self._tended.start(learning)
        written: SharedState | None = None
        inner: Buffer = b""
        while written is not agreed.head or inner is not self.inner:  # vertices are adopted while it starts
            if inner is not self.inner:
                inner = self.inner  # before it is written: the run may go back meanwhile
                await self._trainer.set_inner_state(inner)
            written = agreed.head
            await self._trainer.write_x(self._mine.begins(written))
        self._count_anew()
        self._left = None
        self._tended.ready = True

    async def train(
        self, work: TrainRound, learning: TrainingSpec, auditing: ReplayAuditWorker | None
    ) -> TrainingResult:
        begin, agreed = time.monotonic(), self._agreed
        await self._tended.wanted(work.seconds_max)
        async with self._tended.turn:
            if self.runs_on(learning.recipe) and work.round <= agreed.round:
                raise RunFailedError("E-RUN-09", f"round {work.round} is over: it was agreed without this peer")
            self._left = None
            try:
                await self.ready(learning)
                until = begin + work.seconds_max
                if work.limit_s is not None:
                    until = min(until, time.monotonic() + work.limit_s)
                assert agreed.head is not None
                recipe, self.members = learning.recipe, work.shards
                more: dict[str, Any] = {"batch": work.batch} if work.batch else {}
                more |= self._tended.rates(recipe)
                if auditing is not None:
                    held = tuple(sorted(auditing.showing))
                    more |= {"assignment": auditing.assignment(work, agreed.head), "held": held}
                done = await self._trainer.train(
                    work.steps if work.round > self._hurried else 0,  # then those that were taken ahead
                    cursor=cursor_after(agreed.head.samples, work.shards),
                    shard=work.shard,
                    shards=work.shards,
                    global_step=position_of(learning.recipe, agreed.head),
                    until=until,
                    # with an anchor of my own it goes on as soon as that has what it sent: `follow`
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
            except TrainerFailed as failed:
                await self._tended.failed()
                raise failed
        self._tended.failures = 0
        carried = self.steps_since and learning.recipe.reducer.quorum  # the last round went on without them
        if (done.steps == 0 or done.loss is None) and not carried:
            return TrainingResult(0, 0, 0.0, 0.0)
        if done.steps and done.loss is not None:
            self._loss_since += done.loss * done.steps
            self.steps_since += done.steps
            self._samples_since += done.samples
            self._step_s = done.seconds / done.steps
        return TrainingResult(
            self.steps_since, self._samples_since, self._loss_since / self.steps_since, self._step_s
        )

    def handed(self, learning: TrainingSpec, head: SharedState) -> Tensor:
        """What my steps of the round after this head came to, (N,): x, and behind it moments that are due.

        RunFailedError if another trainer was started since, as an audit or a look at the head may do: it begins
        from the head, so its x would make an update of nothing, beside a claim that says how it was trained.
        """
        x_F, (_, hi) = self._trainer.read_x(), learning.turn(head)
        if self._tended.lives != self._life:  # looked at after x was read: lives are counted before x is another's
            raise RunFailedError(
                "E-TRN-14",
                "its trainer was started anew before what it had learnt was an update",
                cause="it failed at something else, as an audit, right after its last step",
                fix="none is needed: the next round trains again; atoll status names failures that repeat",
            )
        if hi <= len(x_F):
            return x_F
        return behind(x_F, inner_from_bytes(self._moments, learning.layout.parameters), hi)

    async def left(self, recipe: Recipe, undone: bool) -> Buffer:
        """Moments as they will be once the update that was just encoded is counted. Of a trainer that runs on: as
        of the merge before. `undone`: they are as before if it is not counted.
        """
        if self.runs_on(recipe) or gathers(recipe) or not self._tended.ready:
            return self.inner
        async with self._tended.turn:
            if not self._tended.ready:
                return self.inner
            try:
                self._left = await self._trainer.inner_state(self._room)
            except TrainerFailed:
                await self._tended.failed()
                return self.inner
        if not undone:
            self.inner = self._left
        return self._left

    async def recall(self, inner: Buffer, recipe: Recipe) -> None:
        """The update of a life before is counted, which left these moments."""
        if not self._tended.ready:
            self.inner = inner
        if not self._tended.ready or self.runs_on(recipe):
            return  # whatever runs on has its own
        async with self._tended.turn:
            self.inner = self._left = inner
            try:
                if self._tended.ready:
                    await self._trainer.set_inner_state(inner)
            except TrainerFailed:
                await self._tended.failed()

    async def train_apart(
        self, work: TrainApart, learning: TrainingSpec, keep: Callable[[Digest], Awaitable[None]]
    ) -> TrainingResult:
        """`keep` makes durable, for this vertex, what is this peer's own."""
        agreed = self._agreed
        await self._tended.wanted(work.seconds_max)
        async with self._tended.turn:
            try:
                self._left = None
                if work.round > agreed.round and agreed.head is not None:
                    await self.ready(learning)
                if work.round <= agreed.round or agreed.head is None:  # perhaps since a trainer has begun to start
                    raise RunFailedError("E-RUN-09", f"round {work.round} is over: it was agreed without this peer")
                done = await self._away.train(work, agreed.head, learning.recipe)
            except TrainerFailed as failed:
                await self._tended.failed()
                raise failed
            self._tended.failures = 0
            if work.merge and done.steps and agreed.vertex is not None:  # a crash shall not cost all of it
                await keep(agreed.vertex)
            return done

    def hand_over(self, round: int) -> None:
        self._hurried = max(self._hurried, round)  # its training may be waiting for its turn
        if self._tended.ready:
            self._trainer.hand_over()

    def _count_anew(self) -> None:
        self.steps_since = self._samples_since = 0
        self._loss_since = 0.0

    # ---- what was agreed -----------------------------------------------------------------------------------

    def runs_on(self, recipe: Recipe) -> bool:
        """x does not begin every round from the head, so that the trainer takes in only what moved, by itself."""
        return recipe.merge != "replace" or self._wanders(recipe)

    def _wanders(self, recipe: Recipe) -> bool:
        """Live parameters do not begin every round from the head's."""
        if recipe.merge not in ("replace", "delta"):  # members keep a share of their own
            return True
        return recipe.hidden_steps > 0 or recipe.schedule.fragments > 1 or self._mine.own is not None

    def shown(self, recipe: Recipe) -> Tensor | None:
        """The head's parameters (F,), where live ones may be others."""
        others, head = self._wanders(recipe) or self._away.base_F is not None, self._agreed.head
        return head.anchor_F if others and head is not None else None

    async def merge(
        self, learning: TrainingSpec, before: SharedState | None, after: SharedState, sent: bool
    ) -> None:
        """x becomes the new anchor; `sent` says whether an update of mine was encoded. The caller has the turn."""
        recipe = learning.recipe
        if sent or gathers(recipe):  # a gradient that comes too late is one of another anchor
            self._count_anew()
        if not self._tended.ready or (before is not None and before.anchor_F is after.anchor_F):
            return
        try:
            if not sent and before is not None and self.steps_since:
                # nothing of mine was encoded: keep my own steps on top of the new anchor
                await self._trainer.write_x(after.anchor_F + (self._trainer.read_x() - before.anchor_F))
            else:
                await self._trainer.write_x(after.anchor_F)
            if not gathers(recipe):  # else it remembers nothing
                left, self._left = self._left, None  # of this round, once
                self.inner = left or await self._trainer.inner_state(self._room)
            if before is not None and (due := moments_due(recipe.schedule, before.round)):
                self.inner = taken_in(self.inner, after, due)
                await self._trainer.set_inner_state(self.inner)
        except TrainerFailed:
            await self._tended.failed()

    async def begin_again(self, anchor_F: Tensor, counts: bool, goes_on: bool) -> None:
        """x becomes this anchor (F,), and no step is in it that its round does not count.

        Where the round counts, moments are as its steps left them if that trainer goes on, else fresh. Where it
        does not, they are `inner`, which is what they were before.
        """
        self._count_anew()
        if counts and not goes_on:
            self.inner = b""  # another trainer than the one that took the steps: it never had their moments
        try:
            if self._tended.ready:
                await self._trainer.write_x(anchor_F)
                if goes_on:
                    self.inner = self._left or await self._trainer.inner_state(self._room)
                else:
                    await self._trainer.set_inner_state(self.inner)
        except TrainerFailed:
            self.inner = b"" if counts else self.inner
            await self._tended.failed()

    def take_in(
        self,
        learning: TrainingSpec,
        before: SharedState | None,
        after: SharedState,
        sent: bool,
        by_F: Tensor | None,
    ) -> None:
        """The same as `merge` while x goes its own way: between two steps, for which the next round does not wait.

        Where nothing of mine was encoded, all my own steps stay on top of the new anchor: what moved is added. Of
        gradients none stays: that of this round comes too late, and those of later ones begin anew.
        `by_F` is what my own anchor moved by, where I have one.
        """
        sums = gathers(learning.recipe)
        if sent or sums:
            self._count_anew()
        if before is None or before.anchor_F is after.anchor_F:
            return
        lo, hi = learning.turn(before)
        how: Taken = "shift"
        if self._mine.own is not None:
            value_N = by_F
        elif learning.recipe.merge == "swap":  # also if I sent nothing: what all have agreed on is not mine to keep
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
                return  # another trainer began from a head that has it
            try:
                if value_N is not None:
                    await self._trainer.merge(lo, value_N, how)
                if not sums:  # else it remembers nothing
                    self.inner = await self._trainer.inner_state(self._room)
            except TrainerFailed:
                await self._tended.failed()

    async def taken_in(self) -> None:
        """One at a time: a loop that pauses must not pile up states."""
        if self._merging is not None:
            await self._merging

    async def follow(self, own: LocalAnchor) -> None:
        """My own anchor moved with what I sent: x goes on from it, with the steps taken since."""
        async with self._tended.turn:
            try:
                if self._tended.ready:
                    await self._trainer.merge(0, own.anchor_F, "delta")
            except TrainerFailed:
                await self._tended.failed()

    async def close(self) -> None:
        if self._merging is not None:
            self._merging.cancel()
            await asyncio.gather(self._merging, return_exceptions=True)
