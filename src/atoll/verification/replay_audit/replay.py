"""Replay of a trainer's steps: a function of its assignment, built from the same pieces as training.

`TrainingAssignment` decides a round of training and holds no choice of the trainer: it follows from genesis, the
agreed state and the plan. `TrainerSnapshot` holds all that the next step depends on: parameters, buffers, counters
and the optimizer's moments. The same steps from the same state give the same bits on the same settings (torch
version, threads, instruction set), and nearly the same elsewhere.
Invariants:
- Positions in the data follow from the assignment and are taken from no peer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import SEGMENT_STEPS
from atoll.crypto.digest import Buffer, digest
from atoll.training.data import Data, batch
from atoll.training.exchange.layout import ModelLayout, bind, flatten, layout_of, unflatten
from atoll.training.exchange.tensorfile import dump, load
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.inner import InnerState, fresh_inner, inner_step, matrices_of
from atoll.training.recipe.lr_position import horizon_of, later, step_at
from atoll.training.recipe.recipes import Recipe

FORMAT = "atoll/audit/live/1"

P = ParamSpec("P")
T = TypeVar("T")


class TrainingAssignment(msgspec.Struct, frozen=True):
    """One trainer's work in one round. An auditor derives its own copy from agreed state."""

    run: Digest
    round: int
    peer: PeerId
    recipe: Recipe
    data: Digest  # the blob that genesis names; zero where data never leaves its peer
    anchor: Digest  # `name_of_x` of the agreed parameters and buffers, from which every round starts
    shard: int
    shards: int
    cursor: int  # cursor of the first step
    global_step: int  # position of the first step: training/recipe/lr_position.py
    steps: int  # most steps; a deadline may end the round earlier
    carried: Digest = ZERO_DIGEST  # `ChainLink.private` at the end of the peer's last chain; zero: unknown
    memory: Digest | None = None  # error feedback after the last claim; None: some of it was not counted
    segment_steps: int = SEGMENT_STEPS


def segments(assignment: TrainingAssignment, steps: int) -> tuple[tuple[int, int], ...]:
    """[first, after the last) step of every segment of a round of `steps` steps; the last may be shorter."""
    size = assignment.segment_steps
    return tuple((at, min(at + size, steps)) for at in range(0, steps, size))


def step_of(assignment: TrainingAssignment, step: int) -> int:
    """The step of the run that sets the rates of this step of the round."""
    recipe, horizon = assignment.recipe, horizon_of(assignment.recipe)
    together = recipe.batch * recipe.seq_len * assignment.shards
    return step_at(horizon, later(horizon, assignment.global_step, step, together))


@dataclass(frozen=True)
class TrainerSnapshot:
    """A trainer's whole state between two steps, on the CPU. It is immutable."""

    x_F: Tensor  # parameters, then float buffers
    counters_K: Tensor  # integer buffers
    inner: InnerState


class ChainLink(NamedTuple):
    """The name of a state in a chain. Two digests, so that x can be held against the agreed anchor by itself."""

    x: Digest
    private: Digest  # moments, their count, counters


def name_of(live: TrainerSnapshot) -> ChainLink:
    inner = live.inner
    rest = (inner.first_P, inner.second_P, live.counters_K)
    private = b"".join(map(_digest_of, rest)) + inner.steps.to_bytes(8, "big")
    return ChainLink(name_of_x(live.x_F), digest(b"atoll/audit/private/1" + private))


def name_of_x(x_F: Tensor) -> Digest:
    return _digest_of(x_F)


def fresh_private(layout: ModelLayout) -> Digest:
    """`ChainLink.private` of a trainer that begins anew, as after a crash."""
    nothing = torch.zeros(0, dtype=torch.float32)
    counters_K = torch.zeros(layout.counters, dtype=torch.int64)
    return name_of(TrainerSnapshot(nothing, counters_K, fresh_inner(layout.parameters))).private


def _digest_of(values: Tensor) -> Digest:
    return digest(values.contiguous().view(torch.uint8).numpy().data)


def live_bytes(live: TrainerSnapshot) -> bytes:
    """Encode a state for auditors."""
    tensors = {
        "x": live.x_F,
        "counters": live.counters_K,
        "first": live.inner.first_P,
        "second": live.inner.second_P,
    }
    return dump(tensors, {"format": FORMAT, "steps": str(live.inner.steps)})


def live_from_bytes(data: Buffer, layout: ModelLayout) -> TrainerSnapshot:
    """Decode a state. PeerFault if it does not fit the model."""
    tensors, metadata = load(data)
    steps = metadata.get("steps", "")
    if metadata.get("format") != FORMAT or not (steps.isascii() and steps.isdigit() and len(steps) < 19):
        raise PeerFault("", "not the state of a trainer")
    if set(tensors) != {"x", "counters", "first", "second"}:
        raise PeerFault("", "the state's tensors are not those of a trainer")
    x_F, counters_K, first_P, second_P = (tensors[name] for name in ("x", "counters", "first", "second"))
    live = TrainerSnapshot(x_F, counters_K, InnerState(first_P, second_P, int(steps)))
    if problem := why_no_state(live, layout):
        raise PeerFault("", problem)
    return live


