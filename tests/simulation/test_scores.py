"""Swarms that score updates: who teaches nothing stays on probation, a member that lies about it; records agree."""

from __future__ import annotations

import pytest

from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.loss_scoring import ScoringReportRecorder, play_scores
from atoll.simulation.swarm import peer_name
from atoll.verification.loss_scoring import policy


def played(
    kinds: dict[int, str], peers: int = 4, rounds: int = 20, network: NetworkKnobs | None = None
) -> ScoringReportRecorder:
    """Ends with a look at every record: cheats on probation, no honest peer there."""
    return play_scores(ScenarioContext("scores", 1, peers, rounds, "two-thirds"), kinds, network)


@pytest.mark.parametrize("kind", ["copycat", "noise", "refuser", "joker"])
def test_updates_that_teach_nothing_keep_their_author_on_probation(kind: str):
    told = played({2: kind})
    found = told.opinions[peer_name(2)]
    assert not found["taught"] and found["hollow"] >= (3 if kind == "copycat" else 1)


@pytest.mark.parametrize("kind", ["slanderer", "praiser", "mute"])
def test_a_scorer_that_lies_or_is_silent_moves_no_record(kind: str):
    told = played({1: kind})
    assert all(not found["hollow"] for found in told.opinions.values())


def test_whoever_names_anothers_update_as_its_own_and_hands_nothing_over_harms_itself_alone():
    """The other's is not left aside because the same bytes are said to be on their way already."""
    told = played({2: "squatter"}, network=NetworkKnobs(0.01, 0.2, jitter_s=0.05))
    assert all(not found["hollow"] for peer, found in told.opinions.items() if peer != peer_name(2))


def test_two_of_seven_lie_for_each_other_and_gain_nothing():
    told = played({1: "copycat", 4: "praiser"}, peers=7)
    assert not told.opinions[peer_name(1)]["taught"]


def test_it_is_so_on_a_network_that_loses_words():
    played({3: "noise"}, network=NetworkKnobs(0.01, 0.2, jitter_s=0.05, loss_rate=0.02))


def test_if_a_bare_sign_were_enough_copies_would_teach(monkeypatch: pytest.MonkeyPatch):
    """Mutant: an update teaches as soon as own samples gain a little more."""
    monkeypatch.setattr(policy, "ERRORS_LEAST", 0)
    with pytest.raises((InvariantBroken, AssertionError)):
        test_updates_that_teach_nothing_keep_their_author_on_probation("copycat")


def test_records_stay_the_same_in_bad_weather():
    """Restarts, sleeps, partitions, joins: a member that differed in one score would stop voting, and no member
    finishes.
    """
    run_scenario("scored_churn", 3, peers=5, rounds=8, quorum="two-thirds")


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(20), 5014])  # the last: of one honest member no member is ever sure
def test_many_swarms_that_score(seed: int):
    run_scenario("scores", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("scored_churn", seed)


def test_runs_without_scores_are_encoded_as_they_always_were():
    plain = encode_settings(RunSettings())
    assert b"score_rate" not in plain and b"score_rate" in encode_settings(RunSettings(score_rate=0.05))
    assert decode_settings(plain).scored_share == 0.0
