"""Index coding of sparse wires: increasing indices in 0 … n-1, in a number of bytes that n and m determine.

Elias-Fano coding (Elias 1974): the low bits of every index verbatim; of the high bits, which grow slowly, only
their growth, in unary. 64 of 4096 cost 8.0 bits each. Rice-coded gaps, the same idea on differences (Rice 1979),
cost 7.5 bits, with a length that depends on the data; packed numbers of a chunk cost 12.
Also here: `SparseValues`, the decoded indices and values.
Invariants:
- Invalid indices raise PeerFault before they are used.
- Opening the densest wire takes 36 bytes per agreed value for a moment, and 8 or 12 while it is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.compiled import native

LOW_BITS_MAX = 8  # eight low parts then fit one 64-bit word; a choice sparser than 1 in 256 costs slightly more
_LANES = np.arange(8, dtype=np.uint64)
FORM_FAULT = "the indices of values are not in the agreed form"
ORDER_FAULT = "the indices of values do not increase, or exceed the vector"


class IndexFormat(NamedTuple):
    """Encoding of indices as bytes."""

    most_bytes: Callable[[int, int], int]  # (n, m) -> length for m indices below n; the longest if not `fixed`
    encode: Callable[[np.ndarray, int], bytes]  # (indices: int64, increasing, below n; n) -> bytes
    decode: Callable[[Buffer, int, int], np.ndarray]
    """(bytes, n, m) -> (m,) int64. PeerFault unless these are the bytes of m increasing indices below n. The caller
    has compared the length with `most_bytes`.
    """
    fixed: bool


# ---- Elias-Fano: the indices themselves ----------------------------------------------------------------------


def _low_bits(n: int, m: int) -> int:
    """The cheapest split for m of n: the low bits are log2(n / m), rounded down."""
    return min(LOW_BITS_MAX, max(0, (n // m).bit_length() - 1))


def _sizes(n: int, m: int) -> tuple[int, int, int]:
    """(low bits of an index, bytes of all low parts, bits of the unary part)."""
    low_bits = _low_bits(n, m)
    return low_bits, -(-m * low_bits // 8), m + (n - 1 >> low_bits)


def places_bytes(n: int, m: int) -> int:
    if m == 0:
        return 0
    _, low_bytes, unary_bits = _sizes(n, m)
    return low_bytes + -(-unary_bits // 8)


def encode_places(place_M: np.ndarray, n: int) -> bytes:
    m = len(place_M)
    if m == 0:
        return b""
    low_bits, low_bytes, unary_bits = _sizes(n, m)
    if native.kernels is not None:
        both = np.zeros(low_bytes + -(-unary_bits // 8), np.uint8)
        native.kernels.encode_places(place_M, low_bits, both[:low_bytes], both[low_bytes:])
        return both.tobytes()
    unary = np.zeros(unary_bits, np.uint8)
    unary[(place_M >> low_bits) + np.arange(m)] = 1
    return _pack_low_bits(place_M, low_bits) + np.packbits(unary, bitorder="little").tobytes()


def decode_places(data: Buffer, n: int, m: int) -> np.ndarray:
    if m == 0:
        return np.empty(0, np.int64)
    low_bits, low_bytes, unary_bits = _sizes(n, m)
    whole = np.frombuffer(data, np.uint8)
    if native.kernels is not None:
        place_M = np.empty(m, np.int64)
        ones = native.kernels.decode_places(whole[:low_bytes], whole[low_bytes:], low_bits, place_M)
        if ones != m or _padded(whole[:low_bytes], m * low_bits) or _padded(whole[low_bytes:], unary_bits):
            raise PeerFault("", FORM_FAULT)
    else:
        low_M = _unpack_low_bits(whole[:low_bytes], low_bits, m)
        one_M = np.flatnonzero(np.unpackbits(whole[low_bytes:], bitorder="little"))
        if len(one_M) != m or one_M[-1] >= unary_bits:
            raise PeerFault("", FORM_FAULT)
        place_M = (one_M - np.arange(m) << low_bits) | low_M
    if place_M[-1] >= n or not bool((place_M[1:] > place_M[:-1]).all()):
        raise PeerFault("", ORDER_FAULT)
    return place_M


# ---- Rice: gaps between one index and the next -------------------------------------------------------------------


def _gap_bits(n: int, m: int) -> int:
    """The cheapest split of gaps between random indices: the low bits are log2(0.69 n / m), rounded (Rice 1979)."""
    return min(LOW_BITS_MAX, max(0, (98 * n // (100 * m)).bit_length() - 1))


def gaps_bytes(n: int, m: int) -> int:
    """The longest encoding: the gaps round off at least as much as their sum."""
    if m == 0:
        return 0
    low_bits = _gap_bits(n, m)
    return -(-m * low_bits // 8) + -(-(m + (n - m >> low_bits)) // 8)


def encode_gaps(place_M: np.ndarray, n: int) -> bytes:
    m = len(place_M)
    if m == 0:
        return b""
    low_bits = _gap_bits(n, m)
    gap_M = np.diff(place_M, prepend=-1) - 1
    end_M = np.cumsum((gap_M >> low_bits) + 1)
    unary = np.zeros(end_M[-1], np.uint8)
    unary[end_M - 1] = 1
    return _pack_low_bits(gap_M, low_bits) + np.packbits(unary, bitorder="little").tobytes()


def decode_gaps(data: Buffer, n: int, m: int) -> np.ndarray:
    if m == 0:
        if len(data):
            raise PeerFault("", FORM_FAULT)
        return np.empty(0, np.int64)
    low_bits = _gap_bits(n, m)
    low_bytes = -(-m * low_bits // 8)
    whole = np.frombuffer(data, np.uint8)
    if len(whole) <= low_bytes:
        raise PeerFault("", FORM_FAULT)
    low_M = _unpack_low_bits(whole[:low_bytes], low_bits, m)
    one_M = np.flatnonzero(np.unpackbits(whole[low_bytes:], bitorder="little"))
    if len(one_M) != m or one_M[-1] // 8 + 1 != len(whole) - low_bytes:
        raise PeerFault("", FORM_FAULT)
    place_M = one_M.copy()  # in place from here on: a dense wire is large
    place_M[1:] -= one_M[:-1] + 1  # zeros before each one
    place_M <<= low_bits
    place_M |= low_M
    place_M[1:] += 1
    np.cumsum(place_M, out=place_M)
    if place_M[-1] >= n:
        raise PeerFault("", ORDER_FAULT)
    return place_M


# ---- both ----------------------------------------------------------------------------------------------------


def _pack_low_bits(number_M: np.ndarray, low_bits: int) -> bytes:
    """The low bits of every number, packed, padded to a byte."""
    m = len(number_M)
    low_M8 = np.zeros(-(-m // 8) * 8, np.uint64)
    low_M8[:m] = number_M & (1 << low_bits) - 1
    word_W = np.bitwise_or.reduce(low_M8.reshape(-1, 8) << (_LANES * np.uint64(low_bits)), axis=1)
    return word_W.view(np.uint8).reshape(-1, 8)[:, :low_bits].tobytes()[: -(-m * low_bits // 8)]


def _unpack_low_bits(data: np.ndarray, low_bits: int, m: int) -> np.ndarray:
    """Inverse of `_pack_low_bits`, (m,) int64. PeerFault if padding bits of the last byte are not zero."""
    low_WB = np.zeros((-(-m // 8), 8), np.uint8)
    padded = np.zeros(len(low_WB) * low_bits, np.uint8)
    padded[: len(data)] = data
    low_WB[:, :low_bits] = padded.reshape(len(low_WB), low_bits)
    word_W1 = low_WB.view(np.uint64)
    low_M8 = (word_W1 >> (_LANES * np.uint64(low_bits)) & np.uint64((1 << low_bits) - 1)).reshape(-1)
    if low_M8[m:].any():
        raise PeerFault("", FORM_FAULT)
    return low_M8[:m].view(np.int64)


def _padded(data: np.ndarray, bits: int) -> bool:
    """Whether the padding of the last byte, after `bits` bits, is not zero."""
    return bool(bits % 8 and data[-1] >> bits % 8)


PLACES = IndexFormat(places_bytes, encode_places, decode_places, True)
GAPS = IndexFormat(gaps_bytes, encode_gaps, decode_gaps, False)


class SparseValues(NamedTuple):
    """A checked sparse wire: values and their indices."""

    place_M: np.ndarray  # int32, increasing
    value_M: Tensor


def scatter_span(opened: SparseValues, lo: int, out_S: Tensor) -> None:
    """Values lo … lo + len(out): zero where no value was sent."""
    place_M, value_M = _within(opened, lo, len(out_S))
    if native.kernels is not None:
        native.kernels.scatter(place_M, value_M, lo, out_S.numpy())
        return
    out_S.zero_()
    out_S.numpy()[place_M - lo] = value_M


def scatter_add(opened: SparseValues, lo: int, share: float, sum_S: Tensor) -> bool:
    """See `Codec.add_span`."""
    if native.kernels is None:
        return False
    native.kernels.scatter_add(*_within(opened, lo, len(sum_S)), lo, share, sum_S.numpy())
    return True


def _within(opened: SparseValues, lo: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    # keys of the same dtype: otherwise numpy would convert all indices at every span
    first, last = np.searchsorted(opened.place_M, np.array((lo, lo + size), opened.place_M.dtype))
    return opened.place_M[first:last], opened.value_M[first:last].numpy()


def taken(x: Tensor, place_M: np.ndarray) -> Tensor:
    return torch.from_numpy(x.numpy()[place_M])
