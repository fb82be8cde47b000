"""Honest peers that are slow, behind bad links, or unlucky with messages: no member ever accuses them."""

from __future__ import annotations

import pytest

from atoll.peer.events import MemberAccused
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.slow_links import slow
from atoll.wire.messages.statements import OwnerComplaint


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_twenty_rounds_with_slow_members_and_not_one_accusation(seed: int):
    """Two of seven at half the speed and a tenth of the bandwidth; a fifth of all updates is audited."""
    report = run_scenario("slow", seed)
    assert report.rounds >= 20 and report.measured["audits"] > 10


def test_one_complaint_would_be_noticed():
    """The first fact of an accusation ends the story."""
    stage = ScenarioContext("slow", 1, peers=4, rounds=2, quorum="two-thirds")

    def complain() -> None:
        node = stage.world.nodes[stage.swarm.founders[0]]
        stage.world.watchers[-1](
            stage.world.now, node, MemberAccused(peer=node.name, statement=OwnerComplaint(1, node.name, "withheld"))
        )

    gather = stage.gather

    def gathered(*words: object, **more: object):
        swarm = gather(*words, **more)
        stage.world.at(1.0, complain)
        return swarm

    stage.gather = gathered
    with pytest.raises(InvariantBroken, match="Complaint"):
        slow(stage)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 51))
def test_a_thousand_rounds_with_slow_members(seed: int):
    run_scenario("slow", seed)
