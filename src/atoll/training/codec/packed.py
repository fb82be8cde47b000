"""Block codecs with a few bits per value: one scale per block of 256, then the packed codes.

A `PackingRule` holds the specifics of one codec: scale, codes, levels. Level times scale is exact in fp32, so
decoding rounds nothing.
Wire: all scales (2 bytes each), then the codes, the first value of a byte in its lowest bits; unused bits of the
last byte are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import (
    BLOCK,
    SCALE_BYTES,
    SCALE_MIN,
    OpenedBlocks,
    Room,
    as_blocks,
    blocks_of,
    check_length,
    checked_scales,
    new_wire,
    refuse,
    scale_values,
    scratch,
    spans_of,
    tensor_over,
    times_scales,
)
from atoll.training.codec.compiled import native
from atoll.training.codec.core import Codec, whole


@dataclass(frozen=True)
class PackingRule:
    levels: tuple[float, ...]  # by code; NaN for a code that encode never makes: only the eighth of sixteen
    scale: Callable[[Tensor, Tensor, int], Tensor]
    """(magnitude_BK, largest_B, size) -> 16 wire bits of every scale. It may not change magnitude_BK."""
    codes: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x_BK, magnitude_BK, scale_B) -> code of every value, (B, K) of any integer type."""
    kernel: str | None = None  # kernel that does all of this for a span, if there is one

    @property
    def bits(self) -> int:
        return (len(self.levels) - 1).bit_length()

    @property
    def per_byte(self) -> int:
        return 8 // self.bits


# The bytes that hold one code each, as one integer, times this factor: the packed codes in the top byte
_GATHER = {
    1: (torch.int64, sum(2 ** (56 - 7 * i) for i in range(8)), 56),
    2: (torch.int32, sum(2 ** (24 - 6 * i) for i in range(4)), 24),
    4: (torch.int16, 2**8 + 2**4, 8),
}


def packed_codec(name: str, rule: PackingRule) -> Codec:
    table = level_table(rule.levels)
    never = [code for code, level in enumerate(rule.levels) if level != level]
    assert never in ([], [8])
    spanwise = partial(_encode_spans, rule)
    return Codec(
        name,
        partial(_wire_bytes, rule.per_byte),
        whole(spanwise),
        partial(_open_wire, rule, bool(never)),
        partial(_decode_span, rule.per_byte, table),
        spanwise=spanwise,
        add_span=partial(_add_span, rule.per_byte, table),
        sections=((BLOCK, SCALE_BYTES), (rule.per_byte, 1)),
    )


def level_table(levels: tuple[float, ...]) -> np.ndarray:
    """(256, codes in a byte): row b has the levels of byte b."""
    mask, bits = len(levels) - 1, (len(levels) - 1).bit_length()
    rows = [[levels[byte >> shift & mask] for shift in range(0, 8, bits)] for byte in range(256)]
    return np.array(rows, np.float32)


