"""What one peer says about its round: the pseudo-gradient, cut into parts, encoded under error feedback.

Encoding commits to nothing: it returns the wires and the error-feedback memory *as it would be* if everything
were accepted. When the round is agreed, `settle` turns that into the memory that is true: what was not counted
for this peer goes back in. When an attempt fails instead, the Update is thrown away and the old memory stays,
because x was not merged and the next pseudo-gradient covers both spans.
Also here: what a round's members hold alike and codecs may build on (`RoundInputs`), so that `randk` draws the same
places, `delta` and `lowrank` start from the same vector and `changed` sees the same tensors everywhere.
Never changes its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, digest
from atoll.training.codec import Codec, SharedKnowledge, codec_named, pack_spans
from atoll.training.codec.blocks import BLOCK, Room, new_wire, spans_of, tensor_over
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.state import SharedState

Bounds = tuple[tuple[int, int], ...]


class TensorPlace(NamedTuple):
    """Where a tensor lies in a flat vector."""

    at: int
    size: int
    shape: tuple[int, ...]


EXPECTED_SHARE = 0.25
"""Of the mean of past updates, as far as the next one is like it. gpt-tiny, 10 rounds of 30 steps: a quarter left
0.92 … 0.99 of an update's norm in every round, half 0.91 … 1.02, the whole mean 0.87 … 1.19, the anchor 5 … 50."""


@dataclass(frozen=True)
class EncodedUpdate:
    wires: tuple[Buffer, ...]  # one per part
    memory_F: Tensor  # the memory if every part is counted; see settle
    bounds: Bounds


@dataclass(frozen=True)
class RoundInputs:
    """What all members of a round hold alike when they encode and combine: the head, and which round it is."""

    round: int
    state: SharedState
    name: Digest  # of the state
    layout: ModelLayout
    momentum: float  # of the outer step


def part_codecs(
    name: str, common: RoundInputs, bounds: Bounds, link_bytes_s: float | None = None
) -> tuple[Codec, ...]:
    """The codec of that name for each part, with all that it may want to know. ValueError if there is none.

    `link_bytes_s` is for whoever encodes a row alone: what it takes its own link to carry.
    """
    return tuple(part_codec(name, common, bounds, part, link_bytes_s) for part in range(len(bounds)))


