"""Distance rules as arithmetic on a Gram matrix: one weight per row, or for pre-aggregations a mixing matrix.

Weights and mixtures are over (rows, origin) and sum to 1. Rows must come in an order that follows from their
content (`rules` ensures it). Ties go to the row nearer to all others, then to the earlier one. Sums of scores are
exactly rounded (math.fsum); other operations are elementwise and in a fixed order. The dimension of the rows is not
used: with the Gram matrix of the parts, a rule needs no vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeAlias

import numpy as np

from atoll.base.draw import shuffled
from atoll.training.robust.gram import GramMatrix, Square, times

Weights = np.ndarray  # (n + 1,) fp64: rows, then the origin
Solve: TypeAlias = Callable[[GramMatrix, int], Weights]  # (gram, f)
Pre: TypeAlias = Callable[[GramMatrix, int], Square]  # (gram, f) -> (m, n + 1)

FLOOR = 1e-6  # of the median distance: the geometric median has reached a row that is nearer than that
STEPS = 100  # Weiszfeld steps; each is n² work, and it stops if no weight moves by more than SETTLED
SETTLED = 1e-12
SQUARINGS = 30  # squarings of a covariance: 2**30 steps of the power iteration
CLIPPED_STEPS = 3  # steps of centered clipping before the filter of clipped rows
# share of all variance in one direction; clipped rows of honest workers with different data stay below it
ALIGNED = 0.3
SNAP = 1e-12  # a weight that CAF has reduced to rounding noise becomes zero: times 1e30 it would matter again


def even_weights(gram: GramMatrix, chosen: Sequence[int]) -> Weights:
    weights = np.zeros(gram.origin + 1)
    weights[list(chosen)] = 1 / len(chosen)
    return weights


def distances(gram: GramMatrix) -> Square:
    """Squared distances between rows, (n, n), without the origin."""
    return gram.squared()[:-1, :-1]


def remoteness(squared: Square) -> list[float]:
    """Summed distance to all rows, (n,). It breaks ties and, unlike a norm, does not change if all rows move."""
    return [math.fsum(map(float, line)) for line in np.sqrt(squared)]


# Krum and its relatives


def krum_order(squared: Square, f: int, neighbours: int | None) -> list[int]:
    """Rows by score, best first; score = sum of squared distances to the n − f − 2 nearest others.

    With one neighbor, as in Bulyan's last choice, two mutually nearest rows always tie.
    """
    n, remote = len(squared), remoteness(squared)
    count = min(n - f - 2 if neighbours is None else neighbours, n - 1)
    scores = []
    for i in range(n):
        others = sorted(float(squared[i, j]) for j in range(n) if j != i)
        scores.append(math.fsum(others[: max(count, min(1, n - 1))]))
    return sorted(range(n), key=lambda i: (scores[i], remote[i], i))


def krum(gram: GramMatrix, f: int, keep: int = 1, neighbours: int | None = None) -> Weights:
    """The row of least score, or the mean of the `keep` best (Blanchard et al. 2017, section 4 and Multi-Krum)."""
    return even_weights(gram, krum_order(distances(gram), f, neighbours)[:keep])


def bulyan_choice(gram: GramMatrix, f: int) -> list[int]:
    """n − 2f rows: Krum's choice is removed, and again (El Mhamdi et al. 2018, algorithm 1)."""
    squared, left, chosen = distances(gram), list(range(gram.origin)), []
    while len(chosen) < gram.origin - 2 * f:
        best = left[krum_order(squared[np.ix_(left, left)], f, None)[0]]
        chosen.append(best)
        left.remove(best)
    return sorted(chosen)


def monna(gram: GramMatrix, f: int, own: int) -> Weights:
    """Mean of the n − f rows nearest to row `own` (Farhadkhani et al. 2023, MoNNA)."""
    return even_weights(gram, nearest(distances(gram), own, gram.origin - f))


def nearest(squared: Square, to: int, count: int) -> list[int]:
    """The `count` rows nearest to row `to`, itself first."""
    return sorted(range(len(squared)), key=lambda j: (j != to, float(squared[to, j]), j))[:count]


