"""One simulated member of an experiment: model, inner optimizer, position in the data, error feedback.

The arithmetic is that of a trainer process and its peer, run one after the other in one process.
Not responsible for: exchange between members (`simulator`).
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from atoll.training.data import Data, batch
from atoll.training.exchange.layout import ModelLayout, bind, layout_of
from atoll.training.exchange.parameter_names import parameters_of
from atoll.training.exchange.parameter_selection import FrozenBaseGuard
from atoll.training.models import loss_of
from atoll.training.recipe.gradient import PLAIN, ComputeOptions, GradientComputer, Loss
from atoll.training.recipe.inner import (
    GradientSumOptimizer,
    Inner,
    InnerState,
    fresh_inner,
    inner_step,
    matrices_of,
)
from atoll.training.recipe.moments import behind, padded
from atoll.training.recipe.recipes import Recipe


class SimulatedMember:
    def __init__(
        self,
        model: nn.Module,
        fragments: int,
        layout: ModelLayout | None = None,
        computing: ComputeOptions = PLAIN,
        loss: Loss = loss_of,
    ) -> None:
        layout = layout or layout_of(model)
        going = {slot.name for slot in layout.slots}
        still = [p for n, p in parameters_of(model) if n not in going]
        # one frozen base serves all members
        self.model = deepcopy(model, {id(p): p for p in still if not p.requires_grad})
        for name, value in parameters_of(self.model):
            if name not in going:
                value.requires_grad_(False)
        self.layout = layout
        self.still = FrozenBaseGuard(self.model, going, by_name=True)
        self.x_F, self.gradient_P = bind(self.model, self.layout)
        self.gradient = GradientComputer(self.model, self.gradient_P, computing, loss)
        self.base_F: Tensor | None = None  # the anchor it started from, if that is not the common one
        self.memory_F = torch.zeros_like(self.x_F)  # error feedback
        self.inner = fresh_inner(self.layout.parameters)
        self.matrices = matrices_of(self.layout)
        self.cursor = 0
        self.steps = [0] * fragments  # steps since each fragment was last sent
        self.samples = [0] * fragments
        self.losses: list[float] = []  # losses since they were last read

    def train(self, recipe: Recipe, share: tuple[Data, int, int], step: int) -> None:
        """One inner step at the run's `step`, on the next samples of `share`: (data, shard, shards)."""
        data, shard, shards = share
        found = batch(data, shard, shards, self.cursor, recipe.batch, recipe.seq_len, recipe.seed)
        self.cursor += recipe.batch
        self.losses.append(self.gradient.compute(found))
        x_P = self.x_F[: self.layout.parameters]
        if isinstance(recipe.inner, GradientSumOptimizer):
            self.inner.first_P.add_(self.gradient_P)  # exact; the difference of two anchors would round it away
        else:
            inner_step(recipe.inner, self.inner, x_P, self.gradient_P, step, self.matrices)
        for fragment in range(len(self.steps)):
            self.steps[fragment] += 1
            self.samples[fragment] += recipe.batch

    def progress(self, inner: Inner, anchor_F: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """(from, to): their difference is this member's update of lo … hi. Beyond the model lie its moments."""
        if problem := self.still.problem():
            raise ValueError(problem)
        base_F = anchor_F if self.base_F is None else self.base_F
        if isinstance(inner, GradientSumOptimizer):
            gathered_P = self.inner.first_P[lo:hi].clone()
            self.inner.first_P[lo:hi] = 0
            # buffers have no gradient: their update is their own movement
            buffers = slice(max(lo, self.layout.parameters), hi)
            from_F = torch.cat([gathered_P, base_F[buffers]])
            return from_F, torch.cat([torch.zeros_like(gathered_P), self.x_F[buffers]])
        if hi > len(base_F):
            return padded(base_F, hi), behind(self.x_F, self.inner, hi)
        return base_F[lo:hi], self.x_F[lo:hi]

    def restart(self, anchor_F: Tensor, inner: InnerState | None = None) -> None:
        """Restart after an absence: of the earlier state only the error feedback remains."""
        self.x_F.copy_(anchor_F)
        self.inner = fresh_inner(self.layout.parameters) if inner is None else inner
        self.steps, self.samples = [0] * len(self.steps), [0] * len(self.steps)
