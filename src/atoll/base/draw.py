"""Seeded randomness for draws that must be equal at every peer or in a replay.

The stream for (seed, purpose) is BLAKE3 in extendable-output mode. It is equal on every platform and Python
version, which `random.Random` and torch's generators do not guarantee. Never used for secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from blake3 import blake3

T = TypeVar("T")


def draw_bytes(seed: bytes, purpose: str, count: int) -> bytes:
    """`count` pseudo-random bytes that depend only on seed and purpose."""
    return blake3(purpose.encode(), key=blake3(seed).digest()).digest(length=count)


def draw_below(seed: bytes, purpose: str, bound: int) -> int:
    """An integer in [0, bound). 16 bytes are drawn, so the modulo bias is below 2^-64 for bounds < 2^64."""
    assert bound > 0
    return int.from_bytes(draw_bytes(seed, purpose, 16), "big") % bound


def shuffled(seed: bytes, purpose: str, items: Sequence[T]) -> list[T]:
    """A permutation of `items`, sorted by a keyed hash of the position, O(n log n), equal on all machines."""
    return [items[i] for i in _order(seed, purpose, len(items))]


def draw_pairs(round: int, items: Sequence[T]) -> list[tuple[T, ...]]:
    """Random pairs of all items, different in each round; with an odd number, one item stays alone.

    They depend only on the round and the positions of the items, so all peers draw the same pairs.
    """
    order = shuffled(b"atoll/pairs/1", str(round), items)
    return [tuple(order[at : at + 2]) for at in range(0, len(order), 2)]


@lru_cache(maxsize=64)  # all peers of a simulation draw the same few orders
def _order(seed: bytes, purpose: str, count: int) -> tuple[int, ...]:
    key = blake3(purpose.encode(), key=blake3(seed).digest()).digest()
    return tuple(sorted(range(count), key=lambda i: blake3(i.to_bytes(8, "big"), key=key).digest()))