def mda(gram: GramMatrix, f: int) -> Weights:
    """Mean of the n − f rows of least diameter (El Mhamdi et al. 2018; exact, not sampled).

    Rows farther apart than t may not both stay: is there a cover of those pairs by f rows? Bisection over t, and
    for each t a search that branches on the row with most such pairs: it goes, or all its partners go. Often
    several subsets are equally tight; then remote rows go first.
    """
    squared = distances(gram)
    n, remote = len(squared), remoteness(squared)
    tried = sorted({float(squared[i, j]) for i in range(n) for j in range(i)} | {0.0})
    lo, hi = 0, len(tried) - 1
    gone: frozenset[int] | None = frozenset()
    while lo < hi:
        middle = (lo + hi) // 2
        found = _cover(_apart(squared, tried[middle]), f, remote)
        if found is None:
            lo = middle + 1
        else:
            hi, gone = middle, found
    assert gone is not None
    kept = [i for i in range(n) if i not in gone]
    while len(kept) > n - f:  # fewer than f rows had to go
        kept.remove(max(kept, key=lambda i: (remote[i], i)))
    return even_weights(gram, kept)


def _apart(squared: Square, most: float) -> dict[int, frozenset[int]]:
    n = len(squared)
    return {i: frozenset(j for j in range(n) if squared[i, j] > most) for i in range(n)}


def _cover(partners: dict[int, frozenset[int]], budget: int, remote: list[float]) -> frozenset[int] | None:
    """At most `budget` rows that cover every pair, or None."""
    worst = max(partners, key=lambda i: (len(partners[i]), remote[i], i), default=None)
    if worst is None or not partners[worst]:
        return frozenset()
    degree = len(partners[worst])
    if budget <= 0 or sum(map(len, partners.values())) > 2 * budget * degree:
        return None
    without = _cover(_without(partners, frozenset([worst])), budget - 1, remote)
    if without is not None:
        return without | {worst}
    if degree > budget:
        return None
    instead = _cover(_without(partners, partners[worst]), budget - degree, remote)
    return None if instead is None else instead | partners[worst]


def _without(partners: dict[int, frozenset[int]], gone: frozenset[int]) -> dict[int, frozenset[int]]:
    return {i: others - gone for i, others in partners.items() if i not in gone}


# rules that iterate, on n weights instead of on vectors


def geometric_median(gram: GramMatrix, f: int, steps: int, floor: float | None, from_origin: bool) -> Weights:
    """The point of least summed distance, by Weiszfeld's iteration (RFA: Pillutla et al. 2022, algorithm 2).

    `floor`: lower bound of distances; None: FLOOR of the median distance. Starts at the mean of the n − f rows
    around the row with least summed distance, or at the origin.
    """
    n = gram.origin
    if from_origin:
        weights = even_weights(gram, [n])
    else:
        squared = distances(gram)
        remote = remoteness(squared)
        weights = even_weights(gram, nearest(squared, min(range(n), key=remote.__getitem__), n - f))
    for _ in range(steps):
        away = np.sqrt(gram.squared_to(weights))[:n]
        least = FLOOR * median(map(float, away)) if floor is None else floor
        if least == 0.0:  # more than half of the rows are one point, and the iterate is on it
            return even_weights(gram, [i for i in range(n) if away[i] == 0.0])
        pull = 1 / np.maximum(away, least)
        before, weights = weights, np.append(pull / math.fsum(map(float, pull)), 0.0)
        if np.abs(weights - before).max() <= SETTLED:
            break
    return weights


def centered_clipping(gram: GramMatrix, f: int, steps: int, radius: float | None) -> Weights:
    """From the origin, `steps` times: v += mean of (x_i − v) · min(1, radius / ‖x_i − v‖).

    Karimireddy et al. 2021, algorithm 2. `radius` None: the median of the n distances, anew in every step; a fixed
    radius above all distances has no effect.
    """
    weights = even_weights(gram, [gram.origin])
    for _ in range(steps):
        weights = clipping_step(weights, gram.squared_to(weights)[:-1], radius)
    return weights