def at_once(work: Generator[None, None, T]) -> T:
    """Run pausing work to its end; its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def without_pauses(work: Callable[P, Generator[None, None, T]]) -> Callable[P, T]:
    """The function that does all of this work at once."""
    return lambda *args, **options: at_once(work(*args, **options))


def why_no_state(live: TrainerSnapshot, layout: ModelLayout) -> str:
    """Why this state does not fit the model; empty if it does."""
    inner = live.inner
    sizes = ((live.x_F, layout.floats), (inner.first_P, layout.parameters), (inner.second_P, layout.parameters))
    for values, count in sizes:
        if values.shape != (count,) or values.dtype != torch.float32:
            return f"{values.dtype} of shape {tuple(values.shape)} where {count} fp32 values are expected"
        if not bool(values.isfinite().all()):
            return "it holds values that are not finite"
    if live.counters_K.shape != (layout.counters,) or live.counters_K.dtype != torch.int64:
        return f"{tuple(live.counters_K.shape)} counters where {layout.counters} are expected"
    if bool((inner.second_P < 0).any()):
        return "a mean of squares is negative"
    return ""


class ReplayReplica:
    """A model, its data and its optimizer, which takes assigned steps from any state.

    `data_name` is the blob id of `data` and is not checked. `pieces`: parts of a batch, for an auditor with less
    memory than the trainer. ValueError with buffers in the model: their values depend on the pieces.
    """

    def __init__(self, recipe: Recipe, data: Data, data_name: Digest, pieces: int = 1) -> None:
        self.recipe, self.data, self.data_name, self.pieces = recipe, data, data_name, pieces
        self.model = build_model(recipe.model, recipe.seed)
        self.layout = layout_of(self.model)
        if pieces > 1 and self.layout.floats > self.layout.parameters:
            raise ValueError(f"{recipe.model} has buffers that see a whole batch at once: pieces must be 1")
        self.x_F, self.gradient_P = bind(self.model, self.layout)
        self.inner = fresh_inner(self.layout.parameters)
        self.matrices = matrices_of(self.layout)

    def load(self, live: TrainerSnapshot) -> None:
        unflatten(live.x_F, live.counters_K, self.model, self.layout)
        inner = live.inner
        self.inner = InnerState(inner.first_P.clone(), inner.second_P.clone(), inner.steps)

    def live(self) -> TrainerSnapshot:
        x_F, counters_K = flatten(self.model, self.layout)
        inner = self.inner
        return TrainerSnapshot(
            x_F, counters_K, InnerState(inner.first_P.clone(), inner.second_P.clone(), inner.steps)
        )

    def replay(
        self, assignment: TrainingAssignment, begin: TrainerSnapshot, first: int, end: int
    ) -> TrainerSnapshot:
        """The state after steps `first` … `end` of the round, taken from `begin`."""
        return at_once(self.replaying(assignment, begin, first, end))

    def replaying(
        self, assignment: TrainingAssignment, begin: TrainerSnapshot, first: int, end: int
    ) -> Generator[None, None, TrainerSnapshot]:
        """`replay` that pauses after every step; no other work may use the replica meanwhile."""
        self.load(begin)
        for step in range(first, end):
            self.step(self.samples(assignment, step), step_of(assignment, step))
            yield
        return self.live()

    def samples(self, assignment: TrainingAssignment, step: int) -> tuple[Tensor, Tensor]:
        """Batch of this step of the round: (inputs, targets)."""
        recipe, cursor = assignment.recipe, assignment.cursor + step * assignment.recipe.batch
        where = (assignment.shard, assignment.shards, cursor)
        return batch(self.data, *where, recipe.batch, recipe.seq_len, recipe.seed)

    def step(self, samples: tuple[Tensor, Tensor], global_step: int) -> float:
        """One inner step; the loss before it."""
        self.gradient_P.zero_()
        loss_sum = 0.0
        for share, piece in self._cut(samples):
            loss = loss_of(self.model, piece)
            loss_sum += loss.item() * share
            (loss if share == 1 else loss * share).backward()
        x_P = self.x_F[: self.layout.parameters]
        inner_step(self.recipe.inner, self.inner, x_P, self.gradient_P, global_step, self.matrices)
        return loss_sum

    def _cut(self, samples: tuple[Tensor, Tensor]) -> Iterator[tuple[float, tuple[Tensor, Tensor]]]:
        inputs, targets = samples
        for piece in zip(inputs.chunk(self.pieces), targets.chunk(self.pieces), strict=True):
            yield len(piece[0]) / len(inputs), piece
