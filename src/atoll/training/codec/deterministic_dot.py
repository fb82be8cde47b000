"""Deterministic inner products of rows, all pairs: one fixed order of sums, so every machine gets the same bits.

A run and its experiment weigh rows by the same bits. A library's dot product adds in an order that depends on the
processor, so the order is fixed here:
    values in chunks of 4096, the last one filled up with zeros, as fp64
    in a chunk, x · y value by value, then halved twelve times: the first half gets the second half added
    what is left of each chunk is added to the sum, in the order of chunks, from zero on

Every product and every sum rounds once. A tree of twelve levels and n / 4096 sums after it: the error is below (12
+ n / 4096) · 1.2e-16 of Σ |x · y|. The compiled kernels (codec/compiled/kernels.py) do the same one chunk at a
time.
Invariants:
- No product is fused with a sum.
- The result does not depend on thread count or instruction set.
"""

from __future__ import annotations

import numpy as np

from atoll.training.codec.compiled import native

CHUNK = 4096
AT_ONCE = 4  # chunks per numpy call: one call costs more than a thousand values
LANES = 64  # below this length, halvings of all rows and chunks run together: short loops cost more than sums

Products = np.ndarray  # (R (R + 1) / 2,) fp64: upper triangle row by row


def filled(width: int) -> int:
    """`width` rounded up to whole chunks."""
    return -(-width // CHUNK) * CHUNK


def add_inner_products(total_P: Products, rows_RS: np.ndarray) -> None:
    """total += <x_i, x_j> for i <= j. fp32 rows (R, S); S is a multiple of CHUNK."""
    if native.kernels is not None:
        native.kernels.add_inner_products(rows_RS, total_P)
        return
    width = rows_RS.shape[1]
    for at in range(0, width, CHUNK * AT_ONCE):
        for sums_P in _chunk_sums(rows_RS[:, at : at + CHUNK * AT_ONCE]):
            total_P += sums_P


def _chunk_sums(rows_RS: np.ndarray) -> np.ndarray:
    """Sums of the products of each chunk, (chunks, P)."""
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