def clipping_step(weights: Weights, squared_N: np.ndarray, radius: float | None) -> Weights:
    away = [math.sqrt(value) for value in map(float, squared_N)]
    limit = median(away) if radius is None else radius
    kept = [1.0 if distance <= limit else limit / distance for distance in away]
    n = len(away)
    moved = weights * (1 - math.fsum(kept) / n)
    moved[:n] += np.array(kept) / n
    return moved


def caf(gram: GramMatrix, f: int) -> Weights:
    """Covariance-bound agnostic filter (Allouah et al. 2025, algorithm 2).

    The result is the mean with the least largest variance.
    """
    weights, _, _ = min(_filtered(gram, f), key=lambda found: found[1])
    return np.append(weights, 0.0)


def clipped_caf(gram: GramMatrix, f: int) -> Weights:
    """CAF for workers with different data: rows are clipped first, and it stops if no direction stands out.

    v is the result of centered clipping, and every row is shortened to the median distance from it. Then rows lose
    belief as in CAF until no direction has more than ALIGNED of all variance (never: the mean of least variance, as
    in CAF). A clipped row with unique information adds no more variance than others, so the filter keeps it.
    Colluding liars together add theirs in one direction. Both numbers are from trials (docs/lab/).
    """
    center = centered_clipping(gram, f, CLIPPED_STEPS, None)
    away = [math.sqrt(value) for value in map(float, gram.squared_to(center)[:-1])]
    mix = _shorten_rows(away, median(away), center)
    found = list(_filtered(gram.mixed(mix), f))
    calm = (weights for weights, variance, whole in found if variance <= ALIGNED * whole)
    least, _, _ = min(found, key=lambda one: one[1])
    return times(next(calm, least)[None, :], mix)[0]


def blended_caf(gram: GramMatrix, f: int) -> Weights:
    """All means of the filter's iterations, weighted by the inverse square of their largest variance.

    Honest rows that the filter removed return in part, and a mean that liars have moved far away has almost no
    weight. The returning rows also help a backdoor (docs/lab/), so this is not the default.
    """
    found = list(_filtered(gram, f))
    least = min(variance for _, variance, _ in found)
    # identical rows need no other iteration
    says = [float(variance <= 0.0) if least <= 0.0 else (least / variance) ** 2 for _, variance, _ in found]
    total = math.fsum(says)
    blend = np.zeros(gram.origin + 1)
    for say, (weights, _, _) in zip(says, found, strict=True):
        blend[:-1] += weights * (say / total)
    return blend


def _filtered(gram: GramMatrix, f: int) -> Iterator[tuple[np.ndarray, float, float]]:
    """Iterations of the filter: (weights of the rows (n,), largest variance about their mean, total variance).

    While the rows' beliefs sum to more than n − 2f: weighted mean, direction of most weighted variance; every row
    loses belief by its share in it, the farthest all.
    """
    n = gram.origin
    products = gram.products[:-1, :-1]
    belief, first = np.ones(n), True
    while (total := math.fsum(map(float, belief))) > n - 2 * f or first:
        first = False
        weights = belief / total
        towards = times(products, weights[:, None])
        centered = products - towards - towards.T + times(weights[None, :], towards)[0, 0]
        roots = np.sqrt(weights)
        variance, share = _top(roots[:, None] * centered * roots[None, :])
        yield weights, variance, math.fsum(map(float, weights * np.diag(centered)))
        reach = times(centered, (roots * share)[:, None])[:, 0] ** 2
        farthest = reach[belief > 0].max()  # over all rows, as in byzfl, a removed row would shield the others
        if variance <= 0.0 or farthest <= 0.0:
            return
        left = 1 - np.minimum(reach / farthest, 1.0)
        belief = np.where(left < SNAP, 0.0, belief * left)


