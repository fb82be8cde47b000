"""Parts that lose all their owners in the middle of a round: a member that is left combines them, and is held to
it.

Two owners per part here, where runs have six: the same story among eight members and not twenty.
"""

from __future__ import annotations

from typing import cast

import pytest

from atoll.policy import plan
from atoll.policy.capability_terms import SumCheckTerms
from atoll.protocol.allreduce import topology
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.replay_audits import as_it_is
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.all_owners_lost import OrphanedPart
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.sum_check import CUT, LyingOwnerWorker, islands
from atoll.simulation.swarm import SwarmKnobs, peer_name

OWNERS = 2


@pytest.fixture(autouse=True)
def _few_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (topology, plan):
        monkeypatch.setattr(module, "OWNERS_PER_PART", OWNERS)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 30))])
def test_whoever_is_left_combines_a_part_whose_owners_are_all_gone(seed: int):
    """They die or freeze at drawn moments, twice, under each trust: all who are left are in it, and agree on it."""
    assert run_scenario("orphans", seed, peers=8, rounds=2).rounds >= 6


def test_whoever_stands_in_and_lies_is_opened_like_any_owner():
    """Owners die again and again, and one of eight lies about nothing but parts that it stands in for: blocks of
    them are opened, and it is out for good."""
    stage, liar = ScenarioContext("orphans", 2, peers=8, rounds=0, quorum="two-thirds"), peer_name(5)
    settings = stage.settings(round=stage.paced(), tolerance=0.33, openings=SumCheckTerms(0.5, CUT.leaf_bytes))
    kinds = islands({liar: "accomplice"})
    stage.gather(SwarmKnobs(stage.peers, run=settings), {5: villain(as_it_is)}, island=kinds)
    node = stage.world.nodes[liar]
    island = node.island
    assert isinstance(island, LyingOwnerWorker)

    def stands_in(part: int) -> bool:
        round = cast(ByzantineMember, node.machine).peer.round
        return (
            round is not None and round.reduce is not None and round.reduce.accumulators[part].owner_index >= OWNERS
        )

    def standing() -> str:
        assert stage.newest is not None
        return next(m.standing for m in stage.newest.head_body.members if m.peer == liar)

    island.captures = stands_in
    stage.until_round(1)
    while not island.false:
        OrphanedPart(stage).play()
        stage.demand_progress(rounds=1)
    stage.until(lambda: standing() == "expelled", 120.0, "nobody found the lie")
