"""The island behind a peer: the trainer process that owns the device, and the tensors of the shared state.

Carries out the work that machines ask for, off the event loop: training in the trainer's own process, tensor
arithmetic on one thread (torch releases Python's lock), disk on another. Anchor, outer state and error feedback
belong to the peer and live here, so a crashed trainer costs a round and nothing more.
Promises: every piece of work is answered once; `Advanced` and `Adopt` are answered when their bytes are durable.
Never decides anything: what is counted and what is the head is said by the vertex.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import Digest, Seconds
from atoll.base.machine import Payload
from atoll.host.attached import AttachedTrainer
from atoll.host.learning import ATTACHED, Learning
from atoll.host.store import Store, stored
from atoll.host.trainer import Beat, Evaluated, Trainer, TrainerFailed, TrainerSpec
from atoll.keys.digest import Buffer, digest
from atoll.learn.codec import Codec, codec_named, native
from atoll.learn.combine import combine
from atoll.learn.data import cursor_after
from atoll.learn.layout import check_same
from atoll.learn.outer import SHARED, momentum_of
from atoll.learn.state import SharedState, advance, export_model, state_bytes, state_from_bytes
from atoll.learn.statistic import Statistic
from atoll.learn.update import (
    Common,
    Update,
    encode_update,
    memory_bytes,
    memory_from_bytes,
    part_bounds,
    part_codec,
    part_codecs,
    settle,
)
from atoll.node.jobs import Adopt, Advance, Advanced, Encode, Encoded, Restore, Train, Trained
from atoll.protocol.reduce.work import Combine, Combined

STATES_HELD = 4  # recent shared states in memory: the head, its parent, and proposals
STATES_KEPT_S = 60.0  # older ones stay on disk for laggards this long, which a download of the head has to fit
STATES_KEPT_MAX = 64  # of them; rounds of a second each would fill the disk
RETRY_FIRST_S, RETRY_LAST_S = 0.5, 60.0  # a trainer that failed is started again after this long, doubling
FAILURES_MAX = 6  # in a row; then the peer leaves with a farewell


class Private(msgspec.Struct, frozen=True):
    """What only this peer knows; good for exactly one vertex."""

    vertex: Digest
    memory: bytes
    inner: bytes


class Island:
    """`data` is a path or name for the trainer; None until the data set is here."""

    def __init__(
        self, store: Store, threads: int, trains: bool = True, trainer: AttachedTrainer | None = None
    ) -> None:
        self.store, self.threads, self.trains = store, threads, trains
        self.learning: Learning | None = None
        self.data: str | None = None
        self.attached = trainer is not None
        self.trainer = trainer or Trainer(on_beat=self._on_beat)
        self.trainer_ready = False
        self.failures = 0
        self.retry_at: Seconds = 0.0
        self.beat: Beat | None = None
        self.on_beat: Callable[[Beat], None] = lambda beat: None
        self.head: SharedState | None = None
        self.head_name: Digest | None = None
        self.head_vertex: Digest | None = None
        self.adopted = -1  # the round whose state is the head, or is just becoming it
        self.states: OrderedDict[Digest, SharedState] = OrderedDict()
        self.kept_since: dict[Digest, float] = {}  # states on disk -> when they were put there
        self.memory_F: Tensor | None = None
        self.inner = b""
        self.update: Update | None = None
        self.up: tuple[Codec, ...] = ()  # what it was encoded with
        self.steps_since = 0  # inner steps in the live parameters that no vertex has counted
        self.loss_since = 0.0
        self._equipped = asyncio.Event()
        self._arithmetic = ThreadPoolExecutor(1, "arithmetic")
        self._disk = ThreadPoolExecutor(1, "disk")
        self._device = asyncio.Lock()  # one trainer command at a time, in the order they were asked

    def equip(self, data: str) -> None:
        """The data set is here: from now on there is something to train."""
        self.data = data
        self._equipped.set()

    async def close(self) -> None:
        await self.trainer.stop()
        self._arithmetic.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True, cancel_futures=True)

    async def do(self, work: Any) -> Any:
        """The answer to a piece of work. Raises AtollError, PeerFault or OSError: the driver answers Failed."""
        loop = asyncio.get_running_loop()
        match work:
            case Train():
                return await self._train(work)
            case Encode():
                return await loop.run_in_executor(self._arithmetic, self._encode, work)
            case Combine():
                if work.round <= self.adopted:
                    raise RunFailedError("E-RUN-09", f"round {work.round} is over: its rows build on an older head")
                return await loop.run_in_executor(self._arithmetic, self._combine, work, self._common(work.round))
            case Advance():
                return await loop.run_in_executor(self._arithmetic, self._advance, work)
            case Adopt():
                return await self._adopt(work)
            case Restore():
                return await loop.run_in_executor(self._arithmetic, self._restore, work)
            case _:
                return await loop.run_in_executor(self._disk, stored, self.store, work)

    def name_of(self, message: object, payload: Buffer) -> Digest:
        return digest(payload)

    async def evaluate(self, samples: int = 512) -> Evaluated:
        """Validation loss of the head."""
        await self._equipped.wait()
        async with self._device:
            await self._ready()
            return await self.trainer.evaluate(samples)

    async def sample(self, prompt: str, count: int, seed: int) -> str:
        await self._equipped.wait()
        async with self._device:
            await self._ready()
            return await self.trainer.sample(prompt, count, seed)

    async def export(self) -> bytes:
        """The agreed model by tensor name, as a safetensors file."""
        assert self.head is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._arithmetic, export_model, self.head, self._learning.layout)

    # ---- the trainer ---------------------------------------------------------------------------------------

    async def _train(self, work: Train) -> Trained:
        if not self.trains:
            raise RunFailedError("E-TRN-10", "this peer does not train")
        if time.monotonic() < self.retry_at:
            raise RunFailedError("E-TRN-11", f"its trainer failed {self.failures} times and is being restarted")
        begin = time.monotonic()
        try:
            async with asyncio.timeout(work.seconds_max):
                await self._equipped.wait()
        except TimeoutError:
            raise RunFailedError("E-TRN-12", "its data set has not arrived yet") from None
        async with self._device:
            try:
                await self._ready()
                assert self.head is not None
                done = await self.trainer.train(
                    work.steps,
                    cursor=cursor_after(self.head.samples, work.shards),
                    shard=work.shard,
                    shards=work.shards,
                    global_step=self.head.steps,
                    until=begin + work.seconds_max,
                )
            except TrainerFailed as failed:
                await self._trainer_failed()
                raise failed
        self.failures = 0
        if done.steps == 0 or done.loss is None:
            return Trained(0, 0, 0.0, 0.0)
        self.loss_since += done.loss * done.steps
        self.steps_since += done.steps
        samples = self.steps_since * self._learning.recipe.batch
        loss = self.loss_since / self.steps_since
        return Trained(self.steps_since, samples, loss, done.seconds / done.steps)

    async def warm_up(self) -> None:
        """Start the trainer before it is needed: a newcomer's first round should not wait for imports."""
        if not self.trains:
            return
        await self._equipped.wait()
        async with self._device:
            try:
                await self._ready()
            except TrainerFailed:
                await self._trainer_failed()

    async def _ready(self) -> None:
        """The trainer runs and holds the live parameters."""
        if self.trainer_ready:
            return
        recipe = self._learning.recipe
        assert self.head is not None and self.data is not None
        if self._learning.data == ATTACHED and not self.attached:
            raise TrainerFailed(
                "refused",
                "this run trains a model of its members' own",
                cause="its founder attached a PyTorch model from Python",
                fix="in your own training loop: atoll.join(ticket).attach(model, optimizer)",
            )
        spec = TrainerSpec(
            recipe.model, recipe.seed, self.data, recipe.batch, recipe.seq_len, recipe.inner, self.threads
        )
        layout = await self.trainer.start(spec)
        check_same(self._learning.layout, layout)
        if self.inner:
            await self.trainer.set_inner_state(self.inner)
        written = None
        while written is not self.head:  # vertices are adopted while it starts
            written = self.head
            await self.trainer.write_x(written.anchor_F)
        self.steps_since, self.loss_since = 0, 0.0
        self.trainer_ready = True

    async def _trainer_failed(self) -> None:
        """Start anew from the anchor, later each time: what the live parameters held is lost."""
        self.trainer_ready = False
        self.failures += 1
        self.retry_at = time.monotonic() + min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** (self.failures - 1))
        await self.trainer.stop()

    @property
    def hopeless(self) -> bool:
        return self.failures >= FAILURES_MAX

    def _on_beat(self, beat: Beat) -> None:
        self.beat = beat
        self.on_beat(beat)

    # ---- tensors -------------------------------------------------------------------------------------------

    def _encode(self, work: Encode) -> Encoded:
        assert self.head is not None
        recipe = self._learning.recipe
        native.load_for(len(self.head.anchor_F))
        bounds = part_bounds(len(self.head.anchor_F), work.shares)
        x_F = self.trainer.read_x()
        self.up = part_codecs(recipe.coding.up, self._common(work.round), bounds)
        self.update = encode_update(self.head.anchor_F, x_F, self.memory_F, bounds, self.up, recipe.coding.beta)
        return Encoded(tuple(_payload(wire) for wire in self.update.wires))

    def _common(self, round: int) -> Common:
        assert self.head is not None and self.head_name is not None
        learning = self._learning
        return Common(round, self.head, self.head_name, learning.layout, momentum_of(learning.recipe.outer))

    def _combine(self, work: Combine, common: Common) -> Combined:
        coding, floats = self._learning.recipe.coding, self._learning.layout.floats
        bounds = part_bounds(floats, work.shares)
        lo, hi = bounds[work.part]
        rows = [(row.weight, row.payload.data) for row in work.rows]
        up = part_codec(coding.up, common, bounds, work.part)
        down, statistic = codec_named(coding.down), Statistic(work.statistic, work.liars)
        done = combine(rows, hi - lo, up, down, statistic)
        counted = tuple(work.rows[i].peer for i in done.counted)
        faulty = tuple(work.rows[i].peer for i, _ in done.faults)
        return Combined(None if done.wire is None else _payload(done.wire), counted, faulty, done.why)

    def _advance(self, work: Advance) -> Advanced:
        before = self._state(work.before)
        if before is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        recipe, layout = self._learning.recipe, self._learning.layout
        assert isinstance(recipe.outer, SHARED), "decode_learning refuses the others"
        bounds = part_bounds(layout.floats, work.shares)
        after = advance(
            before,
            [None if p is None else p.data for p in work.parts],
            bounds,
            codec_named(recipe.coding.down),
            recipe.outer,
            steps=work.steps,
            samples=work.steps * recipe.batch * work.shards,
            tokens=work.samples * recipe.seq_len,
        )
        name = self.store.put_blob(state_bytes(after, layout))
        self._hold(name, after)
        return Advanced(name)

    async def _adopt(self, work: Adopt) -> None:
        self.adopted = work.round
        loop = asyncio.get_running_loop()
        after = await loop.run_in_executor(self._arithmetic, self._state, work.state)
        if after is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        if self.trainer_ready:
            self.trainer.cancel()  # the round is over for everybody: what is left of its steps is not taken
            async with self._device:
                await self._merge(work, after)
        else:  # it is starting, or gone: it will begin from the head, whichever that is by then
            await self._settle(work)
            self.head = after
        self.head_name, self.head_vertex = work.state, work.vertex
        await loop.run_in_executor(self._disk, self._write_private, work.vertex)

    async def _merge(self, work: Adopt, after: SharedState) -> None:
        """The live parameters take in the new anchor."""
        before = self.head
        if await self._settle(work):
            x_F, self.steps_since, self.loss_since = after.anchor_F, 0, 0.0
        elif before is not None and self.trainer_ready and self.steps_since:
            # nothing of mine was encoded: keep my own steps on top of the new anchor
            x_F = after.anchor_F + (self.trainer.read_x() - before.anchor_F)
        else:
            x_F = after.anchor_F
        self.head = after
        if not self.trainer_ready or (before is not None and before.anchor_F is after.anchor_F):
            return
        try:
            await self.trainer.write_x(x_F)
            self.inner = await self.trainer.inner_state()
        except TrainerFailed:
            await self._trainer_failed()

    async def _settle(self, work: Adopt) -> bool:
        """Error feedback after an agreed round; True if something of mine was encoded for it."""
        update, self.update = self.update, None
        if work.counted is None or update is None:
            return False
        loop = asyncio.get_running_loop()
        self.memory_F = await loop.run_in_executor(self._arithmetic, settle, update, work.counted, self.up)
        return True

    def _restore(self, work: Restore) -> bool:
        state = self._state(work.state)
        if state is None:
            return False
        self.head, self.head_name, self.adopted = state, work.state, work.round
        self._read_private(work.vertex)
        self.update, self.trainer_ready = None, False
        return True

    def _state(self, name: Digest) -> SharedState | None:
        held = self.states.get(name)
        if held is not None:
            return held
        data = self.store.read_blob(name)
        if data is None:
            return None
        try:
            state = state_from_bytes(data, self._learning.layout)
        except PeerFault as fault:
            raise RunFailedError("E-RUN-03", f"the agreed state cannot be read: {fault.what}") from fault
        self._hold(name, state)
        return state

    def _hold(self, name: Digest, state: SharedState) -> None:
        self.states[name] = state
        self.states.move_to_end(name)
        self.kept_since[name] = time.monotonic()
        while len(self.states) > STATES_HELD:
            self.states.popitem(last=False)

    def _write_private(self, vertex: Digest) -> None:
        memory = memory_bytes(self.memory_F) if self.memory_F is not None else b""
        self.store.write_private(msgspec.msgpack.encode(Private(vertex, memory, self.inner)))
        assert self.head_name is not None
        recent = time.monotonic() - STATES_KEPT_S
        self.kept_since = {n: t for n, t in list(self.kept_since.items())[-STATES_KEPT_MAX:] if t > recent}
        self.store.drop_blobs({*self.states, *self.kept_since, self.head_name, self._learning.data_blob})

    def _read_private(self, vertex: Digest) -> None:
        self.memory_F, self.inner = None, b""
        data = self.store.read_private()
        if data is None:
            return
        try:
            private = msgspec.msgpack.decode(data, type=Private)
            if private.vertex == vertex:
                floats = self._learning.layout.floats
                self.memory_F = memory_from_bytes(private.memory, floats) if private.memory else None
                self.inner = private.inner
        except (msgspec.DecodeError, ValueError):
            return  # damaged: it costs this peer's error feedback and moments, nothing that was agreed

    @property
    def _learning(self) -> Learning:
        if self.learning is None:
            raise RunFailedError("E-RUN-04", "the run's genesis is not known yet")
        return self.learning

    # ---- blobs ---------------------------------------------------------------------------------------------


def _payload(wire: Buffer) -> Payload:
    return Payload(digest(wire), len(wire), wire)


__all__ = ["FAILURES_MAX", "Island", "Private"]

torch.set_num_threads(1)  # the arithmetic thread; trainers have processes of their own
