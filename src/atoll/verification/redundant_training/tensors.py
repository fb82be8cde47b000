"""Distance of twins: how far two updates from the same samples are apart, and from a replay of the steps.

Steps replayed in fp32 from the agreed anchor make nearly the same update if rounds begin with one optimizer state
at all members. If moments of rounds before are carried on, or steps are rounded to bf16, small differences grow
over the steps until a comparison means nothing (bench/twins.py). Such recipes are refused by name. Not responsible
for: which twin is at fault (`verification/redundant_training/policy.py`).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import torch
from msgspec import UNSET
from torch import Tensor, nn

from atoll.training.codec.byte_compression import AUTO, METHODS
from atoll.training.data import Data, batch
from atoll.training.exchange.layout import ModelLayout, bind, unflatten
from atoll.training.recipe.gradient import ComputeOptions, GradientComputer
from atoll.training.recipe.inner import SGD, GradientSumOptimizer, Inner, fresh_inner, inner_step
from atoll.training.recipe.lr_position import ScheduleHorizon, later, step_at
from atoll.training.recipe.recipes import Recipe

FINE = ("fp32", "fp16", "bf16", "int8")  # codecs with rounding far below the tolerance


def distance(row_F: Tensor, of_F: Tensor) -> float:
    """‖row − of‖ / ‖of‖: 0 for equal values, infinite if one is zero or not a number."""
    far, long = float((row_F - of_F).double().norm()), float(of_F.double().norm())
    if far == 0:
        return 0.0
    return far / long if long and math.isfinite(far) else math.inf


@dataclass(frozen=True)
class TwinAssignment:
    """A member's assignment in a round. `batch_samples` of each step."""

    shard: int
    shards: int
    cursor: int
    steps: int
    batch_samples: int
    position: int  # position of the first step in the learning rates: training/recipe/lr_position.py
    inner: Inner
    horizon: ScheduleHorizon | None
    seq_len: int
    seed: int


def taking_again(
    model: nn.Module,
    layout: ModelLayout,
    computing: ComputeOptions,
    anchor_F: Tensor,
    data: Data,
    told: TwinAssignment,
    device: str = "cpu",
) -> Generator[None, None, Tensor]:
    """The update (F,) that these steps make, from an anchor and a fresh optimizer. Pauses after every step."""
    x_F, gradient_P = bind(model, layout, device)
    unflatten(anchor_F, torch.zeros(layout.counters, dtype=torch.int64), model, layout)
    began_F = x_F.clone()
    gradient, inner = GradientComputer(model, gradient_P, computing), fresh_inner(layout.parameters, device)
    x_P, together = x_F[: layout.parameters], told.batch_samples * told.seq_len * told.shards
    for step in range(told.steps):
        cursor = told.cursor + step * told.batch_samples
        inputs, targets = batch(data, told.shard, told.shards, cursor, told.batch_samples, told.seq_len, told.seed)
        gradient.compute((inputs.to(device), targets.to(device)))
        if isinstance(told.inner, GradientSumOptimizer):
            inner.first_P.add_(gradient_P)
        else:
            at = step_at(told.horizon, later(told.horizon, told.position, step, together))
            inner_step(told.inner, inner, x_P, gradient_P, at)
        yield
    update_F = began_F - x_F
    if isinstance(told.inner, GradientSumOptimizer):  # x rests, except buffers
        update_F[: layout.parameters].copy_(inner.first_P)
    return update_F


def twins_problem(recipe: Recipe) -> str:
    """Why updates of the same samples cannot be compared under this recipe; empty if they can."""
    schedule, coding, inner = recipe.schedule, recipe.coding, recipe.inner
    if recipe.model == "attached":
        return "members train a model of their own on data of their own, and no other member has either"
    if recipe.own_anchors or recipe.merge != "replace" or schedule.fragments > 1 or recipe.hidden_steps:
        return "with overlap, fragments, parameters or anchors of its own, no round starts from one agreed anchor"
    if recipe.computing and recipe.computing.precision != "fp32":
        return f"rounding of {recipe.computing.precision} grows over the steps, in some rounds beyond any tolerance"
    if any(schedule.moments) or schedule.closing or schedule.phases:
        return "some of its rounds send something else than the others"
    if schedule.epochs is not UNSET:
        return "members pass over data of their own"
    if isinstance(inner, SGD) and inner.momentum:
        return f"SGD with a momentum of {inner.momentum:g} carries it from round to round, each member its own"
    if not isinstance(inner, SGD | GradientSumOptimizer):
        return (
            f"{type(inner).__name__} carries moments from round to round, each member its own, and honest updates "
            "of the same samples are half as far apart as those of others"
        )
    if coding.beta:
        return "error feedback puts what rounds before left out into an update"
    stages = coding.up.split("+")
    if not all(stage in FINE or stage.partition(":")[0] in (*METHODS, AUTO) for stage in stages):
        return f"sync.up = {coding.up!r} rounds so much that honest updates of the same samples differ by it"
    return ""
