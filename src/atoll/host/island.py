"""The island behind a peer: the trainer process that owns the device, and the tensors of the shared state.

Carries out the work that machines ask for, off the event loop: training in the trainer's own process (`tended.py`),
tensor arithmetic on one thread (torch releases Python's lock), disk on another. Anchor, outer state and error
feedback belong to the peer and live here and in `shelf.py`, so a crashed trainer costs a round and nothing more.
Promises: every piece of work is answered once; `Advanced` and `Adopt` are answered when their bytes are durable.
Never decides anything: what is counted and what is the head is said by the vertex.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Literal

import torch
from msgspec import UNSET
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.host.apart import Away
from atoll.host.arithmetic import advanced, answer, compared, named, weighed
from atoll.host.attached import AttachedTrainer
from atoll.host.auditing import Auditing
from atoll.host.learning import Learning
from atoll.host.mine import Mine, gathers
from atoll.host.opening import Openings
from atoll.host.owing import Owing
from atoll.host.pieces import cut_state, rebuild_blob
from atoll.host.shelf import Shelf, read_private, write_private
from atoll.host.store import Store, stored
from atoll.host.tended import Tended
from atoll.host.trainer import Evaluated, TrainerFailed
from atoll.host.validating import canary_in, validated
from atoll.keys.digest import Buffer, digest
from atoll.learn.answers import remembers
from atoll.learn.data import cursor_after
from atoll.learn.eager import Own
from atoll.learn.merge import Merge
from atoll.learn.state import SharedState, export_model, gone_back
from atoll.learn.update import (
    Common,
)
from atoll.node.config.sections import Keep
from atoll.node.jobs import (
    Adopt,
    Advance,
    Advanced,
    CutState,
    Encode,
    Encoded,
    Exhibit,
    FindState,
    GoBack,
    HandOver,
    Hold,
    HoldPieces,
    Judge,
    JudgeOpening,
    LayOpen,
    Rebuild,
    Restore,
    Train,
    TrainApart,
    Trained,
    Validate,
)
from atoll.protocol.reduce.work import Combine, Combined, Compare, Weigh
from atoll.protocol.transfer.work import CloseBlob


class Island:
    """`trains` is false for an observer; `trainer` is the user's own loop, or None for a process of ours."""

    def __init__(
        self,
        store: Store,
        threads: int,
        trains: bool = True,
        trainer: AttachedTrainer | None = None,
        keep: Keep = Keep(),  # a frozen value
    ) -> None:
        self.store, self.trains = store, trains
        self.learning: Learning | None = None
        self.tended = Tended(threads, trainer)
        self.trainer = self.tended.trainer
        self.shelf = Shelf(store, keep)
        self._arithmetic = ThreadPoolExecutor(1, "arithmetic")
        self.away = Away(self.tended)
        self.mine = Mine(self.away, self._arithmetic)
        self.head: SharedState | None = None
        self.head_name: Digest | None = None
        self.head_vertex: Digest | None = None
        self.adopted = -1  # the round whose state is the head, or is just becoming it
        self.inner = b""
        self.members = 1  # whose updates make the mean of this round
        self.hurried = -1  # the round in which I was last told to hand over what I have
        self.step_s: Seconds = 0.0  # of the last steps taken
        self.steps_since = 0  # inner steps in the live parameters that no vertex has counted
        self.loss_since = 0.0
        self.owing = Owing()  # where owners remember
        self.auditing: Auditing | None = None  # where rounds are audited
        self.needed: dict[str, frozenset[Digest]] = {}  # blobs that stay on disk, by what for
        self.openings: Openings | None = None  # where answers are opened
        self._disk = ThreadPoolExecutor(1, "disk")
        self._coding = ThreadPoolExecutor(1, "coding")  # pieces of a large state take seconds, and nobody waits
        self._merging: asyncio.Task[None] | None = None  # what the trainer is to take in, where it runs on

    def be_audited(self, run: Digest, me: PeerId) -> None:
        """Rounds of this run are: keep a chain of every one, and be able to take others' again."""
        self.auditing = Auditing(
            run,
            me,
            self._learning,
            self.store,
            self.shelf,
            self.tended,
            self._arithmetic,
            self._ready,
            self._up_name,
        )

    def be_opened(self) -> None:
        """Blocks of answers of this run are: name wires so that they can be, show mine, judge others'."""
        self.openings = Openings(self._learning, self.store, self.shelf)

    def equip(self, data: str) -> None:
        """The data set is here: from now on there is something to train."""
        self.tended.equip(data)

    async def close(self) -> None:
        await self.trainer.stop()
        if self._merging is not None:
            self._merging.cancel()
            await asyncio.gather(self._merging, return_exceptions=True)
        self._arithmetic.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True, cancel_futures=True)
        self._coding.shutdown(wait=True, cancel_futures=True)

    async def do(self, work: Any) -> Any:
        """The answer to a piece of work. Raises AtollError, PeerFault or OSError: the driver answers Failed."""
        loop = asyncio.get_running_loop()
        match work:
            case Train():
                return await self._train(work)
            case HandOver():
                self.hurried = max(self.hurried, work.round)  # its training may be waiting for its turn
                if self.tended.ready:
                    self.trainer.hand_over()
                return None
            case TrainApart():
                return await self._train_apart(work)
            case Encode():
                if self.mine.own is not None and work.round <= self.adopted:  # it must not move my anchor any more
                    raise RunFailedError("E-RUN-09", f"round {work.round} is over: it was agreed without this peer")
                encoded = await loop.run_in_executor(self._arithmetic, self._encode, work)
                if self.mine.own is not None:
                    await self._merge_own(self.mine.own)
                return encoded
            case Combine():
                if work.round <= self.adopted:
                    raise RunFailedError("E-RUN-09", f"round {work.round} is over: its rows build on an older head")
                return await loop.run_in_executor(self._arithmetic, self._combine, work, self._common(work.round))
            case Compare():
                if work.round <= self.adopted:
                    raise RunFailedError("E-RUN-09", f"round {work.round} is over: its rows build on an older head")
                return await loop.run_in_executor(
                    self._arithmetic, compared, work, self._learning, self._common(work.round)
                )
            case Weigh():
                return await loop.run_in_executor(self._arithmetic, weighed, work)
            case Advance():
                return await loop.run_in_executor(self._arithmetic, self._advance, work)
            case Adopt():
                return await self._adopt(work)
            case GoBack():
                return await loop.run_in_executor(self._arithmetic, self._go_back, work)
            case FindState():
                return await loop.run_in_executor(self._disk, self.shelf.look_for, work.state)
            case CutState():
                return await loop.run_in_executor(
                    self._coding, cut_state, self.store, work, self.shelf.hold_a_while
                )
            case Rebuild():
                return await loop.run_in_executor(
                    self._coding, rebuild_blob, self.store, work, self.shelf.hold_a_while
                )
            case HoldPieces():
                return await loop.run_in_executor(self._disk, self.shelf.hold_pieces, work.pieces, work.whole)
            case Hold(blobs, why):
                self.needed[why] = frozenset(blobs)
                return None
            case Validate():
                looked_at = await loop.run_in_executor(self._arithmetic, self._find, work.state)
                canary = canary_in(self.store, self._learning.canary)
                return await validated(self.tended, self._ready, looked_at, canary)
            case LayOpen() if self.openings is not None:
                return await asyncio.to_thread(self.openings.lay, work)
            case JudgeOpening() if self.openings is not None:
                return await loop.run_in_executor(self._arithmetic, self.openings.judge, work)
            case Exhibit() if self.auditing is not None:
                return await self.auditing.show(work)
            case Judge() if self.auditing is not None:
                return await self.auditing.judge(work)
            case CloseBlob():
                await loop.run_in_executor(self._disk, stored, self.store, work)
                return self.shelf.hold_a_while(work.blob)
            case Restore():
                if work.left is not None:
                    await self.mine.leave_open(work.left)
                return await loop.run_in_executor(self._arithmetic, self._restore, work)
            case _:
                return await loop.run_in_executor(self._disk, stored, self.store, work)

    def name_of(self, message: object, payload: Buffer) -> Digest:
        return digest(payload) if self.openings is None else self.openings.name_of(message, payload)

    def _up_name(self, wire: Buffer) -> Digest:
        return digest(wire) if self.openings is None else self.openings.up.name(wire)

    def _down_name(self, wire: Buffer) -> Digest:
        return digest(wire) if self.openings is None else self.openings.down.name(wire)

    async def evaluate(self, samples: int = 512) -> Evaluated:
        """Validation loss of the head."""
        await self.tended.equipped()
        async with self.tended.turn:
            await self._ready()
            return await self.trainer.evaluate(samples, self._shown_F)

    async def sample(self, prompt: str, count: int, seed: int) -> str:
        await self.tended.equipped()
        async with self.tended.turn:
            await self._ready()
            return await self.trainer.sample(prompt, count, seed, self._shown_F)

    async def end_on_head(self) -> None:
        """The run is over: the live parameters become the agreed ones."""
        head_F = self._shown_F
        if head_F is None or not self.tended.ready:
            return
        async with self.tended.turn:
            await self.trainer.write_x(head_F)

    @property
    def _wanders(self) -> bool:
        """Live parameters do not begin every round from the head's."""
        schedule = self._learning.recipe.schedule
        return schedule.overlap > 0 or schedule.fragments > 1 or self.mine.own is not None

    @property
    def _shown_F(self) -> Tensor | None:
        """The head's parameters, where live ones may be others."""
        others = self._wanders or self.away.base_F is not None
        return self.head.anchor_F if others and self.head is not None else None

    async def export(self) -> bytes:
        """The agreed model by tensor name, as a safetensors file."""
        assert self.head is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._arithmetic, export_model, self.head, self._learning.layout)

    # ---- the trainer ---------------------------------------------------------------------------------------

    async def _train(self, work: Train) -> Trained:
        if not self.trains:
            raise RunFailedError("E-TRN-10", "this peer does not train")
        begin = time.monotonic()
        await self.tended.wanted(work.seconds_max)
        async with self.tended.turn:
            if self._runs_on and work.round <= self.adopted:
                raise RunFailedError("E-RUN-09", f"round {work.round} is over: it was agreed without this peer")
            try:
                await self._ready()
                assert self.head is not None
                schedule, self.members = self._learning.recipe.schedule, work.shards
                chain = {}
                if self.auditing is not None:
                    held = tuple(sorted(self.auditing.showing))
                    chain = {"assignment": self.auditing.assignment(work, self.head), "held": held}
                done = await self.trainer.train(
                    work.steps if work.round > self.hurried else 0,  # then those that were taken ahead
                    cursor=cursor_after(self.head.samples, work.shards),
                    shard=work.shard,
                    shards=work.shards,
                    global_step=self.head.steps,
                    until=begin + work.seconds_max,
                    ahead=schedule.overlap if self.mine.own is None else schedule.inner_steps,
                    **chain,
                )
                if self.auditing is not None:
                    self.auditing.taken = done
            except TrainerFailed as failed:
                await self.tended.failed()
                raise failed
        self.tended.failures = 0
        carried = self.steps_since and self._learning.recipe.reducer.quorum  # the last round went on without them
        if (done.steps == 0 or done.loss is None) and not carried:
            return Trained(0, 0, 0.0, 0.0)
        if done.steps and done.loss is not None:
            self.loss_since += done.loss * done.steps
            self.steps_since += done.steps
            self.step_s = done.seconds / done.steps
        samples = self.steps_since * self._learning.recipe.batch
        loss = self.loss_since / self.steps_since
        return Trained(self.steps_since, samples, loss, self.step_s)

    async def _train_apart(self, work: TrainApart) -> Trained:
        await self.tended.wanted(work.seconds_max)
        async with self.tended.turn:
            try:
                if work.round > self.adopted and self.head is not None:
                    await self._ready()
                if work.round <= self.adopted or self.head is None:  # perhaps since a trainer has begun to start
                    raise RunFailedError("E-RUN-09", f"round {work.round} is over: it was agreed without this peer")
                done = await self.away.train(work, self.head, self._learning.recipe)
            except TrainerFailed as failed:
                await self.tended.failed()
                raise failed
            self.tended.failures = 0
            if work.merge and done.steps and self.head_vertex is not None:  # a crash shall not cost all of it
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._disk, self._keep_private, self.head_vertex)
            return done

    async def warm_up(self) -> None:
        """Start the trainer before it is needed: a newcomer's first round should not wait for imports."""
        if not self.trains:
            return
        await self.tended.equipped()
        async with self.tended.turn:
            try:
                await self._ready()
            except TrainerFailed:
                await self.tended.failed()

    async def _ready(self) -> None:
        """The trainer runs and holds the live parameters."""
        if self.tended.ready:
            return
        assert self.head is not None
        self.away.fold()  # before another trainer begins from the head
        await self.tended.start(self._learning)
        written, inner = None, b""
        while written is not self.head or inner != self.inner:  # vertices are adopted while it starts
            if inner != self.inner:
                inner = self.inner  # before it is written: the run may go back meanwhile
                await self.trainer.set_inner_state(inner)
            written = self.head
            await self.trainer.write_x(self.mine.begins(written))
        self.steps_since, self.loss_since = 0, 0.0
        self.tended.ready = True

    # ---- tensors -------------------------------------------------------------------------------------------

    def _encode(self, work: Encode) -> Encoded:
        mine, common = self.mine, self._common(work.round)
        x_F = self.trainer.read_x()
        update, late = mine.encode(work, self._learning, common, x_F, self.steps_since, self.members)
        claim = None
        if self.auditing is not None:
            claim = self.auditing.claim(work.round, update, mine.memory_F, mine.up)
        return Encoded(tuple(named(wire, self._up_name) for wire in update.wires), claim, late)

    def _common(self, round: int) -> Common:
        assert self.head is not None and self.head_name is not None
        return self._learning.common(round, self.head, self.head_name)

    def _combine(self, work: Combine, common: Common) -> Combined:
        name = self._up_name if work.onward else self._down_name
        return answer(work, self._learning, common, self.owing, name)

    def _advance(self, work: Advance) -> Advanced:
        before = self._find(work.before)
        if before is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        after, combined_N = advanced(work, self._learning, before)
        name = self.shelf.put(after, self._learning.layout)
        self.mine.led(name, combined_N)
        return Advanced(name)

    def _go_back(self, work: GoBack) -> Advanced:
        before, earlier = self._find(work.before), self._find(work.back_to)
        if before is None or earlier is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        samples = work.steps * self._learning.recipe.batch * work.shards
        return Advanced(self.shelf.put(gone_back(earlier, before, samples), self._learning.layout))

    # ---- what was agreed -----------------------------------------------------------------------------------

    async def _adopt(self, work: Adopt) -> None:
        if self._merging is not None:  # one at a time: a loop that pauses must not pile up states
            await self._merging
        self.adopted = work.round
        if work.late:
            self.away.forget()
        was_apart = await self.away.come_back()
        in_vain = self.mine.in_vain(work.counted)
        loop = asyncio.get_running_loop()
        after = await loop.run_in_executor(self._arithmetic, self._find, work.state)
        if after is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        if remembers(self._learning.recipe):
            await loop.run_in_executor(self._arithmetic, self.owing.settle, work.led, len(after.anchor_F))
        if self.tended.ready:
            self.trainer.cancel()  # the round is over for everybody: what is left of its steps is not taken
        if self.auditing is not None:
            counts = self.auditing.counts(work) and not work.afresh
            async with self.tended.turn if self.tended.ready else nullcontext():
                await self._begin_anew(work, after, counts)
        elif work.afresh and not self.tended.ready:  # a trainer that is starting has the turn, for long perhaps
            self._begin_afresh(after)
        elif work.afresh:
            async with self.tended.turn:
                await loop.run_in_executor(self._arithmetic, self._begin_afresh, after)
        elif self.tended.ready and self._runs_on:
            await self._take_in(work, after)
        elif self.tended.ready:
            async with self.tended.turn:
                await self._merge(work, after)
        else:  # it is starting, or gone: it will begin from the head, whichever that is by then
            await self._settle(work)
            self.mine.hear(work.state, self._learning, self.head, after)
            self.head = after
        self.head_name, self.head_vertex = work.state, work.vertex
        if work.afresh:
            self.away.forget()
        elif was_apart and in_vain:
            self.mine.owe(in_vain)
        if work.afresh:
            await loop.run_in_executor(self._disk, self.shelf.found_way)  # its lock may be held for long
        await loop.run_in_executor(self._disk, self._keep_private, work.vertex)

    async def _merge(self, work: Adopt, after: SharedState) -> None:
        """The live parameters take in the new anchor."""
        before, mine = self.head, await self._settle(work)
        if mine or gathers(self._learning.recipe):  # a gradient that comes too late is one of another anchor
            self.steps_since, self.loss_since = 0, 0.0
        self.head = after
        if not self.tended.ready or (before is not None and before.anchor_F is after.anchor_F):
            return
        try:
            if not mine and before is not None and self.steps_since:
                # nothing of mine was encoded: keep my own steps on top of the new anchor
                await self.trainer.write_x(after.anchor_F + (self.trainer.read_x() - before.anchor_F))
            else:
                await self.trainer.write_x(after.anchor_F)
            if not gathers(self._learning.recipe):  # else it remembers nothing
                self.inner = await self.trainer.inner_state()
        except TrainerFailed:
            await self.tended.failed()

    async def _begin_anew(self, work: Adopt, after: SharedState, counts: bool) -> None:
        """Where rounds are audited each one begins from the anchor, with moments and error feedback as vertices
        hold them against me: as before if my round does not count, as it left them if it does, else fresh. Fresh,
        too, where the run went back: an auditor takes that for a crash."""
        if counts:
            await self._settle(work)
        elif work.claim is not None or work.afresh:
            self.mine.memory_F, self.inner = None, b""
        if work.afresh:
            self.owing.forget()
        self.mine.update, self.steps_since, self.loss_since = None, 0, 0.0
        self.head = after
        goes_on = counts and self.auditing is not None and self.auditing.lives_on(work.round)
        if counts and not goes_on:
            self.inner = b""  # another trainer than the one that took the steps: it never had their moments
        try:
            if self.tended.ready:
                await self.trainer.write_x(after.anchor_F)
                if goes_on:
                    self.inner = await self.trainer.inner_state()
                else:
                    await self.trainer.set_inner_state(self.inner)
        except TrainerFailed:
            self.inner = b"" if counts else self.inner
            await self.tended.failed()

    @property
    def _runs_on(self) -> bool:
        """x does not begin every round from the head, so that the trainer takes in only what moved, by itself."""
        return self._learning.recipe.merge != "replace" or self._wanders

    async def _take_in(self, work: Adopt, after: SharedState) -> None:
        """The same while x goes its own way: between two steps, for which the next round does not wait.

        Where nothing of mine was encoded, all my own steps stay on top of the new anchor: what moved is added.
        """
        before, mine = self.head, await self._settle(work)
        if mine:
            self.steps_since, self.loss_since = 0, 0.0
        by_F = self.mine.hear(work.state, self._learning, before, after)
        self.head = after
        if before is None or before.anchor_F is after.anchor_F:
            return
        lo, hi = self._learning.turn(before)
        how: Merge | Literal["shift"] = "shift"
        if self.mine.own is not None:
            value_N = by_F
        elif mine:
            value_N, how = after.anchor_F[lo:hi], self._learning.recipe.merge
        else:
            value_N = after.anchor_F[lo:hi] - before.anchor_F[lo:hi]
        self._merging = asyncio.create_task(self._merge_running(self.tended.lives, lo, value_N, how))

    async def _merge_running(
        self, life: int, lo: int, value_N: Tensor | None, how: Merge | Literal["shift"]
    ) -> None:
        async with self.tended.turn:
            if not self.tended.ready or life != self.tended.lives:
                return  # another trainer began from a head that has it
            try:
                if value_N is not None:
                    await self.trainer.merge(lo, value_N, how)
                self.inner = await self.trainer.inner_state()
            except TrainerFailed:
                await self.tended.failed()

    async def _merge_own(self, own: Own) -> None:
        """My own anchor moved with what I sent: x goes on from it, with the steps taken since."""
        async with self.tended.turn:
            try:
                if self.tended.ready:
                    await self.trainer.merge(0, own.anchor_F, "delta")
            except TrainerFailed:
                await self.tended.failed()

    async def _settle(self, work: Adopt) -> bool:
        return await self.mine.settle(work, self._learning, self.head)

    def _restore(self, work: Restore) -> bool:
        state = self._find(work.state)
        if state is None:
            return False
        self.head_name, self.adopted = work.state, work.round
        self._begin_afresh(state)
        private = read_private(self.store, work.vertex, self._learning.layout.floats)
        self.mine.memory_F, self.inner, claim, late = private
        self.away.held, self.head_vertex = self.away.held or late, work.vertex
        if self.auditing is not None:
            self.auditing.remember(claim)
        return True

    def _begin_afresh(self, state: SharedState) -> None:
        """From this state with nothing of my own, like a newcomer: my steps, feedback and moments led elsewhere."""
        self.mine.begin_afresh(self._learning, state)
        self.inner = b""
        self.owing.forget()
        self.tended.ready = False
        self.head = state  # last: a trainer that is starting looks at it, and then writes all of the above

    def _find(self, name: Digest) -> SharedState | None:
        return self.shelf.find(name, self._learning.layout)

    def _keep_private(self, vertex: Digest) -> None:
        claim = self.auditing.memory() if self.auditing is not None else b""
        write_private(self.store, vertex, self.mine.memory_F, self.inner, claim, self.away.kept())
        assert self.head_name is not None
        needed = frozenset[Digest]().union(*self.needed.values())
        data = [blob for blob in (self._learning.data_blob, self._learning.canary) if blob is not UNSET]
        self.shelf.tidy({self.head_name, *data, *needed}, self.adopted)

    @property
    def _learning(self) -> Learning:
        if self.learning is None:
            raise RunFailedError("E-RUN-04", "the run's genesis is not known yet")
        return self.learning


torch.set_num_threads(1)  # the arithmetic thread; trainers have processes of their own
