"""Atoll in your own PyTorch loop: `run = atoll.join(ticket)`, then `run.attach(model, optimizer)`.

After `attach` your loop goes on as before. A hook counts the steps of the optimizer. When the round's steps or its
time are over, the hook hands the parameters to the peer process, waits for the agreed ones, and returns. With
`overlap` it returns at once, and the agreed values are merged some steps later. Learning-rate schedulers, gradient
accumulation, torch.compile and GradScaler stay yours. A step that GradScaler skips is not counted; a round ends by
its time even if steps are skipped. If members agree on gradients, the recipe takes the step and the optimizer only
triggers it (`training/recipe/user_optimizer.py`). Gradients may then queue for their rounds (`pipelined`).

Invariants:
- The model's tensors stay the same objects; their values change inside `optimizer.step()`, and while the loop waits
  for samples of `run.data`.
- The optimizer's state is never touched, except where a recipe averages its moments.
- Data never leave this process. Only exchanged parameters and buffers do, and gradients or moments if the recipe
  averages them. Of a model with frozen parameters, only those that require a gradient or that `only` names travel.
- If the peer process dies, the hook raises; the loop never continues alone silently, nor after the end of the run
  (`after_end.py`). An exception or Ctrl-C during a hand-over or a merge ends the loop's place in the run, since its
  peer waits for the rest.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import torch
from torch import nn

from atoll.base.arguments import Count, Whole, arguments
from atoll.base.errors import AtollError, RunFailedError, UsageError, short_traceback
from atoll.base.units import counted_text
from atoll.base.workload import BATCH_MOST, ZERO_LOSS
from atoll.peer.config.node_sections import FeedbackPrecision, StateMemory
from atoll.runtime.embed.after_end import AfterEnd, PostRunStepHook, refuse_steps
from atoll.runtime.embed.loop_model import HandoverSnapshot, LoopModel, hugging_face_config, number_of
from atoll.runtime.embed.loop_output import is_quiet, log, write_line
from atoll.runtime.embed.member_needs import check_room, needs_of
from atoll.runtime.embed.messages import (
    AgreedReadings,
    AttachedPeerIdentity,
    AttachLoopRequest,
    DeclineRounds,
    LoopLogLine,
    PeerFailureNotice,
    RoundsBegin,
    RunFinishedNotice,
    RunRequest,
    ToUser,
)
from atoll.runtime.embed.notices import (
    NO_BATCH,
    UNREPORTED,
    UNVALIDATED,
    comeback_text,
    error_of,
    ignored_text,
    outer_step_text,
    over_before_text,
    over_text,
    print_invitation,
)
from atoll.runtime.embed.peer_channel import PeerChannel
from atoll.runtime.embed.program_end import on_interrupt
from atoll.runtime.embed.readings import RunProgress, RunReadings
from atoll.runtime.trainer.protocol import (
    CancelTraining,
    InnerStateInMailbox,
    LoadInner,
    MergeAnchorIntoParameters,
    SamplesRead,
    SaveInner,
    SetParameters,
    StepsTrained,
    TrainerCommandCompleted,
    TrainSteps,
)
from atoll.training.codec.blocks import largest_of
from atoll.training.data.shards.dataset import AssignedShardsDataset
from atoll.training.data.shards.sources import source_of
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.user_optimizer import is_skipped
from atoll.wire.data_ranges import DataRange, joined
from atoll.worker.trainer_commands import BeginValidation

T = TypeVar("T")


@dataclass
class _StepSpan:
    """Steps since the last hand-over, or since the previous entry of the gradient queue."""

    steps: int = 0
    reported: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    read: tuple[DataRange, ...] = ()  # samples of the run's data set behind the steps


class Run(RunReadings):
    """This process's place in a run. `atoll.join` and `atoll.found` create it; it does nothing before `attach`."""

    _local: LoopModel

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._seen = RunProgress(request.ticket)
        self._channel = PeerChannel()
        self._joined = self._quiet = False
        self._warned: set[str] = set()  # notices that were given
        self._after_end = PostRunStepHook("warn")
        self._validate: Callable[[], SupportsFloat] | None = None
        self._batch = 1
        self._span = _StepSpan()
        self._job: TrainSteps | None = None  # job that the peer waits for
        self._cancelled_job = self._held_job = -1  # last job that was ended early; last one that pauses the loop
        self._steps_ahead = 0  # steps that the loop may take before the next job
        self._steps_ahead_next = 0  # the same, once the agreed values are merged
        self._sent: HandoverSnapshot | None = None  # values handed over, while the loop takes steps ahead
        self._queue = deque[tuple[_StepSpan, torch.Tensor]]()  # gradients of steps ahead, oldest first
        self._merging: MergeAnchorIntoParameters | None = (
            None  # merge that waits until the queued gradients are complete
        )
        self._data: AssignedShardsDataset | None = None  # the run's data set, if the loop reads it
        self._is_starved = False  # True while the loop waits for shards to read
        self._hooks: list[Any] = []
        self._in_step = False  # True during optimizer.step()
        self._resumed = 0.0  # monotonic time at which the loop got control

    def __repr__(self) -> str:
        began = f"round {self.round}, {counted_text(self.members, 'member')}" if self.round >= 0 else "first round"
        state = "is over" if self.done else began if self._joined else "not attached"
        return f"<atoll.Run {self._request.folder}: {state}, {counted_text(self.trained, 'round')} trained>"

    # ---- what a loop reads ---------------------------------------------------------------------------------

    @property
    def ticket(self) -> str:
        """Ticket for others to join with; empty before `attach` if this process founds the run."""
        if not self._seen.ticket and not self._joined and not self._channel.is_open:
            self._warn("run.ticket is empty until run.attach(model, optimizer) has founded the run")
        return self._seen.ticket

    # ---- what a loop calls ---------------------------------------------------------------------------------

    @arguments("run.attach", "E-ATT-11")
    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch: Count | None = None,
        pass_steps: Whole = 0,
        only: Sequence[str] = (),
        validate: Callable[[], SupportsFloat] | None = None,
        state_memory: StateMemory = "memory",
        feedback_precision: FeedbackPrecision = "fp32",
        after_end: AfterEnd = "warn",
        quiet: bool = False,
    ) -> Run:
        """Join with this model; returns when the first round begins. The model then holds the agreed parameters.

        `batch` is the number of samples per optimizer step; it weighs this peer's update. If it is left out, a step
        counts as one sample: pass it at all members or at none. `pass_steps` is the number of optimizer steps per
        pass over your own data, `len(loader)`, for runs that count epochs.
        Parameters that require no gradient are not exchanged: every member must hold the same ones. `only` names
        the exchanged parameters instead, in shell style: `only=["*lora*", "head.*"]`.

        `validate` returns the model's mean loss on held-out data: some hundred samples, the same ones at every
        member, since losses are compared. If members may lie, some are drawn from time to time to call it between
        two steps, with an agreed state in the model. If enough of them find it bad, all go back to the last good
        one. Parameters, `training` flags and the CPU's random numbers are restored afterwards.

        `state_memory="disk"` keeps the vectors of this peer that are as large as the model in files of its folder,
        for models that hardly fit: rounds take longer. `feedback_precision="bf16"` keeps error feedback in bf16,
        which takes 0.4 models less of memory, and less disk.

        `after_end` sets what `optimizer.step()` does once the run is over: "warn" (train on alone, after one
        warning), "raise" (RunEnded, which ends loops of other libraries) or "skip" (change nothing).

        Members, rounds and problems are logged by `logging.getLogger("atoll")`, or printed on stderr if the
        program configured no logging. `quiet=True`, or ATOLL_QUIET=1, prints problems only.

        Raises RefusedError if the model is not the run's, UsageError if nothing could be exchanged, or the ticket's
        own error.
        """
        if self._channel.is_open or self._joined:
            raise UsageError(
                "E-ATT-02",
                "this run is attached already",
                fix="for a second member, or to come back after close(), call atoll.join again",
            )
        request, self._quiet = self._request, quiet or is_quiet()
        self._batch, self._validate = self._samples_per_step(batch), validate
        self._local = LoopModel(model, optimizer, only)
        optimizer = self._local.optimizer  # without the wrapper of Accelerate or Lightning
        self._seen.exchanged, self._seen.base = self._local.layout.floats, self._local.base_digest
        self._after_end = PostRunStepHook(after_end)
        if request.recipe is not None:
            self._use_recipe(request.recipe)
        memory = self._local.open_mailbox(self._checked_folder(state_memory, feedback_precision))
        self._local.copy_out(self._local.mailbox.x_F, 0, self.exchanged)
        self._require_finite(self._local.mailbox.x_F)
        on_interrupt(lambda: comeback_text(request, self._seen, self._quiet))
        self._channel.start(memory)
        validates, precision = validate is not None, feedback_precision
        own = self._local.layout, self._batch, pass_steps, validates, state_memory, precision, self._local.threads
        self._channel.send(AttachLoopRequest(request, *own, hugging_face_config(model)))
        self._wait_for_turn()
        self._joined = True
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        return self

    @arguments("run.report", "E-ATT-11")
    def report(self, loss: SupportsFloat) -> None:
        """Report this step's training loss to the other members; optional, shown as the run's loss.

        A loss that is not finite (a batch that GradScaler skips) is ignored.
        """
        try:
            value = number_of(loss)
        except (TypeError, ValueError, RuntimeError) as why:  # a tensor of many values
            raise UsageError("E-ATT-11", f"run.report: {why}", fix="run.report(loss.mean().item())") from None
        if math.isfinite(value):
            self._span.loss_sum += value
            self._span.reported += 1

    @arguments("run.decline", "E-ATT-11")
    def decline(self, rounds: Count = 1) -> None:
        """Contribute nothing to the current round and the next `rounds - 1`, at no cost in reputation.

        No member waits for this one. Returns when the next round begins that this loop takes part in, or when the
        run is over. The model then holds the agreed parameters: steps taken in this round are dropped.
        """
        if not self._channel.is_open:
            raise UsageError("E-ATT-05", "this run is not attached", fix="call run.attach(model, optimizer) first")
        if self.done:
            return
        with self._leave_on_interrupt():
            if self._merging is not None:
                self._merge(self._merging)
            self._channel.send(DeclineRounds(0 if self._job is None else self._job.job, rounds))
            self._job = None
            self._drop_steps()
        self._wait_for_turn()

    @arguments("run.shard", "E-ATT-11")
    def shard(self, items: Iterable[T]) -> Iterator[T]:
        """Every n-th item, so that members see disjoint data; for loaders that all members order alike.

        If all members call `torch.manual_seed` with one number and draw batches themselves, they draw the same
        ones: seed the draws by `run.shard_index` after `attach`.
        """
        for index, item in enumerate(items):
            if index % self.shard_count == self.shard_index:
                yield item

    @arguments("run.data", "E-ATT-11")
    def data(
        self,
        dataset: Any,
        *,
        shards: Whole = 0,
        seed: Whole = 0,
        shuffle: bool = True,
        per_step: Whole = 0,
        window: Whole = 0,
    ) -> AssignedShardsDataset:
        """Samples of one data set that all members share. Each is used once, also if members are killed.

        `dataset` must be the same at all members, and so must the arguments: anything with a length and an index
        (a list, `datasets.Dataset`, `torch.utils.data.Dataset`), a `datasets.IterableDataset`, a row of tokens
        (`numpy.memmap`, read in windows of `window` tokens), or the path of a file or folder. The result is an
        `IterableDataset` that ends with the run: `DataLoader(run.data(dataset), batch_size=32, drop_last=True)`.

        Data with a length are shuffled anew in every epoch by `seed` and cut into `shards`, by default of 1,024
        samples or more. A stream keeps its order and its shards; `shards=n` cuts one that has fewer: each is a pass
        that keeps every n-th sample. A member reads 2 to 8 shards in a round. Every agreed round says how far each
        was used, so a restarted loop, or the next reader of a shard, continues at the same sample. `atoll status`
        shows the positions, and how many samples were dropped or repeated.

        What was read since the last `optimizer.step()` is behind the next one. If a loader reads ahead, name the
        samples of one step, accumulated ones included: `per_step=32`. If all shards of this member are used up in
        the middle of a round, the loop hands over early, while it waits for the next sample.
        """
        try:
            source = source_of(dataset, shards, seed, shuffle, window)
        except ValueError as why:
            raise UsageError(
                "E-DATA-02", f"run.data: {why}", fix="pass a list, a Dataset, a stream, an array or a path"
            ) from None
        self._data = AssignedShardsDataset(source, per_step, self._wait_for_data)
        if self._job is not None and self._job.data is not None:
            self._data.assign(self._job.data, ())
        return self._data

    @short_traceback
    def close(self) -> None:
        """Leave the run and end the peer process. Idempotent; also done when Python exits."""
        for hook in self._hooks:
            hook.remove()
        self._channel.stop()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _samples_per_step(self, batch: int | None) -> int:
        if batch is None:
            self._show(NO_BATCH)
        elif self._request.effort is not None and batch > BATCH_MOST:
            raise UsageError(
                "E-ATT-11",
                f"run.attach(batch={batch}): a step has at most {BATCH_MOST} samples in a run of adaptive rounds",
                cause="batch counts tokens, or other parts of samples",
                fix="count samples, in target_samples= as well",
            )
        return batch or 1

    def _checked_folder(self, state_memory: StateMemory, precision: FeedbackPrecision) -> Path | None:
        """The folder for the mailbox, None: memory. Tells what a large model needs; UsageError if it cannot fit."""
        folder = Path(self._request.folder)
        nearest = next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path())
        if text := check_room(needs_of(self._local.layout, state_memory, precision), folder, nearest):
            log.warning("%s", text)
        return nearest if state_memory == "disk" else None

    # ---- between steps -------------------------------------------------------------------------------------

    @short_traceback
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before optimizer.step(): if members agree on gradients, the recipe takes the step instead."""
        self._in_step = True
        if self.done:
            told = f"after {counted_text(self.trained, 'round')}"
            told += f" (the agreed model is in {self.model_file})" * bool(self.model_file)
            return self._after_end.before_step(told, optimizer, args, kwargs)
        gradients = self._local.gradients
        return None if gradients is None else gradients.take_gradients(optimizer, args, kwargs)

    @short_traceback
    def _after_step(self, *_: object) -> None:
        """Hook after optimizer.step(): hand over if the round's steps or its time are over."""
        if not self._in_step:
            return  # the super().step() of a subclass, which torch hooks as well
        self._in_step = False
        self._after_end.after_step()
        if self._local.gradients is not None and not self._local.gradients.restore_gradients():
            self.close()
            raise UsageError(
                "E-ATT-13",
                f"members of this run agree on gradients, but {type(self._local.optimizer).__name__} also moves "
                "parameters that have none: its steps would come on top of the agreed ones",
                fix="attach torch.optim.SGD(model.parameters()): it only triggers the step",
            )
        if self.done or not self._channel.is_open:
            return
        taken = () if self._data is None else self._data.take_step()
        if is_skipped(self._local.optimizer):
            return
        self._span.read = joined((*self._span.read, *taken))
        self._span.steps += 1
        self._span.seconds += time.monotonic() - self._resumed
        if self._local.queue_rounds and self._span.steps == self.round_steps:
            x_F = torch.empty(self.exchanged, dtype=torch.float32, device="cpu")
            self._queue.append((self._end_span(x_F, 0, self.exchanged), x_F))
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """Serve the peer until the loop may take its next step."""
        while not self.done:
            while self._channel.has_message():
                self._handle(self._channel.receive())
            job, may_go_ahead = self._job, self._steps_pending < self._steps_ahead
            if job is not None and self._is_due(job):
                with self._leave_on_interrupt():
                    self._hand_over(job)
            elif self._merging is not None and (not may_go_ahead or self._is_starved):
                with self._leave_on_interrupt():
                    self._merge(self._merging)
            elif self._is_short or ((job is not None or may_go_ahead) and not self._is_starved):
                break
            elif not self.done:
                self._handle(self._channel.receive())
        self._resumed = time.monotonic()

    def _wait_for_data(self) -> bool:
        """Wait until there is a shard to read, handing over the steps taken; False if the run is over."""
        if not self._joined:
            raise UsageError(
                "E-ATT-05", "run.data(…) is read before run.attach", fix="call run.attach(model, optimizer) first"
            )
        assert self._data is not None
        self._is_starved = not self.done
        self._wait_for_turn()
        if self._is_starved and not self._data.read_again():
            self.close()
            raise UsageError(
                "E-DATA-06",
                "one optimizer step reads more samples than this member has in its shards",
                fix="pass a smaller number of shards to run.data at all members",
            )
        self._is_starved = False
        return not self.done

    @property
    def _steps_pending(self) -> int:
        """Steps taken and not handed over."""
        return self._span.steps + sum(span.steps for span, _ in self._queue)

    @property
    def _is_short(self) -> bool:
        """Whether the loop waits for samples while the round waits for its first step: no more will come."""
        shards = self._job.data if self._job is not None else None
        return self._is_starved and not self._steps_pending and any(shards or ())

    def _is_due(self, job: TrainSteps) -> bool:
        is_late = job.until is not None and time.monotonic() >= job.until
        is_complete = self._span.steps >= job.steps or is_late or self._cancelled_job >= job.job or self._is_starved
        return bool(self._queue) or (self._span.steps > 0 and is_complete)

    def _hand_over(self, job: TrainSteps) -> None:
        with self._close_on_refusal():
            self._local.check_base()
        mailbox_F, (lo, hi) = self._local.mailbox.x_F, job.span or (0, self.exchanged)
        if self._queue:
            span, sent_F = self._queue.popleft()
            mailbox_F.copy_(sent_F)
        else:
            span = self._end_span(mailbox_F, lo, hi)
        if not span.reported:
            self._warn(UNREPORTED)
        loss = (span.loss_sum / span.reported or ZERO_LOSS) if span.reported else 0.0
        samples, queues = span.steps * self._batch, self._local.queue_rounds > 0
        goes_ahead = job.ahead is not None and self._held_job < job.job
        self._sent = HandoverSnapshot(lo, mailbox_F[lo:hi].clone()) if goes_ahead and not queues else None
        self._steps_ahead_next = (job.ahead or 0 if queues else job.steps) if goes_ahead else 0
        self._steps_ahead = 0 if self._cancelled_job >= job.job else job.ahead or 0
        self._job = None
        read = SamplesRead(self._data.name, span.read) if self._data is not None else None
        self._channel.send(StepsTrained(span.steps, samples, samples, loss, span.seconds, 0, (), read=read))

    def _end_span(self, into_F: torch.Tensor, lo: int, hi: int) -> _StepSpan:
        """The steps taken. Their outcome goes into values lo … hi of this vector (F,): see `take_update`."""
        self._local.take_update(into_F, lo, hi)
        self._require_finite(into_F[lo:hi])
        span, self._span = self._span, _StepSpan()
        return span

    def _drop_steps(self) -> None:
        """Reset the step count after the model got agreed values."""
        self._span, self._steps_ahead, self._sent = _StepSpan(), 0, None
        self._queue.clear()
        self._local.drop_gradients()
        if self._data is not None:
            self._data.forget_places()

    @contextmanager
    def _leave_on_interrupt(self) -> Iterator[None]:
        """Leave the run if the block is interrupted: the peer would wait for the rest of it."""
        try:
            yield
        except AtollError:
            raise
        except BaseException as why:
            self.close()
            if self._joined:
                self._hooks.append(self._local.optimizer.register_step_pre_hook(refuse_steps(type(why).__name__)))
            raise

    @contextmanager
    def _close_on_refusal(self) -> Iterator[None]:
        try:
            yield
        except UsageError:
            self.close()
            raise

    def _handle(self, message: ToUser) -> None:
        with self._leave_on_interrupt():
            self._handle_message(message)

    def _handle_message(self, message: ToUser) -> None:
        match message:
            case TrainSteps():
                self._job, self._seen.round_steps = message, message.steps
                self._seen.shard = message.shard, message.shards
                if self._data is not None and message.data is not None:
                    held = (one for span in (*(s for s, _ in self._queue), self._span) for one in span.read)
                    self._data.assign(message.data, held)
                    self._is_starved = self._is_starved and self._data.is_waiting
            case SetParameters():
                self._write_agreed()
                self._channel.send(TrainerCommandCompleted())
            case MergeAnchorIntoParameters() if (
                self._local.queue_rounds and self._steps_pending < self._steps_ahead
            ):
                self._merging = message  # all gradients of a job belong to the parameters that it began with
            case MergeAnchorIntoParameters():
                self._merge(message)
            case SaveInner():
                self._channel.send(InnerStateInMailbox(self._local.save_moments()))
            case LoadInner():
                self._local.load_moments(message.size_bytes)
                self._channel.send(TrainerCommandCompleted())
            case CancelTraining(job, stands=stands):
                self._cancelled_job = job
                if stands:
                    self._held_job, self._steps_ahead, self._steps_ahead_next = job, 0, 0
            case BeginValidation():
                assert self._validate is not None
                self._channel.send(self._local.evaluate(self._validate))
            case RoundsBegin(recipe, validated) if not self._joined:
                self._begin_rounds(recipe, validated)
            case RoundsBegin():
                pass
            case AttachedPeerIdentity():
                self._announce(message)
            case AgreedReadings():
                self._seen.update(message)
            case LoopLogLine(level, text):
                self._show(text, level)
            case RunFinishedNotice(rounds, model):
                self._seen.done, self._seen.trained, self._seen.model_file = True, rounds, model
                self._is_starved = False
                if self._data is not None:
                    self._data.forget_places()
                if self._joined:
                    self._show(over_text(rounds, model))
                else:
                    log.warning("%s", over_before_text(self._seen, self._request.folder))
            case PeerFailureNotice():
                self.close()
                raise error_of(message)

    def _announce(self, message: AttachedPeerIdentity) -> None:
        self._seen.ticket, self._seen.peer = message.ticket, message.me
        for text in message.lacks:
            log.warning("%s", text)
        if message.ignored:
            log.warning("%s", ignored_text(self._request.folder, message.ignored))
        if not self._request.ticket and message.ticket:
            print_invitation(message.ticket, self._request)

    def _show(self, text: str, level: int = logging.INFO) -> None:
        write_line(level, text, quiet=self._quiet)

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def _begin_rounds(self, recipe: Recipe, validated: bool) -> None:
        self._use_recipe(recipe)
        if validated and self._validate is None:
            self._warn(UNVALIDATED)  # this message may arrive several times before the loop has joined
        if self._local.gradients is not None:
            self._warn(outer_step_text(recipe, self._local.optimizer))

    def _use_recipe(self, recipe: Recipe) -> None:
        with self._close_on_refusal():
            self._local.use_recipe(recipe)

    def _write_agreed(self) -> None:
        self._local.write_agreed()
        self._drop_steps()

    def _merge(self, message: MergeAnchorIntoParameters) -> None:
        """Merge agreed values; steps since the hand-over stay in the model as far as the recipe keeps them."""
        if message.how == "afresh":
            self._write_agreed()
        else:
            self._local.merge(message, self._sent)
        self._sent, self._steps_ahead, self._merging = None, self._steps_ahead_next, None
        self._channel.send(TrainerCommandCompleted())

    def _require_finite(self, x_N: torch.Tensor) -> None:
        """RunFailedError if a value is not finite, since no member could use them."""
        if not largest_of(x_N) < math.inf:
            self.close()
            what = "the model" if self._local.gradients is None or not self._joined else "a gradient"
            after = f"after {counted_text(self.trained, 'trained round')}" if self.trained else "in the first round"
            when = f"{after}, step {self._span.steps}" if self._joined else "before its first round"
            raise RunFailedError(
                "E-ATT-10",
                f"{what} is not finite {when}: no member could use it",
                cause="training diverged: the learning rate is too large, or a batch or a loss holds nan",
                fix="fix that and start the program again in the same folder: the last agreed state is good",
            )
