"""Default aggregation rule: number of liars that it tolerates, and typical rows that it is built for."""

import pytest
import torch

from atoll.training.robust import caf, default, geometric_median, liars_of, mean, trimmed_mean
from atoll.training.robust.attacks import ATTACKS, OPTIMISED, attack_rows, foe, optimized_foe, sign_flip

HONEST, VALUES = 13, 300


def uneven_rows(seed: int) -> torch.Tensor:
    """Honest rows with different data: each is farther from their mean than that mean's norm."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HONEST, VALUES, generator=generator) * 2.5 + torch.randn(VALUES, generator=generator)


def test_liars_follow_from_the_number_of_rows():
    """Fewer than a third, and 2f + 3 rows at least; below five rows no liar is tolerated."""
    assert [liars_of(n) for n in (0, 1, 4, 5, 6, 7, 8, 10, 13, 17, 25)] == [0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 8]
    assert all(n >= 2 * liars_of(n) + 3 and n > 3 * liars_of(n) for n in range(5, 300))


def test_too_many_liars_are_refused_with_the_number_that_would_do():
    with pytest.raises(ValueError, match="at least 11 updates to tolerate 4 liars, got 10"):
        default(10, 4)
    assert torch.equal(default(11, 4)(uneven_rows(0)), caf(uneven_rows(0), 4))


def test_who_does_not_say_how_many_lie_gets_as_many_as_the_rows_allow():
    """Four of thirteen lie, each for itself: who reckons with none stops looking too early."""
    honest = uneven_rows(1)[:9]
    rows = torch.cat([honest, *(torch.roll(sign_flip(honest, 1), at, 1) * 9 for at in range(4))])
    assert torch.equal(default(13)(rows), default(13, 4)(rows))
    assert not torch.equal(default(13)(rows), default(13, 0)(rows))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("attack", [sign_flip, foe])
def test_among_uneven_rows_it_still_goes_where_the_honest_go(attack, seed):
    """Four turn back, nearer to every honest row than those are to each other: distances speak for them."""
    honest = uneven_rows(seed)
    mu, rows = honest.mean(dim=0), torch.cat([honest, attack(honest, 4)])

    def off(answer: torch.Tensor) -> float:
        return float((answer - mu).norm() / mu.norm())

    assert off(default(17, 4)(rows)) < 0.15 < 0.4 < off(mean(rows))
    if attack is sign_flip:
        assert off(trimmed_mean(rows, 4, pre=["nnm"])) > 0.4 and off(geometric_median(rows, 4)) > 0.4


@pytest.mark.parametrize("name", [*ATTACKS, *OPTIMISED])
def test_every_attack_has_a_name(name):
    """And one function to ask for it; the rule under attack is asked by those that search against it only."""
    honest, asked = uneven_rows(2), []

    def rule(rows):
        asked.append(len(rows))
        return mean(rows)

    assert attack_rows(name, honest, 3, rule).shape == (3, VALUES)
    assert bool(asked) == (name in OPTIMISED) and set(asked) <= {HONEST + 3}
    assert torch.equal(attack_rows("foe, optimised", honest, 3, mean), optimized_foe(honest, 3, mean))
    with pytest.raises(ValueError, match="unknown attack 'lie'"):
        attack_rows("lie", honest, 3, mean)
