"""Inner products of rows, each value with each, in one order of sums: the same bits on every machine.

A run and the experiment of it weigh rows by the same bits. A library's dot product adds in whatever order its
processor likes best, so this one is spelled out:

    values in chunks of 4096, the last one filled up with zeros, as fp64
    in a chunk, x · y value by value, then halved twelve times: the first half gets the second half added
    what is left of each chunk is added to the sum, in the order of chunks, from zero on

Every product and every sum rounds once. A tree of twelve levels and n / 4096 sums after it: the error is below
(12 + n / 4096) · 1.2e-16 of Σ |x · y|. Kernels (codec/kernels.py) do the same a chunk at a time. Never fuses a
product with a sum, never asks how many threads or which instructions there are.
"""

from __future__ import annotations

import numpy as np

from atoll.training.codec.compiled import native

CHUNK = 4096
AT_ONCE = 4  # chunks: a call of numpy costs more than a thousand values
LANES = 64  # below so many a halving waits for those of other rows and chunks: short loops cost more than sums

Products = np.ndarray  # (R (R + 1) / 2,) fp64: upper triangle row by row


def filled(width: int) -> int:
    """So many values are whole chunks."""
    return -(-width // CHUNK) * CHUNK


def add_inner_products(total_P: Products, rows_RS: np.ndarray) -> None:
    """total += <x_i, x_j> for i <= j; fp32 rows side by side, (R, S), S whole chunks."""
    if native.kernels is not None:
        native.kernels.add_inner_products(rows_RS, total_P)
        return
    width = rows_RS.shape[1]
    for at in range(0, width, CHUNK * AT_ONCE):
        for sums_P in _chunk_sums(rows_RS[:, at : at + CHUNK * AT_ONCE]):
            total_P += sums_P


def _chunk_sums(rows_RS: np.ndarray) -> np.ndarray:
    """(chunks, P)."""
    count, chunks = len(rows_RS), rows_RS.shape[1] // CHUNK
    wide_RKC = rows_RS.reshape(count, chunks, CHUNK).astype(np.float64)
    room_RKC = np.empty_like(wide_RKC)
    lanes_LKP = np.empty((LANES, chunks, count * (count + 1) // 2))
    first = 0
    for i in range(count):
        product_RKC = np.multiply(wide_RKC[i], wide_RKC[i:], out=room_RKC[i:])
        half = CHUNK // 2
        while half >= LANES:
            product_RKC[..., :half] += product_RKC[..., half : 2 * half]
            half //= 2
        lanes_LKP[..., first : first + count - i] = product_RKC[..., :LANES].transpose(2, 1, 0)
        first += count - i
    half = LANES // 2
    while half:
        lanes_LKP[:half] += lanes_LKP[half : 2 * half]
        half //= 2
    return lanes_LKP[0]
