"""2-bit: per block of 256 the root mean square (bf16) and one of four levels per value.

The levels are the Lloyd-Max quantiser of a Gaussian, ±0.4528 and ±1.510 (Max 1960, table I, N = 4), written
as multiples of 1/1024 so that level * scale is exact in fp32: decoding rounds nothing.
Made to be used under error feedback; alone it loses a third of a Gaussian update.
Wire: all scales (2 bytes each), then four values per byte, the first in the lowest bits; bit 0 of a value
says "outer level", bit 1 is its sign; unused bits of the last byte are zero. 2.0625 bits per value.
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
    SCALE_MIN,
    Opened,
    as_blocks,
    blocks_of,
    check_input,
    check_length,
    checked_scales,
    refuse,
    scale_bits,
    scale_values,
    scratch,
    spans_of,
    tensor_over,
    times_scales,
)

INNER, OUTER = 464 / 1024, 1546 / 1024
BORDER = (464 + 1546) / 2 / 1024  # Lloyd's condition: half way between the levels
LEVELS = (INNER, OUTER, -INNER, -OUTER)  # by code
PER_BYTE = 4
GRID = 255  # 256 squares of integers up to 255 add up to less than 2^24: exact in fp32, in any order
ONE_255TH = float(torch.tensor(1 / 255, dtype=torch.float32))
# the four values of every byte; looked up as one 16-byte element, three times as fast as four floats
_TABLE = torch.tensor(
    [[LEVELS[byte >> shift & 3] for shift in (0, 2, 4, 6)] for byte in range(256)], dtype=torch.float32
).view(torch.complex128)[:, 0]
GATHER = 2**24 + 2**18 + 2**12 + 2**6  # times four codes in four bytes: the codes side by side in the top byte


def wire_bytes(n: int) -> int:
    return SCALE_BYTES * blocks_of(n) + -(-n // PER_BYTE)


def encode(x: Tensor) -> bytes:
    x = check_input(x)
    n = x.numel()
    wire, work = bytearray(wire_bytes(n)), scratch(n)
    scales, packed = _halves(wire, n)
    for lo, hi in spans_of(n):
        x_BK = as_blocks(x[lo:hi])
        magnitude_BK = torch.abs(x_BK, out=work[: len(x_BK)])
        largest_B = magnitude_BK.amax(1)
        refuse(float(largest_B.max()))
        bits_B = scale_bits(_root_mean_square(magnitude_BK, largest_B, hi - lo), up=False)
        code_S = _codes(x_BK, magnitude_BK, scale_values(bits_B))[: hi - lo]
        scales[lo // BLOCK : blocks_of(hi)] = bits_B
        packed[lo // PER_BYTE : -(-hi // PER_BYTE)] = _packed(code_S)
    return bytes(wire)


def open_wire(wire: Buffer, n: int) -> Opened:
    check_length(wire, wire_bytes(n))
    scales, packed = _halves(wire, n)
    if n % PER_BYTE and int(packed[-1]) >> 2 * (n % PER_BYTE):
        raise PeerFault("", "unused bits of the last byte are not zero")
    return Opened(checked_scales(scales), packed)


def decode_span(opened: Opened, lo: int, out_S: Tensor) -> None:
    hi = lo + out_S.numel()
    bytes_Q = opened.codes[lo // PER_BYTE : -(-hi // PER_BYTE)].to(torch.int64)
    if out_S.numel() % PER_BYTE:
        out_S.copy_(_TABLE.index_select(0, bytes_Q).view(torch.float32)[: out_S.numel()])
    else:
        torch.index_select(_TABLE, 0, bytes_Q, out=out_S.view(torch.complex128))
    times_scales(out_S, opened.scale_B[lo // BLOCK : blocks_of(hi)])


def _root_mean_square(magnitude_BK: Tensor, largest_B: Tensor, size: int) -> Tensor:
    """Per block, (B,), of values rounded to 1/255 of the block's largest, so that the sum of squares is exact.

    The largest alone makes the result at least 1/16 of itself: what the rounding leaves out does not matter.
    """
    tiny_B = largest_B < SCALE_MIN
    per_grid_B = torch.full_like(largest_B, GRID) / torch.where(tiny_B, 1.0, largest_B)
    grid_BK = (magnitude_BK * per_grid_B[:, None]).round_()
    sum_B = grid_BK.mul_(grid_BK).sum(1)
    mean_B = sum_B * (1 / BLOCK)
    short = size % BLOCK
    if short:  # the last block holds fewer values
        mean_B[-1:] = sum_B[-1:] / torch.tensor([float(short)])
    # numpy takes the processor's own square root, which is correctly rounded; torch may take a library's
    return torch.from_numpy(np.sqrt(mean_B.numpy())) * ONE_255TH * largest_B


def _codes(x_BK: Tensor, magnitude_BK: Tensor, scale_B: Tensor) -> Tensor:
    """The code of every value, (S,) uint8. On bit patterns: non-negative floats are ordered as integers are."""
    border_B1 = (scale_B * BORDER).view(torch.int32)[:, None]
    code_BK = (border_B1 - magnitude_BK.view(torch.int32)).bitwise_right_shift_(31).bitwise_and_(1)
    code_BK.bitwise_or_((x_BK.view(torch.int32) >> 30).bitwise_and_(2))
    return code_BK.view(-1).to(torch.uint8)


def _packed(code_S: Tensor) -> Tensor:
    short = -code_S.numel() % PER_BYTE
    if short:
        code_S = torch.cat([code_S, code_S.new_zeros(short)])
    return (code_S.view(torch.int32) * GATHER).bitwise_right_shift_(24).to(torch.uint8)


def _halves(wire: Buffer, n: int) -> tuple[Tensor, Tensor]:
    cut = SCALE_BYTES * blocks_of(n)
    view = memoryview(wire)
    return tensor_over(view[:cut], torch.int16), tensor_over(view[cut:], torch.uint8)
