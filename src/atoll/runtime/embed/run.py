"""Atoll in your own PyTorch loop: `run = atoll.join(ticket)`, then `run.attach(model, optimizer)`.

After `attach` your loop goes on as it was. After every inner step of the optimizer a hook counts; when the round's
steps are done, or its time is, the hook hands the parameters to the peer process, waits for the agreed ones, and
returns. With `overlap` it returns at once, and what is agreed is merged some steps later. Learning-rate schedulers,
gradient accumulation, torch.compile and GradScaler stay yours: a step that GradScaler skips is not counted, and a
round ends by its time even if steps are skipped. Where members agree on gradients the recipe takes the step, the
optimizer only says when (`training/recipe/user_optimizer.py`), and gradients may wait for their rounds in a
queue (`pipelined`).

Promises: the model's tensors stay the same objects, only their values change, inside `optimizer.step()`; the
optimizer's own state is never touched, but where a recipe averages its moments; the data never leaves this process.
If the peer process dies the hook raises, it never goes on alone silently; nor does it after an exception or Ctrl-C
in the midst of what its peer waits for: then the loop has left the run. Never sends anything but parameters and
buffers of the model, gradients or moments where the recipe says so, and of those only what is exchanged: of a model
with frozen parameters only what requires a gradient, or what `only` names.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import msgspec
import torch
from torch import nn

from atoll.base.arguments import Count, Whole, arguments
from atoll.base.errors import AtollError, NetworkError, RefusedError, RunFailedError, UsageError
from atoll.base.workload import BATCH_MOST, WorkloadPolicy
from atoll.policy.participation import ParticipationPolicy, group_problem, named
from atoll.runtime.embed.peer_process import (
    AttachLoop,
    DeclineRounds,
    DetachLoop,
    LoopRoundClosed,
    LoopRunOver,
    PeerError,
    PeerNews,
    RoundsBegin,
    ToUser,
    room_of,
)
from atoll.runtime.network.addresses import LOOPBACK
from atoll.runtime.trainer.protocol import (
    LENGTH,
    CancelTraining,
    CommandDone,
    CommandFailed,
    InnerSaved,
    LoadInner,
    MergeAnchor,
    SaveInner,
    StepsTrained,
    TrainSteps,
    WriteParameters,
)
from atoll.runtime.trainer.shared_memory import SharedMailbox, anonymous
from atoll.training.exchange.layout import base_digest, flatten, layout_of, tensors_of, unflatten
from atoll.training.exchange.parameter_selection import FrozenBaseGuard, check_optimizer, exchanged
from atoll.training.recipe.inner import (
    GradientAccumulation,
    PipelinedGradients,
    fresh_inner,
    inner_from_bytes,
    inner_pieces,
)
from atoll.training.recipe.merge import merge
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.user_optimizer import AdamMoments, GradientSums, optimizer_problem, skipped
from atoll.wire.ticket import parse
from atoll.worker.trainer_commands import BeginValidation, LossesMeasured

T = TypeVar("T")
LEAVE_S = 15.0  # for the peer's farewell
UNVALIDATED = (
    "members of this run may lie, and this loop cannot see whether an agreed model is bad. Where too few can, "
    "the run never goes back behind a bad one. Give it a held-out loss: run.attach(model, optimizer, validate=…)"
)


@dataclass
class _StepSpan:
    """Steps since the parameters were handed over, or since the gradients before theirs were all taken."""

    steps: int = 0
    reported: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0


class Run:
    """This process's place in a run. Made by `atoll.join` or `atoll.found`; does nothing before `attach`."""

    def __init__(
        self,
        *,
        folder: Path,
        ticket: str = "",
        recipe: Recipe | None = None,
        start_peers: int = 1,
        min_peers: int = 0,
        trust: str = "private",
        statistic: str | None = None,
        name: str = "",
        group: str = "",
        sample: ParticipationPolicy | None = None,
        effort: WorkloadPolicy | None = None,
        listen: tuple[str, ...] = LOOPBACK,
        announce: tuple[str, ...] = (),
    ) -> None:
        self._wish: dict[str, Any] = {
            "folder": str(folder),
            "ticket": ticket,
            "recipe": recipe,
            "start_peers": start_peers,
            "min_peers": min_peers,
            "trust": trust,
            "statistic": statistic,
            "name": named(name, _checked(group)),
            "sample": sample,
            "effort": effort,
            "listen": listen,
            "announce": announce,
        }
        self.ticket = ticket  # give it to others; known after `attach` where this process founds the run
        self.peer = ""  # who this process is in the run
        self.round = -1  # the last agreed round
        self.trained = 0  # agreed training rounds so far
        self.members = 0  # present in the last agreed membership
        self.loss = float("nan")  # mean reported training loss of the last agreed round
        self.done = False  # the run is over; the model holds the agreed parameters
        self.exchanged = 0  # values that travel: all of the model, or its adapters
        self.base = ""  # digest of what does not travel; empty where everything does
        self.shard_index, self.shard_count = 0, 1  # this round's slice of the data, for `shard`
        self._process: subprocess.Popen[bytes] | None = None
        self._joined = False
        self._warned = False  # that it brings no held-out loss
        self._span = _StepSpan()
        self._cancelled = self._stands = -1  # the job that was over last, and the one after which the loop waits
        self._job: TrainSteps | None = None  # what the peer waits for
        self._asked = 0  # steps of the last one
        self._full = self._may = 0  # steps of a round, and how many of the next may be taken before it is asked for
        self._sent_F: torch.Tensor | None = None  # what was handed over, while the loop goes on
        self._gradients: GradientSums | None = None  # where members agree on them
        self._depth = 0  # rounds whose gradients may wait for their turn, oldest first
        self._waiting = deque[tuple[_StepSpan, torch.Tensor]]()
        self._merging: MergeAnchor | None = (
            None  # what is to be taken in once the gradients before it are all taken
        )
        self._moments: AdamMoments | None = None  # where members average them
        self._hooks: list[Any] = []
        self._in_step = False  # of the optimizer
        self._heard = b""  # of a word that is not whole yet

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
    ) -> Run:
        """Join with this model; returns when the first round begins, the model then holds the agreed parameters.

        `batch` is the number of samples behind one optimizer step: it weighs this peer's update. `pass_steps` are
        the optimizer steps of one pass over your own data, `len(loader)`, where the run counts epochs. Parameters
        that require no gradient are not exchanged: every member must hold the same ones. `only` names what is
        exchanged instead, in shell style: `only=["*lora*", "head.*"]`.

        `validate` returns the model's mean loss on held-out data: some hundred samples, the same ones at every
        member, since losses are compared. Where members may lie, some of them are drawn now and then to call it
        between two steps, with an agreed state in the model. If enough find it bad, all go back to the last good
        one. Parameters, `training` flags and the CPU's random numbers are afterwards what they were.

        Raises RefusedError if the model is not the run's, UsageError if nothing could be exchanged, or the ticket's
        own error.
        """
        if self._process is not None or self._joined:
            raise UsageError(
                "E-ATT-02",
                "this run was attached already",
                fix="call atoll.join again for another place in it, or to come back after close()",
            )
        if self._wish["effort"] is not None and batch > BATCH_MOST:
            raise UsageError(
                "E-ATT-11",
                f"run.attach(batch={batch}): a step has at most {BATCH_MOST} samples where rounds follow the run",
                cause="these are tokens, or other parts of samples",
                fix="count samples, in target_samples= as well",
            )
        self._model, self._optimizer, self._batch, self._validate = model, optimizer, batch, validate
        self._choose(only)
        if self._wish["recipe"] is not None:
            self._work_with(self._wish["recipe"])
        looks = validate is not None
        wish = AttachLoop(layout=self._layout, batch=batch, pass_steps=pass_steps, validates=looks, **self._wish)
        memory = anonymous()
        self._mailbox = SharedMailbox(memory, self._layout.floats, room_of(self._layout))
        self._mailbox.x_F.copy_(self._finite(flatten(self._model, self._layout)[0]))
        self._loop_process = os.getpid()
        self._begin(memory)
        self._say(wish)
        self._go_on()
        self._joined = True
        if not self.done:
            self._hooks.append(optimizer.register_step_pre_hook(self._begins_step))
            self._hooks.append(optimizer.register_step_post_hook(self._ends_step))
        return self

    def _begin(self, memory: int) -> None:
        """The peer process."""
        ours, theirs = socket.socketpair()
        # -P: no module comes from the working directory, which `-m` would search first
        command = [
            sys.executable,
            "-P",
            "-m",
            "atoll.runtime.embed.peer_process",
            str(theirs.fileno()),
            str(memory),
        ]
        paths = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module, no shell
            command,
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,
            env=paths,
            process_group=0,  # Ctrl-C, and a notebook's interrupt, are for the loop; its peer still says farewell
        )
        theirs.close()
        os.close(memory)
        self._socket = ours
        atexit.register(self.close)

    def _choose(self, only: Sequence[str]) -> None:
        """What of the model travels, and the watch over the rest."""
        try:
            going = exchanged(self._model, only)
            self._layout = layout_of(self._model, only)
            check_optimizer(self._model, going, (p for g in self._optimizer.param_groups for p in g["params"]))
        except ValueError as why:
            raise UsageError("E-ATT-05", str(why)) from None
        self._base = FrozenBaseGuard(self._model, going, by_name=bool(only))
        self.exchanged = self._layout.floats
        self.base = base_digest(self._layout).hex() if self._layout.held else ""

    def _work_with(self, recipe: Recipe) -> None:
        """What this recipe takes from the optimizer, if anything."""
        if problem := optimizer_problem(recipe, self._optimizer, self._model, self._layout):
            self.close()
            raise UsageError("E-ATT-13", problem)
        inner = recipe.inner
        self._gradients = (
            GradientSums(self._model, self._layout) if isinstance(inner, GradientAccumulation) else None
        )
        self._depth = inner.depth if isinstance(inner, PipelinedGradients) else 0
        averages = any(recipe.schedule.moments)
        self._moments = AdamMoments(self._optimizer, self._model, self._layout) if averages else None

    @arguments("run.report", "E-ATT-11")
    def report(self, loss: SupportsFloat) -> None:
        """Tell the others this step's training loss; optional, shown as the run's loss.

        One that is not finite (a batch that GradScaler passes over) counts for nothing.
        """
        try:
            value = _number(loss)
        except (TypeError, ValueError, RuntimeError) as why:  # a tensor of many values
            raise UsageError("E-ATT-11", f"run.report: {why}", fix="run.report(loss.mean().item())") from None
        if math.isfinite(value):
            self._span.loss_sum += value
            self._span.reported += 1

    @arguments("run.decline", "E-ATT-11")
    def decline(self, rounds: Count = 1) -> None:
        """Give nothing to the round under way, nor to the `rounds - 1` after it; nobody waits, and no record falls.

        Returns when the next round begins that this loop takes part in (or the run is over), with the agreed
        parameters in the model: steps taken in this round so far are dropped.
        """
        if self._process is None:
            raise UsageError("E-ATT-05", "this run is not attached", fix="call run.attach(model, optimizer) first")
        if self.done:
            return
        with self._whole():
            if self._merging is not None:
                self._merge(self._merging)
            self._say(DeclineRounds(0 if self._job is None else self._job.job, rounds))
            self._job = None
            self._forget()
        self._go_on()

    @arguments("run.shard", "E-ATT-11")
    def shard(self, items: Iterable[T]) -> Iterator[T]:
        """Every n-th item, so that members see disjoint data: for loaders that all members order alike."""
        for index, item in enumerate(items):
            if index % self.shard_count == self.shard_index:
                yield item

    def close(self) -> None:
        """Say farewell and end the peer process. Harmless if there is none; also done when Python exits."""
        process, self._process = self._process, None
        for hook in self._hooks:
            hook.remove()
        if process is None or self._loop_process != os.getpid():  # a fork of the loop ends, not the loop
            return
        with suppress(OSError):
            self._say(DetachLoop())
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._socket.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- between steps -------------------------------------------------------------------------------------

    def _begins_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The optimizer begins a step: the recipe's, where members agree on gradients, until the run is over."""
        self._in_step = True
        return None if self._gradients is None or self.done else self._gradients.take(optimizer, args, kwargs)

    def _ends_step(self, *_: object) -> None:
        """The optimizer took a step: hand over if the round's steps or its time are done."""
        if not self._in_step:
            return  # it was its super().step(), which torch hooks, too
        self._in_step = False
        if self._gradients is not None and not self._gradients.give_back():
            self.close()
            raise UsageError(
                "E-ATT-13",
                f"members of this run agree on gradients, and {type(self._optimizer).__name__} moves parameters "
                "that have none: its steps would come on top of the agreed ones",
                fix="attach torch.optim.SGD(model.parameters()): it only says when a step is due",
            )
        if self.done or self._process is None or skipped(self._optimizer):
            return
        self._span.steps += 1
        self._span.seconds += time.monotonic() - self._resumed
        if self._depth and self._span.steps == self._asked:
            self._waiting.append(self._end_span())
        self._go_on()

    def _go_on(self) -> None:
        """Returns as soon as the loop may take its next step; the peer has the floor until then."""
        while not self.done:
            while select.select([self._socket], [], [], 0)[0]:
                self._take(self._hear())
            job, goes_ahead = self._job, self._unasked < self._may
            if job is not None and self._due(job):
                with self._whole():
                    self._hand_over(job)
            elif self._merging is not None and not goes_ahead:
                with self._whole():
                    self._merge(self._merging)
            elif job is not None or goes_ahead:
                break
            elif not self.done:
                self._take(self._hear())
        self._resumed = time.monotonic()

    @property
    def _unasked(self) -> int:
        """Steps that were taken and not handed over."""
        return self._span.steps + sum(span.steps for span, _ in self._waiting)

    def _due(self, job: TrainSteps) -> bool:
        late = job.until is not None and time.monotonic() >= job.until
        enough = self._span.steps >= job.steps or late or self._cancelled >= job.job
        return bool(self._waiting) or (self._span.steps > 0 and enough)

    def _hand_over(self, job: TrainSteps) -> None:
        if problem := self._base.problem():
            self.close()
            raise UsageError("E-ATT-06", problem)
        span, sent_F = self._waiting.popleft() if self._waiting else self._end_span()
        self._mailbox.x_F.copy_(sent_F)
        loss = span.loss_sum / span.reported if span.reported else 0.0
        samples = span.steps * self._batch
        goes_on = job.ahead is not None and self._stands < job.job
        self._sent_F = sent_F if goes_on and not self._depth else None
        self._full = (job.ahead or 0 if self._depth else job.steps) if goes_on else 0
        self._may = 0 if self._cancelled >= job.job else job.ahead or 0
        self._job = None
        self._say(StepsTrained(span.steps, samples, samples, loss, span.seconds, 0, ()))

    def _end_span(self) -> tuple[_StepSpan, torch.Tensor]:
        """The steps taken and what they came to (F,): the model, or in it the sum of gradients."""
        span, x_F = self._span, flatten(self._model, self._layout)[0]
        if self._gradients is not None:
            x_F[: self._layout.parameters] = self._gradients.end()
        self._finite(x_F)
        self._span = _StepSpan()
        return span, x_F

    def _forget(self) -> None:
        """Nothing was stepped since what the model holds now."""
        self._span, self._may, self._sent_F = _StepSpan(), 0, None
        self._waiting.clear()
        if self._gradients is not None:
            self._gradients.end()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What happens in here does so whole, or the loop has left: its peer would wait for the rest of it."""
        try:
            yield
        except AtollError:
            raise
        except BaseException as why:
            self.close()
            if self._joined:
                self._hooks.append(self._optimizer.register_step_pre_hook(_refusing(type(why).__name__)))
            raise

    def _take(self, word: ToUser) -> None:
        with self._whole():
            self._carry_out(word)

    def _carry_out(self, word: ToUser) -> None:
        match word:
            case TrainSteps():
                self._job, self._asked = word, word.steps
                self.shard_index, self.shard_count = word.shard, word.shards
            case WriteParameters():
                self._write_x()
                self._say(CommandDone())
            case MergeAnchor() if self._depth and self._unasked < self._may:
                self._merging = word  # every gradient is of the parameters that its turn has
            case MergeAnchor():
                self._merge(word)
            case SaveInner() | LoadInner():
                self._carry_moments(word)
            case CancelTraining(job, stands=stands):
                self._cancelled = job
                if stands:
                    self._stands, self._may, self._full = job, 0, 0
            case BeginValidation():
                self._say(self._looked())
            case RoundsBegin(recipe, validated) if not self._joined:
                self._work_with(recipe)
                if validated and self._validate is None and not self._warned:
                    self._warned = True  # a loop may begin several times before it has joined
                    print(UNVALIDATED, file=sys.stderr, flush=True)
                if self._gradients is not None:
                    print(_steps_of(recipe, self._optimizer), file=sys.stderr, flush=True)
            case RoundsBegin():
                pass
            case PeerNews(ticket, me, lacks):
                self.ticket, self.peer = ticket, me
                for text in lacks:
                    print(text, file=sys.stderr, flush=True)
                if not self._wish["ticket"]:
                    alone = self._wish["listen"] == LOOPBACK
                    where = "  (on this computer; for others ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071)" * alone
                    print(f"others join with: atoll.join({ticket!r}){where}", flush=True)
                    if parse(ticket).uses == 1:
                        print(f"it admits one; for each of the others: atoll invite --dir {self._wish['folder']}")
            case LoopRoundClosed():
                self.round, self.trained, self.members = word.round, word.trained, word.members
                self.loss = word.loss
            case LoopRunOver(rounds):
                self.done, self.trained = True, rounds
                if not self._joined:
                    print(
                        f"this run was over after {rounds} rounds: the model is as they left it; "
                        f"to begin another, name another folder than {self._wish['folder']}",
                        file=sys.stderr,
                    )
            case PeerError(code, what, cause, fix):
                self.close()
                raise _error(code)(code, what, cause=cause, fix=fix)

    def _write_x(self) -> None:
        own = flatten(self._model, self._layout)[1]
        unflatten(self._mailbox.x_F, own, self._model, self._layout)
        self._forget()

    def _looked(self) -> LossesMeasured | CommandFailed:
        """The loop's own held-out loss of the model in the mailbox. The loop's model is as it was afterwards."""
        assert self._validate is not None
        own = [(tensor, tensor.detach().clone()) for _, tensor in tensors_of(self._model, self._layout)]
        modes = [(module, module.training) for module in self._model.modules()]
        counters_K = flatten(self._model, self._layout)[1]
        try:
            with torch.random.fork_rng([]), torch.no_grad():
                unflatten(self._mailbox.shown(), counters_K, self._model, self._layout)
                self._model.eval()
                return LossesMeasured(True, (_number(self._validate()),))
        except Exception as why:
            traceback.print_exc()
            print("validate= failed: this member does not look at this state", file=sys.stderr, flush=True)
            return CommandFailed("refused", f"validate= failed: {type(why).__name__}")
        finally:
            with torch.no_grad():
                for tensor, value in own:
                    tensor.copy_(value)
            for module, training in modes:
                module.training = training

    def _merge(self, word: MergeAnchor) -> None:
        """What was agreed goes into the model; the steps since the hand-over stay, as far as the recipe has it."""
        if word.how == "afresh":
            self._write_x()
        else:
            x_F, own = flatten(self._model, self._layout)
            here = slice(word.lo, word.hi)
            x_N, new_N = x_F[here], self._mailbox.x_F[here]
            if word.how == "shift":
                x_N.add_(new_N)
            else:
                merge(word.how, x_N, x_N if self._sent_F is None else self._sent_F[here], new_N)
            unflatten(x_F, own, self._model, self._layout)
        self._sent_F, self._may, self._merging = None, self._full, None
        self._say(CommandDone())

    def _carry_moments(self, word: SaveInner | LoadInner) -> None:
        assert self._moments is not None
        if isinstance(word, SaveInner):
            self._say(InnerSaved(self._mailbox.put(*inner_pieces(self._moments.read()))))
        else:
            parameters, data = self._layout.parameters, self._mailbox.take(word.size_bytes)
            self._moments.write(inner_from_bytes(data, parameters) if data else fresh_inner(parameters))
            self._say(CommandDone())

    def _finite(self, x_F: torch.Tensor) -> torch.Tensor:
        """The same. RunFailedError if nobody could use it."""
        if not bool(x_F.isfinite().all()):
            self.close()
            what = "the model" if self._gradients is None or not self._joined else "a gradient"
            when = (
                f"after round {self.round}, step {self._span.steps}" if self._joined else "before its first round"
            )
            raise RunFailedError(
                "E-ATT-10",
                f"{what} is not finite {when}: nobody could use it",
                cause="training diverged: the learning rate is too large, or a batch or a loss holds nan",
                fix="mend that and start the program again in the same folder: the last agreed state is good",
            )
        return x_F

    # ---- the socket ----------------------------------------------------------------------------------------

    def _say(self, word: Any) -> None:
        body = msgspec.msgpack.encode(word)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def _hear(self) -> ToUser:
        """The next word; whoever is interrupted on the way to it hears it the next time."""
        (size,) = LENGTH.unpack(self._hear_bytes(LENGTH.size)[: LENGTH.size])
        word = _DECODER.decode(self._hear_bytes(LENGTH.size + size)[LENGTH.size :])
        self._heard = b""
        return word

    def _hear_bytes(self, count: int) -> bytes:
        """So many of the word that is on its way, at least."""
        while len(self._heard) < count:
            more = self._socket.recv(count - len(self._heard))
            if not more:
                assert self._process is not None
                code = self._process.wait()
                raise RunFailedError(
                    "E-ATT-03",
                    f"the peer process behind this loop ended with exit status {code}",
                    cause="it was killed, or it said why above or in atoll.log",
                    fix="start the program again in the same folder: it goes on from the last agreed state",
                )
            self._heard += more
        return self._heard


_DECODER = msgspec.msgpack.Decoder(ToUser)


def _steps_of(recipe: Recipe, optimizer: torch.optim.Optimizer) -> str:
    """Whose steps these are, for people: a rate that does nothing must not be looked for in vain."""
    outer = recipe.outer
    numbers = ", ".join(f"{name}={getattr(outer, name)!r}" for name in outer.__struct_fields__)
    return (
        f"members of this run agree on gradients: optimizer.step() takes the step of its recipe, "
        f"{type(outer).__name__}({numbers}); rates and moments of your {type(optimizer).__name__} do nothing"
    )


def _number(loss: SupportsFloat) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def _refusing(why: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise RunFailedError(
            "E-ATT-14",
            f"this loop has left its run: {why} came while it took in what was agreed, or handed over",
            cause="its model may be half of one state and half of another",
            fix="start the program again in the same folder: it goes on from the last agreed state",
        )

    return refuse


def _error(code: str) -> type[AtollError]:
    if code.startswith("E-NET"):
        return NetworkError
    return UsageError if code.startswith(("E-DIR", "E-TKT")) else RefusedError


def _checked(group: str) -> str:
    if problem := group_problem(group):
        raise UsageError("E-ATT-07", f"group={group!r}: {problem}", fix='name it like "hospital-a"')
    return group
