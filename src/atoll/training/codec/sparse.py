"""sparse: only the nonzero values of a mostly zero vector, after a two-level bit mask.

A word is 64 values. The first level has a bit per word, the second the 64 bits of every word that is not all zero.
Zeros are exact; the inner codec sets the accuracy of the other values.
Wire: first level (a bit per word), second level (8 bytes per nonzero word), the wire of the nonzero values. 1/64
bit per value if all are zero, one bit and the inner codec's if none is: its length varies.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import check_input, largest_of, refuse
from atoll.training.codec.core import Codec
from atoll.training.codec.index_coding import SparseValues, scatter_add, scatter_span, taken

WORD = 64
WORD_BYTES = 8


def sparse(values: Codec) -> Codec:
    return Codec(
        f"sparse+{values.name}",
        partial(_most_bytes, values),
        partial(_encode, values),
        partial(_open_wire, values),
        scatter_span,
        False,
        values.same_everywhere,
        add_span=scatter_add,
    )


def _words(n: int) -> int:
    return -(-n // WORD)


def _most_bytes(values: Codec, n: int) -> int:
    return -(-_words(n) // 8) + WORD_BYTES * _words(n) + values.wire_bytes(n)


def _encode(values: Codec, x: Tensor) -> Buffer:
    x = check_input(x)
    refuse(largest_of(x))
    bits = np.zeros(_words(x.numel()) * WORD, np.uint8)
    np.not_equal(x.numpy(), 0, out=bits[: x.numel()].view(np.bool_))
    word_W = np.packbits(bits, bitorder="little").view(np.uint64)
    used_W = word_W != 0
    first = np.packbits(used_W, bitorder="little").tobytes()
    return first + word_W[used_W].tobytes() + values.encode(taken(x, np.flatnonzero(bits)))


def _open_wire(values: Codec, wire: Buffer, n: int) -> SparseValues:
    data, words = np.frombuffer(wire, np.uint8), _words(n)
    first_bytes = -(-words // 8)
    if not first_bytes <= len(data) <= _most_bytes(values, n):
        raise PeerFault("", f"{len(data)} bytes are not a sparse vector of {n} values")
    first = np.unpackbits(data[:first_bytes], bitorder="little")
    used_U = np.flatnonzero(first)
    cut = first_bytes + WORD_BYTES * len(used_U)
    if first[words:].any() or len(data) < cut:
        raise PeerFault("", "the mask names words that are missing")
    second = data[first_bytes:cut]
    bit_M = np.flatnonzero(np.unpackbits(second, bitorder="little"))
    place_M = used_U[bit_M // WORD] * WORD + bit_M % WORD
    word_U = np.frombuffer(second.tobytes(), np.uint64)  # copied: a wire may lie at any address
    if np.count_nonzero(word_U) < len(word_U) or (len(place_M) and place_M[-1] >= n):
        raise PeerFault("", "a word of the mask is empty, or exceeds the vector")
    return SparseValues(place_M.astype(np.int32), values.decode(memoryview(wire)[cut:], len(place_M)))
