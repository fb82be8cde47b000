"""Vectors by which a mean tells of whom it is made: the numbers, not the report, say who was counted where.

The peer in slot k brings 2^k times a pattern of small whole numbers that moves on with every trial, so sums are
exact in fp32, every subset of peers has a mean of its own, and what is left from another trial fits nowhere. More
than DIGIT peers are told apart by four neighbouring values, in fp32 only: see `weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

PLATEAU = 2**16  # values of equal pattern: longer than a codec's block, so that coarse codecs can keep them apart
STEPS = 7  # heights of the pattern
DIGIT = 8  # slots that one value tells of
STRETCH = 2**20  # values looked at at once
TOLERANCES = {"fp32": 2e-6}  # relative: the rounding of a sum and a division
CODEC_TOLERANCE = 0.01  # relative, of every other codec, on plateaus
RUNS_MAX = 256  # more than parts could explain: the numbers are noise


def check(peers: int, codec: str) -> None:
    """ValueError if results would not tell of whom they are made."""
    if peers <= DIGIT:
        subset_means(peers, TOLERANCES.get(codec, CODEC_TOLERANCE))
    elif codec != "fp32" or peers > 2 * DIGIT:
        raise ValueError(f"{peers} peers cannot be told apart with {codec}; use at most {2 * DIGIT} and fp32")


def weights(slot: int, peers: int) -> list[int]:
    """What a peer's neighbouring values are times the pattern; parts are never cut between them.

    Of more than DIGIT peers the first two values add up to the bits of a subset, if its size is known; the last
    two fit only one size. Of the 65 535 subsets of 16 no two have the same four means.
    """
    if peers <= DIGIT:
        return [1 << slot]
    return [1 << slot if slot < DIGIT else 0, 1 << slot - DIGIT if slot >= DIGIT else 0, slot**2 + 1, slot**3 % 97]


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


def paint(x: Tensor, slot: int, trial: int, peers: int) -> None:
    mine = torch.tensor(weights(slot, peers)).float()
    for where in stretches(len(x)):
        x[where] = heights(where, trial) * mine[torch.arange(where.start, where.stop) % len(mine)]


@dataclass(frozen=True)
class Seen:
    runs: list[tuple[int, int]]  # (values, subset as a bit mask), from the first value to the last
    unexplained: int  # values that are no subset's mean


def recognise(x: Tensor, peers: int, trial: int, codec: str) -> Seen:
    """Of whom each value of a result is the mean."""
    unexplained, runs = 0, []
    for where in stretches(len(x)):
        found = x[where].double() / heights(where, trial)
        masks, wrong = (_by_mean if peers <= DIGIT else _by_bits)(found, peers, codec)
        unexplained += wrong
        for mask, count in zip(
            *(each.tolist() for each in masks.unique_consecutive(return_counts=True)), strict=True
        ):
            if runs and runs[-1][1] == mask:
                runs[-1] = (runs[-1][0] + count, mask)
            else:
                runs.append((count, mask))
        if len(runs) > RUNS_MAX:
            return Seen([], len(x))
    return Seen(runs, unexplained)


def _by_mean(found: Tensor, peers: int, codec: str) -> tuple[Tensor, int]:
    """(subset of every value, how many values are no subset's mean): the nearest of all means."""
    tolerance = TOLERANCES.get(codec, CODEC_TOLERANCE)
    means, masks = subset_means(peers, tolerance)
    nearest = torch.bucketize(found, (means[1:] + means[:-1]) / 2)
    wrong = int(((found - means[nearest]).abs() > tolerance * means[nearest]).sum()) + int(found.isnan().sum())
    return torch.tensor(masks)[nearest], wrong


def _by_bits(found: Tensor, peers: int, codec: str) -> tuple[Tensor, int]:
    """The same for four neighbours: whichever size makes whole numbers of them that are this many slots' sums."""
    slot_S4 = torch.tensor([weights(slot, peers) for slot in range(peers)])
    found_Q4 = torch.nn.functional.pad(found.nan_to_num(-1.0), (0, -len(found) % 4)).view(-1, 4)
    whose = torch.zeros(len(found_Q4), dtype=torch.int64)
    for size in range(1, peers + 1):
        sum_Q4 = (found_Q4 * size).round()
        near = ((found_Q4 * size - sum_Q4).abs() <= 1e-3).all(1)
        mask = sum_Q4[:, 0].long().clamp(0, 255) | sum_Q4[:, 1].long().clamp(0, 255) << DIGIT
        in_S = mask[:, None] >> torch.arange(peers) & 1
        fits = near & (in_S.sum(1) == size) & (in_S @ slot_S4 == sum_Q4.long()).all(1)
        whose = torch.where(fits, mask, whose)
    of_each = whose.repeat_interleave(4)[: len(found)]
    return of_each, int((of_each == 0).sum())
