"""Gram-matrix engine: one pass over the rows gives all distances; the rules are n×n arithmetic.

Rows are centered on one of them before they are multiplied, in fp64. Distances do not change, and a common mean of
the rows cancels. The center is the row of median norm, so no sender can choose it with a huge row (an fp32 Gram
matrix centered on the first row lets the first sender choose Krum's result).
Gram matrices about one center add up over coordinates: each owner of a part contributes n×n numbers, and every
distance rule still sees whole vectors. Sums have any fast order: that of the kernels (the extra `fast`) or of BLAS.
Callers that need the same bits on other computers use codec/deterministic_dot.
Invariants:
- Arithmetic on the matrix is elementwise and in a fixed order, without LAPACK: equal matrices give equal weights on
  every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from atoll.training.codec.compiled import native
from atoll.training.robust.rows import DOT, SPAN, Vector, dot, opened, spans

Square = np.ndarray  # (n, n) fp64

CHUNK_BYTES = 2**20  # centered fp64 columns: they stay in the second-level cache between filling and multiplying
PRODUCT_MAX = 2**18  # multiply-adds per call: OpenBLAS stays on this thread (its pool spins: 10x the CPU at n = 50)
BLOCK = 16  # rows per product with all later rows, so only about half of the matrix is computed
DEVICE_CHUNK = 2**20  # columns at once on an accelerator


class GramMatrix(NamedTuple):
    """Inner products of n rows and, last, of their origin, about a center c.

    products[i, j] = <p_i − c, p_j − c>, shape (n + 1, n + 1), p = (x_0 … x_{n−1}, origin).
    """

    products: Square
    center: int | None  # index of the row that is c; None: c is the origin

    @property
    def origin(self) -> int:
        return len(self.products) - 1

    def plus(self, other: GramMatrix) -> GramMatrix:
        """The Gram matrix of two parts together: disjoint coordinates of the same rows about the same center."""
        if self.center != other.center or self.products.shape != other.products.shape:
            raise ValueError(
                "parts add up for the same rows about the same center, not "
                f"{self.origin} rows about {self.center} and {other.origin} about {other.center}"
            )
        return GramMatrix(self.products + other.products, self.center)

    def squared(self) -> Square:
        """‖p_i − p_j‖², shape (n + 1, n + 1): never negative, exactly 0 on the diagonal."""
        lengths = np.diag(self.products)
        squared = np.maximum(lengths[:, None] + lengths[None, :] - 2 * self.products, 0.0)
        np.fill_diagonal(squared, 0.0)
        return squared

    def squared_to(self, weights: np.ndarray) -> np.ndarray:
        """‖p_i − Σ_j w_j p_j‖² for weights that sum to 1, shape (n + 1,).

        Computed about the center, not from distances: with one row at 1e30, differences of distances lose all
        digits.
        """
        towards = times(self.products, weights[:, None])[:, 0]
        here = times(weights[None, :], towards[:, None])[0, 0]
        return np.maximum(np.diag(self.products) - 2 * towards + here, 0.0)

    def mixed(self, mix: Square) -> GramMatrix:
        """The Gram matrix of y = mix · p, m mixtures and the same origin; rows of `mix` (m, n + 1) sum to 1.

        Mixtures are never built, so NNM costs only n×n arithmetic.
        """
        whole = with_origin(mix)
        return GramMatrix(times(times(whole, self.products), whole.T), self.center)


def with_origin(mix: Square) -> Square:
    """Append the origin as one more mixture: (m, n + 1) -> (m + 1, n + 1)."""
    return np.vstack([mix, np.eye(mix.shape[1])[-1:]])


def times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ right, every entry summed in the same order everywhere, one rounding at a time."""
    total = np.zeros((left.shape[0], right.shape[1]))
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k, :]
    return total


