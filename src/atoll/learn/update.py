"""What one peer says about its round: the pseudo-gradient, cut into parts, encoded under error feedback.

Encoding commits to nothing: it returns the wires and the error-feedback memory *as it would be* if everything
were accepted. When the round is agreed, `settle` turns that into the memory that is true: what was not counted
for this peer goes back in. When an attempt fails instead, the Update is thrown away and the old memory stays,
because x was not merged and the next pseudo-gradient covers both spans.
Never changes its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.learn.codec import Codec, pack
from atoll.learn.codec.blocks import BLOCK
from atoll.learn.tensorfile import dump, load

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Update:
    wires: tuple[bytes, ...]  # one per part
    memory_F: Tensor  # the memory if every part is counted; see settle
    bounds: Bounds


def part_bounds(floats: int, parts: int) -> Bounds:
    """[lo, hi) of each of `parts` nearly equal slices of the flat vector, cut between blocks of the codecs.

    A small vector gives fewer parts than asked for: none is empty.
    """
    assert parts >= 1
    blocks = -(-floats // BLOCK)
    parts = max(1, min(parts, blocks))
    cuts = [min(floats, blocks * index // parts * BLOCK) for index in range(parts + 1)]
    return tuple(pairwise(cuts))


def encode_update(
    anchor_F: Tensor, x_F: Tensor, memory_F: Tensor | None, bounds: Bounds, codec: Codec, beta: float
) -> Update:
    """Wires of anchor − x under error feedback. ValueError if a value is not finite."""
    assert anchor_F.shape == x_F.shape and bounds[-1][1] == len(x_F)
    delta_F = anchor_F - x_F
    wires, left = [], torch.empty_like(delta_F)
    for lo, hi in bounds:
        wire, left[lo:hi] = pack(codec, delta_F[lo:hi], None if memory_F is None else memory_F[lo:hi], beta)
        wires.append(wire)
    return Update(tuple(wires), left, bounds)


def settle(update: Update, counted: Sequence[bool], codec: Codec) -> Tensor:
    """The error-feedback memory (F,) after an agreed round: parts not counted for this peer are added back."""
    memory_F = update.memory_F.clone()
    for wire, (lo, hi), was_counted in zip(update.wires, update.bounds, counted, strict=True):
        if not was_counted:
            memory_F[lo:hi] += codec.decode(wire, hi - lo)
    return memory_F


def memory_bytes(memory_F: Tensor) -> bytes:
    """For the peer's private file."""
    return dump({"memory": memory_F}, {"format": "atoll/memory/1"})


def memory_from_bytes(data: bytes, floats: int) -> Tensor:
    """ValueError if the file is not the memory of a model of this size."""
    try:
        tensors, metadata = load(data)
    except PeerFault as fault:
        raise ValueError(f"the private file is damaged: {fault.what}") from fault
    memory_F = tensors.get("memory")
    fits = memory_F is not None and memory_F.shape == (floats,) and memory_F.dtype == torch.float32
    if metadata.get("format") != "atoll/memory/1" or not fits:
        raise ValueError(f"the private file is not the error feedback of a model of {floats} values")
    return memory_F.clone()
