"""Owners that lie about their parts, beside owners that watch them: nothing false is agreed on, liars leave.

Every scenario checks each agreed part against the very rows that its contributors encoded.
"""

from __future__ import annotations

from collections import Counter

import pytest

from atoll.base.ids import PeerId
from atoll.base.machine import Effect
from atoll.peer.membership import report_broadcaster, report_pool
from atoll.peer.round import context
from atoll.peer.settings import RunSettings
from atoll.policy import fault_tolerance, membership
from atoll.policy.plan import RoundSettings
from atoll.protocol.allreduce.cross_check import CrossCheck
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.verified import CrossCheckedOwners
from atoll.simulation.adversaries.lying_owners import CROOKS
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.lying_owners import PROVEN, play_crooks, watched
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm


@pytest.mark.parametrize("kind", sorted(set(CROOKS) - {"framer"}))
def test_two_lying_owners_of_seven_are_out_within_three_rounds(kind: str):
    """Whatever the lie, what is agreed on is true; who signed it never comes back, who was silent may."""
    stage = ScenarioContext(f"owners/{kind}", 1, peers=7, rounds=3, quorum="two-thirds")
    play_crooks(stage, {2: kind, 5: kind})
    newest = stage.newest
    assert newest is not None
    standing = {m.peer: m.standing for m in newest.head_body.members}
    if kind in PROVEN:
        assert {standing[v] for v in stage.swarm.checkers.villains} == {"expelled"}


def test_one_liar_of_each_kind_in_a_drawn_swarm():
    assert run_scenario("owners", 4, rounds=3).rounds >= 3


def test_villains_that_call_everybody_a_liar_are_not_believed():
    """Two of seven show true answers, the same one twice, two of different owners, and nonsense of their own."""
    assert run_scenario("framers", 1, rounds=4).members == 7


@pytest.mark.parametrize("crashes", [False, True])
def test_who_made_the_bytes_of_an_answer_is_not_sent_them_unless_it_came_back(
    crashes: bool, monkeypatch: pytest.MonkeyPatch
):
    """Seven, two witnesses for each part: one of them restarts when it has signed, and holds every answer again."""
    heard, said = CrossCheckedOwners.accept_result, CrossCheckedOwners.publish_result
    plan = RoundSettings(inner_steps=5, first_train_s=10, quorum="two-thirds")
    run = RunSettings(open_to_all=True, round=plan, tolerance=0.33, witnessed=True)
    sent, swarm = Counter[tuple[PeerId, bool]](), VirtualSwarm(1, SwarmKnobs(7, run=run))
    fallen: list[PeerId] = []

    def hears(self, result, now):
        if result.payload is not None and result.answered.round == 2:
            sent[self.me, self.me in self.plan.parallel_owners(result.answered.part)] += 1
        return heard(self, result, now)

    def signs(self, held, now):
        if crashes and not fallen and held.result.round == 2 and held.result.owner_index == 1:
            fallen.append(self.me)
            swarm.world.at(swarm.world.now + 0.05, lambda: swarm.world.crash(fallen[0]))
            swarm.world.at(swarm.world.now + 0.06, lambda: swarm.world.start(fallen[0]))
        return said(self, held, now)

    monkeypatch.setattr(CrossCheckedOwners, "accept_result", hears)
    monkeypatch.setattr(CrossCheckedOwners, "publish_result", signs)
    swarm.world.run(600, stop=lambda: min(swarm.heads()) >= 3)
    assert min(swarm.heads()) >= 3 and swarm.checkers.complaints == 0
    assert {peer for peer, made in sent if made} == set(fallen) and len(fallen) == crashes


@pytest.mark.parametrize(
    ("seed", "peers", "rounds"),
    [(2, 4, 30), *(pytest.param(*more, marks=pytest.mark.long) for more in ((1, 7, 20), (3, 5, 30), (4, 4, 30)))],
)
def test_a_hundred_honest_rounds_over_a_network_that_loses_messages(seed: int, peers: int, rounds: int):
    """One message of a hundred is lost: no member is accused, and no member loses its place."""
    check_honest(seed, peers, rounds)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 150))
