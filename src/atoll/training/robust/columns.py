"""Sorted-columns engine: order statistics per coordinate, by a network of elementwise minima and maxima.

n rows of a chunk of columns stay in a cache while Batcher's odd-even merge sort runs over them, row against row.
Comparators, and halves of comparators, with an unused result are left out: the median of 20 rows needs the two
middle ranks, a trimmed mean only the sum of the kept ranks. Kernels (the extra `fast`) sort copies of a chunk in
place, a range that fits the first-level cache at a time: the same comparators, and the same bits except the sign of
zeros.
Invariants:
- Rows are read in place and never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from atoll.training.codec.compiled import native
from atoll.training.robust.gram import DEVICE_CHUNK, PRODUCT_MAX
from atoll.training.robust.rows import SPAN, arithmetic, spans

# rows being sorted: larger than the second-level cache, but with fewer calls (33 ms instead of 56)
CHUNK_BYTES = 2**22
COPIED_BYTES = 2**21  # copies that kernels sort: 5.6 ms instead of 6.5 (n = 8, d = 1M); half of it is no faster
APART = 16  # values between rows that kernels sort: rows a power of two apart would share cache lines
CHUNK_MIN, CHUNK_MAX = 4096, SPAN  # columns: calls cost more than work below, torch starts threads above

# what is needed of a rank; any other label: only the sum over all ranks with that label
EXACT, DROPPED = "exact", "dropped"


class SortingNetworkComparator(NamedTuple):
    low: int
    high: int
    wants_low: bool  # the lesser goes to `low`
    wants_high: bool  # the greater goes to `high`


class CompareStep(NamedTuple):
    maximum: bool
    left: int
    right: int
    into: int  # registers: 0 … n−1 are the rows, never written; above are scratch


class SortingNetwork(NamedTuple):
    steps: tuple[CompareStep, ...]
    ranks: tuple[int, ...]  # register of rank i at the end; undefined if the rank was dropped
    registers: int


def batcher(n: int) -> list[tuple[int, int]]:
    """Comparators (low, high) that sort n values: odd-even merge sort (Batcher 1968; Knuth vol. 3, 5.3.4)."""
    comparators = []
    size = 1 << (n - 1).bit_length()
    p = 1
    while p < size:
        k = p
        while k >= 1:
            for j in range(k % p, size - k, 2 * k):
                for low in range(j, min(j + k, n - k)):
                    if low // (2 * p) == (low + k) // (2 * p):
                        comparators.append((low, low + k))
            k //= 2
        p *= 2
    return comparators


@lru_cache(maxsize=64)
def comparators(wanted: tuple[str, ...]) -> tuple[SortingNetworkComparator, ...]:
    """The comparators that are needed if rank i is used as `wanted[i]` says."""
    labels, kept = list(wanted), list[SortingNetworkComparator]()
    for low, high in reversed(batcher(len(wanted))):
        if labels[low] == labels[high] != EXACT:
            continue  # both dropped, or both in one sum: their order does not matter
        kept.append(SortingNetworkComparator(low, high, labels[low] != DROPPED, labels[high] != DROPPED))
        labels[low] = labels[high] = EXACT
    return tuple(reversed(kept))


@lru_cache(maxsize=64)
def network(wanted: tuple[str, ...]) -> SortingNetwork:
    """Registers for the values of `comparators` if no row may be written to."""
    n = len(wanted)
    wires, free, registers, steps = list(range(n)), [], n, []

    def fresh() -> int:
        nonlocal registers
        if free:
            return free.pop()
        registers += 1
        return registers - 1

    for low, high, wants_low, wants_high in comparators(wanted):
        left, right = wires[low], wires[high]
        if wants_low:
            # the maximum still needs both inputs; a lone minimum may overwrite one
            wires[low] = fresh() if wants_high or left < n else left
            steps.append(CompareStep(False, left, right, wires[low]))
        if wants_high:
            wires[high] = right if right >= n else left if left >= n else fresh()
            steps.append(CompareStep(True, left, right, wires[high]))
        now = {wires[low] if wants_low else -1, wires[high] if wants_high else -1}
        free.extend(register for register in (left, right) if register >= n and register not in now)
    return SortingNetwork(tuple(steps), tuple(wires), registers)


Chosen: TypeAlias = tuple[tuple[int, ...], ...]  # for each mixture the rows of its mean
Mix: TypeAlias = np.ndarray | Chosen
Finish = Callable[[list[Tensor], Tensor, Tensor], None]  # sorted rows (undefined where dropped), result, scratch


def by_columns(
    rows: Sequence[Tensor], wanted: tuple[str, ...], finish: Finish, mix: Mix | None = None, chunk: int = 0
) -> Tensor:
    """Result of `finish` on the sorted columns, shape (d,), dtype of the rows.

    `mix` (m, n): sort y = mix · x instead, mixed chunk by chunk in the cache, by BLAS in any order. `Chosen`: means
    of rows on the CPU in one order of sums, for results that must have the same bits on other computers. `chunk`:
    columns at a time, 0 for as many as fit a cache; it changes no bits except those of BLAS products.
    """
    first, n = rows[0], len(wanted)
    size, device, working = len(first), first.device, arithmetic(first.dtype)
    kernels = native.kernels if device.type == "cpu" and first.dtype == torch.float32 else None
    if not chunk:
        fits = (COPIED_BYTES if kernels else CHUNK_BYTES) // (working.itemsize * n) // 256 * 256
        chunk = DEVICE_CHUNK if device.type != "cpu" else min(max(CHUNK_MIN, fits), CHUNK_MAX)
    chunk = max(1, min(chunk, size))
    ranked = (
        _stepwise(rows, wanted, mix, chunk) if kernels is None else _compiled(kernels, rows, wanted, mix, chunk)
    )
    into_C, scratch_C = torch.empty((2, chunk), dtype=working, device=device)
    result_D = torch.empty_like(first)
    for span in spans(size, chunk):
        width = span.stop - span.start
        finish(ranked(span), into_C[:width], scratch_C[:width])
        result_D[span] = into_C[:width]
    return result_D


Ranked = Callable[[slice], list[Tensor]]  # the sorted rows of a span, valid until the next call


def _stepwise(rows: Sequence[Tensor], wanted: tuple[str, ...], mix: Mix | None, chunk: int) -> Ranked:
    """One call of numpy or torch per step, on rows in place."""
    first, n, net, working = rows[0], len(wanted), network(wanted), arithmetic(rows[0].dtype)
    scratch_RC = torch.empty((net.registers - n, chunk), dtype=working, device=first.device)
    direct = mix is None and working == first.dtype
    loaded_NC = None if direct else torch.empty((len(rows), chunk), dtype=working, device=first.device)
    mixed_NC = None if mix is None else torch.empty((n, chunk), dtype=working, device=first.device)

    def ranked(span: slice) -> list[Tensor]:
        width = span.stop - span.start
        values = [row[span] for row in rows]
        if loaded_NC is not None:
            values = [place[:width].copy_(value) for place, value in zip(loaded_NC, values, strict=True)]
        if mix is not None and mixed_NC is not None and loaded_NC is not None:
            loaded, mixed = loaded_NC[:, :width], mixed_NC[:, :width]
            if first.device.type == "cpu":
                multiply(mix, loaded.numpy(), mixed.numpy())
            else:
                torch.mm(torch.as_tensor(mix, dtype=working, device=first.device), loaded, out=mixed)
            values = list(mixed)
        registers = values + [line[:width] for line in scratch_RC]
        _run(net, registers)
        return [registers[at] for at in net.ranks]

    return ranked


def _compiled(
    kernels: ModuleType, rows: Sequence[Tensor], wanted: tuple[str, ...], mix: Mix | None, chunk: int
) -> Ranked:
    """One call for all comparators, on copies of fp32 rows (by numpy: torch takes ten microseconds for each)."""
    given = [row.numpy() for row in rows]
    loaded_NC = np.empty((len(rows), chunk + APART), dtype=np.float32)
    sorted_NC = loaded_NC if mix is None else np.empty((len(wanted), chunk + APART), dtype=np.float32)
    ranked_N = [torch.from_numpy(row) for row in sorted_NC]
    steps = np.array(comparators(wanted), dtype=np.int64).reshape(-1, 4)

    def ranked(span: slice) -> list[Tensor]:
        width = span.stop - span.start
        for place_C, row in zip(loaded_NC, given, strict=True):
            place_C[:width] = row[span]
        if mix is not None:
            multiply(mix, loaded_NC[:, :width], sorted_NC[:, :width])
        kernels.sort_columns(sorted_NC, width, steps)
        return [row[:width] for row in ranked_N]

    return ranked


def multiply(mix: Mix, values: np.ndarray, into: np.ndarray) -> None:
    """into = mix · values, in products so small that BLAS stays on this thread."""
    if not isinstance(mix, np.ndarray):
        return average(mix, values, into)
    weights = mix.astype(values.dtype, copy=False)
    for at in spans(values.shape[1], max(1, PRODUCT_MAX // mix.size)):
        np.matmul(weights, values[:, at], out=into[:, at])


def average(mix: Chosen, values: np.ndarray, into: np.ndarray) -> None:
    """Means of the chosen rows: added in their order, then one product."""
    for chosen, mean_C in zip(mix, into, strict=True):
        mean_C[:] = values[chosen[0]]
        for row in chosen[1:]:
            np.add(mean_C, values[row], out=mean_C)
        np.multiply(mean_C, mean_C.dtype.type(1 / len(chosen)), out=mean_C)


def _run(net: SortingNetwork, registers: list[Tensor]) -> None:
    if registers[0].device.type == "cpu":  # numpy calls cost less: 36 ms instead of torch's 47 (n = 20, d = 1M)
        return _play(net, [register.numpy() for register in registers], np.minimum, np.maximum)
    _play(net, registers, torch.minimum, torch.maximum)


def _play(
    net: SortingNetwork, places: Sequence[object], lesser: Callable[..., object], greater: Callable[..., object]
) -> None:
    for maximum, left, right, into in net.steps:
        (greater if maximum else lesser)(places[left], places[right], out=places[into])


def median(rows: Sequence[Tensor], mix: Mix | None = None, chunk: int = 0) -> Tensor:
    """Per coordinate the middle value, or the mean of the two middle ones (torch.median takes the lower one)."""
    n = len(rows if mix is None else mix)
    lo, hi = (n - 1) // 2, n // 2
    wanted = tuple("kept" if rank in (lo, hi) else DROPPED for rank in range(n))

    def middle(ranked: list[Tensor], into: Tensor, _: Tensor) -> None:
        if lo == hi:
            into.copy_(ranked[lo])
        else:
            torch.mul(ranked[lo], 0.5, out=into)
            into.add_(ranked[hi] * 0.5)

    return by_columns(rows, wanted, middle, mix, chunk)


def trimmed_mean(rows: Sequence[Tensor], trim: int, mix: Mix | None = None, chunk: int = 0) -> Tensor:
    """Per coordinate the mean without the `trim` lowest and highest; n > 2 trim (Yin et al. 2018, Definition 2)."""
    n = len(rows if mix is None else mix)
    assert 0 <= 2 * trim < n
    kept = range(trim, n - trim)
    wanted = tuple("kept" if rank in kept else DROPPED for rank in range(n))

    def mean(ranked: list[Tensor], into: Tensor, _: Tensor) -> None:
        _sum([ranked[rank] for rank in kept], into)
        into.mul_(1 / len(kept))

    return by_columns(rows, wanted, mean, mix, chunk)


def mean_around_median(rows: Sequence[Tensor], keep: int, mix: Mix | None = None, chunk: int = 0) -> Tensor:
    """Per coordinate the mean of the `keep` values nearest the median; of two equally near the lower one.

    MeaMed (Xie et al. 2018, Definition 4) and the last step of Bulyan (El Mhamdi et al. 2018, section 4). The
    nearest are `keep` consecutive ranks, so they hold exactly one of the ranks r, r + keep, r + 2 keep … for every
    r < keep: the nearest of these. No running window sum is used, so a 1e30 leaves no trace.
    """
    n = len(rows if mix is None else mix)
    assert 1 <= keep <= n
    lo, hi = (n - 1) // 2, n // 2
    alone = [rank for rank in range(keep) if rank + keep >= n]  # in every window
    wanted = ["kept" if rank in alone else EXACT for rank in range(n)]
    wanted[lo] = wanted[hi] = EXACT

    def mean(ranked: list[Tensor], into: Tensor, far: Tensor) -> None:
        middle = ranked[lo] if lo == hi else (ranked[lo] * 0.5).add_(ranked[hi] * 0.5)
        picked = [ranked[rank] for rank in alone]
        for start in range(keep):
            if start in alone:
                continue
            nearest = ranked[start]
            for rank in range(start + keep, n, keep):
                distance = (middle - nearest).abs_()
                torch.sub(ranked[rank], middle, out=far).abs_()
                nearest = torch.where(distance <= far, nearest, ranked[rank])
            picked.append(nearest)
        _sum(picked, into)
        into.mul_(1 / keep)

    return by_columns(rows, tuple(wanted), mean, mix, chunk)


def _sum(values: list[Tensor], into: Tensor) -> None:
    into.copy_(values[0])
    for value in values[1:]:
        into.add_(value)
