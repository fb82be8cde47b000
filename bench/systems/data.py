"""N(0, 1) vectors that anybody can make again, a stretch at a time, and what a mean of them should have been.

Each stretch has a seed of its own, so the exact mean is computed without holding anybody else's vector.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

STRETCH = 2**18  # values
# What is worked in, there from the beginning: megabytes from malloc left up to 20 MB behind in what is measured.
_value, _mean, _one = torch.zeros(STRETCH), torch.zeros(STRETCH).double(), torch.zeros(STRETCH).double()


def stretches(values: int) -> list[slice]:
    return [slice(at, min(at + STRETCH, values)) for at in range(0, values, STRETCH)]


def drawn(round: int, rank: int, index: int, into: Tensor) -> Tensor:
    """N(0, 1) in fp32, as many values as there is room: stretch `index` of what peer `rank` brings to a round."""
    seed = int.from_bytes(hashlib.blake2b(f"{round}/{rank}/{index}".encode(), digest_size=8).digest()) >> 1
    return torch.randn(len(into), generator=torch.Generator().manual_seed(seed), out=into)


def fill(x: Tensor, round: int, rank: int) -> None:
    for index, where in enumerate(stretches(len(x))):
        if x.is_cuda:
            x[where] = drawn(round, rank, index, _value[: where.stop - where.start])
        else:
            drawn(round, rank, index, x[where])


def digest(x: Tensor) -> str:
    return hashlib.blake2b(x.cpu().numpy(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Errors:
    square_sum: float  # of (result − exact mean) over `values`
    max: float
    values: int  # that were looked at
    digest: str  # of the whole result: equal digests, equal bits


def errors(x: Tensor, round: int, rank: int, peers: int) -> Errors:
    """Compare every n-th stretch of a result with the exact mean in fp64: n peers together look at each once."""
    square_sum, worst, values = 0.0, 0.0, 0
    for index, where in enumerate(stretches(len(x))):
        if index % peers != rank:
            continue
        size = where.stop - where.start
        value, mean, one = _value[:size], _mean[:size].zero_(), _one[:size]
        for each in range(peers):
            mean += one.copy_(drawn(round, each, index, value))
        off = one.copy_(x[where]).sub_(mean.div_(peers)).abs_()
        worst = max(worst, float(off.max())) if not off.isnan().any() else math.nan
        square_sum += float(off.square_().sum())
        values += size
    return Errors(square_sum, worst, values, digest(x))
