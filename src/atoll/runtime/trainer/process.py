"""Trainer process: model, data and inner state, and the loop over commands.

Takes steps between commands where it may (`TrainSteps.ahead`), and notices a cancel between any two steps. With
pipelined gradients these are steps of later rounds: the sums wait in a queue, and each round gets the oldest.
Invariants:
- A mistake of the user or of the data is an answer (`CommandFailed`), and the next command is served.
- Heartbeats are the only unrequested output.
Not responsible for: when to train and what counts.
"""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.base.workload import ZERO_LOSS
from atoll.runtime.storage.ownership import open_private
from atoll.runtime.trainer.protocol import (
    COMMAND,
    LENGTH,
    SPEC,
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
    TextSampled,
    TrainerCommandCompleted,
    TrainerHeartbeat,
    TrainerReady,
    TrainSteps,
    read_frame,
)
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.data import batch, cursor_after, epoch_samples, load_data, validation
from atoll.training.exchange.layout import bind, flatten, unflatten
from atoll.training.models import generate_text, scores_of
from atoll.training.recipe.gradient import GradientComputer
from atoll.training.recipe.inner import (
    GradientSumOptimizer,
    InnerState,
    PipelinedGradients,
    fresh_inner,
    inner_from_bytes,
    inner_pieces,
    inner_step,
    matrices_of,
)
from atoll.training.recipe.lr_position import later, step_at
from atoll.training.recipe.merge import merge
from atoll.verification.replay_audit.replay import TrainerSnapshot
from atoll.verification.replay_audit.tolerance import TrainingProfile, profile_here
from atoll.verification.replay_audit.trainer import SegmentReplayer
from atoll.verification.replay_audit.trainer_commands import JudgeSegment, NextAuditStep, WriteSegmentExhibit
from atoll.verification.state_validation.trainer import VALIDATION_BATCH, ModelEvaluator, model_of
from atoll.worker.trainer_commands import (
    BeginReplay,
    BeginScoring,
    BeginValidation,
    ContinueMeasurement,
    LossesMeasured,
)

BEAT_EVERY_S = 0.5  # seconds between heartbeats, sent at step boundaries; more would only wake the peer

T = TypeVar("T")


