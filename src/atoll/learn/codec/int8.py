"""int8: per block of 256 one step (bf16) and one signed byte per value; value = byte * step.

The step is max|x| / 127 rounded up, so no value is clipped and the error is at most half a step. A byte has
7 bits and a step 8, so their product is exact in fp32: decoding rounds nothing.
Wire: all steps (2 bytes each), then all bytes. 8.0625 bits per value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.keys.digest import Buffer
from atoll.learn.codec.blocks import (
    BLOCK,
    SCALE_BYTES,
    SPAN,
    as_blocks,
    blocks_of,
    check_input,
    check_length,
    check_scales,
    refuse,
    scale_bits,
    scale_values,
    tensor_over,
)

ONE_127TH = float(torch.tensor(1 / 127, dtype=torch.float32))  # a factor, since devices divide differently


def wire_bytes(n: int) -> int:
    return SCALE_BYTES * blocks_of(n) + n


def encode(x: Tensor) -> bytes:
    x = check_input(x)
    n = x.numel()
    wire = bytearray(wire_bytes(n))
    if n == 0:
        return b""
    steps, codes = _halves(wire, n)
    for lo in range(0, n, SPAN):
        span = x[lo : lo + SPAN]
        x_BK = as_blocks(span)
        largest_B = torch.maximum(x_BK.amax(1), -x_BK.amin(1))  # a maximum has no order to get wrong
        refuse(float(largest_B.max()))
        bits_B = scale_bits(largest_B * ONE_127TH, up=True)
        step_B = scale_values(bits_B)
        divisor_B1 = torch.where(step_B == 0, 1.0, step_B)[:, None]
        codes_BK = (x_BK / divisor_B1).round_().clamp_(-127, 127)
        steps[lo // BLOCK : lo // BLOCK + len(bits_B)] = bits_B
        codes[lo : lo + SPAN] = codes_BK.view(-1)[: span.numel()]
    return bytes(wire)


def check(wire: Buffer, n: int) -> None:
    check_length(wire, wire_bytes(n))
    if n:
        check_scales(_halves(wire, n)[0])


def decode_span(wire: Buffer, n: int, lo: int, out_S: Tensor) -> None:
    steps, codes = _halves(wire, n)
    size = out_S.numel()
    step_B1 = scale_values(steps[lo // BLOCK : blocks_of(lo + size)])[:, None]
    whole = size - size % BLOCK
    out_S.copy_(codes[lo : lo + size])
    out_S[:whole].view(-1, BLOCK).mul_(step_B1[: whole // BLOCK])
    if whole < size:
        out_S[whole:].mul_(step_B1[-1])


def _halves(wire: Buffer, n: int) -> tuple[Tensor, Tensor]:
    cut = SCALE_BYTES * blocks_of(n)
    view = memoryview(wire)
    return tensor_over(view[:cut], torch.int16), tensor_over(view[cut:], torch.int8)
