"""The built-in models, by name: what a run among strangers may ask for, since code never travels.

`build_model` gives the same weights for the same seed on one machine and torch version only; a run's first
weights are therefore a blob in genesis, and the seed matters to its creator alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from atoll.learn.models.cnn import SmallCNN
from atoll.learn.models.gpt import GPT, GPTSize, generate

BYTES = 256

GPT_SIZES = {
    "gpt-nano": GPTSize(width=32, layers=1, heads=2, seq_len=32),  # 22 k parameters, for tests
    "gpt-tiny": GPTSize(width=64, layers=3, heads=4, seq_len=64),  # 168 k, the demo: a round takes seconds
    "gpt-small": GPTSize(width=128, layers=5, heads=4, seq_len=128),  # 1.0 M, a laptop
    "gpt-10m": GPTSize(width=320, layers=8, heads=5, seq_len=256),  # 10 M
    "gpt-30m": GPTSize(width=512, layers=10, heads=8, seq_len=256),  # 32 M, one small GPU
    "gpt-100m": GPTSize(width=768, layers=14, heads=12, seq_len=512),  # 100 M
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda size=size: GPT(size, BYTES)) for name, size in GPT_SIZES.items()},
    "cnn-mnist": SmallCNN,  # 100 k
}
Task = Literal["text", "images"]


def build_model(name: str, seed: int) -> nn.Module:
    """A freshly initialised model; torch's global generator is left as it was found."""
    if name not in MODELS:
        raise ValueError(f"no built-in model is called {name!r}; there are {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]()


def task_of(name: str) -> Task:
    return "text" if name in GPT_SIZES else "images"


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy in nats, over tokens or images: inputs (B, …), targets (B,) or (B, T)."""
    inputs, targets = batch
    scores = model(inputs)
    return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))


def generate_text(model: nn.Module, prompt: str, n: int, seed: int) -> str:
    """`prompt` continued by `n` bytes, drawn with a generator of its own."""
    assert isinstance(model, GPT), "only the GPT models write text"
    written = generate(model, prompt.encode(), n, seed)
    return written.decode(errors="replace")
