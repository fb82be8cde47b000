"""bf16 and fp16: two bytes per value.

bf16 is the upper half of every fp32 value, rounded to the nearest (ties to even). Error at most 2^-8 of a value.
Magnitudes below 2^-80 become zero and those above 2^60 are clipped, as in all codecs. Decoded values can then be
weighted and added without denormal numbers or infinities.

fp16 is IEEE half precision, little-endian. Error at most 2^-11 of a value, or 2^-25; above 65504 it saturates.
OpenDiLoCo's wire (2407.07852). Pseudo-gradients below 6e-8 are lost: bf16 keeps those, with 3 bits less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import (
    VALUE_MAX,
    OpenedBlocks,
    Room,
    check_length,
    copy_span,
    largest_of,
    new_wire,
    refuse,
    spans_of,
    tensor_over,
)
from atoll.training.codec.core import Codec, whole

FP16_MAX = 65504.0
_MAGNITUDE, _FP16_MAX_BITS = 0x7FFF, 0x7BFF
LEAST_BITS, _MOST = np.uint16((127 - 80) << 7), np.uint16((127 + 60) << 7)  # bf16 bits of 2^-80 and 2^60


def _codec(
    name: str, dtype: torch.dtype, most: float, finish: Callable[[Tensor], object], flaw: Callable[[Tensor], str]
) -> Codec:
    """`finish` changes encoded values in place; `flaw` names what encoding cannot have made, or is empty."""

    def wire_bytes(n: int) -> int:
        return 2 * n

    def encode_spans(n: int, spans: Iterable[Tensor], room: Room = new_wire) -> Buffer:
        if n == 0:
            return b""
        wire = room(wire_bytes(n))
        values = tensor_over(wire, dtype)
        for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
            largest = largest_of(x_S)
            refuse(largest)
            values[lo:hi] = x_S if largest <= most else x_S.clamp(-most, most)
            finish(values[lo:hi])
        return wire

    def open_wire(wire: Buffer, n: int) -> OpenedBlocks:
        check_length(wire, wire_bytes(n))
        values = tensor_over(wire, dtype)
        for lo, hi in spans_of(n):
            if what := flaw(values[lo:hi]):
                raise PeerFault("", f"a value in {lo}…{hi} is {what}")
        return OpenedBlocks(torch.empty(0, dtype=torch.float32), values)

    return Codec(
        name,
        wire_bytes,
        whole(encode_spans),
        open_wire,
        copy_span,
        spanwise=encode_spans,
        sections=((1, 2),),
    )


def _bits(value_S: Tensor) -> np.ndarray:
    return value_S.view(torch.int16).numpy().view(np.uint16)


def _drop_least(value_S: Tensor) -> None:
    bits_S = _bits(value_S)
    bits_S *= np.bitwise_and(bits_S, np.uint16(_MAGNITUDE)) >= LEAST_BITS


def _bf16_flaw(value_S: Tensor) -> str:
    bits_S = _bits(value_S)
    above_S = np.bitwise_and(bits_S, np.uint16(_MAGNITUDE))
    above_S -= LEAST_BITS  # unsigned: smaller values wrap around to the largest ones
    wrong = np.count_nonzero(above_S > _MOST - LEAST_BITS) > len(bits_S) - np.count_nonzero(bits_S)
    return "not finite, too small or too large" if wrong else ""


def _fp16_flaw(value_S: Tensor) -> str:
    return "not finite" if int((value_S.view(torch.int16) & _MAGNITUDE).amax()) > _FP16_MAX_BITS else ""


BF16 = _codec("bf16", torch.bfloat16, VALUE_MAX, _drop_least, _bf16_flaw)
FP16 = _codec("fp16", torch.float16, FP16_MAX, lambda value_S: None, _fp16_flaw)
