"""Error feedback of an update: what its codec left out is kept and added to the next one (Karimireddy et al. 2019).

    encode_update          pseudo-gradient plus error memory becomes wires, and the memory if every part is counted
    settle_error_feedback  once the round is agreed, parts that were not counted go back into the memory

Later attempts of a round share the same update. If a round ends without it, the old memory stays: x was not merged,
so the next pseudo-gradient covers both intervals. The arithmetic is in `training/codec/__init__.py` (`pack_spans`).
Invariants:
- Arguments are never changed.
Not responsible for: an owner's error feedback on results (`worker/downlink_error_feedback.py`), error feedback of
`atoll.reduce` (`runtime/allreduce/error_feedback.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec, pack_spans
from atoll.training.codec.blocks import lend_spans, spans_of
from atoll.training.recipe.gradient import Precision
from atoll.training.recipe.update import Bounds

FEEDBACK_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class EncodedUpdate:
    wires: tuple[Buffer, ...]  # one per part
    memory_F: Tensor  # the memory if every part is counted, fp32 or bf16; see `settle_error_feedback`
    bounds: Bounds


def encode_update(
    anchor_F: Tensor,
    x_F: Tensor,
    memory_F: Tensor | None,
    bounds: Bounds,
    codec: Codec | Sequence[Codec],
    beta: float,
    memory_of: Callable[[int], Tensor] = torch.empty,
) -> EncodedUpdate:
    """Wires of anchor − x under error feedback; `codec` is one for all parts or one for each.

    The memory is written into the vector `memory_of(values)`, rounded if that is bf16; all arithmetic is in fp32.
    ValueError if a value is not finite.
    """
    assert anchor_F.shape == x_F.shape and bounds[-1][1] == len(x_F)
    left_F, wires = memory_of(len(x_F)), []
    with lend_spans(1) as (delta_S,):
        for one, (lo, hi) in zip(_each(codec, bounds), bounds, strict=True):
            places = ((lo + a, lo + b) for a, b in spans_of(hi - lo))
            deltas = (torch.sub(anchor_F[a:b], x_F[a:b], out=delta_S[: b - a]) for a, b in places)
            owed_N = None if memory_F is None else memory_F[lo:hi].float()
            left_N = left_F[lo:hi] if left_F.dtype == torch.float32 else torch.empty(hi - lo, dtype=torch.float32)
            wires.append(pack_spans(one, deltas, owed_N, beta, left_N))
            if left_N.dtype != left_F.dtype:
                left_F[lo:hi] = left_N
    return EncodedUpdate(tuple(wires), left_F, bounds)


def settle_error_feedback(update: EncodedUpdate, counted: Sequence[bool], codec: Codec | Sequence[Codec]) -> Tensor:
    """The error-feedback memory (F,) after an agreed round: parts not counted for this peer are added back.

    `codec` is the codec of the update. If all parts are counted, the result is the update's own memory.
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
