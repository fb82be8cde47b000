"""fp16: IEEE half precision, little-endian. Error at most 2^-11 of a value, or 2^-25; above 65504 it saturates.

OpenDiLoCo's wire (2407.07852). Pseudo-gradients below 6e-8 are lost: bf16 keeps those, with 3 bits less.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import (
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

LARGEST = 65504.0
_MAGNITUDE, _LARGEST_BITS = 0x7FFF, 0x7BFF


def _wire_bytes(n: int) -> int:
    return 2 * n


def _encode_spans(n: int, spans: Iterable[Tensor], room: Room = new_wire) -> Buffer:
    if n == 0:
        return b""
    wire = room(_wire_bytes(n))
    values = tensor_over(wire, torch.float16)
    for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
        largest = largest_of(x_S)
        refuse(largest)
        values[lo:hi] = x_S if largest <= LARGEST else x_S.clamp(-LARGEST, LARGEST)
    return wire


def _open_wire(wire: Buffer, n: int) -> OpenedBlocks:
    check_length(wire, _wire_bytes(n))
    values = tensor_over(wire, torch.float16)
    for lo, hi in spans_of(n):
        if int((values[lo:hi].view(torch.int16) & _MAGNITUDE).amax()) > _LARGEST_BITS:
            raise PeerFault("", f"a value in {lo}…{hi} is not finite")
    return OpenedBlocks(torch.empty(0, dtype=torch.float32), values)


FP16 = Codec(
    "fp16",
    _wire_bytes,
    whole(_encode_spans),
    _open_wire,
    copy_span,
    spanwise=_encode_spans,
    sections=((1, 2),),
)