def test_a_thousand_honest_rounds(seed: int):
    check_honest(seed, 7, 20)


def check_honest(seed: int, peers: int, rounds: int) -> None:
    stage = ScenarioContext("watched", seed, peers, rounds, "two-thirds")
    watched(stage)
    assert stage.swarm.checkers.complaints == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_hundreds_of_crooked_swarms(seed: int):
    run_scenario("owners", seed, peers=[4, 5, 7, 7, 10][seed % 5])
    run_scenario("framers", seed, peers=[4, 5, 7, 7, 10][seed % 5])


# ---- a rule is deleted, and the scenarios notice -----------------------------------------------------------


def test_without_witnesses_a_lie_is_agreed_on(monkeypatch: pytest.MonkeyPatch):
    """Mutant: whatever one owner signs is believed."""
    monkeypatch.setattr(CrossCheck, "believes", lambda self, answered: True)
    monkeypatch.setattr(CrossCheck, "_believes_signed", lambda self, result: True)
    with pytest.raises(ScenarioFailed, match="false answer"):
        run_scenario("owners", 2, rounds=3)


def test_if_one_accuser_were_enough_anybody_could_be_framed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership, "suspicions_needed", lambda voters, rule: 1)
    with pytest.raises(ScenarioFailed, match=r"lost their place|agreed .*'expelled'"):
        run_scenario("framers", 2, rounds=4)


def test_two_answers_prove_a_lie_only_in_one_slot(monkeypatch: pytest.MonkeyPatch):
    """Mutant: any two answers of one owner are taken for a contradiction."""
    monkeypatch.setattr(membership, "slot_of", lambda statement: ("answer", 0, 0, ""))
    with pytest.raises(ScenarioFailed, match=r"lost their place|agreed .*'expelled'"):
        for seed in range(1, 4):
            run_scenario("framers", seed, rounds=6)


# ---- a large committee: a jury opens the rows of doubted parts, for all ------------------------------------


def test_a_jury_makes_doubted_parts_again_and_nobody_else_asks_for_a_row(monkeypatch: pytest.MonkeyPatch):
    """Twelve members, called a large committee, a jury of two: no part is missing, and both liars are out."""
    monkeypatch.setattr(context, "COMMITTEE_MAX", 8)
    monkeypatch.setattr(fault_tolerance, "VOICES", 6)
    wishes: list[bool] = []
    open_row = AllReduce._open_row

    def watch(reduce: AllReduce, sender: PeerId, part: int, author: PeerId) -> list[Effect]:
        wishes.append(reduce.plan.recomputes_disputes(part, sender))
        return open_row(reduce, sender, part, author)

    monkeypatch.setattr(AllReduce, "_open_row", watch)
    stage = ScenarioContext("jury", 1, peers=12, rounds=2, quorum="two-thirds")
    play_crooks(stage, {2: "miscounter", 5: "two_tongued"})
    assert wishes and all(wishes)
    assert stage.newest is not None
    assert all(None not in body.parts for body in stage.newest.bodies.values())


def test_voices_reach_a_vertex_though_only_two_writers_are_told(monkeypatch: pytest.MonkeyPatch):
    """Seven members, called many. More than two must say that they made the sum again: the liar is out in time."""
    monkeypatch.setattr(report_pool, "COMMITTEE_MAX", 4)
    monkeypatch.setattr(report_broadcaster, "WRITERS_TOLD", 2)
    play_crooks(ScenarioContext("voices", 3, peers=7, rounds=3, quorum="two-thirds"), {2: "miscounter"})


def test_voices_that_nobody_is_told_end_nothing(monkeypatch: pytest.MonkeyPatch):
    """Mutant: each keeps its own."""
    monkeypatch.setattr(report_pool, "COMMITTEE_MAX", 4)
    monkeypatch.setattr(report_broadcaster, "WRITERS_TOLD", 0)
    with pytest.raises(AssertionError, match="the miscounter p0003 left after round None"):
        play_crooks(ScenarioContext("voices", 3, peers=7, rounds=3, quorum="two-thirds"), {3: "miscounter"})
