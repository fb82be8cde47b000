"""The trainer process's side of validation: the loss of given parameters on held-out data, or on drawn samples,
batch by batch; or the steps of somebody's round, taken again one by one.

Pauses after every batch, so that the peer may put the next round before the rest. Looks in a second model, steps in
a third: x and moments of this trainer are never touched. Never decides what a loss means.
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
from atoll.training.models.frozen_base import built
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

VALIDATION_BATCH = 64  # samples; small enough for any device that can train


def model_of(spec: TrainerSpec) -> tuple[nn.Module, ModelLayout]:
    """The model that this trainer is about, with its base, and the layout of what is exchanged."""
    return built(spec.model, spec.seed, Path(spec.base).read_bytes() if spec.base else b"")


class ModelEvaluator:
    def __init__(self, spec: TrainerSpec, data: Data) -> None:
        self.spec, self.data = spec, data
        self._canary: tuple[str, Data] | None = None  # read once
        self._model: tuple[nn.Module, ModelLayout] | None = None  # made when it is first needed
        self.chore: Generator[None, None, LossesMeasured] | None = None
        self.made_F: Tensor | None = None  # by steps that were taken again

    def start(self, wish: Look, x_F: Tensor) -> LossesMeasured:
        """The first batch, with these parameters and buffers (F,)."""
        self.made_F = None
        match wish:
            case BeginValidation():
                self.chore = self._look(wish, x_F)
            case BeginScoring():
                self.chore = self._look_along(wish, x_F)
            case BeginReplay():
                self.chore = self._step_again(wish, x_F)
        return self.go_on()

    def go_on(self) -> LossesMeasured:
        """One batch more."""
        if self.chore is None:
            raise ValueError("there is nothing to look on at")
        try:
            next(self.chore)
        except StopIteration as done:
            self.chore = None
            return done.value
        except BaseException:
            self.chore = None
            raise
        return LossesMeasured(False)

    def _look(self, wish: BeginValidation, x_F: Tensor) -> Generator[None, None, LossesMeasured]:
        model = self._model_with(x_F)
        losses, right = list[float](), list[float]()
        for data in self._sets(wish.canary):
            loss_sum, hits, targets_seen = 0.0, 0, 0
            for inputs, targets in self._batches(data, wish.samples):
                with torch.no_grad():  # not around the yield: training goes on meanwhile
                    scores = model(inputs)
                    flat, wanted = scores.reshape(-1, scores.shape[-1]), targets.reshape(-1)
                    loss = torch.nn.functional.cross_entropy(flat, wanted, reduction="sum")
                    hits += int((flat.argmax(1) == wanted).sum())
                loss_sum, targets_seen = loss_sum + float(loss), targets_seen + targets.numel()
                yield
            losses.append(loss_sum / targets_seen)
            right.append(hits / targets_seen)
        return LossesMeasured(True, tuple(losses), tuple(right))

    def _look_along(self, wish: BeginScoring, x_F: Tensor) -> Generator[None, None, LossesMeasured]:
        """A loss per sample."""
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

    def _step_again(self, wish: BeginReplay, x_F: Tensor) -> Generator[None, None, LossesMeasured]:
        """As the run computes; not compiled, since nobody waits for it."""
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
