"""The Gram engine: one pass over the rows gives every distance; what follows is n×n arithmetic.

Rows are centred on one of them before they are multiplied, in fp64: distances do not change, a mean that all rows
share cancels, and the centre is the row of middle length, so that nobody can choose it by sending a huge row (an
fp32 Gram centred on the first row hands Krum's choice to whoever sends first).
Gram matrices about one centre add up over coordinates: the owners of the parts of an update each contribute n×n
numbers, and every distance rule still sees whole vectors.
Sums have whatever order is fast: compiled (the extra `fast`) or BLAS's. Whoever has to hear the same bits from
somebody else's computer asks training/codec/deterministic_dot.
The arithmetic on the matrix is elementwise and in a fixed order, without LAPACK: the same matrix gives the same
weights on every machine.
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

CHUNK_BYTES = 2**20  # of centred fp64 columns: they stay in the second-level cache between filling and multiplying
PRODUCT_MAX = 2**18  # multiply-adds per call: OpenBLAS stays on this thread (its pool spins: 10x the CPU at n = 50)
BLOCK = 16  # rows times all rows after them, so that only about half the matrix is computed
DEVICE_CHUNK = 2**20  # columns at once on an accelerator


class GramMatrix(NamedTuple):
    """Inner products about a centre c of n rows and, last, of the origin they are measured from.

    products[i, j] = <p_i − c, p_j − c>, shape (n + 1, n + 1), p = (x_0 … x_{n−1}, origin).
    """

    products: Square
    centre: int | None  # index of the row that is c; None: c is the origin

    @property
    def origin(self) -> int:
        return len(self.products) - 1

    def plus(self, other: GramMatrix) -> GramMatrix:
        """The Gram matrix of two parts together: disjoint coordinates of the same rows about the same centre."""
        if self.centre != other.centre or self.products.shape != other.products.shape:
            raise ValueError(
                "parts add up for the same rows about the same centre, not "
                f"{self.origin} rows about {self.centre} and {other.origin} about {other.centre}"
            )
        return GramMatrix(self.products + other.products, self.centre)

    def squared(self) -> Square:
        """‖p_i − p_j‖², shape (n + 1, n + 1): never negative, exactly 0 on the diagonal."""
        lengths = np.diag(self.products)
        squared = np.maximum(lengths[:, None] + lengths[None, :] - 2 * self.products, 0.0)
        np.fill_diagonal(squared, 0.0)
        return squared

    def squared_to(self, weights: np.ndarray) -> np.ndarray:
        """‖p_i − Σ_j w_j p_j‖² for weights that sum to 1, shape (n + 1,).

        About the centre, not from distances: with one row at 1e30 the distances' own differences lose everything.
        """
        towards = times(self.products, weights[:, None])[:, 0]
        here = times(weights[None, :], towards[:, None])[0, 0]
        return np.maximum(np.diag(self.products) - 2 * towards + here, 0.0)

    def mixed(self, mix: Square) -> GramMatrix:
        """The Gram matrix of y = mix · p, m mixtures and the same origin; rows of `mix` (m, n + 1) sum to 1.

        Mixtures are never built: this is how NNM costs nothing but n×n arithmetic.
        """
        whole = with_origin(mix)
        return GramMatrix(times(times(whole, self.products), whole.T), self.centre)


def with_origin(mix: Square) -> Square:
    """One more mixture, the origin itself: (m, n + 1) -> (m + 1, n + 1)."""
    return np.vstack([mix, np.eye(mix.shape[1])[-1:]])


def times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ right, every entry summed in the same order everywhere, one rounding at a time."""
    total = np.zeros((left.shape[0], right.shape[1]))
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k, :]
    return total