def _top(symmetric: Square) -> tuple[float, np.ndarray]:
    """Largest eigenvalue and an eigenvector of it, (n,), of a positive semi-definite matrix.

    Power iteration by squaring the matrix. If several vectors share the eigenvalue, every machine returns the same
    one.
    """
    power = symmetric
    for _ in range(SQUARINGS):
        scale = float(np.abs(power).max())
        if scale == 0.0:
            return 0.0, np.zeros(len(symmetric))
        before, power = power / scale, times(power / scale, power / scale)
        if np.abs(power / np.abs(power).max() - before).max() <= 1e-15:
            break
    vector = power[:, int(np.argmax(np.diag(power)))]
    vector = vector / math.sqrt(math.fsum(float(value) * float(value) for value in vector))  # pow may round twice
    image = times(symmetric, vector[:, None])[:, 0]
    return math.fsum(float(a * b) for a, b in zip(vector, image, strict=True)), vector


# pre-aggregations: the input of the rule in place of the rows


def nnm(gram: GramMatrix, f: int) -> Square:
    """y_i = mean of the n − f rows nearest x_i, itself included (Allouah et al. 2023, algorithm 2)."""
    squared = distances(gram)
    return np.stack([even_weights(gram, nearest(squared, i, gram.origin - f)) for i in range(gram.origin)])


def bucketing(size: int = 2, seed: bytes = b"") -> Pre:
    """Means of groups of `size` rows, drawn by `seed`; the last group may be smaller (Karimireddy et al. 2022).

    n becomes ⌈n / size⌉ and f stays: keep f · size well below n / 2. A sender that knows the seed in advance can
    choose its neighbors; take the seed from values agreed after the commitments.
    """
    if size < 1:
        raise ValueError(f"a bucket holds at least one row, not {size}")

    def buckets(gram: GramMatrix, f: int) -> Square:
        order = shuffled(seed, "bucketing", range(gram.origin))
        return np.stack([even_weights(gram, order[at : at + size]) for at in range(0, len(order), size)])

    return buckets


def arc(gram: GramMatrix, f: int) -> Square:
    """The ⌊2f(n − f)/n⌋ longest rows are shortened to the longest of the others (Allouah et al. 2024, ARC)."""
    n = gram.origin
    lengths = _lengths(gram)
    spared = n - 2 * f * (n - f) // n
    return _shorten_rows(lengths, sorted(lengths)[spared - 1])


def clip(norm: float) -> Pre:
    """Rows longer than `norm` are shortened to it: x_i · min(1, norm / ‖x_i‖)."""
    if not norm > 0:
        raise ValueError(f"clip needs a norm above 0, not {norm}")
    return lambda gram, f: _shorten_rows(_lengths(gram), norm)


def _lengths(gram: GramMatrix) -> list[float]:
    return [math.sqrt(value) for value in map(float, gram.squared()[-1, :-1])]


def _shorten_rows(lengths: list[float], norm: float, center: Weights | None = None) -> Square:
    """Mixing matrix of shortened rows: a row shortened towards the center (default: the origin) is a mixture of
    both.
    """
    scales = np.array([1.0 if length <= norm else norm / length for length in lengths])
    whither = np.append(np.zeros(len(scales)), 1.0) if center is None else center
    return np.hstack([np.diag(scales), np.zeros((len(scales), 1))]) + (1 - scales)[:, None] * whither


# outlier scores

OUTLIER_SCORE = 3.5  # a row above it is an outlier (Iglewicz and Hoaglin 1993)


def scores(gram: GramMatrix) -> list[float]:
    """Robust z-score of each row's distance to the others, n numbers.

    A row's distance is the median of its distances to the others. It is compared with median and 1.4826 · MAD of
    the *others'* distances, so no row hides by widening its own scale (Iglewicz and Hoaglin 1993).
    """
    n = gram.origin
    apart = np.sqrt(distances(gram))
    if n < 3:
        return [0.0] * n
    typical = [median(float(apart[i, j]) for j in range(n) if j != i) for i in range(n)]
    found = []
    for i, mine in enumerate(typical):
        others = [value for j, value in enumerate(typical) if j != i]
        middle = median(others)
        spread = 1.4826 * median(abs(value - middle) for value in others)
        above = mine - middle
        # identical rows have no spread: a difference beyond rounding is then infinitely far
        found.append(
            above / max(spread, 1e-6 * middle) if max(spread, middle) > 0 else math.inf if above > 0 else 0.0
        )
    return found
