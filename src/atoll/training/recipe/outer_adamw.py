"""AdamW as the outer step: the optimizer of synchronous training, at every peer to the same bits.

Members sum gradients and the anchor moves by AdamW of their mean (specs/codecs.md, shared state). The formula is
that of `inner.AdamW` (Loshchilov & Hutter 2019, algorithm 2), spelt out in operations that round once: libraries'
norms, cosines, powers and fused products differ in their last bits between machines, and one bit is another state.
Never changes its arguments.
"""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import torch
from torch import Tensor

from atoll.training.codec.deterministic_dot import CHUNK, add_inner_products, filled
from atoll.training.recipe.inner import AdamW

SINE_TERMS = 12  # of the Taylor series up to pi / 2: the next one is below 1e-19
CHUNKS_AT_ONCE = 64  # of the norm: 1 MiB of values


def adamw_step(
    outer: AdamW, anchor_P: Tensor, first_P: Tensor, second_P: Tensor, combined_P: Tensor, step: int, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(anchor', first', second'), each (P,), of a run's step, after `rounds` earlier ones of the same kind."""
    rate, taken = rate_of(outer, step), rounds + 1
    gradient_P = combined_P * min(1.0, outer.clip_norm / (norm_of(combined_P) + 1e-6))
    first_P = (first_P * outer.beta1).add_(gradient_P * (1 - outer.beta1))
    second_P = (second_P * outer.beta2).add_((gradient_P * gradient_P).mul_(1 - outer.beta2))
    spread_P = torch.from_numpy(np.sqrt(second_P.numpy()))  # of torch's there are several
    spread_P.mul_(1.0 / sqrt(1 - power(outer.beta2, taken))).add_(outer.eps)
    step_P = (first_P / spread_P).mul_(rate / (1 - power(outer.beta1, taken)))
    return (anchor_P * (1 - rate * outer.weight_decay)).sub_(step_P), first_P, second_P


def norm_of(x_P: Tensor) -> float:
    """Euclidean, of fp32 values (P,)."""
    total, values_P = np.zeros(1), x_P.numpy()
    for at in range(0, len(values_P), CHUNK * CHUNKS_AT_ONCE):
        piece_S = values_P[at : at + CHUNK * CHUNKS_AT_ONCE]
        room_S = np.zeros(filled(len(piece_S)), np.float32)
        room_S[: len(piece_S)] = piece_S
        add_inner_products(total, room_S[None])
    return sqrt(total[0])


def rate_of(outer: AdamW, step: int) -> float:
    """As `inner.rate_at` has it, but for the last bits."""
    if step < outer.warmup_steps:
        return outer.lr * (step + 1) / outer.warmup_steps
    done = (step - outer.warmup_steps) / max(1, outer.total_steps - outer.warmup_steps)
    return outer.lr * (outer.floor + (1 - outer.floor) * 0.5 * (1 + cosine(min(1.0, done))))


def cosine(turn: float) -> float:
    """cos(pi turn) for 0 … 1, from sums, products and quotients alone: -sin(pi (turn - 1/2))."""
    x = pi * (turn - 0.5)
    sine = term = x
    for k in range(1, SINE_TERMS):
        term = term * -(x * x) / (2 * k * (2 * k + 1))
        sine += term
    return -sine


def power(base: float, exponent: int) -> float:
    """base^exponent by squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result