def _wire_bytes(per_byte: int, n: int) -> int:
    return SCALE_BYTES * blocks_of(n) + -(-n // per_byte)


def _encode_spans(rule: PackingRule, n: int, spans: Iterable[Tensor], room: Room = new_wire) -> Buffer:
    per_byte = rule.per_byte
    if n == 0:
        return b""
    wire, work = room(_wire_bytes(per_byte, n)), scratch(n)
    scales, packed = _halves(wire, n)
    for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
        into = scales[lo // BLOCK : blocks_of(hi)], packed[lo // per_byte : -(-hi // per_byte)]
        if native.kernels is not None and rule.kernel is not None:
            encode = getattr(native.kernels, rule.kernel)
            refuse(encode(x_S.numpy(), *(half.numpy() for half in into)))
        else:
            _encode_span(rule, x_S, *into, work)
    return wire


def _encode_span(rule: PackingRule, x_S: Tensor, scales_B: Tensor, packed_Q: Tensor, work: Tensor) -> None:
    size, x_BK = x_S.numel(), as_blocks(x_S)
    magnitude_BK = torch.abs(x_BK, out=work[: len(x_BK)])
    largest_B = magnitude_BK.amax(1)
    refuse(float(largest_B.max()))
    bits_B = rule.scale(magnitude_BK, largest_B, size)
    code_S = rule.codes(x_BK, magnitude_BK, scale_values(bits_B)).to(torch.uint8).view(-1)[:size]
    scales_B.copy_(bits_B)
    packed_Q.copy_(pack_codes(code_S, rule.bits))


def pack_codes(code_S: Tensor, bits: int) -> Tensor:
    short = -code_S.numel() % (8 // bits)
    if short:
        code_S = torch.cat([code_S, code_S.new_zeros(short)])
    dtype, factor, shift = _GATHER[bits]
    return (code_S.view(dtype) * factor).bitwise_right_shift_(shift).to(torch.uint8)


def _open_wire(rule: PackingRule, has_hole: bool, wire: Buffer, n: int) -> OpenedBlocks:
    check_length(wire, _wire_bytes(rule.per_byte, n))
    scales, packed = _halves(wire, n)
    if n % rule.per_byte and int(packed[-1]) >> rule.bits * (n % rule.per_byte):
        raise PeerFault("", "unused bits of the last byte are not zero")
    if has_hole and _has_code_eight(packed.numpy()):
        raise PeerFault("", "a code is invalid")
    return OpenedBlocks(checked_scales(scales), packed)


def _has_code_eight(packed: np.ndarray) -> bool:
    """Whether a four-bit code is 8, eight bytes at a time: zero after the flip, it borrows when 1 is subtracted."""
    words = len(packed) // 8 * 8
    for part, dtype in ((packed[:words], np.uint64), (packed[words:], np.uint8)):
        ones = dtype(0x1111111111111111 & np.iinfo(dtype).max)
        eights = dtype(8) * ones
        for lo in range(0, len(part), 1 << 16):  # intermediate results stay in the cache
            flipped = part[lo : lo + (1 << 16)].view(dtype) ^ eights
            if ((flipped - ones) & ~flipped & eights).any():
                return True
    return False


def _decode_span(per_byte: int, table: np.ndarray, opened: OpenedBlocks, lo: int, out_S: Tensor) -> None:
    hi = lo + out_S.numel()
    if native.kernels is not None:
        bytes_Q, scale_B = opened.span(lo, hi - lo, per_byte)
        native.kernels.packed_decode[per_byte](bytes_Q, table.reshape(-1), scale_B, out_S.numpy())
        return
    bytes_Q = opened.codes[lo // per_byte : -(-hi // per_byte)].numpy()
    if out_S.numel() % per_byte:
        out_S.copy_(torch.from_numpy(table.take(bytes_Q, axis=0)).view(-1)[: out_S.numel()])
    else:
        # numpy copies a row of the table at a time, twice as fast as torch; "clip" saves a copy of the output
        np.take(table, bytes_Q, axis=0, out=out_S.numpy().reshape(-1, per_byte), mode="clip")
    times_scales(out_S, opened.scale_B[lo // BLOCK : blocks_of(hi)])


def _add_span(per_byte: int, table: np.ndarray, opened: OpenedBlocks, lo: int, share: float, sum_S: Tensor) -> bool:
    if native.kernels is None:
        return False
    bytes_Q, scale_B = opened.span(lo, len(sum_S), per_byte)
    native.kernels.packed_add[per_byte](bytes_Q, table.reshape(-1), scale_B, share, sum_S.numpy())
    return True


def _halves(wire: Buffer, n: int) -> tuple[Tensor, Tensor]:
    cut = SCALE_BYTES * blocks_of(n)
    view = memoryview(wire)
    return tensor_over(view[:cut], torch.int16), tensor_over(view[cut:], torch.uint8)


def to_grid(magnitude_BK: Tensor, largest_B: Tensor, grid: int) -> Tensor:
    """Values as integers 0 … grid of their block's largest, so that their sums are exact in any order."""
    tiny_B = largest_B < SCALE_MIN
    per_grid_B = torch.full_like(largest_B, grid) / torch.where(tiny_B, 1.0, largest_B)
    return (magnitude_BK * per_grid_B[:, None]).round_()


def mean_of(sum_B: Tensor, size: int) -> Tensor:
    """Sums over blocks -> means; the last block of `size` values may hold fewer than BLOCK."""
    mean_B = sum_B * (1 / BLOCK)
    short = size % BLOCK
    if short:
        mean_B[-1:] = sum_B[-1:] / torch.full_like(sum_B[-1:], short)
    return mean_B
