"""Trainer client: starts the trainer process, sends commands, watches progress, ends the process.

Invariants:
- Every command has one answer or a `TrainerCommandError`.
- A process without progress is ended.
- One command at a time.
Not responsible for: the model (x lies in the mailbox).
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
from atoll.runtime.system import anonymous_file, usable_cores
from atoll.runtime.trainer.failures import broken, death, hung
from atoll.runtime.trainer.protocol import (
    ANSWER,
    FRAME_MAX,
    LENGTH,
    Answer,
    CancelTraining,
    Command,
    CommandFailed,
    EvaluateModel,
    InnerStateInMailbox,
    LoadInner,
    MergeAnchorIntoParameters,
    ModelEvaluated,
    SampleText,
    SaveInner,
    SetParameters,
    StepsTrained,
    Taken,
    TextSampled,
    TrainerCommandCompleted,
    TrainerHeartbeat,
    TrainerReady,
    TrainSteps,
)
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.codec.blocks import Room, new_wire
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.inner import Inner
from atoll.training.recipe.lr_position import ScheduleHorizon
from atoll.verification.replay_audit.replay import TrainingAssignment
from atoll.verification.replay_audit.trainer_commands import (
    AuditStepCompleted,
    JudgeSegment,
    NextAuditStep,
    WriteSegmentExhibit,
)
from atoll.worker.trainer_commands import (
    ContinueMeasurement,
    Look,
    LossesMeasured,
    TrainerCommandError,
    TrainerSpec,
)

STEPS_OF_SILENCE = 20  # a step that takes 20 times longer than the last ones counts as hung
# Arguments of Python, before the descriptor of the mailbox. -P: no module comes from the working directory, which
# `-m` would search first.
PROGRAM = ("-P", "-m", "atoll.runtime.trainer")
LOOK_EVERY_S = (
    1.0  # seconds between checks of the patience, and its margin: the parent's own loop may have been busy
)
STDERR_KEPT = 4096  # last bytes of the child's stderr that go into a failure

ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else a compiler starts one process per core

T = TypeVar("T")


def threads_per_trainer(trainers: int) -> int:
    """torch threads for each of `trainers` trainers on this computer."""
    return max(1, usable_cores() // max(1, trainers))


def chosen_device(name: str) -> str:
    """The device that `node.device` means on this computer: "auto" is the first GPU, or the CPU."""
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> None:
    """UsageError unless this computer has the device."""
    device = torch.device(chosen_device(name))
    count = torch.cuda.device_count()
    if device.type == "cpu" or (device.index or 0) < count:
        return
    built = "" if torch.version.cuda or torch.version.hip else "; this build of PyTorch is for CPUs alone"
    raise UsageError(
        "E-TRN-14",
        f'node.device = "{name}", and PyTorch finds {count} GPUs here{built}',
        cause="no driver, another build of PyTorch than this computer needs, or CUDA_VISIBLE_DEVICES hides them",
        fix="run python -c 'import torch; print(torch.cuda.device_count())'; "
        'then repair the driver or the build, or write node.device = "cpu"',
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
        self._failure: asyncio.Future[TrainerCommandError] = loop.create_future()
        self._answer: asyncio.Future[Answer] | None = None
        self._job, self._training, self._last_words = 0, False, b""
        fd = anonymous_file()
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
        span: tuple[int, int] | None = None,  # ignored: x lies in the mailbox as a whole
    ) -> StepsTrained:
        """At most `steps` inner steps from x, at most until `until` (time.monotonic()); x is then in `read_x()`.

        With `ahead`, also 0, the trainer then takes up to `ahead` steps by itself, and after a `merge` up to
        `steps`; the next `train` counts them. `cancel`, or cancelling the awaiting task, ends it at the next step
        boundary; the steps taken count. With an `assignment` it keeps a chain and returns the links; it also keeps
        the chains of the rounds in `held`. `apart`: data from half an epoch ahead. `batch`: samples per step, 0:
        the spec's. `inner` and `horizon`: optimizer numbers from now on, of the spec's kind.
        """
        assert steps >= 0
        self._job += 1
        where = cursor, shard, shards, global_step
        job = TrainSteps(self._job, steps, until, *where, ahead, assignment, held, apart, batch, inner, horizon)
        return await self._ask(job, StepsTrained)

    def cancel(self) -> None:
        """End the current training at its next step boundary. Does nothing if there is none."""
        if self._process is not None and not self._failure.done():
            self._say(CancelTraining(self._job))

    def hand_over(self) -> None:
        """Like `cancel`; the trainer then continues by itself as after all steps."""
        if self._process is not None and not self._failure.done():
            self._say(CancelTraining(self._job, ahead=True))

    def stand(self) -> None:
        """Like `cancel`; the trainer takes no step by itself until the next `train`."""
        if self._process is not None and not self._failure.done():
            self._say(CancelTraining(self._job, stands=True))

    def read_x(self) -> Tensor:
        """x (F,) at the end of the last `train` or `write_x`. A view: the next of them changes it."""
        return self._mailbox.x_F

    async def write_x(self, x_F: Tensor, counters: tuple[int, ...] = ()) -> None:
        """Set x to these parameters and buffers (F,)."""
        await self._ask(
            SetParameters(counters), TrainerCommandCompleted, before=lambda: self._mailbox.x_F.copy_(x_F)
        )

    async def merge(self, lo: int, value_N: Tensor, how: Taken) -> None:
        """Merge a new anchor (N,) into x[lo : lo + N], between two steps; `shift` adds the values."""
        into_N = self._mailbox.x_F[lo : lo + len(value_N)]
        await self._ask(
            MergeAnchorIntoParameters(lo, lo + len(value_N), how),
            TrainerCommandCompleted,
            before=lambda: into_N.copy_(value_N),
        )

    async def evaluate(self, samples: int = 512, of_F: Tensor | None = None) -> ModelEvaluated:
        """Loss and accuracy of x, or of these parameters (F,), on the same validation samples every time."""
        command = EvaluateModel(samples, given=of_F is not None)
        return await self._ask(command, ModelEvaluated, before=lambda: self._mailbox.show(of_F))

    async def sample(self, prompt: str, n: int, seed: int = 0, of_F: Tensor | None = None) -> str:
        """`n` bytes that the model writes after `prompt`, with x or with these parameters (F,)."""
        command = SampleText(prompt, n, seed, given=of_F is not None)
        return (await self._ask(command, TextSampled, before=lambda: self._mailbox.show(of_F))).text

    async def audit(self, work: WriteSegmentExhibit | JudgeSegment | NextAuditStep) -> AuditStepCompleted:
        """One step of showing or judging a segment: no round waits for the rest."""
        return await self._ask(work, AuditStepCompleted)

    async def validate(self, work: Look | ContinueMeasurement, of_F: Tensor | None = None) -> LossesMeasured:
        """One batch of a measurement at these parameters (F,): no round waits for the rest."""
        return await self._ask(work, LossesMeasured, before=lambda: self._mailbox.show(of_F))

    def made(self) -> Tensor:
        """A copy (F,) of the update of a replay, valid right after its last step."""
        return self._mailbox.shown()

    async def inner_state(self, room: Room = new_wire) -> Buffer:
        """A copy of the inner state, in `room`."""
        return await self._ask(
            SaveInner(), InnerStateInMailbox, after=lambda saved: self._mailbox.take(saved.size_bytes, room)
        )

    async def set_inner_state(self, data: Buffer) -> None:
        """Empty bytes: fresh inner state, as after a divergence."""
        await self._ask(LoadInner(len(data)), TrainerCommandCompleted, before=lambda: self._mailbox.put(data))

    async def stop(self) -> None:
        """End the process in any state. Does nothing if there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()  # nothing is lost: the mailbox holds all state that counts
        await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(TrainerCommandError("crashed", "the trainer was stopped"))

    async def _ask(
        self,
        command: Command | TrainerSpec,
        expected: type[T],
        before: Callable[[], object] | None = None,
        after: Callable[[T], object] | None = None,
    ) -> Any:
        """Send one command and return its answer, or `after(answer)`.

        The lock is held until the answer arrives, even if the caller is cancelled.
        """
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
                raise TrainerCommandError("crashed", "the trainer is not running", fix="start it first")
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
        """Wait for the answer while there are signs of progress."""
        failure = self._failure  # of this process: a restart makes a new one
        while True:
            patience_s = self._spec.first_patience_s
            if self._step_s is not None:
                patience_s = max(self._spec.patience_s, STEPS_OF_SILENCE * self._step_s)
            await asyncio.wait(  # a heartbeat changes the patience: check every second
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

    def _fail(self, failure: TrainerCommandError) -> None:
        if not self._failure.done():
            self._failure.set_result(failure)

    def _say(self, command: Command | TrainerSpec) -> None:
        assert self._process is not None and self._process.stdin is not None
        body = msgspec.msgpack.encode(command)
        assert len(body) <= FRAME_MAX
        with suppress(ConnectionError):  # the listener notices the end and reports the cause
            self._process.stdin.write(LENGTH.pack(len(body)) + body)

    async def _listen(self) -> None:
        """Read answers until the child's stdout ends, then report how the child ended."""
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
                        asyncio.get_running_loop().call_soon(
                            self._on_beat, answer
                        )  # errors of the callback do not end the listener
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result(answer)
        code = await process.wait()
        await asyncio.wait(self._tasks[1:], timeout=LOOK_EVERY_S)  # for the rest of stderr
        self._fail(death(code, self._last_words.decode(errors="replace")))

    async def _overhear(self) -> None:
        """Keep the last bytes of the child's stderr."""
        assert self._process is not None and self._process.stderr is not None
        while text := await self._process.stderr.read(STDERR_KEPT):
            self._last_words = (self._last_words + text)[-STDERR_KEPT:]


def _python_path() -> str:
    """The parent's import path, so that the child finds the same packages, installed or not."""
    return os.pathsep.join(path for path in sys.path if path)
