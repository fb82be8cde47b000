"""The trainer: its own process that owns a device, and the asyncio object through which a peer drives it.

Networking never waits for a step and a step never waits for Python's lock. Tensors cross by shared memory
(`shared.py`), commands and answers as length-prefixed msgpack over the child's stdin and stdout; what a model
prints goes to stderr. One command is under way at a time; only `cancel` overtakes.

A trainer that crashes, hangs, runs out of memory or diverges surfaces at once as a `TrainerFailed` in plain
words. If the parent dies, however it dies, the pipe ends and the trainer exits.
Never forks: the child is a fresh interpreter, `python -m atoll.host.trainer`, which works from notebooks too.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import BinaryIO, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.host.shared import Mailbox, anonymous
from atoll.learn.data import batch, load_data, validation
from atoll.learn.inner import AdamW, fresh_inner, inner_bytes, inner_from_bytes, inner_step
from atoll.learn.layout import Layout, bind, layout_of
from atoll.learn.models import build_model, generate_text, loss_of

FRAME_MAX = 2**20  # bytes of one command or answer; tensors never travel this way
BEAT_EVERY_S = 0.5  # a heartbeat at the first step boundary after this long; more would only wake the peer
STEPS_OF_SILENCE = 20  # a step that takes so many times longer than the last ones counts as hung
LOOK_EVERY_S = 1.0  # how often patience is checked, and its margin: the parent's own loop may have been busy
STDERR_KEPT = 4096  # bytes of the child's last words that go into a failure
VALIDATION_BATCH = 64  # samples; small enough for any device that can train
NICE = 5  # below the peer beside it: a heartbeat is worth more than a step

T = TypeVar("T")
Why = Literal["crashed", "hung", "memory", "diverged", "refused"]
HINTS = {  # likely cause, what to do
    "memory": ("batch or model are too large for this device", "lower the batch or choose a smaller model"),
    "diverged": ("the learning rate or the outer step is too large", "lower them, then write x anew"),
}
HINTS = {  # likely cause, what to do
    "memory": ("batch or model are too large for this device", "lower the batch or choose a smaller model"),
    "diverged": ("the learning rate or the outer step is too large", "lower them, then write x anew"),
}


class TrainerFailed(RunFailedError):
    """A trainer could not do what it was asked. `alive`: the process still takes commands (after a `write_x`)."""

    def __init__(self, why: Why, what: str, *, cause: str = "", fix: str = "", alive: bool = False) -> None:
        self.why, self.alive = why, alive
        codes = {"crashed": 1, "hung": 2, "memory": 3, "diverged": 4, "refused": 5}
        super().__init__(f"E-TRN-{codes[why]:02d}", what, cause=cause, fix=fix)


class TrainerSpec(msgspec.Struct, frozen=True):
    model: str  # a built-in model's name
    seed: int  # of the first weights and of the order of the data
    data: str  # what learn.data.load_data takes: "stdlib" or a path
    batch: int
    seq_len: int
    inner: AdamW
    threads: int = 1  # threads_per_trainer(); too many cost up to 8x CPU per step
    device: str = "cpu"
    patience_s: float = 30.0  # silence during training that counts as hung; rises with the step time
    first_patience_s: float = 300.0  # the same before the first sign of life: loading, compiling, one huge step


# ---- What the parent says ----------------------------------------------------------------------------------


class Train(msgspec.Struct, frozen=True, tag=True):
    job: int
    steps: int
    until: float | None  # time.monotonic() of this machine: no step begins that would end later
    cursor: int
    shard: int
    shards: int
    global_step: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    job: int  # a cancel that comes too late must not stop the next job


class WriteX(msgspec.Struct, frozen=True, tag=True):
    counters: tuple[int, ...]


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    samples: int


class Sample(msgspec.Struct, frozen=True, tag=True):
    prompt: str
    n: int
    seed: int


class SaveInner(msgspec.Struct, frozen=True, tag=True):
    pass


class LoadInner(msgspec.Struct, frozen=True, tag=True):
    size_bytes: int  # 0: begin afresh


Command = Train | Cancel | WriteX | Evaluate | Sample | SaveInner | LoadInner


# ---- What the trainer says ---------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    layout: Layout
    room_bytes: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of progress, made between steps and never by a thread of its own."""

    steps: int  # of this job so far
    loss: float  # of the last step
    step_s: float


