"""Swarms of members that replay each other's samples in secret: who does not learn from them is found, no
other member.
"""

from __future__ import annotations

from typing import Any

import pytest

from atoll.base.ids import PeerId
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.peer.tasks import TrainRound
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.redundant_training import RedundancyVirtualWorker
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.redundant_training import RedundancyReports, play_twins
from atoll.simulation.swarm import peer_name
from atoll.verification.redundant_training import policy


def played(
    kinds: dict[int, str], peers: int = 4, rounds: int = 16, network: NetworkKnobs | None = None
) -> RedundancyReports:
    """Ends with a look at every verdict: of no honest peer one that costs."""
    return play_twins(ScenarioContext("twins", 1, peers, rounds, "two-thirds"), kinds, network)


@pytest.mark.parametrize("kind", ["skipper", "stale", "elsewhere"])
def test_whoever_sends_another_update_than_its_samples_make_is_found(kind: str):
    told = played({2: kind})
    liar, honest = peer_name(2), peer_name(0)
    assert told.words[liar]["strayed"] >= 3 and told.worth[liar] < told.worth[honest] / 2


@pytest.mark.parametrize("kind", ["refuser", "joker"])
def test_whoever_shows_nothing_pays_as_for_silence_and_no_more(kind: str):
    told = played({2: kind})
    assert told.words[peer_name(2)]["hid"] and not told.words[peer_name(2)]["strayed"]


def test_two_referees_of_seven_who_find_everybody_far_off_move_no_record():
    told = played({1: "slanderer", 4: "slanderer"}, peers=7)
    assert len(told.pairs) > 5 and all(pair.opinion == "alike" for pair in told.pairs.values())


def test_if_one_word_were_enough_slanderers_would_drag_others_down(monkeypatch: pytest.MonkeyPatch):
    """Mutant: a member that one referee finds far off has strayed."""
    monkeypatch.setattr(policy.RedundancyCase, "_with_distance", lambda case, so: one_says(case, so))

    def one_says(case, so) -> tuple[PeerId, ...]:
        columns = zip(*case.said.values(), strict=True) if case.said else ()
        return tuple(peer for peer, of in zip(case.authors, columns, strict=False) if any(map(so, of)))

    with pytest.raises(InvariantBroken, match=r"(honest|slanderer) and was found"):
        test_two_referees_of_seven_who_find_everybody_far_off_move_no_record()


def test_a_liar_is_found_beside_a_friend_who_praises_it():
    assert played({1: "skipper", 4: "praiser"}, peers=7).words[peer_name(1)]["strayed"] >= 2


def test_whoever_reveals_another_secret_than_it_drew_by_does_not_count():
    """Its row is taken in no round in which it would have had to reveal one: its record falls."""
    told = played({2: "forger"})
    assert (
        told.worth[peer_name(2)] < min(worth for peer, worth in told.worth.items() if peer != peer_name(2)) - 1000
    )


def test_it_is_so_on_a_network_that_loses_words():
    played({3: "stale"}, network=NetworkKnobs(0.01, 0.2, jitter_s=0.05, loss_rate=0.02))


def test_nothing_that_members_say_depends_on_whose_samples_they_take(monkeypatch: pytest.MonkeyPatch):
    """The same swarm twice, once with guests and once without: the first vertices that follow are the same to the
    byte, though trainers took other samples for them. Only then are the first guests revealed."""

    def vertices() -> tuple[dict[int, bytes], set[tuple[PeerId, int, int]]]:
        taken = set[tuple[PeerId, int, int]]()

        def do(island: RedundancyVirtualWorker, work: Any) -> Any:
            if isinstance(work, TrainRound):
                taken.add((island.me, work.round, work.shard))
            return plain(island, work)

        plain = RedundancyVirtualWorker.run
        with monkeypatch.context() as patched:
            patched.setattr(RedundancyVirtualWorker, "run", do)
            stage = ScenarioContext("twins", 3, 4, 8, "two-thirds")
            told = play_twins(stage, {}, share=1.0)
        revealed = min(of for of, _ in told.found) + 1 if told.found else 99
        machine = stage.swarm.honest[0].machine
        assert machine is not None and machine.history is not None
        vertices = {r: v.body for r, v in machine.history.vertices.items() if r <= revealed}
        return vertices, {one for one in taken if one[1] <= revealed}

    said, taken = vertices()
    monkeypatch.setattr(policy.RedundancyDraw, "host", lambda *_: None)
    same, own = vertices()
    assert said == {round: same[round] for round in said}
    assert {one for one in own if one[1] in said} != taken


def test_records_stay_the_same_in_bad_weather():
    """Restarts, sleeps, partitions, joins: who draws otherwise after a restart would stray, and no member may."""
    run_scenario("twinned_churn", 3, peers=5, rounds=8, quorum="two-thirds")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_many_swarms_of_twins(seed: int):
    run_scenario("twins", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("twinned_churn", seed)


def test_runs_without_twins_are_encoded_as_they_always_were():
    plain = encode_settings(RunSettings())
    twinned = encode_settings(RunSettings(twin_rate=0.05, reputation=True))
    assert b"twin_rate" not in plain and decode_settings(plain).twinned_share == 0.0
    assert decode_settings(twinned).twinned_share == 0.05