def part_codec(
    name: str, common: RoundInputs, bounds: Bounds, part: int, link_bytes_s: float | None = None
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


def _expected(common: RoundInputs, lo: int, hi: int) -> Tensor:
    """What the next update may be like (hi - lo,): a share of the mean of past ones. Buffers have no momentum."""
    momentum_P = common.state.momentum_P[lo:hi] * ((1 - common.momentum) * EXPECTED_SHARE)
    return torch.cat([momentum_P, momentum_P.new_zeros(hi - lo - len(momentum_P))])


def tensor_sizes(tensors: Iterable[TensorPlace], lo: int, hi: int) -> tuple[int, ...]:
    """How many values of lo … hi belong to each tensor that it touches, in the order of the flat vector."""
    inside = (min(hi, tensor.at + tensor.size) - max(lo, tensor.at) for tensor in tensors)
    return tuple(size for size in inside if size > 0)


def whole_sizes(tensors: Iterable[TensorPlace], lo: int, hi: int) -> tuple[int, ...]:
    """How many values each of these has, also where it begins before lo or ends behind hi."""
    return tuple(tensor.size for tensor in tensors if max(lo, tensor.at) < min(hi, tensor.at + tensor.size))


def tensors_of(layout: ModelLayout) -> Iterator[TensorPlace]:
    """The tensors of the flat vector; counters are in none."""
    return (TensorPlace(slot.at, slot.size, slot.shape) for slot in layout.slots if slot.kind != "counter")


def matrices(tensors: Iterable[TensorPlace], lo: int, hi: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the pieces of lo … hi: whole rows of matrices, and single rows of whatever is left over.

    A tensor of more dimensions is the matrix of its first one, like a convolution in PowerSGD.
    """
    shapes: list[tuple[int, int]] = []
    for slot in tensors:
        begin, end = max(lo, slot.at), min(hi, slot.at + slot.size)
        if begin >= end:
            continue
        columns = slot.size // slot.shape[0] if len(slot.shape) > 1 else slot.size
        first, last = -((slot.at - begin) // columns), (end - slot.at) // columns  # rows that are here as a whole
        if first >= last:
            shapes.append((1, end - begin))
            continue
        before, after = slot.at + first * columns - begin, end - slot.at - last * columns
        shapes += [shape for shape in ((1, before), (last - first, columns), (1, after)) if shape[1]]
    return tuple(shapes)


def part_bounds(floats: int, shares: Sequence[int]) -> Bounds:
    """[lo, hi) of each part of the flat vector, in proportion to the shares, cut between blocks of the codecs.

    A small vector gives fewer parts than there are shares: none is empty.
    """
    assert shares
    blocks = -(-floats // BLOCK)
    shares = shares[: max(1, min(len(shares), blocks))]
    total, free = sum(shares), max(0, blocks - len(shares))  # one block for everybody, the others by share
    edges = [
        min(floats, (k + free * seen // total) * BLOCK) for k, seen in enumerate(accumulate(shares, initial=0))
    ]
    return tuple(pairwise([*edges[:-1], floats]))


def moved(bounds: Bounds, by: int) -> Bounds:
    """The same parts of a fragment that begins so far into the flat vector."""
    return tuple((lo + by, hi + by) for lo, hi in bounds) if by else bounds


def encode_update(
    anchor_F: Tensor,
    x_F: Tensor,
    memory_F: Tensor | None,
    bounds: Bounds,
    codec: Codec | Sequence[Codec],
    beta: float,
    room: Room = new_wire,
) -> EncodedUpdate:
    """Wires of anchor − x under error feedback; `codec` is one for all parts or one for each.

    The memory is written into `room`. ValueError if a value is not finite.
    """
    assert anchor_F.shape == x_F.shape and bounds[-1][1] == len(x_F)
    left_F, wires = tensor_over(room(4 * len(x_F)), torch.float32), []
    for one, (lo, hi) in zip(_each(codec, bounds), bounds, strict=True):
        deltas = (anchor_F[lo + a : lo + b] - x_F[lo + a : lo + b] for a, b in spans_of(hi - lo))
        owed_N = None if memory_F is None else memory_F[lo:hi]
        wires.append(pack_spans(one, deltas, owed_N, beta, left_F[lo:hi]))
    return EncodedUpdate(tuple(wires), left_F, bounds)


def gathered_span(gathered_F: Tensor, anchor_F: Tensor, parameters: int) -> tuple[Tensor, Tensor]:
    """(from, to) whose difference is the update of a trainer that only sums gradients: these, where parameters are.

    `gathered_F` has behind them buffers, which have no gradient: they moved by themselves. Kept apart from x, since
    the difference of two anchors would round small gradients away.
    """
    to_F = gathered_F.clone()
    to_F[:parameters] = 0
    return torch.cat([gathered_F[:parameters], anchor_F[parameters:]]), to_F


def settle(update: EncodedUpdate, counted: Sequence[bool], codec: Codec | Sequence[Codec]) -> Tensor:
    """The error-feedback memory (F,) after an agreed round: parts not counted for this peer are added back.

    `codec` is what the update was encoded with. Where all are counted it is the update's own.
    """
    if all(counted):
        return update.memory_F
    memory_F = update.memory_F.clone()
    codecs = _each(codec, update.bounds)
    for one, wire, (lo, hi), was_counted in zip(codecs, update.wires, update.bounds, counted, strict=True):
        if not was_counted:
            memory_F[lo:hi] += one.decode(wire, hi - lo)
    return memory_F


def _each(codec: Codec | Sequence[Codec], bounds: Bounds) -> Sequence[Codec]:
    return [codec] * len(bounds) if isinstance(codec, Codec) else codec
