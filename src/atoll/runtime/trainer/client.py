"""The peer's side of a trainer: starts the process, asks it, watches over it, ends it.

Promises: every question has one answer or a `TrainerFailed`; a process that shows no progress is ended.
Never asks a second thing before the first is answered, never touches the model itself: x lies in the mailbox.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import UsageError
from atoll.crypto.digest import Buffer
from atoll.runtime.trainer.failures import broken, death, hung
from atoll.runtime.trainer.protocol import (
    ANSWER,
    FRAME_MAX,
    LENGTH,
    Answer,
    CancelTraining,
    Command,
    CommandDone,
    CommandFailed,
    EvaluateModel,
    InnerSaved,
    LoadInner,
    MergeAnchor,
    ModelEvaluated,
    SampleText,
    SaveInner,
    StepsTrained,
    Taken,
    TextSampled,
    TrainerHeartbeat,
    TrainerReady,
    TrainSteps,
    WriteParameters,
)
from atoll.runtime.trainer.shared_memory import SharedMailbox, anonymous
from atoll.training.codec.blocks import Room, new_wire
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.inner import Inner
from atoll.training.recipe.lr_position import ScheduleHorizon
from atoll.verification.replay_audit.replay import TrainingAssignment
from atoll.verification.replay_audit.trainer_commands import AuditProgress, JudgeSegment, NextAuditStep, ShowSegment
from atoll.worker.trainer_commands import Look, LossesMeasured, NextBatch, TrainerFailed, TrainerSpec

STEPS_OF_SILENCE = 20  # a step that takes so many times longer than the last ones counts as hung
# What Python runs, with the descriptor of the mailbox behind it. -P: no module comes from the working directory,
# which `-m` would search first.
PROGRAM = ("-P", "-m", "atoll.runtime.trainer")
LOOK_EVERY_S = 1.0  # how often patience is checked, and its margin: the parent's own loop may have been busy
STDERR_KEPT = 4096  # bytes of the child's last words that go into a failure

ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else a compiler starts as many processes as there are cores

T = TypeVar("T")


def threads_per_trainer(trainers: int) -> int:
    """torch threads for each of so many trainers on this computer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, trainers))


def check_device(name: str) -> None:
    """UsageError unless this computer has it."""
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cpu" or (device.index or 0) < count:
        return
    built = "" if torch.version.cuda or torch.version.hip else "; this build of PyTorch is for CPUs alone"
    raise UsageError(
        "E-TRN-14",
        f'node.device = "{name}", and PyTorch finds {count} GPUs here{built}',
        cause="no driver, another build of PyTorch than this computer needs, or CUDA_VISIBLE_DEVICES hides them",
        fix="ask python -c 'import torch; print(torch.cuda.device_count())'; "
        'then mend that, or write node.device = "cpu"',
    )


