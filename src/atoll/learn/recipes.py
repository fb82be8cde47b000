"""Recipes: which six pieces one training run is made of, as plain values that travel in genesis.

A recipe names the model, the work of a round and the pieces INNER, SCHEDULE, CODEC, REDUCER, OUTER, MERGE
(inner, schedule, codec, reducer, outer, merge). Every number has a reason or the measurement it comes from.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from atoll.learn.codec import check_name, codec_named
from atoll.learn.inner import AdamW
from atoll.learn.merge import Merge
from atoll.learn.models import GPT_SIZES, MODELS
from atoll.learn.outer import Nesterov

SEQ_LEN = 64  # tokens per sample where nobody says: enough to learn words from bytes


class Schedule(msgspec.Struct, frozen=True):
    """When peers synchronise: after so many steps, or earlier when the plan's time is up."""

    inner_steps: int = 50  # H; the gap to synchronous training grows with it, the bytes shrink
    rounds: int = 30


class Coding(msgspec.Struct, frozen=True):
    """How updates travel. Error feedback is the sender's; the answer is encoded once and has none."""

    up: str = "int8"  # member to part owner
    down: str = "int8"  # part owner to all; "2bit" would add an error that nothing feeds back
    beta: float = 1.0  # share of the error-feedback memory that survives a round; 0 switches it off


class Recipe(msgspec.Struct, frozen=True):
    model: str
    seed: int  # of the first weights and of the order of the data
    batch: int  # samples per inner step of one peer
    seq_len: int  # tokens per sample; ignored for images
    inner: AdamW
    schedule: Schedule
    coding: Coding
    statistic: Literal["mean"]  # over the rows an owner has, weighted by samples
    outer: Nesterov
    merge: Merge


def diloco(
    model: str = "gpt-tiny",
    *,
    rounds: int = 30,
    inner_steps: int = 50,
    batch: int = 4,
    seq_len: int | None = None,
    lr: float = 4e-3,
    outer_lr: float = 1.0,
    outer_momentum: float | None = None,
    up: str = "int8",
    down: str = "int8",
    seed: int = 0,
) -> Recipe:
    """DiLoCo (2311.08105, algorithm 1): AdamW inside, Nesterov outside, compressed pseudo-gradients.

    The paper's outer step (0.7, 0.9) wants hundreds of rounds; with 30–50 it leaves +11.9 % loss where
    (1.0, 0.5–0.6) leaves +8 %. So the momentum follows the number of rounds unless it is given.
    """
    _check_codecs(up, down)
    if model not in MODELS:  # better said here than in every trainer
        raise ValueError(f"no built-in model is called {model!r}; there are {', '.join(MODELS)}")
    seq_len = fitting_seq_len(model, seq_len)
    if min(rounds, inner_steps, batch, seq_len) < 1:
        raise ValueError("rounds, inner_steps, batch and seq_len must all be at least 1")
    if outer_momentum is None:
        outer_momentum = 0.5 if rounds <= 50 else 0.7 if rounds <= 100 else 0.8
    steps = rounds * inner_steps
    return Recipe(
        model=model,
        seed=seed,
        batch=batch,
        seq_len=seq_len,
        inner=AdamW(lr=lr, warmup_steps=min(100, steps // 10), total_steps=steps),
        schedule=Schedule(inner_steps=inner_steps, rounds=rounds),
        coding=Coding(up=up, down=down),
        statistic="mean",
        outer=Nesterov(lr=outer_lr, momentum=outer_momentum),
        merge="replace",
    )


def fitting_seq_len(model: str, seq_len: int | None) -> int:
    """Tokens per sample: what was asked for if the model can read so many, else SEQ_LEN or what it can."""
    longest = GPT_SIZES[model].seq_len if model in GPT_SIZES else SEQ_LEN
    if seq_len is None:
        return min(SEQ_LEN, longest)
    if model in GPT_SIZES and seq_len > longest:
        raise ValueError(f"{model} reads at most {longest} tokens at once, seq_len is {seq_len}")
    return seq_len


def own_loop(
    *,
    rounds: int,
    inner_steps: int,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.6,
    up: str = "int8",
    down: str = "int8",
) -> Recipe:
    """DiLoCo rounds around somebody's own training loop, which brings model, data and inner optimizer."""
    _check_codecs(up, down)
    if inner_steps < 1:
        raise ValueError("inner_steps must be at least 1")
    return Recipe(
        model="attached",
        seed=0,
        batch=1,
        seq_len=1,
        inner=AdamW(lr=1.0, warmup_steps=0, total_steps=1),  # never used: the loop has its own
        schedule=Schedule(inner_steps=inner_steps, rounds=rounds),
        coding=Coding(up=up, down=down),
        statistic="mean",
        outer=Nesterov(lr=outer_lr, momentum=outer_momentum),
        merge="replace",
    )


def _check_codecs(up: str, down: str) -> None:
    check_name(up)
    if not codec_named(down).same_everywhere:
        raise ValueError(
            f"{down!r} cannot carry answers: its bytes may differ between owners' machines; "
            "name a codec without zstd, lz4 or snappy for the way down"
        )


def demo_recipe() -> Recipe:
    """`atoll demo`: four peers on one ordinary computer learn Python's standard library in a minute or two.

    Measured with bench/solo.py: validation loss 5.4 -> 1.66 nats per byte; one peer alone, as many steps, 1.81.
    One step is 13 ms of one core, so four peers on two cores train for about half a minute.
    """
    return diloco("gpt-tiny", rounds=24, inner_steps=40, batch=8, lr=6e-3, up="2bit", down="int8")
