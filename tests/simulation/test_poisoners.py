"""What the literature has worst, by two of seven that know every honest row and each other, on the real round.

Distances are in units of the honest rows' spread: one honest row alone is at 1 from their mean, on average.
"""

from __future__ import annotations

import math

import pytest
import torch

from atoll.simulation.adversaries.colluding_poisoners import GANGS
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.colluding_poisoners import HonestMeanDeviation, bound, play_poisoners
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.training.exchange import statistic
from atoll.training.robust.attacks import attack_rows

REFUSED = ("huge", "nan", "inf")  # by every codec


def poisoned(attack: str, statistic: str, places: tuple[int, ...] = (2, 5), rounds: int = 2) -> HonestMeanDeviation:
    stage = ScenarioContext("poisoners", 1, peers=7, rounds=rounds, quorum="two-thirds")
    return play_poisoners(stage, list(places), attack, statistic)


@pytest.mark.parametrize("attack", GANGS)
def test_the_default_rule_bears_every_attack_that_moves_a_mean(attack: str):
    """A mean of what was sent would be elsewhere, by far with most attacks; what is agreed on is the honest mean
    except for a third of a spread. A member that sends no number is refused by name and expelled, and no other
    member is.
    """
    harm = poisoned(attack, "robust")
    assert harm.moved < 0.4
    hides = attack in ("alie", "alie 1.5", "min-max", "mimic", "alie, optimised")  # and does less
    assert harm.moved_a_mean > (0.05 if hides else 1.0)
    assert harm.refused == harm.out.keys() == (harm.gang.liars if attack in REFUSED else set())


@pytest.mark.parametrize("statistic", ["krum", "nnm + multi_krum"])
def test_a_rule_that_needs_more_rows_than_are_left_goes_on_when_whoever_sends_none_is_out(statistic: str):
    """It needs seven of seven rows to withstand two liars, and five are left: the first round has no answer, and of
    five members one may lie."""
    harm = poisoned("nan", statistic, rounds=3)
    assert harm.rounds == {1, 2} and harm.out == dict.fromkeys(harm.gang.liars, 0)


@pytest.mark.parametrize("attack", GANGS)
def test_a_trimmed_mean_stays_within_its_proof_under_every_attack(attack: str):
    harm = poisoned(attack, "trimmed_mean", rounds=1)
    assert harm.moved < 0.7 < bound("trimmed_mean", 7, 2, 1.0)


@pytest.mark.parametrize("attack", ["sign flip", "foe 2", "scaling", "gaussian", "largest"])
def test_with_a_mean_in_its_place_the_same_attacks_break_the_bound(attack: str, monkeypatch: pytest.MonkeyPatch):
    """Mutant: what is called a trimmed mean is a mean."""
    monkeypatch.setitem(statistic.OF_COLUMNS, "trimmed_mean", lambda rows, *_: sum(rows) / len(rows))
    with pytest.raises(InvariantBroken, match="moved round 0 by"):
        poisoned(attack, "trimmed_mean", rounds=1)


@pytest.mark.parametrize("attack", ["largest", "nan"])
def test_huge_rows_may_come_first(attack: str):
    """Rows stand in the order of their authors: the first is what a careless rule measures the others from."""
    assert poisoned(attack, "robust", places=(0, 1)).moved < 1e-3


@pytest.mark.parametrize("attack", ["alie", "min-max", "mimic", "foe, optimised"])
def test_poisoners_know_what_the_honest_will_send_and_send_it_together(attack: str):
    """Lies were made when the first of them committed, some honest ones not yet: they are of the rows that came."""
    gang = poisoned(attack, "robust").gang
    for said in gang.said.values():
        honest_HV = torch.stack([said[peer] for peer in sorted(said.keys() - gang.liars)])
        told = [said[peer] for peer in sorted(gang.liars)]
        assert len(honest_HV) == 5 and torch.equal(torch.stack(told), attack_rows(attack, honest_HV, 2, gang.rule))


def test_bounds_are_those_of_the_paper():
    """Seven rows, two of them lies: κ = 20/3, 10 and 100/9; what has no proof in this form has two diameters."""
    assert bound("trimmed_mean", 7, 2, 9.0) ** 2 == pytest.approx(20 / 3)
    assert bound("krum", 7, 2, 9.0) ** 2 == pytest.approx(10)
    assert bound("median", 7, 2, 9.0) == bound("geometric_median", 7, 2, 9.0) == pytest.approx(10 / 3)
    assert bound("robust", 7, 2, 9.0) == 18


@pytest.mark.parametrize("seed", [3, pytest.param(2, marks=pytest.mark.long)])
def test_drawn_attacks_against_drawn_statistics(seed: int):
    report = run_scenario("poisoners", seed, peers=4 if seed % 2 else 10, rounds=3)
    assert report.rounds >= 3 and 0 < report.measured["moved"] < math.inf


@pytest.mark.parametrize("statistic", ["nnm + krum", "nnm + meamed"])
def test_an_attack_is_optimized_against_mixed_rows(statistic: str):
    """The liars know the rule of the run, with its mixing of rows, and search their attack against it."""
    assert poisoned("alie, optimised", statistic, rounds=1).rounds == {0}