def gram_of(rows: Sequence[Tensor], center: int, origin_D: Tensor | None = None, chunk: int = 0) -> GramMatrix:
    """The Gram matrix of finite rows, each (d,), about row `center`; the origin is `origin_D` or zero.

    Relative error of distances up to 2e-13 for rows that differ by a thousandth of their norm. `chunk` columns at a
    time (0: as many as fit a cache) change only the last bits.
    """
    n, size, device = len(rows), len(rows[0]), rows[0].device
    if not chunk:
        chunk = CHUNK_BYTES // (8 * n) // 256 * 256 or 256
        chunk = DEVICE_CHUNK if device.type != "cpu" else min(max(1024, chunk), SPAN)
    chunk = max(1, min(chunk, size))
    # the center's own row would be zero: the origin takes its place
    points = [origin_D if index == center else row for index, row in enumerate(rows)]
    kernels = native.load_now(n * size) if device.type == "cpu" else None
    given = rows if origin_D is None else [*rows, origin_D]
    if kernels is not None and all(row.dtype == torch.float32 and row.is_contiguous() for row in given):
        return _placed(_compiled_sums(kernels, points, rows[center], chunk), center)
    filled_NC = torch.empty((n, chunk), dtype=torch.float64, device=device)
    center_C = torch.empty(chunk, dtype=torch.float64, device=device)
    sums_NN = torch.zeros((n, n), dtype=torch.float64, device=device)
    for span in spans(size, chunk):
        width = span.stop - span.start
        about_C, block_NC = center_C[:width].copy_(rows[center][span]), filled_NC[:, :width]
        for place_C, point in zip(block_NC, points, strict=True):  # row by row: a block is large enough for threads
            place_C.zero_() if point is None else place_C.copy_(point[span])
            place_C -= about_C
        add_products(sums_NN, block_NC)
    return _placed(sums_NN.cpu().numpy(), center)


def _compiled_sums(kernels: ModuleType, points: Sequence[Tensor | None], center_D: Tensor, chunk: int) -> Square:
    """Upper triangle of the products of `points` about the center; fp32 on the CPU, None is zero."""
    filled_NC, sums = np.empty((len(points), chunk)), np.zeros((len(points), len(points)))
    center, values = center_D.numpy(), [None if point is None else point.numpy() for point in points]
    for span in spans(len(center), chunk):
        for place_C, value in zip(filled_NC, values, strict=True):
            if value is None:
                np.negative(center[span], out=place_C[: span.stop - span.start])
            else:
                kernels.about(value[span], center[span], place_C)
        kernels.add_gram(filled_NC, span.stop - span.start, sums)
    return sums


def add_products(sums_NN: Tensor, block_NC: Tensor) -> None:
    """sums += block · blockᵀ, at least the upper triangle."""
    if block_NC.device.type != "cpu":
        sums_NN += block_NC @ block_NC.T
        return
    n = len(block_NC)
    sums, block = sums_NN.numpy(), block_NC.numpy()  # numpy's BLAS: 22 ms instead of torch's 45 (n = 20, d = 1M)
    step = max(1, PRODUCT_MAX // (n * min(n, BLOCK)))
    for at in spans(block.shape[1], step):
        for lo in range(0, n, BLOCK):
            # from one row earlier if the block is the last: numpy turns A·Aᵀ into syrk, twice as slow at this size
            first = lo if lo + BLOCK < n else max(lo - 1, 0)
            sums[lo : lo + BLOCK, first:] += block[lo : lo + BLOCK, at] @ block[first:, at].T


def _placed(sums: Square, center: int) -> GramMatrix:
    """Both triangles, with the origin moved from the center's place to the end."""
    n = len(sums)
    upper = np.triu(sums)
    both = upper + np.triu(sums, 1).T
    products = np.zeros((n + 1, n + 1))
    places = [n if index == center else index for index in range(n)]
    products[np.ix_(places, places)] = both
    return GramMatrix(products, center)


class IncrementalGramRows(Sequence[Tensor]):
    """Rows added one by one, usable as the rows of any rule: `krum(arrivals, f=2)`.

    Each row costs one pass over the earlier ones, while the next is in flight. Rows are kept, not copied. Products
    are about zero, the origin of the resulting matrix. Distances keep ten digits if row norms are at most about
    thirty times the distances.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._products: list[list[float]] = []

    def add(self, row: Vector) -> None:
        """Add a row, (d,); a row that is not finite counts as one of the f. ValueError if its shape or dtype
        differs.
        """
        row_D = opened([*self._rows[:1], row])[-1]
        self._rows.append(row_D)
        self._products.append([0.0] * len(self._rows))
        for span in spans(len(row_D), DOT):
            new_C = row_D[span].to(torch.float64)
            for index, before_D in enumerate(self._rows):
                self._products[-1][index] += dot(new_C, before_D[span].to(torch.float64))

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def gram(self, places: Sequence[int] | None = None) -> GramMatrix:
        """Gram matrix of the rows at these places, in this order; of all rows in order of arrival by default."""
        chosen = range(len(self._rows)) if places is None else places
        n = len(chosen)
        products = np.zeros((n + 1, n + 1))
        for i, j in itertools.product(range(n), repeat=2):
            late, early = max(chosen[i], chosen[j]), min(chosen[i], chosen[j])
            products[i, j] = self._products[late][early]
        return GramMatrix(products, None)
