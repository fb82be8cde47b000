"""Robust aggregation rules: one vector out of n, of which up to f may be Byzantine.

Rows may be `IncrementalGramRows`: their distances are known when the last row arrives. `pre` lists
pre-aggregations, applied in order: "nnm", "arc", "bucketing", bucketing(size, seed), clip(norm); these functions
are for `pre` only. If n is below the bound of the paper, the error states the required n.
Invariants:
- Rows are never changed; the result has their dtype (arrays for arrays).
- Equal rows in any order give equal bits (plain means add rows in the given order, which may round otherwise).
- No result holds a NaN: a row with a NaN, an infinity or a norm beyond 1e75 is removed first and counts as one of
  the f.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from atoll.base.arguments import did_you_mean
from atoll.training.codec.compiled import native
from atoll.training.robust import columns, weights
from atoll.training.robust.gram import GramMatrix, IncrementalGramRows, Square, gram_of, times, with_origin
from atoll.training.robust.rows import (
    DOT,
    SQUARED_MAX,
    Rows,
    Vector,
    all_finite,
    content_order,
    dot,
    opened,
    spans,
    squared_norms,
    weighted_sum,
)
from atoll.training.robust.weights import Pre, Solve, Weights

Before: TypeAlias = str | Sequence[str | Pre]

PRE: dict[str, Pre] = {"nnm": weights.nnm, "arc": weights.arc, "bucketing": weights.bucketing()}


class PreparedRows(NamedTuple):
    """Rows prepared for a rule: finite, small enough to be squared twice, in the order of their content."""

    rows: list[Tensor]
    places: list[int]  # index of each in the caller's rows
    norms2: list[float]
    f: int  # liars that may still be among them
    arrived: IncrementalGramRows | None  # rows with known distances

    @property
    def middle(self) -> int:
        return len(self.rows) // 2  # the row of median norm

    def gram(self, origin_D: Tensor | None = None) -> GramMatrix:
        if self.arrived is not None and origin_D is None:
            return self.arrived.gram(self.places)
        return gram_of(self.rows, self.middle, origin_D)


def ready(rows: Rows, f: int) -> PreparedRows:
    views = opened(rows)
    native.load_now(len(views) * len(views[0]))  # sorting uses kernels only if they are loaded
    norms2 = squared_norms(views)
    finite = [index for index, norm2 in enumerate(norms2) if norm2 <= SQUARED_MAX]  # NaN compares false
    if not finite:
        raise ValueError(f"none of the {len(views)} rows is finite")
    kept, kept2 = [views[index] for index in finite], [norms2[index] for index in finite]
    order = content_order(kept, kept2)
    left = max(0, f - (len(views) - len(finite)))
    return PreparedRows(
        [kept[i] for i in order],
        [finite[i] for i in order],
        [kept2[i] for i in order],
        left,
        rows if isinstance(rows, IncrementalGramRows) else None,
    )


def check(rule: str, n: int, f: int, least: int) -> None:
    if not isinstance(f, Integral) or f < 0:
        raise ValueError(f"{rule} cannot tolerate {f} liars; f is a whole number, 0 or more")
    if n < least:
        raise ValueError(
            f"{rule} needs at least {least} updates to tolerate {f} liars, got {n}; lower f or wait for more peers"
        )


def majority(f: int) -> int:
    return 2 * f + 1


def krum_least(f: int) -> int:
    return 2 * f + 3


def bulyan_least(f: int) -> int:
    return 4 * f + 3


# averages


def mean(rows: Rows, f: int = 0, pre: Before = ()) -> Vector:
    """Mean of the finite rows, (d,). Tolerates no liar, with any pre-aggregation."""
    if pre:
        return _by_distances(
            "mean", rows, f, pre, majority, lambda gram, _: weights.even_weights(gram, range(gram.origin))
        )
    return weighted_mean(rows, [1.0] * len(rows))


def weighted_mean(rows: Rows, weights: Sequence[float]) -> Vector:
    """Σ w_i x_i / Σ w_i over the finite rows, (d,). A sender that sets its weight controls the result: cap weights
    first.
    """
    views = opened(rows)
    if len(weights) != len(views):
        raise ValueError(f"{len(views)} rows and {len(weights)} weights")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError("weights are finite and not negative")
    kept = list(zip(views, map(float, weights), strict=True))
    result = _mean(kept)
    if not all_finite(result):  # a row that is not finite always shows here
        norms2 = squared_norms(views)
        result = _mean([pair for pair, norm2 in zip(kept, norms2, strict=True) if math.isfinite(norm2)])
    return _like(rows, result)


def _mean(kept: list[tuple[Tensor, float]]) -> Tensor:
    total = math.fsum(weight for _, weight in kept)
    if not total > 0:
        raise ValueError("no finite row has any weight")
    return weighted_sum([row for row, _ in kept], [weight / total for _, weight in kept])


# rules by distance


def krum(rows: Rows, f: int, pre: Before = (), neighbours: int | None = None) -> Vector:
    """The row with the least summed squared distance to its n − f − 2 nearest others, (d,); n ≥ 2f + 3.

    Blanchard et al. 2017. `neighbours` replaces n − f − 2; byzfl counts n − f − 1. Its error does not shrink with
    n: prefer multi_krum.
    """
    return _by_distances("krum", rows, f, pre, krum_least, partial(weights.krum, neighbours=neighbours))


def multi_krum(
    rows: Rows, f: int, pre: Before = (), keep: int | None = None, neighbours: int | None = None
) -> Vector:
    """Mean of the `keep` rows of least Krum score, by default n − f, (d,); n ≥ 2f + 3."""

    def solve(gram: GramMatrix, f: int) -> Weights:
        most = gram.origin - f if keep is None else keep
        return weights.krum(gram, f, min(most, gram.origin), neighbours)

    if keep is not None and keep < 1:
        raise ValueError(f"multi_krum keeps at least one row, not {keep}")
    return _by_distances("multi_krum", rows, f, pre, krum_least, solve)


def geometric_median(
    rows: Rows,
    f: int = 0,
    pre: Before = (),
    steps: int = weights.STEPS,
    floor: float | None = None,
    from_origin: bool = False,
) -> Vector:
    """The point of least summed distance, (d,); n ≥ 2f + 1 (Pillutla et al. 2022).

    It iterates to convergence, which costs nothing beside the one pass over the rows. byzfl's is `steps=3,
    floor=0.1, from_origin=True`.
    """
    solve = partial(weights.geometric_median, steps=steps, floor=floor, from_origin=from_origin)
    return _by_distances("geometric_median", rows, f, pre, majority, solve)


def centered_clipping(
    rows: Rows,
    f: int = 0,
    pre: Before = (),
    steps: int = 3,
    radius: float | None = None,
    start: Vector | None = None,
) -> Vector:
    """`steps` times v += mean of (x_i − v) · min(1, radius / ‖x_i − v‖), (d,) (Karimireddy et al. 2021).

    `start` is the first v: zero, or the last round's result (pre-aggregations then measure norms from it too).
    `radius` None: the median distance to v, in every step. Proven for f < n / 10; n ≥ 2f + 1 is checked.
    """
    if radius is not None and not radius > 0:
        raise ValueError(f"the radius is above 0, not {radius}")
    origin_D = None if start is None else _start(start, rows)
    if steps == 1 and not pre:
        return _clipped_once(rows, f, radius, origin_D)
    solve = partial(weights.centered_clipping, steps=steps, radius=radius)
    return _by_distances("centered_clipping", rows, f, pre, majority, solve, origin_D)


def _start(start: Vector, rows: Rows) -> Tensor:
    """`start` as a tensor, (d,). ValueError unless it is finite and as long as the rows."""
    start_D, size = opened([start])[0], len(opened(rows)[0])
    if len(start_D) != size or not squared_norms([start_D])[0] <= SQUARED_MAX:
        raise ValueError(
            f"start is a finite vector of {size} values; give the last round's result, or None for zero"
        )
    return start_D


def _clipped_once(rows: Rows, f: int, radius: float | None, origin_D: Tensor | None) -> Vector:
    """One step needs the distances to one point only, no Gram matrix."""
    check("centered_clipping", len(rows), f, majority(f))
    given = ready(rows, f)
    away2 = given.norms2 if origin_D is None else [_squared_distance(row, origin_D) for row in given.rows]
    at_origin = np.append(np.zeros(len(given.rows)), 1.0)
    return _like(rows, _combined(given, weights.clipping_step(at_origin, np.array(away2), radius), origin_D))


def _squared_distance(row_D: Tensor, origin_D: Tensor) -> float:
    total = 0.0
    for span in spans(len(row_D), DOT):
        apart_C = row_D[span].to(torch.float64) - origin_D[span]
        total += dot(apart_C, apart_C)
    return total


def mda(rows: Rows, f: int, pre: Before = ()) -> Vector:
    """Mean of the n − f rows of least diameter, (d,); n ≥ 2f + 1. Exact; may be slow for f above 20."""
    return _by_distances("mda", rows, f, pre, majority, weights.mda)


def monna(rows: Rows, f: int, own: int, pre: Before = ()) -> Vector:
    """Mean of the n − f rows nearest to row `own`, the caller's, (d,); n ≥ 2f + 1 (Farhadkhani et al. 2023).

    No pre-aggregation may group rows: the own row, the only trusted one, would be mixed with others.
    """
    check("monna", len(rows), f, majority(f))
    given = ready(rows, f)
    if own not in given.places:
        raise ValueError(f"own row {own} must be one of the {len(rows)} rows and finite")

    def nearest_to_own(gram: GramMatrix, f: int) -> Weights:
        if gram.origin != len(given.rows):
            raise ValueError("monna cannot find its own row after rows are grouped; leave out bucketing")
        return weights.monna(gram, f, given.places.index(own))

    return _like(rows, _solved("monna", given, pre, majority, nearest_to_own, None))


def caf(rows: Rows, f: int, pre: Before = ()) -> Vector:
    """Covariance-bound agnostic filter, (d,); n ≥ 2f + 1 (Allouah et al. 2025)."""
    return _by_distances("caf", rows, f, pre, majority, weights.caf)


def clipped_caf(rows: Rows, f: int, pre: Before = ()) -> Vector:
    """CAF of clipped rows that stops if no direction stands out, (d,); n ≥ 2f + 1. For data that differ between
    workers.

    Rows are clipped about the result of centered clipping from zero, so rows must be updates, not models.
    """
    return _by_distances("clipped_caf", rows, f, pre, majority, weights.clipped_caf)


def blended_caf(rows: Rows, f: int, pre: Before = ()) -> Vector:
    """All means of CAF's iterations, weighted by the inverse square of their largest variance, (d,); n ≥ 2f + 1."""
    return _by_distances("blended_caf", rows, f, pre, majority, weights.blended_caf)


# rules by coordinate


def coordinate_median(rows: Rows, f: int = 0, pre: Before = ()) -> Vector:
    """Per coordinate the median, for even n the mean of the middle two, (d,); n ≥ 2f + 1 (Yin et al. 2018)."""
    return _by_columns("coordinate_median", rows, f, pre, lambda views, f, mix: columns.median(views, mix))


def trimmed_mean(rows: Rows, f: int, pre: Before = ()) -> Vector:
    """Per coordinate the mean without the f lowest and the f highest, (d,); n ≥ 2f + 1 (Yin et al. 2018)."""
    return _by_columns("trimmed_mean", rows, f, pre, columns.trimmed_mean)


def meamed(rows: Rows, f: int, pre: Before = ()) -> Vector:
    """Per coordinate the mean of the n − f values nearest the median, (d,); n ≥ 2f + 1 (Xie et al. 2018)."""

    def around(views: list[Tensor], f: int, mix: Square | None) -> Tensor:
        n = len(views) if mix is None else len(mix)
        return columns.mean_around_median(views, n - f, mix)

    return _by_columns("meamed", rows, f, pre, around)


def bulyan(rows: Rows, f: int, pre: Before = ()) -> Vector:
    """n − 2f rows by Krum, then per coordinate the mean of the n − 4f nearest their median, (d,); n ≥ 4f + 3."""
    check("bulyan", len(rows), f, bulyan_least(f))
    given = ready(rows, f)
    gram, mix = _prepared_gram("bulyan", given, pre, bulyan_least)
    chosen = weights.bulyan_choice(gram, given.f)
    views = given.rows if mix is not None else [given.rows[index] for index in chosen]
    keep = len(chosen) - 2 * given.f
    return _like(rows, columns.mean_around_median(views, keep, None if mix is None else mix[chosen][:, :-1]))


# execution of a rule


def _by_distances(
    rule: str,
    rows: Rows,
    f: int,
    pre: Before,
    least: Callable[[int], int],
    solve: Solve,
    origin_D: Tensor | None = None,
) -> Vector:
    check(rule, len(rows), f, least(f))
    return _like(rows, _solved(rule, ready(rows, f), pre, least, solve, origin_D))


def _solved(
    rule: str, given: PreparedRows, pre: Before, least: Callable[[int], int], solve: Solve, origin_D: Tensor | None
) -> Tensor:
    gram, mix = _prepared_gram(rule, given, pre, least, origin_D)
    found = solve(gram, given.f)
    if mix is not None:
        found = times(found[None, :], with_origin(mix))[0]
    return _combined(given, found, origin_D)


def _prepared_gram(
    rule: str, given: PreparedRows, pre: Before, least: Callable[[int], int], origin_D: Tensor | None = None
) -> tuple[GramMatrix, Square | None]:
    """Input of the rule: the Gram matrix after all pre-aggregations, and its mixture of rows."""
    gram, mix = given.gram(origin_D), None
    for step in map(_named, [pre] if isinstance(pre, str) else pre):
        new = step(gram, given.f)
        if len(new) < gram.origin:
            check(f"{rule} after grouping {gram.origin} updates", len(new), given.f, least(given.f))
        gram, mix = gram.mixed(new), new if mix is None else times(new, with_origin(mix))
    return gram, mix


def _combined(given: PreparedRows, found: Weights, origin_D: Tensor | None) -> Tensor:
    views = given.rows if origin_D is None else [*given.rows, origin_D]
    return weighted_sum(views, [float(weight) for weight in found[: len(views)]])


def _by_columns(
    rule: str, rows: Rows, f: int, pre: Before, work: Callable[[list[Tensor], int, Square | None], Tensor]
) -> Vector:
    check(rule, len(rows), f, majority(f))
    given = ready(rows, f)
    mix = _prepared_gram(rule, given, pre, majority)[1] if pre else None
    return _like(rows, work(given.rows, given.f, None if mix is None else mix[:, :-1]))


def _named(step: str | Pre) -> Pre:
    if not isinstance(step, str):
        return step
    if step not in PRE:
        meant = did_you_mean(step, PRE)
        raise ValueError(f"unknown pre-aggregation {step!r}{meant}; known are {', '.join(PRE)}")
    return PRE[step]


def _like(rows: Rows, result: Tensor) -> Vector:
    first = rows[0]
    return result if isinstance(first, Tensor) else result.numpy()


# lookup by name

RULES: dict[str, Callable[..., Vector]] = {
    rule.__name__: rule
    for rule in (
        *(mean, weighted_mean, krum, multi_krum, coordinate_median, trimmed_mean, meamed),
        *(geometric_median, centered_clipping, mda, monna, bulyan, caf, blended_caf, clipped_caf),
    )
}


def aggregate(rule: str, rows: Rows, **settings: object) -> Vector:
    """The rule of that name: aggregate("trimmed_mean", rows, f=2, pre=["nnm"])."""
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}{did_you_mean(rule, RULES)}; known are {', '.join(RULES)}")
    return RULES[rule](rows, **settings)


def scores(rows: Rows) -> list[float]:
    """Robust z-score of every row's distance to the others, n numbers; infinite for a row that is not finite."""
    given = ready(rows, 0)
    found = weights.scores(given.gram())
    placed = [math.inf] * len(rows)
    for place, score in zip(given.places, found, strict=True):
        placed[place] = score
    return placed


def outliers(rows: Rows, threshold: float = weights.OUTLIER_SCORE) -> tuple[int, ...]:
    """Indices of rows far from the others: score above `threshold`."""
    return tuple(index for index, score in enumerate(scores(rows)) if score > threshold)
