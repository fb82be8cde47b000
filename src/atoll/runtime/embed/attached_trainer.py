"""Trainer stand-in that drives a user's training loop over a socket.

In `trainer/` the peer starts the trainer. Here the user's process is the trainer, and the peer process
(`peer_process.py`) holds this stand-in. Commands, replies and shared memory are the same, over a socket pair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import Buffer
from atoll.policy.data.claims import UncountedSampleRanges
from atoll.runtime.embed.messages import (
    AgreedReadings,
    DeclineRounds,
    FromUser,
    LoopDetachNotice,
    RoundsBegin,
    ToUser,
)
from atoll.runtime.trainer import ModelEvaluated, TrainerCommandError, TrainerSpec
from atoll.runtime.trainer.protocol import (
    FRAME_MAX,
    LENGTH,
    CancelTraining,
    CommandFailed,
    InnerStateInMailbox,
    LoadInner,
    MergeAnchorIntoParameters,
    SaveInner,
    SetParameters,
    StepsTrained,
    Taken,
    TrainerCommandCompleted,
    TrainSteps,
)
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.codec.blocks import Room, new_wire
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.recipes import Recipe
from atoll.wire.data_ranges import AssignedShard
from atoll.worker.trainer_commands import BeginValidation, ContinueMeasurement, Look, LossesMeasured

T = TypeVar("T")
_FROM_USER: msgspec.msgpack.Decoder[FromUser] = msgspec.msgpack.Decoder(FromUser)


class AttachedTrainer:
    """Stand-in for `TrainerClient` over a user's loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mailbox: SharedMailbox) -> None:
        self.layout: ModelLayout | None = None
        self._reader, self._writer, self._mailbox = reader, writer, mailbox
        self._lock = asyncio.Lock()
        self._replies: asyncio.Queue[FromUser] = asyncio.Queue()
        self._job = 0
        self._training = False  # True while the loop takes steps for a job
        self.recipe: Recipe | None = None  # recipe of the run, once genesis is known
        self.claims = UncountedSampleRanges()
        self.pass_steps = 0
        self.validated = self.validates = False  # members evaluate the model; this loop can evaluate it
        self.readings: Callable[[], AgreedReadings] | None = None  # figures of the last agreed round, until sent
        self.on_decline: Callable[[int], None] = lambda rounds: None
        self.ended = asyncio.Event()
        self.has_detached = False  # True if the loop closed its run, False if its program was killed

    async def read_messages(self) -> None:
        """Receive the loop's messages until it ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                message = _FROM_USER.decode(await self._reader.readexactly(size))
                if isinstance(message, LoopDetachNotice):
                    self.has_detached = True
                    break
                if isinstance(message, DeclineRounds):
                    self.on_decline(message.rounds)
                    if not self._training or message.job != self._job:
                        continue  # steps ahead of a job that was not requested yet
                self._replies.put_nowait(message)
        self.ended.set()

    def send(self, message: ToUser) -> None:
        body = msgspec.msgpack.encode(message)
        assert len(body) <= FRAME_MAX
        with suppress(ConnectionError):
            self._writer.write(LENGTH.pack(len(body)) + body)

    async def start(self, spec: TrainerSpec) -> ModelLayout:
        assert self.layout is not None
        if self.ended.is_set():
            raise _ended()
        assert self.recipe is not None, "a spec implies a known genesis"
        self.send(RoundsBegin(self.recipe, self.validated))
        return self.layout

    async def train(
        self,
        steps: int,
        *,
        cursor: int,
        shard: int,
        shards: int,
        global_step: int,
        until: float | None = None,
        ahead: int | None = None,
        apart: bool = False,  # ignored: the loop chooses its data
        batch: int = 0,  # ignored: the loop chooses its batch
        span: tuple[int, int] | None = None,
        data: tuple[AssignedShard, ...] | None = None,
    ) -> StepsTrained:
        if self.recipe is not None and self.recipe.schedule.epochs is not msgspec.UNSET:
            steps = min(steps, self.recipe.schedule.steps_of(self.pass_steps))
        async with self._lock:
            if self.readings is not None:  # attach returns at the first job
                self.send(self.readings())
                self.readings = None
            self._job, self._training = self._job + 1, True
            try:
                where = cursor, shard, shards, global_step
                assigned = self.claims.begin(data) if data is not None else None
                message = TrainSteps(self._job, steps, until, *where, ahead, span=span, data=assigned)
                done = await self._request(message, StepsTrained)
                claim = self.claims.add(*done.read) if done.read is not None else None
                return msgspec.structs.replace(done, data=claim)
            finally:
                self._training = False

    def cancel(self) -> None:
        self.send(CancelTraining(self._job))

    def hand_over(self) -> None:
        self.cancel()

    def stand(self) -> None:
        self.send(CancelTraining(self._job, stands=True))

    def read_x(self) -> Tensor:
        return self._mailbox.x_F

    async def write_x(self, x_F: Tensor, counters: tuple[int, ...] = ()) -> None:
        async with self._lock:
            await asyncio.to_thread(self._mailbox.x_F.copy_, x_F)  # a large model takes a second
            await self._request(SetParameters(counters), TrainerCommandCompleted)

    async def merge(self, lo: int, value_N: Tensor, how: Taken) -> None:
        async with self._lock:
            await asyncio.to_thread(self._mailbox.x_F[lo : lo + len(value_N)].copy_, value_N)
            await self._request(MergeAnchorIntoParameters(lo, lo + len(value_N), how), TrainerCommandCompleted)

    async def evaluate(self, samples: int = 512, of_F: Tensor | None = None) -> ModelEvaluated:
        raise TrainerCommandError("refused", "an attached loop evaluates its model itself", alive=True)

    async def sample(self, prompt: str, n: int, seed: int = 0, of_F: Tensor | None = None) -> str:
        raise TrainerCommandError("refused", "an attached loop draws its own samples", alive=True)

    async def validate(self, work: Look | ContinueMeasurement, of_F: Tensor | None = None) -> LossesMeasured:
        if not isinstance(work, BeginValidation) or of_F is None or not self.validates:
            raise TrainerCommandError("refused", "this attached loop has no held-out loss (validate=)", alive=True)
        async with self._lock:
            self._mailbox.show(of_F)
            return await self._request(work, LossesMeasured)

    def made(self) -> Tensor:
        raise TrainerCommandError("refused", "an attached loop cannot replay steps", alive=True)

    async def inner_state(self, room: Room = new_wire) -> Buffer:
        if not self._averages:
            return b""  # the optimizer belongs to the loop
        async with self._lock:
            saved = await self._request(SaveInner(), InnerStateInMailbox)
            return self._mailbox.take(saved.size_bytes, room)

    async def set_inner_state(self, data: Buffer) -> None:
        if not self._averages:
            return
        async with self._lock:
            await self._request(LoadInner(self._mailbox.put(data)), TrainerCommandCompleted)

    @property
    def _averages(self) -> bool:
        """True if rounds average the moments of the loop's optimizer."""
        return self.recipe is not None and any(self.recipe.schedule.moments)

    async def stop(self) -> None:
        return  # the user ends the loop

    async def _request(self, command: ToUser, expected: type[T]) -> T:
        self.send(command)
        answer = asyncio.ensure_future(self._replies.get())
        ended = asyncio.ensure_future(self.ended.wait())
        await asyncio.wait({answer, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not answer.done():
            answer.cancel()
            raise _ended()
        message = answer.result()
        if isinstance(message, CommandFailed):
            raise TrainerCommandError(message.why, message.what, alive=True)
        if isinstance(message, DeclineRounds):
            raise RunFailedError("E-ATT-08", "its loop declined this round")
        assert isinstance(message, expected), f"{type(message).__name__} does not reply to {command}"
        return message


def _ended() -> TrainerCommandError:
    return TrainerCommandError("crashed", "the training loop that this peer belongs to has ended")
