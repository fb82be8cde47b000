"""Shared parts of block codecs: 256 values under one bf16 scale, and spans that fit the cache.

A scale is the upper half of an fp32 number. It spans fp32's range in 2 bytes (fp16 loses pseudo-gradients below
6e-8) and is exact to convert in any language.
Invariants:
- Scales on the wire are 0 or in [SCALE_MIN, SCALE_MAX]: no product overflows, becomes NaN or becomes a denormal
  number, which some devices flush to zero.
- All operations run on the CPU, elementwise, single-rounded and in a fixed order.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.compiled import native

assert sys.byteorder == "little", "wire formats are little-endian and are read without swapping"
# torch warns about views of read-only memory; received bytes and mapped files are never written here
warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")

BLOCK = 256  # values under one scale: 0.06 bit per value for the scale
SPAN = 1024 * BLOCK  # values processed at a time: 1 MiB of fp32 fits the second-level cache, and calls cost little
SCALE_BYTES = 2
SCALE_MIN = 2.0**-80  # smaller blocks become zero; error feedback keeps the difference
SCALE_MAX = 2.0**53  # times 128 is VALUE_MAX
VALUE_MAX = 2.0**60  # bound of decoded values; sums over 4096 peers with any weights stay finite
# bound of values to encode; no honest update, and no weighted mean of decoded values, comes near it
REFUSE_ABOVE = 2.0**62
SCALE_MIN_BITS, SCALE_MAX_BITS = ((127 - 80) << 7), ((127 + 53) << 7)


def blocks_of(n: int) -> int:
    return -(-n // BLOCK)


def tensor_over(data: Buffer, dtype: torch.dtype) -> Tensor:
    """A vector over the memory of `data`, without a copy; do not write to it."""
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not a whole number of {dtype}")
    return torch.frombuffer(data, dtype=dtype)


def check_input(x: Tensor) -> Tensor:
    """The vector as contiguous fp32 on the CPU."""
    if x.dim() != 1 or x.dtype != torch.float32:
        raise ValueError(f"codecs take one fp32 vector, got {x.dtype} of shape {tuple(x.shape)}")
    return x.detach().cpu().contiguous()


def largest_of(x: Tensor) -> float:
    """The largest magnitude, of any shape; NaN if there is one. A maximum does not depend on the order."""
    if native.kernels is not None and x.is_contiguous() and x.dtype == torch.float32:
        return native.kernels.largest(x.detach().view(-1).numpy())
    return max(float(x.amax()), -float(x.amin())) if x.numel() else 0.0


def largest_in(values: np.ndarray) -> float:
    """`largest_of` for a numpy vector: 400 slices of 100 MB cost less in numpy than in torch."""
    return native.kernels.largest(values) if native.kernels is not None else largest_of(torch.from_numpy(values))


def refuse(largest: float) -> None:
    """ValueError if the largest magnitude of an update is not finite or above REFUSE_ABOVE. NaN compares false."""
    if not largest <= REFUSE_ABOVE:
        raise ValueError(
            f"an update holds {largest}: training diverged before encoding; "
            "lower the learning rate or the outer step"
        )


def spans_of(n: int) -> Iterator[tuple[int, int]]:
    """[lo, hi) of the spans of n values; only the last may end inside a block."""
    return ((lo, min(lo + SPAN, n)) for lo in range(0, n, SPAN))


def as_blocks(x_S: Tensor) -> Tensor:
    """A span as rows of BLOCK values, the last row padded with zeros: (blocks, BLOCK)."""
    short = -x_S.numel() % BLOCK
    if short:
        x_S = torch.cat([x_S, x_S.new_zeros(short)])
    return x_S.view(-1, BLOCK)


Room = Callable[[int], Buffer]
"""Allocates memory of a given size (bytes) for a wire. Its contents do not matter: encoders write every byte."""


def new_wire(size: int) -> bytes:
    """Zeroed bytes that the encoder fills before any other use: a bytearray would need a copy to become bytes."""
    assert size > 1  # Python shares the bytes objects of one byte
    return bytes(size)


def scratch(n: int) -> Tensor:
    """Working memory for one span of n values: (blocks, BLOCK). Allocated once: fresh pages cost more than the
    work.
    """
    return torch.empty(blocks_of(min(n, SPAN)), BLOCK, dtype=torch.float32)


@contextmanager
def lend_spans(count: int) -> Iterator[list[Tensor]]:
    """Lend `count` reusable spans of working memory.

    Allocating a mebibyte per call leaves holes among smaller objects, and the next one does not fit into them: a
    group that averaged 100 MB grew by a megabyte with every call.
    """
    lent = [_take_spare_span() for _ in range(count)]
    try:
        yield lent
    finally:
        _spare_spans.extend(lent)


_spare_spans: list[Tensor] = []  # as many as were lent at once


def _take_spare_span() -> Tensor:
    try:
        return _spare_spans.pop()
    except IndexError:  # another thread may have taken the last one
        return torch.empty(SPAN, dtype=torch.float32)


def times_scales(value_S: Tensor, scale_B: Tensor) -> None:
    """Multiply a span in place by the scales of its blocks."""
    whole = value_S.numel() // BLOCK * BLOCK
    value_S[:whole].view(-1, BLOCK).mul_(scale_B[: whole // BLOCK, None])
    if whole < value_S.numel():
        value_S[whole:].mul_(scale_B[-1])


class OpenedBlocks(NamedTuple):
    """A checked wire: the input of decode_span."""

    scale_B: Tensor  # fp32, one per block; empty if the codec has none
    codes: Tensor

    def span(self, lo: int, size: int, per_byte: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) of `size` values from lo on, for kernels."""
        codes = self.codes[lo // per_byte : -(-(lo + size) // per_byte)]
        return codes.numpy(), self.scale_B[lo // BLOCK : blocks_of(lo + size)].numpy()


def copy_span(opened: OpenedBlocks, lo: int, out_S: Tensor) -> None:
    """Decode a span if codes are values of their own dtype."""
    out_S.copy_(opened.codes[lo : lo + out_S.numel()])


def scale_bits(scale_B: Tensor, *, up: bool) -> Tensor:
    """fp32 scales -> 16 wire bits each (int16), rounded up or to the nearest (ties up).

    Integer arithmetic on the bit pattern gives the same bits everywhere. A scale below the range becomes 0, above
    it SCALE_MAX.
    """
    # numpy: for a thousand blocks a torch call costs more than its work
    bits_B = (scale_B.numpy().view(np.int32) + np.int32(0xFFFF if up else 0x8000)) >> 16
    np.minimum(bits_B, SCALE_MAX_BITS, out=bits_B)
    bits_B *= bits_B >= SCALE_MIN_BITS
    return torch.from_numpy(bits_B.astype(np.int16))


def scale_values(bits_B: Tensor) -> Tensor:
    """The 16 wire bits of each scale -> fp32, exactly."""
    return torch.from_numpy((bits_B.numpy().astype(np.int32) << 16).view(np.float32))


def checked_scales(bits_B: Tensor) -> Tensor:
    """Scales from the wire as fp32. PeerFault unless each is 0 or in range: not negative, infinite or NaN."""
    bits = bits_B.numpy()
    wrong_B = (bits != 0) & ((bits < SCALE_MIN_BITS) | (bits > SCALE_MAX_BITS))
    if wrong_B.any():
        raise PeerFault("", f"scale of block {int(wrong_B.argmax())} is out of range")
    return scale_values(bits_B)


def check_length(wire: Buffer, expected: int) -> None:
    if len(wire) != expected:
        raise PeerFault("", f"{len(wire)} bytes instead of the agreed {expected}")