class Trained(msgspec.Struct, frozen=True, tag=True):
    steps: int
    samples: int
    tokens: int
    loss: float | None  # mean over the steps; None if the deadline left no time for one
    seconds: float
    cursor: int
    counters: tuple[int, ...]


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    loss: float  # nats per token or image
    accuracy: float  # share of tokens or images guessed right


class Sampled(msgspec.Struct, frozen=True, tag=True):
    text: str


class Saved(msgspec.Struct, frozen=True, tag=True):
    size_bytes: int


class Carried(msgspec.Struct, frozen=True, tag=True):
    """The command was carried out and has no answer of its own."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    why: Why
    what: str


Answer = Ready | Beat | Trained | Evaluated | Sampled | Saved | Carried | Broken

LENGTH = struct.Struct("<I")


def threads_per_trainer(trainers: int) -> int:
    """torch threads for each of so many trainers on this computer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, trainers))


# ---- The parent's side -------------------------------------------------------------------------------------


class Trainer:
    """One trainer process. `start` it, drive it, `stop` it; after a crash, `start` it again.

    `on_beat` is called about twice a second while it trains.
    """

    def __init__(self, on_beat: Callable[[Beat], None] | None = None) -> None:
        self.layout: Layout | None = None
        self._on_beat = on_beat
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()

    async def start(self, spec: TrainerSpec) -> Layout:
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
                *(sys.executable, "-m", "atoll.host.trainer", str(fd)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(fd,),
                env=os.environ | {"OMP_NUM_THREADS": str(spec.threads), "PYTHONPATH": _python_path()},
            )
            self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._overhear())]
            ready = await self._ask(spec, Ready)
            self.layout = ready.layout
            self._mailbox = Mailbox(fd, ready.layout.floats, ready.room_bytes)
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
    ) -> Trained:
        """At most `steps` inner steps from x, at most until `until` (time.monotonic()); x is then in `read_x()`.

        `cancel`, or cancelling the awaiting task, ends it at the next step boundary; the steps taken count.
        """
        assert steps >= 0
        self._job += 1
        job = Train(self._job, steps, until, cursor, shard, shards, global_step)
        return await self._ask(job, Trained)

    def cancel(self) -> None:
        """End the training under way at its next step boundary. Harmless if there is none."""
        if self._process is not None and not self._failure.done():
            self._say(Cancel(self._job))

    def read_x(self) -> Tensor:
        """(F,): x as of the end of the last `train` or `write_x`. A view: it changes with the next of them."""
        return self._mailbox.x_F

    async def write_x(self, x_F: Tensor, counters: tuple[int, ...] = ()) -> None:
        """Go on from these parameters and buffers (F,)."""
        await self._ask(WriteX(counters), Carried, before=lambda: self._mailbox.x_F.copy_(x_F))

    async def evaluate(self, samples: int = 512) -> Evaluated:
        """Loss and accuracy of x on the same validation samples every time."""
        return await self._ask(Evaluate(samples), Evaluated)

    async def sample(self, prompt: str, n: int, seed: int = 0) -> str:
        """What the model would write after `prompt`, `n` bytes."""
        return (await self._ask(Sample(prompt, n, seed), Sampled)).text

    async def inner_state(self) -> bytes:
        return await self._ask(SaveInner(), Saved, after=lambda saved: self._mailbox.take(saved.size_bytes))

    async def set_inner_state(self, data: bytes) -> None:
        """Empty bytes begin afresh, as after a divergence."""
        await self._ask(LoadInner(len(data)), Carried, before=lambda: self._mailbox.put(data))

    async def failure(self) -> TrainerFailed:
        """Waits until the process is gone without having been asked to, and says why."""
        return await asyncio.shield(self._failure)

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
    ) -> T:
        """Send one command and wait for its answer; the lock is held until it came, even if the caller leaves."""
        turn = asyncio.ensure_future(self._turn(command, expected, before, after))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            turn.add_done_callback(lambda done: done.cancelled() or done.exception())
            if isinstance(command, Train) and self._process is not None and not turn.done():
                self._say(Cancel(command.job))
            raise

    async def _turn(self, command, expected, before, after):
        async with self._lock:
            if self._process is None:
                raise TrainerFailed("crashed", "the trainer is not running", fix="start it first")
            if self._failure.done():
                raise self._failure.result()
            self._answer = asyncio.get_running_loop().create_future()
            self._heard, self._step_s = time.monotonic(), None
            self._training = isinstance(command, Train)
            if before is not None:
                before()
            self._say(command)
            answer = await self._watch(self._answer)
            if isinstance(answer, Broken):
                raise _failure_of(answer)
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
        self._fail(
            TrainerFailed(
                "hung",
                f"the trainer made no progress for {patience_s:.0f} s and was ended",
                cause="a device driver that stopped answering, or a machine that swaps",
                fix="look at its load, lower the batch, then start it again",
            )
        )
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
        decoder = msgspec.msgpack.Decoder(Answer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
                answer = decoder.decode(await stdout.readexactly(size))
                self._heard = time.monotonic()
                if isinstance(answer, Beat):
                    self._step_s = answer.step_s
                    if self._on_beat is not None and self._training:
                        asyncio.get_running_loop().call_soon(self._on_beat, answer)  # its errors are its own
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result(answer)
        code = await process.wait()
        await asyncio.wait(self._tasks[1:], timeout=LOOK_EVERY_S)  # the last words
        self._fail(_death(code, self._last_words.decode(errors="replace")))

    async def _overhear(self) -> None:
        """Keep the end of what the child prints."""
        assert self._process is not None and self._process.stderr is not None
        while text := await self._process.stderr.read(STDERR_KEPT):
            self._last_words = (self._last_words + text)[-STDERR_KEPT:]


def _failure_of(broken: Broken) -> TrainerFailed:
    cause, fix = HINTS.get(broken.why, ("", ""))
    return TrainerFailed(broken.why, broken.what, cause=cause, fix=fix, alive=True)


def _death(code: int, last_words: str) -> TrainerFailed:
    if code == -signal.SIGKILL:
        return TrainerFailed(
            "memory",
            "the trainer was killed by the system (SIGKILL)",
            cause="out of memory, or somebody killed it",
            fix="lower the batch or choose a smaller model",
        )
    lines = [line for line in last_words.strip().splitlines() if line.strip()]
    how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
    return TrainerFailed("crashed", f"the trainer ended {how}", cause="\n  ".join(lines[-3:]))


def _python_path() -> str:
    """The child finds the very packages the parent runs with, also when they are not installed."""
    return os.pathsep.join(path for path in sys.path if path)


# ---- The child's side --------------------------------------------------------------------------------------


class _Worker:
    """The trainer process: model, data and inner state, and the loop over commands."""

    def __init__(self, fd: int, frame: bytes, commands: _Commands, answers: BinaryIO) -> None:
        self.fd, self.commands, self.answers = fd, commands, answers
        self.spec = msgspec.msgpack.decode(frame, type=TrainerSpec)
        self.beaten = time.monotonic()

    def serve(self) -> None:
        """Build what the spec names, then carry out commands until the process is ended."""
        self.attempt(self.set_up)
        while True:
            command = self.commands.next()
            self.attempt(partial(self.carry_out, command))

    def attempt(self, work: Callable[[], Answer]) -> None:
        """Answer with the outcome. What the user or the data did wrong is an answer too; our own bugs end us."""
        try:
            self.say(work())
        except _Diverged as why:
            self.say(Broken("diverged", str(why)))
        except (MemoryError, torch.OutOfMemoryError) as why:
            self.say(Broken("memory", f"out of memory: {_first_line(why)}"))
        except (ValueError, IndexError, OSError, AssertionError, PeerFault) as why:
            self.say(Broken("refused", _first_line(why) or type(why).__name__))
        except RuntimeError as why:  # torch's CPU allocator has no exception of its own
            if "allocate memory" not in str(why):
                raise
            self.say(Broken("memory", f"out of memory: {_first_line(why)}"))

    def set_up(self) -> Ready:
        spec = self.spec
        torch.set_num_threads(spec.threads)
        self.data = load_data(spec.data)
        self.model = build_model(spec.model, spec.seed)
        self.layout = layout_of(self.model)
        self.x_F, self.gradient_P = bind(self.model, self.layout, spec.device)
        self.x_P = self.x_F[: self.layout.parameters]
        self.inner = fresh_inner(self.layout.parameters, spec.device)
        room_bytes = len(inner_bytes(self.inner)) + 64  # the count of steps may gain digits
        self.mailbox = Mailbox(self.fd, self.layout.floats, room_bytes)
        self.mailbox.x_F.copy_(self.x_F)
        return Ready(self.layout, room_bytes)

    def carry_out(self, command: Command) -> Answer:
        match command:
            case Train():
                return self.train(command)
            case WriteX(counters):
                return self.write_x(counters)
            case Evaluate(samples):
                return self.evaluate(samples)
            case Sample(prompt, n, seed):
                return Sampled(generate_text(self.model, prompt, n, seed))
            case SaveInner():
                return Saved(self.mailbox.put(inner_bytes(self.inner)))
            case LoadInner(size_bytes):
                return self.load_inner(size_bytes)
            case Cancel():
                raise AssertionError("the listener keeps these to itself")

    def train(self, job: Train) -> Trained:
        began, losses, step_s = time.monotonic(), [], 0.0
        cursor, tokens = job.cursor, 0
        while len(losses) < job.steps and self.commands.cancelled != job.job:
            stepped = time.monotonic()
            if job.until is not None and stepped + step_s > job.until:
                break
            inputs, targets = self._batch(job, cursor)
            losses.append(self._step(inputs, targets, job.global_step + len(losses)))
            cursor += self.spec.batch
            tokens += targets.numel()
            step_s = time.monotonic() - stepped
            self._beat(len(losses), losses[-1], step_s)
        if not bool(self.x_F.isfinite().all()):
            raise _Diverged(f"parameters are not finite after {len(losses)} steps")
        self.mailbox.x_F.copy_(self.x_F)
        return Trained(
            steps=len(losses),
            samples=cursor - job.cursor,
            tokens=tokens,
            loss=sum(losses) / len(losses) if losses else None,
            seconds=time.monotonic() - began,
            cursor=cursor,
            counters=self._counters(),
        )

    def _step(self, inputs: Tensor, targets: Tensor, global_step: int) -> float:
        self.gradient_P.zero_()
        loss = loss_of(self.model, (inputs, targets))
        value = loss.item()
        if not abs(value) < float("inf"):  # NaN compares false
            raise _Diverged(f"the loss is {value} at step {global_step}")
        loss.backward()
        inner_step(self.spec.inner, self.inner, self.x_P, self.gradient_P, global_step)
        return value

    def _batch(self, job: Train, cursor: int) -> tuple[Tensor, Tensor]:
        spec = self.spec
        found = batch(self.data, job.shard, job.shards, cursor, spec.batch, spec.seq_len, spec.seed)
        return self._on_device(found)

    def _on_device(self, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return found[0].to(self.spec.device), found[1].to(self.spec.device)

    def _beat(self, steps: int, loss: float, step_s: float) -> None:
        now = time.monotonic()
        if steps == 1 or now - self.beaten >= BEAT_EVERY_S:
            self.beaten = now
            self.say(Beat(steps, loss, step_s))

    @torch.no_grad()
    def write_x(self, counters: tuple[int, ...]) -> Carried:
        self.x_F.copy_(self.mailbox.x_F)
        buffers = dict(self.model.named_buffers())
        for slot in self.layout.slots:
            if slot.kind == "counter" and counters:
                values = torch.tensor(counters[slot.at : slot.at + slot.size])
                buffers[slot.name].copy_(values.view(slot.shape))
        return Carried()

    @torch.no_grad()
    def evaluate(self, samples: int) -> Evaluated:
        self.model.eval()
        loss_sum, right, targets_seen = 0.0, 0, 0
        found_batches = validation(self.data, samples, VALIDATION_BATCH, self.spec.seq_len)
        for index, found in enumerate(found_batches):
            began = time.monotonic()
            inputs, targets = self._on_device(found)
            scores = self.model(inputs)
            flat = scores.reshape(-1, scores.shape[-1])
            loss_sum += float(torch.nn.functional.cross_entropy(flat, targets.reshape(-1), reduction="sum"))
            right += int((flat.argmax(1) == targets.reshape(-1)).sum())
            targets_seen += targets.numel()
            self._beat(index + 1, loss_sum / targets_seen, time.monotonic() - began)
        self.model.train()
        return Evaluated(loss_sum / targets_seen, right / targets_seen)

    def load_inner(self, size_bytes: int) -> Carried:
        parameters, device = self.layout.parameters, self.spec.device
        if size_bytes == 0:
            self.inner = fresh_inner(parameters, device)
        else:
            self.inner = inner_from_bytes(self.mailbox.take(size_bytes), parameters, device)
        return Carried()

    def _counters(self) -> tuple[int, ...]:
        buffers = dict(self.model.named_buffers())
        counters = [slot for slot in self.layout.slots if slot.kind == "counter"]
        return tuple(int(value) for slot in counters for value in buffers[slot.name].reshape(-1).tolist())

    def say(self, answer: Answer) -> None:
        body = msgspec.msgpack.encode(answer)
        self.answers.write(LENGTH.pack(len(body)) + body)
        self.answers.flush()


class _Diverged(Exception):
    """The loss or the parameters are no longer finite."""


class _Commands:
    """Commands as they come in on a thread of their own, so that a cancel is seen between steps."""

    def __init__(self, source: BinaryIO) -> None:
        self.cancelled = -1  # number of the job that was cancelled last
        self._source, self._waiting = source, queue.SimpleQueue[Command]()

    def listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Command)
        while (frame := read_frame(self._source)) is not None:
            command = decoder.decode(frame)
            if isinstance(command, Cancel):
                self.cancelled = command.job
            else:
                self._waiting.put(command)
        os._exit(0)  # the parent is gone: nobody is left to answer to

    def next(self) -> Command:
        return self._waiting.get()


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame, or None at the end of the pipe."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = source.read(size)
    return body if len(body) == size else None


def _first_line(why: BaseException) -> str:
    return str(why).strip().split("\n")[0][:300]


def _be_humble() -> None:
    """The peer beside this process comes first, for the processor and when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the parent's to answer; its end ends us
    with suppress(OSError):
        os.nice(NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a model or a library prints must not be taken for an answer
    _be_humble()
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return
    commands = _Commands(sys.stdin.buffer)
    threading.Thread(target=commands.listen, daemon=True).start()
    try:
        _Worker(int(sys.argv[1]), frame, commands, answers).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # an orderly end would wait for the listener, which waits for the parent


if __name__ == "__main__":
    _main()
