"""Loss measurement in the trainer process: held-out data, drawn samples, or the replayed steps of a member's round.

Invariants:
- Pauses after every batch or step, so that the peer can run the next round first.
- Measures in a second model and steps in a third: x and the moments of this trainer are never touched.
Not responsible for: what a loss means.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from atoll.training.data import Data, all_held_out, data_from_blob, epoch_samples, samples_at, validation
from atoll.training.exchange.layout import ModelLayout, unflatten
from atoll.training.models import scores_of
from atoll.training.models.frozen_base import build_with_base
from atoll.verification.loss_scoring.tensors import LOOKED_AT_ONCE, dealt, losses_of, undealt
from atoll.verification.redundant_training.tensors import TwinAssignment, taking_again
from atoll.worker.trainer_commands import (
    BeginReplay,
    BeginScoring,
    BeginValidation,
    Look,
    LossesMeasured,
    TrainerSpec,
)

VALIDATION_BATCH = 64  # samples; fits any device that can train


def model_of(spec: TrainerSpec) -> tuple[nn.Module, ModelLayout]:
    """The trainer's model with its frozen base, and the layout of the exchanged vector."""
    return build_with_base(spec.model, spec.seed, Path(spec.base).read_bytes() if spec.base else b"")


class ModelEvaluator:
    def __init__(self, spec: TrainerSpec, data: Data) -> None:
        self.spec, self.data = spec, data
        self._canary: tuple[str, Data] | None = None  # path and data of the canary blob, read once
        self._model: tuple[nn.Module, ModelLayout] | None = None  # second model, built when it is first needed
        self.chore: Generator[None, None, LossesMeasured] | None = None
        self.made_F: Tensor | None = None  # update of the last replay

    def start(self, wish: Look, x_F: Tensor) -> LossesMeasured:
        """The first batch or step at these parameters and buffers (F,)."""
        self.made_F = None
        match wish:
            case BeginValidation():
                self.chore = self._evaluate_sets(wish, x_F)
            case BeginScoring():
                self.chore = self._evaluate_samples(wish, x_F)
            case BeginReplay():
                self.chore = self._replay(wish, x_F)
        return self.go_on()

    def go_on(self) -> LossesMeasured:
        """The next batch or step."""
        if self.chore is None:
            raise ValueError("no measurement is in progress")
        try:
            next(self.chore)
        except StopIteration as done:
            self.chore = None
            return done.value
        except BaseException:
            self.chore = None
            raise
        return LossesMeasured(False)

    def _evaluate_sets(self, wish: BeginValidation, x_F: Tensor) -> Generator[None, None, LossesMeasured]:
        model = self._model_with(x_F)
        losses, right = list[float](), list[float]()
        for data in self._sets(wish.canary):
            loss_sum, hits, targets_seen = 0.0, 0, 0
            for inputs, targets in self._batches(data, wish.samples):
                with torch.no_grad():  # not around the yield: training continues meanwhile
                    scores = scores_of(model, inputs)
                    flat, wanted = scores.reshape(-1, scores.shape[-1]), targets.reshape(-1)
                    loss = torch.nn.functional.cross_entropy(flat, wanted, reduction="sum")
                    hits += int((flat.argmax(1) == wanted).sum())
                loss_sum, targets_seen = loss_sum + float(loss), targets_seen + targets.numel()
                yield
            losses.append(loss_sum / targets_seen)
            right.append(hits / targets_seen)
        return LossesMeasured(True, tuple(losses), tuple(right))

    def _evaluate_samples(self, wish: BeginScoring, x_F: Tensor) -> Generator[None, None, LossesMeasured]:
        """One loss per sample."""
        model, spec = self._model_with(x_F), self.spec
        own = dealt(wish.drawn, wish.shard, wish.shards, wish.cursor, wish.samples)
        others = undealt(wish.drawn, wish.dealt, epoch_samples(self.data, spec.seq_len), len(own))
        positions_B, losses = np.array(own + others, dtype=np.int64), list[float]()
        for at in range(0, len(positions_B), LOOKED_AT_ONCE):
            here_B = positions_B[at : at + LOOKED_AT_ONCE]
            inputs, targets = samples_at(self.data, here_B, spec.seq_len, spec.seed)
            losses += losses_of(model, (inputs.to(spec.device), targets.to(spec.device)))
            yield
        return LossesMeasured(True, tuple(losses))

    def _replay(self, wish: BeginReplay, x_F: Tensor) -> Generator[None, None, LossesMeasured]:
        """Replay with the run's compute options, but not compiled, since no round waits for it."""
        spec, where = self.spec, (wish.shard, wish.shards, wish.cursor, wish.steps, wish.batch, wish.position)
        model, layout = model_of(spec)
        computing = msgspec.structs.replace(spec.computing, compiled=False)
        told = TwinAssignment(*where, wish.inner, wish.horizon, spec.seq_len, spec.seed)
        self.made_F = yield from taking_again(model, layout, computing, x_F, self.data, told, spec.device)
        return LossesMeasured(True)

    def _sets(self, canary: str) -> tuple[Data, ...]:
        if not canary:
            return (self.data,)
        if self._canary is None or self._canary[0] != canary:
            self._canary = canary, all_held_out(data_from_blob(Path(canary).read_bytes()))
        return self.data, self._canary[1]

    def _model_with(self, x_F: Tensor) -> nn.Module:
        if self._model is None:
            model, layout = model_of(self.spec)
            self._model = model.to(self.spec.device).eval(), layout
        model, layout = self._model
        unflatten(x_F, torch.zeros(layout.counters, dtype=torch.int64), model, layout)
        return model

    def _batches(self, data: Data, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in validation(data, samples, VALIDATION_BATCH, self.spec.seq_len):
            yield inputs.to(self.spec.device), targets.to(self.spec.device)
