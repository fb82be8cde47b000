"""Proposers that are known to be gone cost a round trip each, however many of them follow each other."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from atoll.base.machine import Fact
from atoll.node.facts import RoundBegan, RoundClosed
from atoll.node.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.protocol.reduce.facts import Reduced
from atoll.sim.network import NetworkKnobs
from atoll.sim.swarm import Swarm, SwarmKnobs
from atoll.sim.world import Node

PEERS, ROUND, DEAD = 7, 4, 3
HOP_S = 0.02


@pytest.mark.parametrize("protocol", [UNSET, "raft"])
def test_dead_proposers_one_after_the_other_are_passed_as_fast_as_votes_travel(protocol):
    """Three of seven die as a round begins, whose turn it is to propose. The surprise: only the first of them was
    passed at once, each other one when most had happened to look again, which everybody does once a second."""
    settings = RunSettings(protocol=protocol, round=RoundSettings(inner_steps=20, first_train_s=10))
    swarm = Swarm(1, SwarmKnobs(PEERS, NetworkKnobs(HOP_S, HOP_S, jitter_s=0.0), run=settings))
    world, reduced, closed = swarm.world, dict[str, float](), dict[str, float]()

    def watch(now: float, node: Node, fact: Fact) -> None:
        match fact:
            case RoundBegan(round=round) if round == ROUND and len(swarm.heads()) == PEERS and not closed:
                agreement = node.machine.round.agreement
                for view in range(DEAD):
                    world.at(now, lambda view=view: world.crash(agreement.proposer(view)))
            case Reduced(round=round) if round == ROUND:
                reduced[node.name] = now
            case RoundClosed(round=round) if round == ROUND:
                closed[node.name] = now
            case _:
                pass

    world.watchers.append(watch)
    world.run(600, stop=lambda: len(closed) == PEERS - DEAD)
    assert len(closed) == PEERS - DEAD
    assert max(closed.values()) - max(reduced.values()) < 12 * HOP_S
