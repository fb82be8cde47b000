"""Fault tolerance: how many liars a round withstands."""

from __future__ import annotations

from random import Random

import pytest

from atoll.policy.fault_tolerance import (
    captured_parts,
    captured_share,
    liars_among,
    peers_for_one_liar,
    rows_needed,
    witnesses,
)


@pytest.mark.parametrize(
    ("n", "tolerance", "liars"),
    [(3, 0.33, 0), (4, 0.33, 1), (6, 0.33, 1), (7, 0.33, 2), (10, 0.33, 3), (7, 0.2, 1), (9, 1.0, 2), (1, 0.5, 0)],
)
def test_liars_are_a_share_of_the_members_and_never_a_third(n: int, tolerance: float, liars: int):
    assert liars_among(n, tolerance) == liars
    assert n > 3 * liars


def test_the_fewest_members_for_one_liar_are_the_fewest():
    for tolerance in (0.05, 0.2, 0.33):
        n = peers_for_one_liar(tolerance)
        assert liars_among(n, tolerance) == 1 and liars_among(n - 1, tolerance) == 0


def test_how_likely_a_drawn_committee_holds_too_many_liars():
    """Against a count by drawing, and where all vote. 32 of a hundred, 30 lying: a third of the rounds."""
    assert captured_share(100, 30, 32) == pytest.approx(0.3337, abs=1e-4)
    assert captured_share(100, 30, 90) > 0 == captured_share(100, 30, 91) == captured_share(100, 33, 100)
    assert captured_share(100, 34, 100) == 1
    draw = Random(3)
    bad = sum(sum(k < 6 for k in draw.sample(range(20), 10)) > 3 for _ in range(4000))
    assert captured_share(20, 6, 10) == pytest.approx(bad / 4000, abs=0.03)


def test_rows_and_witnesses():
    """A mean needs no particular member; every sort needs a majority of honest ones."""
    assert rows_needed("mean", 2) == 0 and rows_needed("median", 2) == 5
    none_captured = [witnesses(owners, 20, liars, 0.0) for owners, liars in ((3, 1), (3, 2), (3, 5), (1, 0))]
    assert none_captured == [1, 2, 2, 0]


@pytest.mark.parametrize(
    ("n", "liars", "share", "w", "odds"),
    [
        (4, 1, 0.05, 1, 0.0),
        (7, 2, 0.05, 1, 1 / 21),
        (7, 2, 0.04, 2, 0.0),
        (8, 2, 0.05, 1, 1 / 28),
        (10, 3, 0.05, 2, 1 / 120),
        (100, 33, 0.05, 2, 5456 / 161700),
        (100, 33, 0.0, 5, 0.00093),
        (100, 30, 1.0, 1, 87 / 990),
    ],
)
def test_the_fewest_witnesses_that_leave_liars_alone_with_few_parts(n, liars, share, w, odds):
    """Six owners a part at most; by formula, and by dealing owners as the plan does."""
    assert witnesses(6, n, liars, share) == w
    assert captured_parts(n, liars, w + 1) == pytest.approx(odds, rel=1e-2)
    draw = Random(n)
    owners = (draw.sample(range(n), w + 1) for _ in range(20_000))
    alone = sum(all(owner < liars for owner in first) for first in owners)
    assert alone / 20_000 == pytest.approx(odds, abs=0.01)  # five times what it varies by
