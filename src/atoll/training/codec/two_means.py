"""2means: per block of 64 two magnitudes (bf16 each), and two bits per value: choice of magnitude, and sign.

For the values selected by top-k, which are all large: the levels of a Gaussian would miss them. The two magnitudes
are the means of the values below and above the block's mean magnitude, one step of Lloyd's algorithm; SparseLoCo
(2508.15706) sends means of its bins too. A code's bit 0 means "larger magnitude", bit 1 is the sign.
Wire: all magnitudes (2 bytes each, smaller first), then the codes, four to a byte. 2.5 bits per value.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import (
    SPAN,
    OpenedBlocks,
    Room,
    check_length,
    checked_scales,
    new_wire,
    refuse,
    scale_bits,
    spans_of,
    tensor_over,
)
from atoll.training.codec.core import Codec, whole
from atoll.training.codec.packed import pack_codes, to_grid

GROUP = 64  # values under one pair of magnitudes: SparseLoCo's k of a chunk of 4096
PAIR_BYTES = 4
PER_BYTE = 4
GRID = 65535  # 64 integers up to 65535 add up to less than 2^24: exact in fp32, in any order
ONE_65535TH = float(torch.tensor(1 / 65535, dtype=torch.float32))
_CODES = torch.tensor([[byte >> shift & 3 for shift in (0, 2, 4, 6)] for byte in range(256)], dtype=torch.uint8)
assert SPAN % GROUP == 0


def _groups_of(n: int) -> int:
    return -(-n // GROUP)


def _wire_bytes(n: int) -> int:
    return PAIR_BYTES * _groups_of(n) + -(-n // PER_BYTE)


def _encode_spans(n: int, spans: Iterable[Tensor], room: Room = new_wire) -> Buffer:
    if n == 0:
        return b""
    wire = room(_wire_bytes(n))
    pairs_G2, packed = _halves(wire, n)
    for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
        size = hi - lo
        x_GK = torch.cat([x_S, x_S.new_zeros(-size % GROUP)]).view(-1, GROUP)
        magnitude_GK = x_GK.abs()
        largest_G = magnitude_GK.amax(1)
        refuse(float(largest_G.max()))
        grid_GK, count_G = to_grid(magnitude_GK, largest_G, GRID), torch.full_like(largest_G, GROUP)
        count_G[-1] = size - (len(x_GK) - 1) * GROUP
        upper_GK = grid_GK * count_G[:, None] > grid_GK.sum(1)[:, None]  # integers: above the mean, exactly
        sum_G, upper_sum_G = grid_GK.sum(1), (grid_GK * upper_GK).sum(1)
        upper_count_G = upper_GK.sum(1).to(torch.float32)
        lower_G = (sum_G - upper_sum_G) / (count_G - upper_count_G).clamp_(min=1)
        upper_G = upper_sum_G / upper_count_G.clamp_(min=1)
        for column, mean_G in enumerate((lower_G, upper_G)):
            bits_G = scale_bits(mean_G * ONE_65535TH * largest_G, up=False)
            pairs_G2[lo // GROUP : _groups_of(hi), column] = bits_G
        code_S = (upper_GK + 2 * torch.signbit(x_GK)).to(torch.uint8).view(-1)[:size]
        packed[lo // PER_BYTE : -(-hi // PER_BYTE)] = pack_codes(code_S, 2)
    return wire


def _open_wire(wire: Buffer, n: int) -> OpenedBlocks:
    check_length(wire, _wire_bytes(n))
    pairs_G2, packed = _halves(wire, n)
    if n % PER_BYTE and int(packed[-1]) >> 2 * (n % PER_BYTE):
        raise PeerFault("", "unused bits of the last byte are not zero")
    return OpenedBlocks(checked_scales(pairs_G2.reshape(-1)), packed)


def _decode_span(opened: OpenedBlocks, lo: int, out_S: Tensor) -> None:
    size = out_S.numel()
    bytes_Q = opened.codes[lo // PER_BYTE : -(-(lo + size) // PER_BYTE)].numpy()
    code_S = torch.from_numpy(_CODES.numpy().take(bytes_Q, axis=0)).view(-1)[:size]
    level_G4 = _levels(opened.scale_B[2 * (lo // GROUP) : 2 * _groups_of(lo + size)].view(-1, 2))
    place_S = torch.arange(size, dtype=torch.int32).div_(GROUP, rounding_mode="floor").mul_(4).add_(code_S)
    torch.index_select(level_G4.view(-1), 0, place_S, out=out_S)


def _levels(pair_G2: Tensor) -> Tensor:
    """The four values of each group, by code."""
    return torch.cat([pair_G2, -pair_G2], 1)


def _halves(wire: Buffer, n: int) -> tuple[Tensor, Tensor]:
    cut = PAIR_BYTES * _groups_of(n)
    view = memoryview(wire)
    return tensor_over(view[:cut], torch.int16).view(-1, 2), tensor_over(view[cut:], torch.uint8)


TWO_MEANS = Codec(
    "2means",
    _wire_bytes,
    whole(_encode_spans),
    _open_wire,
    _decode_span,
    spanwise=_encode_spans,
    sections=((GROUP, PAIR_BYTES), (PER_BYTE, 1)),
)