class TrainerClient:
    """One trainer process. `start` it, drive it, `stop` it; after a crash, `start` it again.

    `on_beat` is called about twice a second while it trains.
    """

    def __init__(self, on_beat: Callable[[TrainerHeartbeat], None] | None = None) -> None:
        self.layout: ModelLayout | None = None
        self._on_beat = on_beat
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()

    async def start(self, spec: TrainerSpec) -> ModelLayout:
        """Start the process and build the model; returns its layout. The first weights are in `read_x()`."""
        await self.stop()
        loop = asyncio.get_running_loop()
        self._spec, self._lock = spec, asyncio.Lock()
        self._failure: asyncio.Future[TrainerFailed] = loop.create_future()
        self._answer: asyncio.Future[Answer] | None = None
        self._job, self._training, self._last_words = 0, False, b""
        fd = anonymous()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *PROGRAM, str(fd)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(fd,),
                env=os.environ | {"OMP_NUM_THREADS": str(spec.threads), "PYTHONPATH": _python_path()} | ALONE,
            )
            self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._overhear())]
            ready = await self._ask(spec, TrainerReady)
            self.layout = ready.layout
            self._mailbox = SharedMailbox(fd, ready.layout.floats, ready.room_bytes)
        except BaseException:
            await self.stop()
            raise
        finally:
            os.close(fd)
        return ready.layout

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
        assignment: TrainingAssignment | None = None,
        held: tuple[int, ...] = (),
        apart: bool = False,
        batch: int = 0,
        inner: Inner | None = None,
        horizon: ScheduleHorizon | None = None,
    ) -> StepsTrained:
        """At most `steps` inner steps from x, at most until `until` (time.monotonic()); x is then in `read_x()`.

        With `ahead`, also of 0, it goes on from there by itself, so many steps, and after a `merge` as many as
        `steps`; the next `train` counts them. `cancel`, or cancelling the awaiting task, ends it at the next step
        boundary; the steps taken count. With an `assignment` it keeps a chain, whose links come with the answer;
        chains of rounds that are `held` it keeps, too. `apart`: on data from half an epoch ahead.
        `batch`: samples of a step, if they are not the spec's. `inner` and `horizon`: numbers of its optimizer from
        now on, of the spec's kind.
        """
        assert steps >= 0
        self._job += 1
        where = cursor, shard, shards, global_step
        job = TrainSteps(self._job, steps, until, *where, ahead, assignment, held, apart, batch, inner, horizon)
        return await self._ask(job, StepsTrained)

    def cancel(self) -> None:
        """End the training under way at its next step boundary. Harmless if there is none."""
        if self._process is not None and not self._failure.done():
            self._say(CancelTraining(self._job))

    def hand_over(self) -> None:
        """The same, and it goes on ahead from there as after all its steps."""
        if self._process is not None and not self._failure.done():
            self._say(CancelTraining(self._job, ahead=True))

    def stand(self) -> None:
        """The same as `cancel`, and it takes no step ahead either until the next `train`."""
        if self._process is not None and not self._failure.done():
            self._say(CancelTraining(self._job, stands=True))

    def read_x(self) -> Tensor:
        """(F,): x as of the end of the last `train` or `write_x`. A view: it changes with the next of them."""
        return self._mailbox.x_F

    async def write_x(self, x_F: Tensor, counters: tuple[int, ...] = ()) -> None:
        """Go on from these parameters and buffers (F,)."""
        await self._ask(WriteParameters(counters), CommandDone, before=lambda: self._mailbox.x_F.copy_(x_F))

    async def merge(self, lo: int, value_N: Tensor, how: Taken) -> None:
        """x[lo : lo + N] takes in a new anchor (N,), between two steps; `shift` adds what is given."""
        into_N = self._mailbox.x_F[lo : lo + len(value_N)]
        await self._ask(MergeAnchor(lo, lo + len(value_N), how), CommandDone, before=lambda: into_N.copy_(value_N))

    async def evaluate(self, samples: int = 512, of_F: Tensor | None = None) -> ModelEvaluated:
        """Loss and accuracy of x, or of these parameters (F,), on the same validation samples every time."""
        command = EvaluateModel(samples, given=of_F is not None)
        return await self._ask(command, ModelEvaluated, before=lambda: self._mailbox.show(of_F))

    async def sample(self, prompt: str, n: int, seed: int = 0, of_F: Tensor | None = None) -> str:
        """What the model would write after `prompt`, `n` bytes, with x or with these parameters (F,)."""
        command = SampleText(prompt, n, seed, given=of_F is not None)
        return (await self._ask(command, TextSampled, before=lambda: self._mailbox.show(of_F))).text

    async def audit(self, work: ShowSegment | JudgeSegment | NextAuditStep) -> AuditProgress:
        """Begin to show or to judge, or go on with it, for one step: no round waits for the rest."""
        return await self._ask(work, AuditProgress)

    async def validate(self, work: Look | NextBatch, of_F: Tensor | None = None) -> LossesMeasured:
        """Begin to look at these parameters (F,), or go on with it, for one batch: no round waits for the rest."""
        return await self._ask(work, LossesMeasured, before=lambda: self._mailbox.show(of_F))

    def made(self) -> Tensor:
        """A copy (F,) of what steps made that were taken again, right after the last of them."""
        return self._mailbox.shown()

    async def inner_state(self, room: Room = new_wire) -> Buffer:
        """A copy of it, in `room`."""
        return await self._ask(
            SaveInner(), InnerSaved, after=lambda saved: self._mailbox.take(saved.size_bytes, room)
        )

    async def set_inner_state(self, data: Buffer) -> None:
        """Empty bytes begin afresh, as after a divergence."""
        await self._ask(LoadInner(len(data)), CommandDone, before=lambda: self._mailbox.put(data))

    async def stop(self) -> None:
        """End the process, whatever it is doing. Harmless if there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()  # it holds nothing that could be lost: what counts lies in the mailbox
        await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(TrainerFailed("crashed", "the trainer was stopped"))

    async def _ask(
        self,
        command: Command | TrainerSpec,
        expected: type[T],
        before: Callable[[], object] | None = None,
        after: Callable[[T], object] | None = None,
    ) -> Any:
        """Send one command and wait for its answer, or what `after` makes of it; the lock is held until it came,
        even if the caller leaves."""
        turn = asyncio.ensure_future(self._turn(command, expected, before, after))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            turn.add_done_callback(lambda done: done.cancelled() or done.exception())
            if isinstance(command, TrainSteps) and self._process is not None and not turn.done():
                self._say(CancelTraining(command.job))
            raise

    async def _turn(
        self,
        command: Command | TrainerSpec,
        expected: type[T],
        before: Callable[[], object] | None,
        after: Callable[[T], object] | None,
    ) -> Any:
        async with self._lock:
            if self._process is None:
                raise TrainerFailed("crashed", "the trainer is not running", fix="start it first")
            if self._failure.done():
                raise self._failure.result()
            self._answer = asyncio.get_running_loop().create_future()
            self._heard, self._step_s = time.monotonic(), None
            self._training = isinstance(command, TrainSteps)
            if before is not None:
                before()
            self._say(command)
            answer = await self._watch(self._answer)
            if isinstance(answer, CommandFailed):
                raise broken(answer)
            assert isinstance(answer, expected), f"{type(answer).__name__} is no answer to {command}"
            return after(answer) if after is not None else answer

    async def _watch(self, answer: asyncio.Future[Answer]) -> Answer:
        """Wait for the answer as long as there are signs of progress."""
        failure = self._failure  # of this process: a restart makes a new one
        while True:
            patience_s = self._spec.first_patience_s
            if self._step_s is not None:
                patience_s = max(self._spec.patience_s, STEPS_OF_SILENCE * self._step_s)
            await asyncio.wait(  # a heartbeat changes the patience: look again every second
                {answer, failure}, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                return answer.result()
            if failure.done():
                raise failure.result()
            if time.monotonic() > self._heard + patience_s + LOOK_EVERY_S:
                self._hung(patience_s)

    def _hung(self, patience_s: float) -> None:
        assert self._process is not None
        self._fail(hung(patience_s))
        with suppress(ProcessLookupError):
            self._process.kill()

    def _fail(self, failure: TrainerFailed) -> None:
        if not self._failure.done():
            self._failure.set_result(failure)

    def _say(self, command: Command | TrainerSpec) -> None:
        assert self._process is not None and self._process.stdin is not None
        body = msgspec.msgpack.encode(command)
        assert len(body) <= FRAME_MAX
        with suppress(ConnectionError):  # the listener notices the end and says why
            self._process.stdin.write(LENGTH.pack(len(body)) + body)

    async def _listen(self) -> None:
        """Read answers until the child's stdout ends, then say what became of it."""
        assert self._process is not None and self._process.stdout is not None
        process, stdout = self._process, self._process.stdout
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
                answer = ANSWER.decode(await stdout.readexactly(size))
                self._heard = time.monotonic()
                if isinstance(answer, TrainerHeartbeat):
                    self._step_s = answer.step_s
                    if self._on_beat is not None and self._training:
                        asyncio.get_running_loop().call_soon(self._on_beat, answer)  # its errors are its own
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result(answer)
        code = await process.wait()
        await asyncio.wait(self._tasks[1:], timeout=LOOK_EVERY_S)  # the last words
        self._fail(death(code, self._last_words.decode(errors="replace")))

    async def _overhear(self) -> None:
        """Keep the end of what the child prints."""
        assert self._process is not None and self._process.stderr is not None
        while text := await self._process.stderr.read(STDERR_KEPT):
            self._last_words = (self._last_words + text)[-STDERR_KEPT:]


def _python_path() -> str:
    """The child finds the very packages the parent runs with, also when they are not installed."""
    return os.pathsep.join(path for path in sys.path if path)
