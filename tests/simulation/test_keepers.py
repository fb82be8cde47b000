"""Liars that want to keep the chair: who proposes next is none of their choice, whatever they write."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.draw import draw_below
from atoll.base.machine import Effect, Fact, Send
from atoll.peer.events import ProposalRejected, RoundClosed
from atoll.policy.plan import RoundPlan
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext


def test_liars_that_try_bodies_have_their_turns_and_no_more():
    """Three of ten, 256 bodies each time: where they propose none of them is audited, elsewhere as often as all."""
    report = run_scenario("keepers", 1, rounds=30)
    assert report.measured["liars_propose"] == report.measured["liars"] == 0.3
    assert report.measured["audited_by_liars"] == 0 < 0.1 < report.measured["audited_by_honest"]


@pytest.mark.long
def test_where_the_id_of_a_vertex_draws_the_next_proposer_liars_keep_the_chair(monkeypatch: pytest.MonkeyPatch):
    """Mutant: as it was. Once one of them has it, no other member gets it."""
    drawn = property(lambda plan: sorted(plan.voters)[draw_below(plan.head, "proposer", len(plan.voters))])
    monkeypatch.setattr(RoundPlan, "first", drawn)
    with pytest.raises(ScenarioFailed, match=r"3 of 10 wrote \d\d of 20"):
        run_scenario("keepers", 1, rounds=20)


def test_a_body_that_names_another_as_its_writer_gets_no_vote():
    """The turn after it would be that of a member that follows the name."""

    def under_another_name(liar: ByzantineMember, send: Send) -> list[Effect]:
        round = liar.peer.round
        if round is not None and "write" not in vars(round.proposal):
            write, other = round.proposal.write, liar.others[0]
            vars(round.proposal)["write"] = lambda *args: replace(write(*args), proposer=other)
        return [send]

    stage, facts = ScenarioContext("keepers", 1, 4, 8, "two-thirds"), list[Fact]()
    swarm = stage.gather(villains={2: villain(under_another_name)})
    stage.world.watchers.append(lambda now, node, fact: facts.append(fact))
    stage.until_round(7)
    assert any(isinstance(f, ProposalRejected) and "wrote it" in f.why for f in facts)
    honest = set(swarm.founders) - swarm.checkers.villains
    assert {f.body.proposer for f in facts if isinstance(f, RoundClosed)} == honest
