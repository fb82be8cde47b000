"""How much lying a round is built for."""

from __future__ import annotations

import pytest

from atoll.policy.trust import liars_among, peers_for_one_liar, rows_needed, witnesses


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


def test_rows_and_witnesses():
    """A mean asks for nobody in particular; every sort needs a majority of honest ones."""
    assert rows_needed("mean", 2) == 0 and rows_needed("median", 2) == 5
    assert (witnesses(3, 1), witnesses(3, 2), witnesses(3, 5), witnesses(1, 0)) == (1, 2, 2, 0)
