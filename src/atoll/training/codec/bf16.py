"""bf16: the upper half of every fp32 value, rounded to the nearest (ties to even). Error at most 2^-8 of a value.

Magnitudes below 2^-80 become zero and those above 2^60 are clipped, as in all codecs. Decoded values can then be
weighted and added without denormal numbers or infinities.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import (
    SPAN,
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

_MAGNITUDE = np.uint16(0x7FFF)
LEAST_BITS, _MOST = np.uint16((127 - 80) << 7), np.uint16((127 + 60) << 7)  # bits of 2^-80 and 2^60


def _wire_bytes(n: int) -> int:
    return 2 * n


def _encode_spans(n: int, spans: Iterable[Tensor], room: Room = new_wire) -> Buffer:
    if n == 0:
        return b""
    wire, work = room(_wire_bytes(n)), np.empty(min(n, SPAN), np.uint16)
    values = tensor_over(wire, torch.bfloat16)
    for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
        largest = largest_of(x_S)
        refuse(largest)
        values[lo:hi] = x_S if largest <= VALUE_MAX else x_S.clamp(-VALUE_MAX, VALUE_MAX)
        bits_S = values[lo:hi].view(torch.int16).numpy().view(np.uint16)
        bits_S *= np.bitwise_and(bits_S, _MAGNITUDE, out=work[: hi - lo]) >= LEAST_BITS
    return wire


def _open_wire(wire: Buffer, n: int) -> OpenedBlocks:
    check_length(wire, _wire_bytes(n))
    bits_N = np.frombuffer(wire, np.uint16)
    work = np.empty(min(n, SPAN), np.uint16)
    for lo, hi in spans_of(n):
        above_S = np.bitwise_and(bits_N[lo:hi], _MAGNITUDE, out=work[: hi - lo])
        above_S -= LEAST_BITS  # unsigned: smaller values wrap around to the largest ones
        if np.count_nonzero(above_S > _MOST - LEAST_BITS) > hi - lo - np.count_nonzero(bits_N[lo:hi]):
            raise PeerFault("", f"a value in {lo}…{hi} is not finite, too small or too large")
    return OpenedBlocks(torch.empty(0, dtype=torch.float32), tensor_over(wire, torch.bfloat16))


BF16 = Codec(
    "bf16",
    _wire_bytes,
    whole(_encode_spans),
    _open_wire,
    copy_span,
    spanwise=_encode_spans,
    sections=((1, 2),),
)
