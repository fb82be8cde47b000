"""Atoll in your own PyTorch loop: `run = atoll.join(ticket)`, then `run.attach(model, optimizer)`.

After `attach` your loop goes on as before. A hook counts the steps of the optimizer. When the round's steps or its
time are over, the hook hands the parameters to the peer process, waits for the agreed ones, and returns. With
`overlap` it returns at once, and the agreed values are merged some steps later. Learning-rate schedulers, gradient
accumulation, torch.compile and GradScaler stay yours. A step that GradScaler skips is not counted; a round ends by
its time even if steps are skipped. If members agree on gradients, the recipe takes the step and the optimizer only
triggers it (`training/recipe/user_optimizer.py`). Gradients may then queue for their rounds (`pipelined`).

Invariants:
- The model's tensors stay the same objects; their values change inside `optimizer.step()` only.
- The optimizer's state is never touched, except where a recipe averages its moments.
- Data never leave this process. Only exchanged parameters and buffers do, and gradients or moments if the recipe
  averages them. Of a model with frozen parameters, only those that require a gradient or that `only` names travel.
- If the peer process dies, the hook raises; the loop never continues alone silently. An exception or Ctrl-C during
  a hand-over or a merge ends the loop's place in the run, since its peer waits for the rest.
"""

from __future__ import annotations

import math
import sys
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
from atoll.base.errors import AtollError, NetworkError, RefusedError, RunFailedError, UsageError
from atoll.base.workload import BATCH_MOST
from atoll.peer.config.node_sections import StateMemory
from atoll.runtime.embed.loop_model import HandedOver, LoopModel, hugging_face_config, number_of
from atoll.runtime.embed.member_needs import check_room, needs_of
from atoll.runtime.embed.messages import (
    AttachLoop,
    DeclineRounds,
    LoopRoundClosed,
    LoopRunOver,
    PeerError,
    PeerIdentityAnnouncement,
    RoundsBegin,
    RunRequest,
    ToUser,
)
from atoll.runtime.embed.peer_channel import PeerChannel
from atoll.runtime.network.addresses import LOOPBACK
from atoll.runtime.trainer.protocol import (
    CancelTraining,
    InnerSaved,
    LoadInner,
    MergeAnchorIntoParameters,
    SaveInner,
    StepsTrained,
    TrainerCommandCompleted,
    TrainSteps,
    WriteParameters,
)
from atoll.training.codec.blocks import largest_of
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.user_optimizer import is_skipped
from atoll.wire.ticket import parse
from atoll.worker.trainer_commands import BeginValidation

T = TypeVar("T")
UNVALIDATED = (
    "members of this run may lie, and this loop cannot see whether an agreed model is bad. If too few members can, "
    "the run never goes back behind a bad one. Give it a held-out loss: run.attach(model, optimizer, validate=…)"
)


@dataclass
class _StepSpan:
    """Steps since the last hand-over, or since the previous entry of the gradient queue."""

    steps: int = 0
    reported: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0


