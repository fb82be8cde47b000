"""Swarms that look at what they agreed on: poison under a mean is left behind, and liars move no member."""

from __future__ import annotations

import pytest

from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.policy.capability_terms import StateValidationTerms
from atoll.runtime.config import load_config, recipe_of, settings_of
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.state_validation import LIES, ValidationRecorder, play_validated
from atoll.verification.state_validation import policy

VILLAINS = (1, 4)


def played(lie: str = "honest", poison: str = "huge", rounds: tuple[int, ...] = (), **how) -> ValidationRecorder:
    """Two of seven poison in these rounds; the model must be where it should be after 24."""
    return play_validated(
        ScenarioContext("validated", 3, 7, 24, "two-thirds"), VILLAINS, lie, poison, rounds, **how
    )


MORE_LIES = ("flatterer", "lifter", "silent")


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_ruined_model_is_left_within_a_few_rounds_whatever_liars_say_of_it(lie: str):
    """The state of round 8 is bad; round 10 goes back to what was agreed in round 7. Its contributors are named."""
    told = played(lie, rounds=(8,))
    ((round, back),) = told.returns.items()
    assert (round, back.back_to, back.refused) == (10, 7, (8, 9))
    assert {"p0001", "p0004"} <= set(back.contributors)
    assert all(fact.opinion == "good" for of, fact in told.judged.items() if of != 8)


def test_poison_in_the_very_first_round_is_left_for_genesis():
    told = played(poison="scaling", rounds=(0,))
    assert [back.back_to for back in told.returns.values()] == [-1]


def test_poison_that_the_bound_lets_through_is_found_when_it_adds_up():
    """One round of it costs less than a tenth of a nat; two cost more, and only the second is refused."""
    told = played(poison="scaling", rounds=(12, 13))
    ((_, back),) = told.returns.items()
    assert back.back_to == 12 and told.judged[12].opinion == "good"


def test_every_other_round_is_enough():
    told = played(rounds=(8, 9), rule=StateValidationTerms(every=2))
    assert [back.back_to for back in told.returns.values()] == [7]


def test_a_mean_of_four_that_may_lie_is_looked_at_though_only_trust_is_written():
    """One of four ruins a round. The rule is what the config makes of it; the model is where it should be."""
    config = load_config(None, ("run.trust=community", "run.start_peers=4", "sync.statistic=mean"), {})
    rule = settings_of(config, recipe_of(config)).validated
    assert rule is not None
    told = play_validated(
        ScenarioContext("validated", 3, 4, 24, "two-thirds"), (1,), "silent", "huge", (8,), rule=rule
    )
    assert [back.back_to for back in told.returns.values()] == [7]


def test_it_is_so_on_a_network_that_loses_words():
    told = played(rounds=(8, 9), network=NetworkKnobs(0.01, 0.2, jitter_s=0.05, loss_rate=0.03))
    assert told.returns and all(back.back_to <= 8 for back in told.returns.values())


@pytest.mark.parametrize("lie", ["wolf", *(pytest.param(lie, marks=pytest.mark.long) for lie in MORE_LIES)])
def test_liars_never_send_a_good_model_back(lie: str):
    told = played(lie, poison="")
    assert told.returns == {} and {fact.opinion for fact in told.judged.values()} == {"good"}


def test_drawn_villains_and_bad_weather():
    run_scenario("validated", 8)
    run_scenario("wolves", 2)
    run_scenario("validated_churn", 3, peers=6, rounds=14)


@pytest.mark.parametrize("kept", [1, 2])
def test_the_state_that_is_needed_is_kept_though_disks_hold_hardly_any(kept: int, monkeypatch: pytest.MonkeyPatch):
    """Only the newest state or two would stay on these disks."""
    from atoll.simulation.scenarios import state_validation as stories

    made = stories.islands

    def small(*how):
        make = made(*how)

        def island(me, knobs, draw):
            knobs.states_kept = kept
            return make(me, knobs, draw)

        return island

    monkeypatch.setattr(stories, "islands", small)
    told = played(rounds=(8,))
    assert [back.back_to for back in told.returns.values()] == [7]


def test_runs_without_validation_are_encoded_as_they_always_were():
    plain, looked_at = encode_settings(RunSettings()), RunSettings(validation=StateValidationTerms(2, 50))
    assert b"validation" not in plain and decode_settings(plain).validated is None
    assert decode_settings(encode_settings(looked_at)).validated == StateValidationTerms(2, 50)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3000, 3060))
def test_many_validated_swarms(seed: int):
    run_scenario("validated", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("wolves", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("validated_churn", seed)


# ---- a rule is deleted, and the scenarios notice -----------------------------------------------------------


def test_if_one_voice_were_enough_any_liar_would_send_anybody_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy, "voices", lambda voters, rule: 1)
    with pytest.raises(ScenarioFailed, match="sent an honest run back"):
        run_scenario("wolves", 1)


@pytest.mark.long
def test_if_nobody_went_back_the_model_would_stay_ruined(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy.ValidationLedger, "demanded", lambda self, head: None)
    with pytest.raises(InvariantBroken, match="from where it should be"):
        played(rounds=(8,))
    with pytest.raises(ScenarioFailed, match="from where it should be"):
        run_scenario("validated_churn", 1, peers=6, rounds=14)