class TrainerCommandLoop:
    """The trainer process: model, data and inner state, and the loop over commands."""

    def __init__(self, fd: int, frame: bytes, commands: CommandReader, answers: BinaryIO) -> None:
        self.fd, self.commands, self.answers = fd, commands, answers
        self.spec = SPEC.decode(frame)
        self.beaten = time.monotonic()
        self.span = _TrainingSpan()  # steps since the last hand-over
        self.onward: TrainSteps | None = None  # job that may continue without a command
        self.full = 0  # steps that it may take once no update is in flight
        self.waiting = deque[tuple[Tensor, _TrainingSpan]]()  # gradient sums for later rounds, oldest first
        self.depth = (
            self.spec.inner.depth if isinstance(self.spec.inner, PipelinedGradients) else 0
        )  # most sums that wait
        self.failure: CommandFailed | None = None  # failure in steps ahead, answered to the next `TrainSteps`
        self.sent_F: Tensor | None = None  # x at the hand-over; stale unless an update is in flight
        self.under_way = False

    def serve(self) -> None:
        """Build what the spec names, then carry out commands until the process is ended."""
        self.say(self.outcome(self.set_up))
        while True:
            self.step_ahead()
            command = self.commands.next()
            self.say(self.outcome(partial(self.carry_out, command)))

    def step_ahead(self) -> None:
        """Take steps ahead while no command arrives."""
        while self.commands.quiet and self._take_step_ahead():
            pass

    def _take_step_ahead(self) -> bool:
        """Take one step ahead, if one may be taken; whether it was."""
        job = self.onward
        if job is None or job.job <= self.commands.stands:
            return False
        if self.span.steps >= job.steps or len(self.waiting) >= self.depth > 0:
            return False
        outcome = self.outcome(partial(self._take_step, job))
        if isinstance(outcome, CommandFailed):
            self.failure, self.onward = outcome, None
            return False
        if self.depth and self.span.steps == job.steps:
            sum_F = torch.empty_like(self.x_F)
            span = self._end_span(sum_F)
            self.waiting.append((sum_F, span))
            self.onward = self._after(job, [span])
        return True

    def outcome(self, work: Callable[[], T]) -> T | CommandFailed:
        """The result, or the failure as an answer if the user or the data caused it; a bug ends the process."""
        try:
            return work()
        except _LossDiverged as why:
            return CommandFailed("diverged", str(why))
        except (MemoryError, torch.OutOfMemoryError) as why:
            return CommandFailed("memory", f"out of memory: {_first_line(why)}")
        except (ValueError, IndexError, OSError, AssertionError, PeerFault) as why:
            return CommandFailed("refused", _first_line(why) or type(why).__name__)
        except RuntimeError as why:  # torch's CPU allocator has no exception of its own
            if "allocate memory" not in str(why):
                raise
            return CommandFailed("memory", f"out of memory: {_first_line(why)}")

    def set_up(self) -> TrainerReady:
        spec = self.spec
        torch.set_num_threads(spec.threads)
        self.data = load_data(spec.data)
        self.auditing = SegmentReplayer(self.data, open_private)
        self.validating = ModelEvaluator(spec, self.data)
        self.model, self.layout = model_of(spec)
        self.x_F, gradient_P = bind(self.model, self.layout, spec.device)
        self.gradient = GradientComputer(self.model, gradient_P, spec.computing)
        if spec.computing.compiled:
            self._compile()
        self.x_P = self.x_F[: self.layout.parameters]
        self.matrices = matrices_of(self.layout)
        self.inner = fresh_inner(self.layout.parameters, spec.device)
        room_bytes = sum(map(len, inner_pieces(self.inner))) + 64  # the step count may gain digits
        room_bytes = max(room_bytes, 4 * self.layout.floats)  # or a second model
        self.mailbox = SharedMailbox(self.fd, self.layout.floats, room_bytes)
        self.mailbox.pin(self.x_F.device)
        self.mailbox.x_F.copy_(self.x_F)
        return TrainerReady(self.layout, room_bytes)

    def _publish_update(self, looked: LossesMeasured) -> LossesMeasured:
        """After a replay the mailbox holds its update."""
        if looked.done:
            self.mailbox.show(self.validating.made_F)
        return looked

    def _compile(self) -> None:
        """Compile before a round waits for a step; the model stays unchanged."""
        kept = flatten(self.model, self.layout)
        self.gradient.compute(self._batch(TrainSteps(0, 1, None, 0, 0, 1, 0), 0))
        unflatten(*kept, self.model, self.layout)

    def carry_out(self, command: Command) -> Answer:
        match command:
            case TrainSteps():
                return self.train(command)
            case SetParameters(counters):
                return self.write_x(counters)
            case MergeAnchorIntoParameters():
                while self.depth and self._take_step_ahead():  # each gradient belongs to the parameters of its turn
                    self._beat(len(self.waiting), self.span.last_loss, self.span.seconds)
                return self.merge(command)
            case EvaluateModel(samples, given):
                with self._model_at(given):
                    return self.evaluate(samples)
            case SampleText(prompt, n, seed, given):
                with self._model_at(given):
                    return TextSampled(generate_text(self.model, prompt, n, seed))
            case SaveInner():
                return InnerStateInMailbox(self.mailbox.put(*inner_pieces(self.inner)))
            case LoadInner(size_bytes):
                return self.load_inner(size_bytes)
            case WriteSegmentExhibit() | JudgeSegment():
                return self.auditing.start(command)
            case NextAuditStep():
                return self.auditing.go_on()
            case BeginValidation() | BeginScoring() | BeginReplay():
                return self._publish_update(self.validating.start(command, self.mailbox.shown()))
            case ContinueMeasurement():
                return self._publish_update(self.validating.go_on())
            case CancelTraining():
                raise AssertionError("CommandReader handles these")

    def train(self, job: TrainSteps) -> StepsTrained | CommandFailed:
        failure, self.failure, onward, self.onward = self.failure, None, self.onward, None
        if failure is not None:
            return failure
        if job.inner is not None:
            self.spec = msgspec.structs.replace(self.spec, inner=job.inner, horizon=job.horizon)
        if onward is not None and _dealt(onward) != _dealt(job):
            self.waiting.clear()  # the waiting sums come from samples that now belong to others
        step_s = 0.0
        if job.assignment is not None:
            assert self.span.steps == 0, "a chain begins with a round"
            self.auditing.begin(job.assignment, self._live(), job.held)
        while self.span.steps < job.steps and job.job not in (self.commands.cancelled, self.commands.hurried):
            if self.waiting:
                break  # the sum of this round is ready
            stepped = time.monotonic()
            if job.until is not None and stepped + step_s > job.until:
                break
            self._take_step(job)
            if self.auditing.record is not None and self.auditing.record.is_due(self.span.steps):
                self.auditing.record.note(self._live(), self.span.steps)
            step_s = time.monotonic() - stepped
            self._beat(self.span.steps, self.span.last_loss, step_s)
        if not all(
            bool(end.isfinite()) for end in self.x_F.aminmax()
        ):  # isfinite over all values would allocate four vectors
            raise _LossDiverged(f"parameters are not finite after {self.span.steps} steps")
        return self._hand_over(job)

    def _take_step(self, job: TrainSteps) -> None:
        """The next step of the job."""
        began, span = time.monotonic(), self.span
        inputs, targets = self._batch(job, job.cursor + span.samples)
        span.last_loss = self._step(inputs, targets, step_at(self.spec.horizon, self._position(job, span.steps)))
        span.loss_sum += span.last_loss
        span.steps += 1
        span.samples += job.batch or self.spec.batch
        span.tokens += targets.numel()
        span.seconds += time.monotonic() - began

    def _hand_over(self, job: TrainSteps) -> StepsTrained:
        if self.waiting:
            oldest_F, span = self.waiting.popleft()
            self.mailbox.x_F.copy_(oldest_F)
        else:
            span = self._end_span(self.mailbox.x_F)
        record = self.auditing.end(self._live, span.steps)
        if job.ahead is not None and span.steps:
            if not self.depth:  # else x stands still
                self.sent_F = self.x_F.clone() if self.sent_F is None else self.sent_F.copy_(self.x_F)
                self.under_way = True
            left = 0 if self.commands.cancelled == job.job else job.steps if self.depth else job.ahead
            self.full = job.steps
            onward = self._after(job, [span, *(ahead for _, ahead in self.waiting)])
            self.onward = msgspec.structs.replace(onward, steps=left)
        return StepsTrained(
            steps=span.steps,
            samples=span.samples,
            tokens=span.tokens,
            loss=(span.loss_sum / span.steps or ZERO_LOSS) if span.steps else None,
            seconds=span.seconds,
            cursor=job.cursor + span.samples,
            counters=self._counters(),
            links=tuple(record.links) if record is not None else (),
            profile=self._profile() if record is not None else None,
            notice=self.gradient.take_notice(),
        )

    def _end_span(self, into_F: Tensor) -> _TrainingSpan:
        """Write the result of the span into this vector (F,) and begin the next span."""
        into_F.copy_(self.x_F)
        if isinstance(
            self.spec.inner, GradientSumOptimizer
        ):  # x stands still: the hand-over is the sum of gradients
            into_F[: self.layout.parameters].copy_(self.inner.first_P)
            self.inner.first_P.zero_()
        span, self.span = self.span, _TrainingSpan()
        return span

    def _after(self, job: TrainSteps, spans: Sequence[_TrainingSpan]) -> TrainSteps:
        """The same job after these spans."""
        cursor = job.cursor + sum(span.samples for span in spans)
        position = self._position(job, sum(span.steps for span in spans))
        return msgspec.structs.replace(job, cursor=cursor, global_step=position)

    def _position(self, job: TrainSteps, steps: int) -> int:
        """The position in the learning rate schedule after this number of steps of the job."""
        spec = self.spec
        together = (job.batch or spec.batch) * spec.seq_len * job.shards
        return later(spec.horizon, job.global_step, steps, together)

    def _profile(self) -> TrainingProfile:
        return msgspec.structs.replace(profile_here(self.spec.computing), device=self.x_F.device.type)

    def _live(self) -> TrainerSnapshot:
        """A copy on the host of all state that the next step depends on."""
        x_F, counters_K = flatten(self.model, self.layout)
        first_P, second_P = (
            moment_P.to("cpu", copy=True) for moment_P in (self.inner.first_P, self.inner.second_P)
        )
        return TrainerSnapshot(x_F, counters_K, InnerState(first_P, second_P, self.inner.steps))

    def _step(self, inputs: Tensor, targets: Tensor, global_step: int) -> float:
        value = self.gradient.compute((inputs, targets))
        if not abs(value) < float("inf"):  # NaN compares false
            raise _LossDiverged(f"the loss is {value} at step {global_step}")
        gradient_P = self.gradient.gradient_P
        if isinstance(self.spec.inner, GradientSumOptimizer):
            self.inner.first_P.add_(gradient_P)
        else:
            inner_step(self.spec.inner, self.inner, self.x_P, gradient_P, global_step, self.matrices)
        return value

    def _batch(self, job: TrainSteps, cursor: int) -> tuple[Tensor, Tensor]:
        spec = self.spec
        shard, shards = (0, 1) if spec.own_data else (job.shard, job.shards)
        if job.apart:
            cursor += cursor_after(epoch_samples(self.data, spec.seq_len) // 2, shards)
        size = job.batch or spec.batch
        found = batch(self.data, shard, shards, cursor, size, spec.seq_len, spec.seed)
        return self._on_device(found)

    def _on_device(self, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return found[0].to(self.spec.device), found[1].to(self.spec.device)

    def _beat(self, steps: int, loss: float, step_s: float) -> None:
        now = time.monotonic()
        if steps == 1 or now - self.beaten >= BEAT_EVERY_S:
            self.beaten = now
            self.say(TrainerHeartbeat(steps, loss, step_s))

    @torch.no_grad()
    def merge(self, job: MergeAnchorIntoParameters) -> TrainerCommandCompleted:
        """Merge agreed values into x; the steps since the hand-over stay as far as the recipe allows."""
        if job.how == "afresh":
            return self.write_x(())
        here = slice(job.lo, job.hi)
        x_N, new_N = self.x_F[here], self.mailbox.x_F[here].to(self.spec.device)
        if job.how == "shift":
            x_N.add_(new_N)
        else:
            sent_N = self.sent_F[here] if self.under_way and self.sent_F is not None else x_N
            merge(job.how, x_N, sent_N, new_N)
        self.under_way = False
        if self.onward is not None:  # no update is in flight: all steps of the next round may be taken
            self.onward = msgspec.structs.replace(self.onward, steps=self.full)
        return TrainerCommandCompleted()

    @contextmanager
    def _model_at(self, given: bool) -> Iterator[None]:
        """Within the context the model holds the parameters behind x in the mailbox, if `given`."""
        if not given:
            yield
            return
        own_F = self.x_F.clone()
        self.x_F.copy_(self.mailbox.shown())
        try:
            yield
        finally:
            self.x_F.copy_(own_F)

    @torch.no_grad()
    def write_x(self, counters: tuple[int, ...]) -> TrainerCommandCompleted:
        self.span, self.onward, self.failure, self.under_way = _TrainingSpan(), None, None, False
        self.waiting.clear()
        self.x_F.copy_(self.mailbox.x_F)
        if isinstance(self.spec.inner, GradientSumOptimizer):
            self.inner.first_P.zero_()  # gradients of another x
        buffers = dict(self.model.named_buffers())
        for slot in self.layout.slots:
            if slot.kind == "counter" and counters:
                values = torch.tensor(counters[slot.at : slot.at + slot.size])
                buffers[slot.name].copy_(values.view(slot.shape))
        return TrainerCommandCompleted()

    @torch.no_grad()
    def evaluate(self, samples: int) -> ModelEvaluated:
        self.model.eval()
        loss_sum, right, targets_seen = 0.0, 0, 0
        found_batches = validation(self.data, samples, VALIDATION_BATCH, self.spec.seq_len)
        for index, found in enumerate(found_batches):
            began = time.monotonic()
            inputs, targets = self._on_device(found)
            scores = scores_of(self.model, inputs)
            flat = scores.reshape(-1, scores.shape[-1])
            loss_sum += float(torch.nn.functional.cross_entropy(flat, targets.reshape(-1), reduction="sum"))
            right += int((flat.argmax(1) == targets.reshape(-1)).sum())
            targets_seen += targets.numel()
            self._beat(index + 1, loss_sum / targets_seen, time.monotonic() - began)
        self.model.train()
        return ModelEvaluated(loss_sum / targets_seen, right / targets_seen)

    def load_inner(self, size_bytes: int) -> TrainerCommandCompleted:
        parameters, device = self.layout.parameters, self.spec.device
        if size_bytes == 0:
            self.inner = fresh_inner(parameters, device)
        else:
            self.inner = inner_from_bytes(self.mailbox.take(size_bytes), parameters, device)
        return TrainerCommandCompleted()

    def _counters(self) -> tuple[int, ...]:
        buffers = dict(self.model.named_buffers())
        counters = [slot for slot in self.layout.slots if slot.kind == "counter"]
        return tuple(int(value) for slot in counters for value in buffers[slot.name].reshape(-1).tolist())

    def say(self, answer: Answer) -> None:
        body = msgspec.msgpack.encode(answer)
        self.answers.write(LENGTH.pack(len(body)) + body)
        self.answers.flush()


@dataclass
class _TrainingSpan:
    """Steps since the last hand-over."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    last_loss: float = 0.0
    seconds: float = 0.0


def _dealt(job: TrainSteps) -> tuple[int, int, int]:
    """How the samples of the job were dealt out."""
    return job.shard, job.shards, job.batch


class _LossDiverged(Exception):
    """The loss or the parameters are no longer finite."""


class CommandReader:
    """Reader of commands in a separate thread, so that a cancel is noticed between steps."""

    def __init__(self, source: BinaryIO) -> None:
        self.cancelled = -1  # last job that was cancelled
        self.hurried = -1  # last job that had to hand over early and continue
        self.stands = -1  # last job after which no step ahead is taken
        self._source, self._waiting = source, queue.SimpleQueue[Command]()

    def listen(self) -> None:
        while (frame := read_frame(self._source)) is not None:
            command = COMMAND.decode(frame)
            if isinstance(command, CancelTraining) and command.ahead:
                self.hurried = command.job
            elif isinstance(command, CancelTraining):
                self.cancelled = command.job
                self.stands = command.job if command.stands else self.stands
            else:
                self._waiting.put(command)
        os._exit(0)  # the parent is gone

    @property
    def quiet(self) -> bool:
        """Whether no command waits."""
        return self._waiting.empty()

    def next(self) -> Command:
        return self._waiting.get()


def _first_line(why: BaseException) -> str:
    return str(why).strip().split("\n")[0][:300]
