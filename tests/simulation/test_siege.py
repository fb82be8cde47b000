"""Every kind of villain at once, nearly a third of all, in bad weather: safety, and a bound on their influence.

As many more seeds as there is time for, on all cores, under `make long`.
"""

from __future__ import annotations

from random import Random

import pytest

from atoll.policy import membership
from atoll.protocol.allreduce.cross_check import CrossCheck
from atoll.simulation.adversaries.influence_bound import allowed, combined_worth
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.churn import FaultInjector
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.mixed_byzantine import MOUTHS, MixedByzantineChecker, play_siege
from atoll.training.exchange import statistic


@pytest.mark.parametrize("seed", [4, pytest.param(9, marks=pytest.mark.long)])
def test_under_siege_nobody_honest_is_harmed_and_poison_moves_no_part_beyond_its_bound(seed: int):
    """Thirteen peers, three villains of drawn kinds: rounds go on, answers stay among the honest rows."""
    report = run_scenario("siege", seed, peers=13, rounds=2)
    assert report.rounds >= 2
    assert 0 < report.measured["liars_rows"] < 1 / 3
    assert report.measured["moved_per_part"] <= report.measured["allowed_per_part"]


def test_the_bound_is_that_of_sorted_rows_and_liars_reach_it():
    """Random honest rows, any lies: never outside. All lies on one side, and far: exactly at the end."""
    draw = Random(7)
    for _ in range(300):
        trim = draw.randrange(1, 6)
        lies = draw.randrange(trim + 1)
        honest = [draw.uniform(-1, 1) for _ in range(2 * trim + 1 + draw.randrange(6) - lies)]
        low, high = allowed(honest, lies, trim)
        poison = [draw.choice([1e6, -1e6, 0.95, draw.uniform(-1, 1)]) for _ in range(lies)]
        assert low - 1e-9 <= combined_worth("trimmed_mean", trim, honest + poison) <= high + 1e-9
        assert combined_worth("trimmed_mean", trim, honest + [1e6] * lies) == pytest.approx(high)
        assert combined_worth("trimmed_mean", trim, honest + [-1e6] * lies) == pytest.approx(low)


def test_every_kind_of_villain_that_the_simulator_knows_takes_part():
    """A new kind joins the siege by being in one of the tables."""
    assert len(MOUTHS) == 5 + 7 + 4 + 2 + 1


def storm(seed: int) -> ScenarioContext:
    """The weather is not held back: seven members, two of them villains, and one honest member less is too few."""
    stage = ScenarioContext("siege", seed, peers=7, rounds=3, quorum="two-thirds")
    play_siege(stage, {2: "silent", 5: "silent"})
    return stage


def test_where_the_weather_leaves_too_few_honest_members_the_story_ends_unjudged(monkeypatch: pytest.MonkeyPatch):
    """And where one of them was sent away that the weather had left alone, it fails."""
    monkeypatch.setattr(MixedByzantineChecker, "spare", lambda siege: 2)
    assert "not_judged_after" in storm(seed=1).measured
    monkeypatch.setattr(FaultInjector, "took", lambda weather, who, since: False)
    with pytest.raises(InvariantBroken, match=r"nothing is promised there, and .* were sent away"):
        storm(seed=1)


# ---- a rule is deleted, and the story notices --------------------------------------------------------------


def besieged(kinds: dict[int, str], seed: int = 1) -> None:
    play_siege(ScenarioContext("siege", seed, peers=7, rounds=3, quorum="two-thirds"), kinds)


def test_without_trimming_the_poison_decides(monkeypatch: pytest.MonkeyPatch):
    """Mutant: what is called a trimmed mean is a mean."""
    monkeypatch.setitem(statistic.OF_COLUMNS, "trimmed_mean", lambda rows, *_: sum(rows) / len(rows))
    with pytest.raises(AssertionError, match="liars moved part"):
        besieged({2: "silent", 5: "silent"})


def test_without_witnesses_a_false_sum_is_agreed_on(monkeypatch: pytest.MonkeyPatch):
    """Mutant: whatever one owner signs is believed."""
    monkeypatch.setattr(CrossCheck, "_believes_kind", lambda self, dispute, kind: True)
    with pytest.raises(AssertionError, match="a false answer was agreed on"):
        besieged({2: "miscounter", 5: "miscounter"})


def test_without_more_voices_than_may_lie_the_honest_are_expelled(monkeypatch: pytest.MonkeyPatch):
    """Mutant: one accuser is enough."""
    monkeypatch.setattr(membership, "suspicions_needed", lambda voters, rule: 1)
    with pytest.raises(AssertionError, match=r"was expelled|agreed .*'expelled'"):
        besieged({2: "framer", 5: "framer"})
