"""Default aggregation rule: the covariance filter (`caf`), and the number of liars that it tolerates.

If data differ between workers, honest rows may be far from each other. Byzantine members that all send −μ are then
nearer to all rows than honest ones, and distance-based rules (Krum, nearest-neighbor mixing, the geometric median)
keep them and drop honest rows. But colluding members make their common direction that of most variance, and the
filter removes exactly that. bench/RESULTS.md compares the rules (bench/under_attack). The filter computes one
weight per row, so owners of parts can run it on the sum of their Gram matrices. Send momenta, not gradients: the
spread of the rows limits every rule.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from atoll.training.robust.rows import Rows, Vector
from atoll.training.robust.rules import caf, check, krum_least


class AggregationRule(Protocol):
    def __call__(self, rows: Rows, /) -> Vector: ...


def liars_of(n: int) -> int:
    """f if only n is known: below a third, as for agreement, and n ≥ 2f + 3; 0 below five rows."""
    return max(0, min((n - 1) // 3, (n - 3) // 2))


def default(n: int, f: int | None = None) -> AggregationRule:
    """The default rule for n rows with f liars: default(17)(rows). f None: `liars_of(n)`.

    Fewer rows may arrive, at least 2f + 1. ValueError unless n ≥ 2f + 3.
    """
    f = liars_of(n) if f is None else f
    check("the default rule", n, f, krum_least(f))
    return partial(caf, f=f)
