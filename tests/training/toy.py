"""A model that learns in milliseconds, and experiments on it: next byte from this byte, 4 thousand numbers."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from atoll.training.data import TextDataset
from atoll.training.experiment.api import (
    ExperimentOptions,
    ExperimentResult,
    ExperimentSimulator,
    FaultSpec,
    experiment,
)
from atoll.training.models import loss_of
from atoll.training.recipe.recipes import Recipe

PARAMETERS = 256 * 8 + 8 * 8 + 8 + 8 * 256 + 256


def corpus() -> TextDataset:
    """Bytes that follow each other by a fixed rule four times in five."""
    draw = np.random.Generator(np.random.PCG64(5))
    chance, noise = draw.random(20_000), draw.integers(0, 32, 20_000)
    text = [7]
    for c, n in zip(chance, noise, strict=True):
        text.append((text[-1] * 5 + 3) % 32 if c < 0.8 else int(n))
    tokens = np.array(text, dtype=np.uint8)
    return TextDataset(tokens[:18_000], tokens[18_000:])


DATA = corpus()


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256))


def short(recipe: Recipe) -> Recipe:
    return replace(recipe, seq_len=16)


def tried(recipe: Recipe, **more) -> ExperimentResult:
    """An experiment on the toy model; `more` are its arguments, or fields of its options."""
    own = {name: more.pop(name) for name in [*more] if name in ExperimentOptions.__dataclass_fields__}
    return experiment(short(recipe), model(), DATA, samples=64, options=ExperimentOptions(**own), **more)


def begun(
    recipe: Recipe, peers: int = 4, steps: int | None = None, trouble: FaultSpec | None = None
) -> ExperimentSimulator:
    """An experiment to be taken step by step."""
    return ExperimentSimulator(
        short(recipe), model(), DATA, peers, steps or recipe.schedule.steps, trouble or FaultSpec(), loss_of
    )
