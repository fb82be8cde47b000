"""Seeded randomness for decisions that every peer must draw alike, or that a replay must repeat.

The stream for (seed, purpose) is BLAKE3 in extendable-output mode, so it is the same on every platform and
Python version, which `random.Random` and torch's generators do not promise. Never used for secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from blake3 import blake3

T = TypeVar("T")


def draw_bytes(seed: bytes, purpose: str, count: int) -> bytes:
    """`count` pseudo-random bytes that depend on nothing but seed and purpose."""
    return blake3(purpose.encode(), key=blake3(seed).digest()).digest(length=count)


def draw_below(seed: bytes, purpose: str, bound: int) -> int:
    """An integer in [0, bound). 16 bytes are drawn, so the modulo bias is below 2^-64 for bounds < 2^64."""
    assert bound > 0
    return int.from_bytes(draw_bytes(seed, purpose, 16), "big") % bound


def shuffled(seed: bytes, purpose: str, items: Sequence[T]) -> list[T]:
    """A permutation of `items`: sorted by a keyed hash of the position, O(n log n), the same everywhere."""
    return [items[i] for i in _order(seed, purpose, len(items))]


def in_pairs(round: int, items: Sequence[T]) -> list[tuple[T, ...]]:
    """Everybody in a drawn pair; of an odd number one stays alone. Another round draws other pairs.

    Drawn by nothing but the round and the places of the items, so that whoever counts rounds draws the same.
    """
    order = shuffled(b"atoll/pairs/1", str(round), items)
    return [tuple(order[at : at + 2]) for at in range(0, len(order), 2)]


@lru_cache(maxsize=64)  # every virtual peer of a simulation draws the same few orders
def _order(seed: bytes, purpose: str, count: int) -> tuple[int, ...]:
    key = blake3(purpose.encode(), key=blake3(seed).digest()).digest()
    return tuple(sorted(range(count), key=lambda i: blake3(i.to_bytes(8, "big"), key=key).digest()))
