"""Vectors by which a mean tells of whom it is made: the numbers, not the report, say who was counted where.

The peer in slot k brings 2^k times a pattern of small whole numbers that moves on with every trial, so sums are
exact in fp32, every subset of peers has a mean of its own, and what is left from another trial fits nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

PLATEAU = 2**16  # values of equal pattern: longer than a codec's block, so that coarse codecs can keep them apart
STEPS = 7  # heights of the pattern
STRETCH = 2**20  # values looked at at once
TOLERANCES = {"fp32": 2e-6}  # relative: the rounding of a sum and a division
CODEC_TOLERANCE = 0.01  # relative, of every other codec, on plateaus
RUNS_MAX = 256  # more than parts could explain: the numbers are noise


def subset_means(peers: int, tolerance: float) -> tuple[Tensor, list[int]]:
    """Means of all subsets, rising, and the subsets as bit masks. ValueError if two cannot be told apart."""
    of = {
        mask: sum(1 << slot for slot in range(peers) if mask >> slot & 1) / mask.bit_count()
        for mask in range(1, 1 << peers)
    }
    masks = sorted(of, key=lambda mask: of[mask])
    for a, b in pairwise(masks):
        if of[b] - of[a] <= 2 * tolerance * of[b]:
            raise ValueError(f"{peers} peers cannot be told apart within {tolerance:.0%}; use fewer, or fp32")
    return torch.tensor([of[mask] for mask in masks], dtype=torch.float64), masks


def heights(where: slice, trial: int) -> Tensor:
    """The pattern of a stretch, between 1 and STEPS, fp32."""
    return ((torch.arange(where.start, where.stop) // PLATEAU + trial) % STEPS + 1).float()


def stretches(values: int) -> list[slice]:
    return [slice(at, min(at + STRETCH, values)) for at in range(0, values, STRETCH)]


def paint(x: Tensor, slot: int, trial: int) -> None:
    for where in stretches(len(x)):
        x[where] = heights(where, trial) * float(1 << slot)


@dataclass(frozen=True)
class Seen:
    runs: list[tuple[int, int]]  # (values, subset as a bit mask), from the first value to the last
    unexplained: int  # values that are no subset's mean


def recognise(x: Tensor, peers: int, trial: int, codec: str) -> Seen:
    """Of whom each value of a result is the mean."""
    tolerance = TOLERANCES.get(codec, CODEC_TOLERANCE)
    means, masks = subset_means(peers, tolerance)
    between = (means[1:] + means[:-1]) / 2
    unexplained, runs = 0, []
    for where in stretches(len(x)):
        found = x[where].double() / heights(where, trial)
        nearest = torch.bucketize(found, between)
        unexplained += int(((found - means[nearest]).abs() > tolerance * means[nearest]).sum())
        unexplained += int(found.isnan().sum())
        for index, count in zip(
            *(each.tolist() for each in nearest.unique_consecutive(return_counts=True)), strict=True
        ):
            if runs and runs[-1][1] == masks[index]:
                runs[-1] = (runs[-1][0] + count, masks[index])
            else:
                runs.append((count, masks[index]))
        if len(runs) > RUNS_MAX:
            return Seen([], len(x))
    return Seen(runs, unexplained)
