"""2-bit: per block of 256 the root mean square (bf16) and one of four levels per value.

The levels are the Lloyd-Max quantiser of a Gaussian, ±0.4528 and ±1.510 (Max 1960, table I, N = 4), written
as multiples of 1/1024 so that level * scale is exact in fp32: decoding rounds nothing.
Made to be used under error feedback; alone it loses a third of a Gaussian update.
Wire: all scales (2 bytes each), then four values per byte, the first in the lowest bits; bit 0 of a value
says "outer level", bit 1 "negative"; unused bits of the last byte are zero. 2.0625 bits per value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
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

INNER, OUTER = 464 / 1024, 1546 / 1024
BORDER = (464 + 1546) / 2 / 1024  # Lloyd's condition: half way between the levels
LEVELS = (INNER, OUTER, -INNER, -OUTER)  # by code
PER_BYTE = 4
_TABLE = torch.tensor([[LEVELS[byte >> shift & 3] for shift in (0, 2, 4, 6)] for byte in range(256)])


def wire_bytes(n: int) -> int:
    return SCALE_BYTES * blocks_of(n) + -(-n // PER_BYTE)


def encode(x: Tensor) -> bytes:
    x = check_input(x)
    n = x.numel()
    wire = bytearray(wire_bytes(n))
    if n == 0:
        return b""
    scales, packed = _halves(wire, n)
    for lo in range(0, n, SPAN):
        span = x[lo : lo + SPAN]
        x_BK = as_blocks(span)
        magnitude_BK = x_BK.abs()
        largest_B = magnitude_BK.amax(1)
        refuse(float(largest_B.max()))
        bits_B = scale_bits(_root_mean_square(magnitude_BK, largest_B, span.numel()), up=False)
        border_B1 = scale_values(bits_B)[:, None] * BORDER
        code_BK = (magnitude_BK > border_B1).to(torch.uint8) + (x_BK < 0).to(torch.uint8) * 2
        code_BK.view(-1)[span.numel() :] = 0
        four_Q4 = code_BK.view(-1, PER_BYTE)
        bytes_Q = four_Q4[:, 0] + four_Q4[:, 1] * 4 + four_Q4[:, 2] * 16 + four_Q4[:, 3] * 64
        scales[lo // BLOCK : lo // BLOCK + len(bits_B)] = bits_B
        packed[lo // PER_BYTE : (lo + SPAN) // PER_BYTE] = bytes_Q[: -(-span.numel() // PER_BYTE)]
    return bytes(wire)


def check(wire: Buffer, n: int) -> None:
    check_length(wire, wire_bytes(n))
    if n:
        scales, packed = _halves(wire, n)
        check_scales(scales)
        unused = -n % PER_BYTE
        if int(packed[-1]) >> (8 - 2 * unused):
            raise PeerFault("", "unused bits of the last byte are not zero")


def decode_span(wire: Buffer, n: int, lo: int, out_S: Tensor) -> None:
    scales, packed = _halves(wire, n)
    size = out_S.numel()
    scale_B1 = scale_values(scales[lo // BLOCK : blocks_of(lo + size)])[:, None]
    bytes_Q = packed[lo // PER_BYTE : -(-(lo + size) // PER_BYTE)]
    value_S = _TABLE.index_select(0, bytes_Q.to(torch.int32)).view(-1)[:size]
    whole = size - size % BLOCK
    torch.mul(value_S[:whole].view(-1, BLOCK), scale_B1[: whole // BLOCK], out=out_S[:whole].view(-1, BLOCK))
    if whole < size:
        torch.mul(value_S[whole:], scale_B1[-1], out=out_S[whole:])


def _root_mean_square(magnitude_BK: Tensor, largest_B: Tensor, size: int) -> Tensor:
    """Per block, (B,). Relative to the largest value, so that no square overflows or underflows in a way that
    matters, and summed by halving, so that the order of additions is the same on every machine."""
    divisor_B1 = torch.where(largest_B == 0, 1.0, largest_B)[:, None]
    sum_BK = magnitude_BK / divisor_B1
    sum_BK = sum_BK * sum_BK
    while sum_BK.shape[1] > 1:
        half = sum_BK.shape[1] // 2
        sum_BK = sum_BK[:, :half] + sum_BK[:, half:]
    mean_B = sum_BK[:, 0] * (1 / BLOCK)
    short = size % BLOCK
    if short:  # the last block holds fewer values
        mean_B[-1:] = sum_BK[-1:, 0] / torch.tensor([float(short)])
    # numpy takes the processor's own square root, which is correctly rounded; torch may take a library's
    return torch.from_numpy(np.sqrt(mean_B.numpy())) * largest_B


def _halves(wire: Buffer, n: int) -> tuple[Tensor, Tensor]:
    cut = SCALE_BYTES * blocks_of(n)
    view = memoryview(wire)
    return tensor_over(view[:cut], torch.int16), tensor_over(view[cut:], torch.uint8)