class Run:
    """This process's place in a run. `atoll.join` and `atoll.found` create it; it does nothing before `attach`."""

    _local: LoopModel

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self.ticket = request.ticket  # for others to join with; known after `attach` if this process founds the run
        self.peer = ""  # id of this process in the run
        self.round = -1  # last agreed round
        self.trained = 0  # agreed training rounds so far
        self.members = 0  # members present in the last agreed membership
        self.loss = float("nan")  # mean reported training loss of the last agreed round
        self.done = False  # True once the run is over and the model holds the agreed parameters
        self.exchanged = 0  # values that travel: all of the model, or its adapters
        self.base = ""  # digest of the values that do not travel; empty if all do
        self.shard_index, self.shard_count = 0, 1  # this round's slice of the data, for `shard`
        self._channel = PeerChannel()
        self._joined = False
        self._warned = False  # True once the missing validate= was reported
        self._validate: Callable[[], SupportsFloat] | None = None
        self._batch = 1
        self._span = _StepSpan()
        self._job: TrainSteps | None = None  # job that the peer waits for
        self._asked_steps = 0  # steps of the last job
        self._cancelled_job = self._held_job = -1  # last job that was ended early; last one that pauses the loop
        self._steps_ahead = 0  # steps that the loop may take before the next job
        self._steps_ahead_next = 0  # the same, once the agreed values are merged
        self._sent: HandedOver | None = None  # values handed over, while the loop takes steps ahead
        self._queue = deque[tuple[_StepSpan, torch.Tensor]]()  # gradients of steps ahead, oldest first
        self._merging: MergeAnchorIntoParameters | None = (
            None  # merge that waits until the queued gradients are complete
        )
        self._hooks: list[Any] = []
        self._in_step = False  # True during optimizer.step()
        self._resumed = 0.0  # monotonic time at which the loop got control

    def __repr__(self) -> str:
        state = "is over" if self.done else f"round {self.round}" if self._joined else "not attached"
        return f"<atoll.Run {self._request.folder}: {state}, {self.trained} rounds trained, {self.members} members>"

    # ---- what a loop calls ---------------------------------------------------------------------------------

    @arguments("run.attach", "E-ATT-11")
    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch: Count = 1,
        pass_steps: Whole = 0,
        only: Sequence[str] = (),
        validate: Callable[[], SupportsFloat] | None = None,
        state_memory: StateMemory = "memory",
    ) -> Run:
        """Join with this model; returns when the first round begins. The model then holds the agreed parameters.

        `batch` is the number of samples per optimizer step; it weighs this peer's update. `pass_steps` is the
        number of optimizer steps per pass over your own data, `len(loader)`, for runs that count epochs.
        Parameters that require no gradient are not exchanged: every member must hold the same ones. `only` names
        the exchanged parameters instead, in shell style: `only=["*lora*", "head.*"]`.

        `validate` returns the model's mean loss on held-out data: some hundred samples, the same ones at every
        member, since losses are compared. If members may lie, some are drawn from time to time to call it between
        two steps, with an agreed state in the model. If enough of them find it bad, all go back to the last good
        one. Parameters, `training` flags and the CPU's random numbers are restored afterwards.

        `state_memory="disk"` keeps the vectors of this peer that are as large as the model in files of its folder,
        for models that hardly fit: rounds take longer.

        Raises RefusedError if the model is not the run's, UsageError if nothing could be exchanged, or the ticket's
        own error.
        """
        if self._channel.is_open or self._joined:
            raise UsageError(
                "E-ATT-02",
                "this run is attached already",
                fix="call atoll.join again for another place in it, or to come back after close()",
            )
        request = self._request
        if request.effort is not None and batch > BATCH_MOST:
            raise UsageError(
                "E-ATT-11",
                f"run.attach(batch={batch}): a step has at most {BATCH_MOST} samples in a run of adaptive rounds",
                cause="batch counts tokens, or other parts of samples",
                fix="count samples, in target_samples= as well",
            )
        self._local, self._batch, self._validate = LoopModel(model, optimizer, only), batch, validate
        optimizer = self._local.optimizer  # without the wrapper of Accelerate or Lightning
        self.exchanged, self.base = self._local.layout.floats, self._local.base_digest
        if request.recipe is not None:
            self._use_recipe(request.recipe)
        memory = self._local.open_mailbox(self._checked_folder(state_memory))
        self._local.copy_out(self._local.mailbox.x_F, 0, self.exchanged)
        self._require_finite(self._local.mailbox.x_F)
        self._channel.start(memory)
        config, validates = hugging_face_config(model), validate is not None
        self._channel.send(
            AttachLoop(request, self._local.layout, batch, pass_steps, validates, state_memory, config)
        )
        self._wait_for_turn()
        self._joined = True
        if not self.done:
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
        """Every n-th item, so that members see disjoint data; for loaders that all members order alike."""
        for index, item in enumerate(items):
            if index % self.shard_count == self.shard_index:
                yield item

    def close(self) -> None:
        """Leave the run and end the peer process. Idempotent; also done when Python exits."""
        for hook in self._hooks:
            hook.remove()
        self._channel.stop()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked_folder(self, state_memory: StateMemory) -> Path | None:
        """The folder for the mailbox, None: memory. Tells what a large model needs; UsageError if it cannot fit."""
        folder = Path(self._request.folder)
        nearest = next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path())
        if text := check_room(needs_of(self._local.layout, state_memory), folder, nearest):
            print(text, file=sys.stderr, flush=True)
        return nearest if state_memory == "disk" else None

    # ---- between steps -------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before optimizer.step(): if members agree on gradients, the recipe takes the step instead."""
        self._in_step = True
        gradients = self._local.gradients
        return None if gradients is None or self.done else gradients.take_gradients(optimizer, args, kwargs)

    def _after_step(self, *_: object) -> None:
        """Hook after optimizer.step(): hand over if the round's steps or its time are over."""
        if not self._in_step:
            return  # the super().step() of a subclass, which torch hooks as well
        self._in_step = False
        if self._local.gradients is not None and not self._local.gradients.restore_gradients():
            self.close()
            raise UsageError(
                "E-ATT-13",
                f"members of this run agree on gradients, but {type(self._local.optimizer).__name__} also moves "
                "parameters that have none: its steps would come on top of the agreed ones",
                fix="attach torch.optim.SGD(model.parameters()): it only triggers the step",
            )
        if self.done or not self._channel.is_open or is_skipped(self._local.optimizer):
            return
        self._span.steps += 1
        self._span.seconds += time.monotonic() - self._resumed
        if self._local.queue_rounds and self._span.steps == self._asked_steps:
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
            elif self._merging is not None and not may_go_ahead:
                with self._leave_on_interrupt():
                    self._merge(self._merging)
            elif job is not None or may_go_ahead:
                break
            elif not self.done:
                self._handle(self._channel.receive())
        self._resumed = time.monotonic()

    @property
    def _steps_pending(self) -> int:
        """Steps taken and not handed over."""
        return self._span.steps + sum(span.steps for span, _ in self._queue)

    def _is_due(self, job: TrainSteps) -> bool:
        is_late = job.until is not None and time.monotonic() >= job.until
        is_complete = self._span.steps >= job.steps or is_late or self._cancelled_job >= job.job
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
        loss = span.loss_sum / span.reported if span.reported else 0.0
        samples, queues = span.steps * self._batch, self._local.queue_rounds > 0
        goes_ahead = job.ahead is not None and self._held_job < job.job
        self._sent = HandedOver(lo, mailbox_F[lo:hi].clone()) if goes_ahead and not queues else None
        self._steps_ahead_next = (job.ahead or 0 if queues else job.steps) if goes_ahead else 0
        self._steps_ahead = 0 if self._cancelled_job >= job.job else job.ahead or 0
        self._job = None
        self._channel.send(StepsTrained(span.steps, samples, samples, loss, span.seconds, 0, ()))

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
                self._hooks.append(self._local.optimizer.register_step_pre_hook(_refuse_steps(type(why).__name__)))
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
                self._job, self._asked_steps = message, message.steps
                self.shard_index, self.shard_count = message.shard, message.shards
            case WriteParameters():
                self._write_agreed()
                self._channel.send(TrainerCommandCompleted())
            case MergeAnchorIntoParameters() if (
                self._local.queue_rounds and self._steps_pending < self._steps_ahead
            ):
                self._merging = message  # all gradients of a job belong to the parameters that it began with
            case MergeAnchorIntoParameters():
                self._merge(message)
            case SaveInner():
                self._channel.send(InnerSaved(self._local.save_moments()))
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
                self.round, self.trained = message.round, message.trained
                self._begin_rounds(recipe, validated)
            case RoundsBegin():
                pass
            case PeerIdentityAnnouncement(ticket, me, lacks):
                self.ticket, self.peer = ticket, me
                for text in lacks:
                    print(text, file=sys.stderr, flush=True)
                if not self._request.ticket:
                    _print_invitation(ticket, self._request)
            case LoopRoundClosed():
                self.round, self.trained, self.members = message.round, message.trained, message.members
                self.loss = message.loss
            case LoopRunOver(rounds):
                self.done, self.trained = True, rounds
                if not self._joined:
                    print(
                        f"this run was over after {rounds} rounds: the model holds their result; "
                        f"to begin another run, use another folder than {self._request.folder}",
                        file=sys.stderr,
                    )
            case PeerError(code, what, cause, fix):
                self.close()
                raise _error_class(code)(code, what, cause=cause, fix=fix)

    def _begin_rounds(self, recipe: Recipe, validated: bool) -> None:
        self._use_recipe(recipe)
        if validated and self._validate is None and not self._warned:
            self._warned = True  # this message may arrive several times before the loop has joined
            print(UNVALIDATED, file=sys.stderr, flush=True)
        if self._local.gradients is not None:
            print(_describe_outer_step(recipe, self._local.optimizer), file=sys.stderr, flush=True)

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
            when = (
                f"after round {self.round}, step {self._span.steps}" if self._joined else "before its first round"
            )
            raise RunFailedError(
                "E-ATT-10",
                f"{what} is not finite {when}: no member could use it",
                cause="training diverged: the learning rate is too large, or a batch or a loss holds nan",
                fix="fix that and start the program again in the same folder: the last agreed state is good",
            )


