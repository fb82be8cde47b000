"""Seeded permutation of 0 … n−1 without a table, for the order of samples; computable from any position.

A four-round Feistel network over the smallest even number of bits that holds n, repeated until the value is below n
(cycle walking; Black & Rogaway 2002, section 3). All arithmetic is on 64-bit integers that wrap, so it is the same
on every machine and library version.
Not responsible for: secrecy; it is not a cipher.
"""

from __future__ import annotations

import numpy as np

FEISTEL_ROUNDS = 4


def places(positions: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(epoch, index in 0 … n−1) of every position of the endless stream of shuffled epochs."""
    assert n > 0
    epochs = positions // n
    return epochs, permute(positions % n, n, mixed(epochs.astype(np.uint64) + np.uint64(mix(seed))))


def permute(values: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Image of each value under the permutation of 0 … n−1 with `keys` (one per value)."""
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    out = _feistel(values.astype(np.uint64), half, keys)
    while (outside := out >= n).any():
        out[outside] = _feistel(out[outside], half, keys[outside])
    return out.astype(np.int64)


def mix(value: int) -> int:
    """splitmix64's finalizer (Steele et al. 2014): a pseudo-random image of one integer."""
    return int(mixed(np.array([value % 2**64], dtype=np.uint64))[0])


def mixed(values: np.ndarray) -> np.ndarray:
    """`mix` for an array of uint64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for round_index in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mixed(right ^ (keys + np.uint64(round_index))) & mask)
    return (left << half) | right
