"""What the block codecs share: 256 values under one bf16 scale, and spans that fit the cache.

A scale is the upper half of an fp32 number, so it spans fp32's range in 2 bytes (fp16 loses pseudo-gradients
below 6e-8) and is exact to convert in any language. Scales on the wire are 0 or in [SCALE_MIN, SCALE_MAX]:
no product can then overflow, become NaN or fall into the denormal numbers that some devices flush to zero.
Everything here runs on the CPU in single-rounded elementwise operations in a fixed order.
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
# torch warns when it looks at read-only memory; nobody here writes to what arrived or to mapped files
warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")

BLOCK = 256  # values under one scale: 0.06 bit per value for the scale
SPAN = 1024 * BLOCK  # values worked on at a time: 1 MiB of fp32 fits the second-level cache, and calls cost little
SCALE_BYTES = 2
SCALE_MIN = 2.0**-80  # smaller blocks become zero; error feedback keeps what was left out
SCALE_MAX = 2.0**53  # times 128 is VALUE_MAX
VALUE_MAX = 2.0**60  # no decoded value is larger; sums over 4096 peers with any weights stay finite
REFUSE_ABOVE = 2.0**62  # no honest update comes near; a weighted mean of decoded values never gets here
SCALE_MIN_BITS, SCALE_MAX_BITS = ((127 - 80) << 7), ((127 + 53) << 7)


def blocks_of(n: int) -> int:
    return -(-n // BLOCK)


def tensor_over(data: Buffer, dtype: torch.dtype) -> Tensor:
    """A vector over the very bytes of `data`, without a copy; do not write to it."""
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no whole number of {dtype}")
    return torch.frombuffer(data, dtype=dtype)


def check_input(x: Tensor) -> Tensor:
    """The vector as contiguous fp32 on the CPU."""
    if x.dim() != 1 or x.dtype != torch.float32:
        raise ValueError(f"codecs take one fp32 vector, got {x.dtype} of shape {tuple(x.shape)}")
    return x.detach().cpu().contiguous()


def largest_of(x: Tensor) -> float:
    """The largest magnitude of fp32 of any shape; NaN if there is one. A maximum has no order to differ in."""
    if native.kernels is not None and x.is_contiguous():
        return native.kernels.largest(x.detach().view(-1).numpy())
    return max(float(x.amax()), -float(x.amin())) if x.numel() else 0.0


def largest_in(values: np.ndarray) -> float:
    """The same of a vector of numpy's: four hundred slices of 100 MB are cheaper there than torch's."""
    return native.kernels.largest(values) if native.kernels is not None else largest_of(torch.from_numpy(values))


def refuse(largest: float) -> None:
    """Raise ValueError if the largest magnitude of an update is not finite or absurd. NaN compares false."""
    if not largest <= REFUSE_ABOVE:
        raise ValueError(
            f"an update holds {largest}: it diverged before it was encoded; "
            "in training, lower the learning rate or the outer step"
        )


def spans_of(n: int) -> Iterator[tuple[int, int]]:
    """[lo, hi) of the spans of n values; only the last may end inside a block."""
    return ((lo, min(lo + SPAN, n)) for lo in range(0, n, SPAN))


def as_blocks(x_S: Tensor) -> Tensor:
    """A span as rows of BLOCK values, the last row filled up with zeros: (blocks, BLOCK)."""
    short = -x_S.numel() % BLOCK
    if short:
        x_S = torch.cat([x_S, x_S.new_zeros(short)])
    return x_S.view(-1, BLOCK)


Room = Callable[[int], Buffer]
"""Memory of so many bytes for a wire. What stands in it does not matter: encoders write every byte."""


def new_wire(size: int) -> bytes:
    """Zeros that the caller fills before anybody else sees them: a bytearray would be copied to become bytes."""
    assert size > 1  # Python shares the bytes objects of one byte
    return bytes(size)


def scratch(n: int) -> Tensor:
    """Working memory for one span of n values: (blocks, BLOCK). Made once, for fresh pages cost more than work."""
    return torch.empty(blocks_of(min(n, SPAN)), BLOCK, dtype=torch.float32)


@contextmanager
def lent_spans(count: int) -> Iterator[list[Tensor]]:
    """So many spans to work in, the same ones again and again.

    Whoever asks the allocator for a mebibyte each time leaves holes among smaller things into which the next one
    does not fit: a group that averaged 100 MB grew by a megabyte with every call.
    """
    lent = [_spare_span() for _ in range(count)]
    try:
        yield lent
    finally:
        _spare_spans.extend(lent)


_spare_spans: list[Tensor] = []  # as many as were lent at once


def _spare_span() -> Tensor:
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
    """A wire that was checked: what decode_span reads from."""

    scale_B: Tensor  # fp32, one per block; empty where the codec has none
    codes: Tensor

    def span(self, lo: int, size: int, per_byte: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) of `size` values from lo on, for kernels."""
        codes = self.codes[lo // per_byte : -(-(lo + size) // per_byte)]
        return codes.numpy(), self.scale_B[lo // BLOCK : blocks_of(lo + size)].numpy()


def copy_span(opened: OpenedBlocks, lo: int, out_S: Tensor) -> None:
    """Decode where codes are the values, in a type of their own."""
    out_S.copy_(opened.codes[lo : lo + out_S.numel()])


def scale_bits(scale_B: Tensor, *, up: bool) -> Tensor:
    """fp32 scales -> the 16 bits that go on the wire (int16), rounded up or to the nearest (ties up).

    Integer arithmetic on the bit pattern: the same everywhere. Out of range becomes 0 or SCALE_MAX.
    """
    # numpy: a thousand blocks at a time, where a call of torch costs more than its work
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
        raise PeerFault("", f"{len(wire)} bytes where {expected} were agreed")
