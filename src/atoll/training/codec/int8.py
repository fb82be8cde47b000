"""int8: per block of 256 one step (bf16) and one signed byte per value; value = byte * step.

The step is max|x| / 127 rounded up, so no value is clipped and the error is at most half a step. A byte has 7 bits
and a step 8, so their product is exact in fp32: decoding rounds nothing.
Wire: all steps (2 bytes each), then all bytes. 8.0625 bits per value.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import (
    BLOCK,
    SCALE_BYTES,
    SCALE_MAX,
    OpenedBlocks,
    Room,
    as_blocks,
    blocks_of,
    check_length,
    checked_scales,
    new_wire,
    refuse,
    scale_bits,
    scale_values,
    scratch,
    spans_of,
    tensor_over,
    times_scales,
)
from atoll.training.codec.compiled import native
from atoll.training.codec.core import Codec, whole

ONE_127TH = float(torch.tensor(1 / 127, dtype=torch.float32))  # a factor, since devices divide differently
UNCLIPPED_MAX = 127 * SCALE_MAX  # up to here no step is clipped to SCALE_MAX


def _wire_bytes(n: int) -> int:
    return SCALE_BYTES * blocks_of(n) + n


def _encode_spans(n: int, spans: Iterable[Tensor], room: Room = new_wire) -> Buffer:
    if n == 0:
        return b""
    wire, work = room(_wire_bytes(n)), scratch(n)
    steps, codes = _halves(wire, n)
    for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
        into = steps[lo // BLOCK : blocks_of(hi)], codes[lo:hi]
        if native.kernels is not None:
            refuse(native.kernels.int8_encode(x_S.numpy(), *(half.numpy() for half in into)))
        else:
            _encode_span(x_S, *into, work)
    return wire


def _encode_span(x_S: Tensor, steps_B: Tensor, codes_S: Tensor, work: Tensor) -> None:
    x_BK = as_blocks(x_S)
    largest_B = torch.maximum(x_BK.amax(1), -x_BK.amin(1))
    largest = float(largest_B.max())
    refuse(largest)
    bits_B = scale_bits(largest_B * ONE_127TH, up=True)
    step_B = scale_values(bits_B)
    divisor_B1 = torch.where(step_B == 0, 1.0, step_B)[:, None]
    code_BK = torch.div(x_BK, divisor_B1, out=work[: len(x_BK)]).round_()
    if largest > UNCLIPPED_MAX:
        code_BK.clamp_(-127, 127)
    steps_B.copy_(bits_B)
    codes_S.copy_(code_BK.view(-1)[: len(codes_S)])


def _open_wire(wire: Buffer, n: int) -> OpenedBlocks:
    check_length(wire, _wire_bytes(n))
    steps, codes = _halves(wire, n)
    return OpenedBlocks(checked_scales(steps), codes)


def _decode_span(opened: OpenedBlocks, lo: int, out_S: Tensor) -> None:
    hi = lo + out_S.numel()
    if native.kernels is not None:
        native.kernels.int8_decode(*opened.span(lo, hi - lo), out_S.numpy())
        return
    out_S.copy_(opened.codes[lo:hi])
    times_scales(out_S, opened.scale_B[lo // BLOCK : blocks_of(hi)])


def _add_span(opened: OpenedBlocks, lo: int, share: float, sum_S: Tensor) -> bool:
    if native.kernels is None:
        return False
    native.kernels.int8_add(*opened.span(lo, len(sum_S)), share, sum_S.numpy())
    return True


def _halves(wire: Buffer, n: int) -> tuple[Tensor, Tensor]:
    cut = SCALE_BYTES * blocks_of(n)
    view = memoryview(wire)
    return tensor_over(view[:cut], torch.int16), tensor_over(view[cut:], torch.int8)


INT8 = Codec(
    "int8",
    _wire_bytes,
    whole(_encode_spans),
    _open_wire,
    _decode_span,
    spanwise=_encode_spans,
    add_span=_add_span,
    sections=((BLOCK, SCALE_BYTES), (1, 1)),
)
