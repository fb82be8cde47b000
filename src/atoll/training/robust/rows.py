"""Rows of an aggregation: one d-vector per member, read in pieces that fit a cache.

The caller's rows (one (n, d) tensor or array, or a list of d-vectors) become a list of views.
Invariants:
- Rows are never written to and never copied whole; no thread is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cmp_to_key
from types import ModuleType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from atoll.training.codec.compiled import native

Vector: TypeAlias = Tensor | np.ndarray
Rows: TypeAlias = Tensor | np.ndarray | Sequence[Vector]

# Pieces are smaller than the sizes at which libraries start threads. Bits then do not depend on the number of
# threads, and no pool spins (on a busy box with two threads, a Gram matrix took ten times the CPU seconds).
DOT = 8192  # values of one dot product: OpenBLAS takes threads above 10 000, MKL about here
SPAN = 31 * 1024  # values of one elementwise operation: torch takes threads from 32 768
# values of one kernel call, which takes no threads: a range of the sum stays in the second-level cache
SUM_SPAN = 2**16
SQUARED_MAX = 1e150  # ‖x‖² of a row: CAF squares sums of these, still in fp64's range; no fp32 row comes near


def opened(rows: Rows) -> list[Tensor]:
    """Views of the n rows, each (d,). ValueError unless all have one length, floating dtype and device."""
    views = [(row if isinstance(row, Tensor) else torch.from_numpy(np.asarray(row))).detach() for row in rows]
    if not views:
        raise ValueError("there are no rows to aggregate")
    first = views[0]
    for index, row in enumerate(views):
        if row.ndim != 1 or not row.is_floating_point():
            raise ValueError(f"row {index} is {row.dtype} of shape {tuple(row.shape)}; rows are float vectors")
        if (row.shape, row.dtype, row.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"row {index} is {row.dtype} of length {len(row)}, row 0 is {first.dtype} of length {len(first)}; "
                "all rows must have the same length, dtype and device"
            )
    return views


def spans(size: int, chunk: int) -> Iterator[slice]:
    return (slice(lo, min(lo + chunk, size)) for lo in range(0, size, chunk))


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and comparisons: fp64 stays, shorter dtypes are converted to fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def squared_norms(rows: Sequence[Tensor]) -> list[float]:
    """‖x_i‖² per row; not finite exactly if the row is not, or if its squares leave the range of fp64.

    fp32 products, fp64 sum: relative error about 1e-6, enough to order rows and to pick one of median norm.
    """
    first = rows[0]
    kernels = native.load_now(len(rows) * len(first)) if first.dtype == torch.float32 and plain(first) else None
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is checked below
        return [_squared_norm(row, kernels if row.is_contiguous() else None) for row in rows]


def _squared_norm(row: Tensor, kernels: ModuleType | None) -> float:
    working = arithmetic(row.dtype)
    if kernels is not None:
        fast = kernels.squared_length(row.numpy())
    elif plain(row):
        values = row.numpy()  # a slice of an array costs a third of a slice of a tensor
        fast = sum(float(values[span].dot(values[span])) for span in spans(len(values), DOT))
    else:
        fast = sum(dot(part, part) for part in _converted(row, working))
    if math.isfinite(fast):
        return fast
    return sum(dot(part, part) for part in _converted(row, torch.float64))  # 1e30 is finite, its fp32 square is not


def _converted(row: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    return (row[span].to(dtype) for span in spans(len(row), DOT))


def dot(left: Tensor, right: Tensor) -> float:
    """Inner product of two vectors of at most DOT values."""
    if left.device.type == "cpu":
        return float(left.numpy().dot(right.numpy()))
    return float(torch.dot(left, right))


def content_order(rows: Sequence[Tensor], norms2: Sequence[float]) -> list[int]:
    """Indices of the rows, shortest first, equal norms ordered by values: independent of the order of arrival.

    Ties between rows are then broken by their content, and sums have one order and one set of bits.
    """

    def compare(i: int, j: int) -> int:
        if norms2[i] != norms2[j]:
            return -1 if norms2[i] < norms2[j] else 1
        for span in spans(len(rows[i]), SPAN):
            differs = (rows[i][span] != rows[j][span]).nonzero()
            if len(differs):
                at = span.start + int(differs[0])
                return -1 if rows[i][at] < rows[j][at] else 1
        return 0

    return sorted(range(len(rows)), key=cmp_to_key(compare))


def weighted_sum(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_i x_i, shape (d,), dtype of the rows; rows of weight 0 are not read.

    Products and sums round once each, in the order of the rows: the same bits on every machine.
    """
    first = rows[0]
    counted = [(row, weight) for row, weight in zip(rows, weights, strict=True) if weight != 0.0]
    if not counted:
        return torch.zeros_like(first)
    result_D, working = torch.empty_like(first), arithmetic(first.dtype)
    given, shares = [row for row, _ in counted], [weight for _, weight in counted]
    if plain(first):
        values, result = [row.numpy() for row in given], result_D.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            for span in spans(len(result), SUM_SPAN if native.kernels is not None else SPAN):
                sum_C = np.multiply(values[0][span], shares[0], out=result[span])
                add_weighted_rows([value[span] for value in values[1:]], shares[1:], sum_C)
        return result_D
    narrow = working != first.dtype  # bf16 is converted first: a bf16 product would keep 8 bits
    wide_C, term_C = torch.empty((2, min(SPAN, len(first))), dtype=working, device=first.device)
    for span in spans(len(first), SPAN):
        size = span.stop - span.start
        sum_C, term_S = wide_C[:size] if narrow else result_D[span], term_C[:size]
        for index, (row, weight) in enumerate(zip(given, shares, strict=True)):
            torch.mul(row[span].to(working) if narrow else row[span], weight, out=term_S if index else sum_C)
            if index:
                torch.add(sum_C, term_S, out=sum_C)
        if narrow:
            result_D[span] = sum_C
    return result_D


def plain(row: Tensor) -> bool:
    """Whether numpy can use the row in place: its calls cost half of torch's, for the same bits."""
    return row.device.type == "cpu" and arithmetic(row.dtype) == row.dtype


def add_weighted_rows(rows: Sequence[np.ndarray], shares: Sequence[float], sum_C: np.ndarray) -> None:
    """sum += share · row for ranges of rows, in order; kernels take four at once, to the same bits."""
    kernels, at = native.kernels if sum_C.dtype == np.float32 else None, 0
    if kernels is not None and all(row.flags.c_contiguous for row in rows):
        share_N = np.array(shares, np.float32)
        for at in range(0, len(rows) - 3, 4):
            kernels.fp32_add_four(*rows[at : at + 4], share_N[at : at + 4], sum_C)
        at = len(rows) // 4 * 4
    term_C = np.empty_like(sum_C) if at < len(rows) else sum_C
    for row, share in zip(rows[at:], shares[at:], strict=True):
        np.add(sum_C, np.multiply(row, share, out=term_C), out=sum_C)


def all_finite(row: Tensor) -> bool:
    if row.dtype == torch.float32 and plain(row) and native.kernels is not None and row.is_contiguous():
        return math.isfinite(native.kernels.largest(row.numpy()))
    return all(bool(torch.isfinite(row[span]).all()) for span in spans(len(row), SPAN))
