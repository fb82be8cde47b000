"""Any k of n pieces make a blob again, bit for bit; what a piece is made of does not depend on any library."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.crypto.digest import blob_id, digest, manifest_of
from atoll.features.archive.reed_solomon import UNIT, cut, cut_stripe, piece_bytes, rebuild

pytest.importorskip("pyeclib")


def pieces_of(data: bytes, k: int, n: int) -> tuple[list[bytes], tuple[bytes, ...]]:
    pieces = [bytearray() for _ in range(n)]
    names = cut(lambda at, count: data[at : at + count], len(data), k, n, lambda i, unit: pieces[i].extend(unit))
    return [bytes(p) for p in pieces], names


def made_of(pieces: dict[int, bytes], size: int, k: int, n: int, index: int | None = None) -> bytes:
    return b"".join(rebuild(lambda i, at, count: pieces[i][at : at + count], list(pieces), size, k, n, index))


def noise(size: int, seed: int = 0) -> bytes:
    from blake3 import blake3

    return blake3(seed.to_bytes(4, "big")).digest(length=size)


def test_each_of_the_210_ways_to_lose_four_of_ten_leaves_the_blob():
    """k = 6 of 10, a blob of two stripes whose second is odd; and each lost piece comes back by itself, too."""
    data = noise(6 * UNIT + 100_003)
    pieces, names = pieces_of(data, 6, 10)
    assert {len(p) for p in pieces} == {piece_bytes(len(data), 6)}
    assert names == tuple(blob_id(manifest_of(p)) for p in pieces)
    ways = list(combinations(range(10), 4))
    assert len(ways) == 210
    tail = noise(3_001, 7)  # all ways for a small blob, and a few for the large one, which takes a second each
    small, _ = pieces_of(tail, 6, 10)
    for lost in ways:
        left = {i: small[i] for i in range(10) if i not in lost}
        assert made_of(left, len(tail), 6, 10) == tail
        assert made_of(left, len(tail), 6, 10, index=lost[0]) == small[lost[0]]
    for lost in ways[::53]:
        left = {i: pieces[i] for i in range(10) if i not in lost}
        assert made_of(left, len(data), 6, 10) == data
        assert made_of(left, len(data), 6, 10, index=lost[-1]) == pieces[lost[-1]]


@settings(max_examples=60)
@given(st.data())
def test_any_k_of_n_make_a_blob_of_any_size(choice: st.DataObject):
    """Also an empty one, one of a byte, and sizes around the borders of units and stripes."""
    k = choice.draw(st.integers(1, 12))
    n = choice.draw(st.integers(k + 1, 16))
    border = st.sampled_from([0, 1, k - 1, k, k + 1, UNIT - 1, UNIT, UNIT + 1])
    size = choice.draw(st.one_of(border, st.integers(0, 5000)))
    data = noise(size, size)
    pieces, _ = pieces_of(data, k, n)
    left = choice.draw(st.permutations(range(n)))[:k]
    assert made_of({i: pieces[i] for i in left}, size, k, n) == data
    wanted = choice.draw(st.integers(0, n - 1))
    assert made_of({i: pieces[i] for i in left}, size, k, n, index=wanted) == pieces[wanted]


def _times(a: int, b: int) -> int:
    """In GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def _inverse(a: int) -> int:
    return next(b for b in range(256) if _times(a, b) == 1)


@pytest.mark.parametrize(("k", "n"), [(6, 10), (1, 3), (20, 32), (5, 6)])
def test_pieces_are_what_the_specification_says(k: int, n: int):
    """Byte by byte: row i of the code is 1 / (i xor j). Another library can make and read the same pieces."""
    data = noise(k * 16, k)
    units = cut_stripe(data, k, n)
    for index in range(k, n):
        for at in (0, 7, 15):
            expected = 0
            for j in range(k):
                expected ^= _times(_inverse(index ^ j), units[j][at])
            assert units[index][at] == expected
    assert b"".join(units[:k]) == data


def test_the_names_of_pieces_are_frozen():
    """Members of one run must name the same pieces whatever they have installed."""
    _, names = pieces_of(noise(100_000), 6, 10)
    assert digest(b"".join(names)).hex() == GOLDEN


GOLDEN = "82617b48cadd65076e0cc86f38b77f307bb78f1b3f87f8ce4ff84ef83786ff85"
