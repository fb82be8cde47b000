"""The rule to take where nobody asks for another, and how many liars it reckons with.

It is the covariance filter (`caf`). Where data differ from worker to worker, honest rows may be so far from each
other that liars who all send −μ stand nearer to everybody than the honest do, and rules that go by distance (Krum,
mixing of neighbours, the geometric median) keep them and drop honest rows. But liars who push somewhere together
make that the direction of most variance, and there the filter looks. bench/RESULTS.md has its figures beside the
others' (bench/under_attack). It answers with one weight per row, so owners of parts can do it with the sum of
their Gram matrices. Send momenta, not gradients: every rule has to live with their spread.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from atoll.training.robust.rows import Rows, Vector
from atoll.training.robust.rules import caf, check, krum_least


class AggregationRule(Protocol):
    def __call__(self, rows: Rows, /) -> Vector: ...


def liars_of(n: int) -> int:
    """f where only n is known: less than a third, as agreement survives, and n ≥ 2f + 3; 0 below five rows."""
    return max(0, min((n - 1) // 3, (n - 3) // 2))


def default(n: int, f: int | None = None) -> AggregationRule:
    """The rule for n rows of which f may lie: default(17)(rows). f None: `liars_of(n)`.

    Fewer rows may come than were reckoned with, at least 2f + 1. ValueError unless n ≥ 2f + 3.
    """
    f = liars_of(n) if f is None else f
    check("the default rule", n, f, krum_least(f))
    return partial(caf, f=f)