def gram_of(rows: Sequence[Tensor], centre: int, origin_D: Tensor | None = None, chunk: int = 0) -> GramMatrix:
    """The Gram matrix of finite rows, each (d,), about row `centre`; the origin is `origin_D` or zero.

    Relative error of distances up to 2e-13 for rows that differ by a thousandth of their length; `chunk` columns
    at a time (0: as many as fit a cache) change nothing but the last bits.
    """
    n, size, device = len(rows), len(rows[0]), rows[0].device
    if not chunk:
        chunk = CHUNK_BYTES // (8 * n) // 256 * 256 or 256
        chunk = DEVICE_CHUNK if device.type != "cpu" else min(max(1024, chunk), SPAN)
    chunk = max(1, min(chunk, size))
    # the centre's own row would be zero: its place is the origin's
    points = [origin_D if index == centre else row for index, row in enumerate(rows)]
    kernels = native.at_once(n * size) if device.type == "cpu" else None
    given = rows if origin_D is None else [*rows, origin_D]
    if kernels is not None and all(row.dtype == torch.float32 and row.is_contiguous() for row in given):
        return _placed(_compiled_sums(kernels, points, rows[centre], chunk), centre)
    filled_NC = torch.empty((n, chunk), dtype=torch.float64, device=device)
    centre_C = torch.empty(chunk, dtype=torch.float64, device=device)
    sums_NN = torch.zeros((n, n), dtype=torch.float64, device=device)
    for span in spans(size, chunk):
        width = span.stop - span.start
        about_C, block_NC = centre_C[:width].copy_(rows[centre][span]), filled_NC[:, :width]
        for place_C, point in zip(block_NC, points, strict=True):  # row by row: a block is large enough for threads
            place_C.zero_() if point is None else place_C.copy_(point[span])
            place_C -= about_C
        add_products(sums_NN, block_NC)
    return _placed(sums_NN.cpu().numpy(), centre)


def _compiled_sums(kernels: ModuleType, points: Sequence[Tensor | None], centre_D: Tensor, chunk: int) -> Square:
    """The upper triangle of what `points` have about the centre; fp32 on the CPU, None is zero."""
    filled_NC, sums = np.empty((len(points), chunk)), np.zeros((len(points), len(points)))
    centre, values = centre_D.numpy(), [None if point is None else point.numpy() for point in points]
    for span in spans(len(centre), chunk):
        for place_C, value in zip(filled_NC, values, strict=True):
            if value is None:
                np.negative(centre[span], out=place_C[: span.stop - span.start])
            else:
                kernels.about(value[span], centre[span], place_C)
        kernels.add_gram(filled_NC, span.stop - span.start, sums)
    return sums


def add_products(sums_NN: Tensor, block_NC: Tensor) -> None:
    """sums += block · blockᵀ, the upper triangle at least."""
    if block_NC.device.type != "cpu":
        sums_NN += block_NC @ block_NC.T
        return
    n = len(block_NC)
    sums, block = sums_NN.numpy(), block_NC.numpy()  # numpy's BLAS: 22 ms where torch's took 45 (n = 20, d = 1M)
    step = max(1, PRODUCT_MAX // (n * min(n, BLOCK)))
    for at in spans(block.shape[1], step):
        for lo in range(0, n, BLOCK):
            # from one row earlier if the block is the last: numpy turns A·Aᵀ into syrk, twice as slow at this size
            first = lo if lo + BLOCK < n else max(lo - 1, 0)
            sums[lo : lo + BLOCK, first:] += block[lo : lo + BLOCK, at] @ block[first:, at].T


def _placed(sums: Square, centre: int) -> GramMatrix:
    """Both triangles, and the origin moved from the centre's place to the end."""
    n = len(sums)
    upper = np.triu(sums)
    both = upper + np.triu(sums, 1).T
    products = np.zeros((n + 1, n + 1))
    places = [n if index == centre else index for index in range(n)]
    products[np.ix_(places, places)] = both
    return GramMatrix(products, centre)


class StreamedRows(Sequence[Tensor]):
    """Rows as they arrive, for any rule in the place of rows: `krum(arrivals, f=2)`.

    Each costs one pass over those before it, while the next is on its way. Rows are kept, not copied. Products are
    about zero, the origin of the resulting matrix: distances keep ten digits while rows are not much longer than
    thirty times what they are apart.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._products: list[list[float]] = []

    def add(self, row: Vector) -> None:
        """One more row, (d,); one that is not finite counts as one of the f. ValueError if it is not alike."""
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
        """Of the rows at these places, in this order; of all as they came, if none are given."""
        chosen = range(len(self._rows)) if places is None else places
        n = len(chosen)
        products = np.zeros((n + 1, n + 1))
        for i, j in itertools.product(range(n), repeat=2):
            late, early = max(chosen[i], chosen[j]), min(chosen[i], chosen[j])
            products[i, j] = self._products[late][early]
        return GramMatrix(products, None)