def _print_invitation(ticket: str, request: RunRequest) -> None:
    is_local = request.listen == LOOPBACK
    where = "  (on this computer; for others ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071)" * is_local
    print(f"others join with: atoll.join({ticket!r}){where}", flush=True)
    if parse(ticket).uses == 1:
        print(f"it admits one; for each of the others: atoll invite --dir {request.folder}")


def _describe_outer_step(recipe: Recipe, optimizer: torch.optim.Optimizer) -> str:
    """Notice that the recipe takes the steps, so that people do not tune rates that have no effect."""
    outer = recipe.outer
    numbers = ", ".join(f"{name}={getattr(outer, name)!r}" for name in outer.__struct_fields__)
    return (
        f"members of this run agree on gradients: optimizer.step() takes the step of its recipe, "
        f"{type(outer).__name__}({numbers}); rates and moments of your {type(optimizer).__name__} have no effect"
    )


def _refuse_steps(why: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise RunFailedError(
            "E-ATT-14",
            f"this loop has left its run: {why} interrupted a merge or a hand-over",
            cause="its model may be half of one state and half of another",
            fix="start the program again in the same folder: it continues from the last agreed state",
        )

    return refuse


def _error_class(code: str) -> type[AtollError]:
    if code.startswith("E-NET"):
        return NetworkError
    return UsageError if code.startswith(("E-DIR", "E-TKT")) else RefusedError
