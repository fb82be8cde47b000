"""Parts of a flat update vector, their codecs, and the values that all members of a round share.

`RoundCodingInputs` holds the shared values that codecs may use. `randk` then draws the same indices, `delta` and
`lowrank` start from the same vector, and `changed` sees the same tensors everywhere.
Not responsible for: encoding an update (`error_feedback.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.base.ids import Digest
from atoll.crypto.digest import digest
from atoll.training.codec import Codec, SharedKnowledge, codec_named
from atoll.training.codec.blocks import BLOCK
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.state import SharedState

Bounds = tuple[tuple[int, int], ...]


class TensorPlace(NamedTuple):
    """Place of a tensor in a flat vector."""

    at: int
    size: int
    shape: tuple[int, ...]


EXPECTED_SHARE = 0.25
"""Share of the mean of past updates that predicts the next one. gpt-tiny, 10 rounds of 30 steps: a quarter left
0.92 … 0.99 of an update's norm in every round, half 0.91 … 1.02, the whole mean 0.87 … 1.19, the anchor 5 … 50.
"""


@dataclass(frozen=True)
class RoundCodingInputs:
    """Values that all members of a round share when they encode and combine: the head and the round number."""

    round: int
    state: SharedState
    name: Digest  # state hash
    layout: ModelLayout
    momentum: float  # outer momentum


def part_codecs(
    name: str, common: RoundCodingInputs, bounds: Bounds, link_bytes_s: float | None = None
) -> tuple[Codec, ...]:
    """The codec `name` for each part, with the shared knowledge that it needs. ValueError if there is none.

    `link_bytes_s`: capacity of the local link; only for the sender of a row.
    """
    return tuple(part_codec(name, common, bounds, part, link_bytes_s) for part in range(len(bounds)))


def part_codec(
    name: str, common: RoundCodingInputs, bounds: Bounds, part: int, link_bytes_s: float | None = None
) -> Codec:
    lo, hi = bounds[part]
    words = {stage.partition(":")[0] for stage in name.split("+")}
    place = common.round.to_bytes(8, "big") + part.to_bytes(4, "big")
    known = SharedKnowledge(
        seed=digest(b"atoll/codec/seed/1" + common.name + place),
        reference_N=_expected(common, lo, hi) if words & {"delta", "lowrank"} else None,
        sizes=tensor_sizes(tensors_of(common.layout), lo, hi) if "changed" in words else None,
        wholes=whole_sizes(tensors_of(common.layout), lo, hi) if "changed" in words else None,
        shapes=matrices(tensors_of(common.layout), lo, hi) if "lowrank" in words else None,
        link_bytes_s=link_bytes_s,
    )
    return codec_named(name, known)


def _expected(common: RoundCodingInputs, lo: int, hi: int) -> Tensor:
    """Prediction of the next update (hi - lo,): a share of the mean of past ones. Buffers have no momentum."""
    momentum_P = common.state.momentum_P[lo:hi] * ((1 - common.momentum) * EXPECTED_SHARE)
    return torch.cat([momentum_P, momentum_P.new_zeros(hi - lo - len(momentum_P))])


def tensor_sizes(tensors: Iterable[TensorPlace], lo: int, hi: int) -> tuple[int, ...]:
    """Number of values of lo … hi in each tensor of that range, in the order of the flat vector."""
    inside = (min(hi, tensor.at + tensor.size) - max(lo, tensor.at) for tensor in tensors)
    return tuple(size for size in inside if size > 0)


def whole_sizes(tensors: Iterable[TensorPlace], lo: int, hi: int) -> tuple[int, ...]:
    """Full size of each tensor that overlaps lo … hi."""
    return tuple(tensor.size for tensor in tensors if max(lo, tensor.at) < min(hi, tensor.at + tensor.size))


def tensors_of(layout: ModelLayout) -> Iterator[TensorPlace]:
    """Places of the tensors in the flat vector, without counters."""
    return (TensorPlace(slot.at, slot.size, slot.shape) for slot in layout.slots if slot.kind != "counter")


def matrices(tensors: Iterable[TensorPlace], lo: int, hi: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the pieces of lo … hi: whole rows of matrices, and a single row for each remainder.

    A tensor with more dimensions counts as the matrix of its first one, like a convolution in PowerSGD.
    """
    shapes: list[tuple[int, int]] = []
    for slot in tensors:
        begin, end = max(lo, slot.at), min(hi, slot.at + slot.size)
        if begin >= end:
            continue
        columns = slot.size // slot.shape[0] if len(slot.shape) > 1 else slot.size
        # rows that lie wholly in the range
        first, last = -((slot.at - begin) // columns), (end - slot.at) // columns
        if first >= last:
            shapes.append((1, end - begin))
            continue
        before, after = slot.at + first * columns - begin, end - slot.at - last * columns
        shapes += [shape for shape in ((1, before), (last - first, columns), (1, after)) if shape[1]]
    return tuple(shapes)


def part_bounds(floats: int, shares: Sequence[int]) -> Bounds:
    """[lo, hi) of each part of the flat vector, in proportion to the shares, cut between blocks of the codecs.

    The last parts of a small vector are empty: no part is smaller than a block without need.
    """
    assert shares
    blocks, parts = -(-floats // BLOCK), len(shares)
    shares = shares[: max(1, min(parts, blocks))]
    total, free = sum(shares), max(0, blocks - len(shares))  # one block for each part, the others by share
    edges = [
        min(floats, (k + free * seen // total) * BLOCK) for k, seen in enumerate(accumulate(shares, initial=0))
    ]
    return (*pairwise([*edges[:-1], floats]), *[(floats, floats)] * (parts - len(shares)))


def moved(bounds: Bounds, by: int) -> Bounds:
    """The bounds of a fragment's parts, shifted by its offset in the flat vector."""
    return tuple((lo + by, hi + by) for lo, hi in bounds) if by else bounds


def gradient_sum_span(gathered_F: Tensor, anchor_F: Tensor, parameters: int) -> tuple[Tensor, Tensor]:
    """(from, to): their difference is the update of a trainer that only sums gradients.

    `gathered_F` is the gradient sums, then the buffers. Buffers have no gradient: their update is their own
    movement. The sums are kept apart from x, since the difference of two anchors would round small gradients away.
    """
    to_F = gathered_F.clone()
    to_F[:parameters] = 0
    return torch.cat([gathered_F[:parameters], anchor_F[parameters:]]), to_F
