"""Proposers that are gone, or propose what is wrong, cost a round trip each, however many follow each other."""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest
from atoll.base.machine import Effect, Event, Fact, Send, expand_broadcasts
from atoll.peer.events import ProposalRejected, RoundBegan, RoundClosed
from atoll.peer.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.protocol.allreduce.events import PartsReduced
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_body, decode_statement, encode, vertex_id
from atoll.wire.messages.round import ProposalMessage

PEERS, ROUND, DEAD = 7, 4, 3
HOP_S = 0.02


@pytest.mark.parametrize("protocol", [UNSET, "raft"])
def test_dead_proposers_one_after_the_other_are_passed_as_fast_as_votes_travel(protocol):
    """Three of seven, the next proposers, die as a round begins. The surprise: only the first of them was
    passed at once, each other one when most had happened to look again, which every member does once a second."""
    settings = RunSettings(protocol=protocol, round=RoundSettings(inner_steps=20, first_train_s=10))
    swarm = VirtualSwarm(1, SwarmKnobs(PEERS, NetworkKnobs(HOP_S, HOP_S, jitter_s=0.0), run=settings))
    world, reduced, closed = swarm.world, dict[str, float](), dict[str, float]()

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        match fact:
            case RoundBegan(round=round) if round == ROUND and len(swarm.heads()) == PEERS and not closed:
                agreement = node.machine.round.agreement
                for view in range(DEAD):
                    world.at(now, lambda view=view: world.crash(agreement.proposer(view)))
            case PartsReduced(round=round) if round == ROUND:
                reduced[node.name] = now
            case RoundClosed(round=round) if round == ROUND:
                closed[node.name] = now
            case _:
                pass

    world.watchers.append(watch)
    world.run(600, stop=lambda: len(closed) == PEERS - DEAD)
    assert len(closed) == PEERS - DEAD
    assert max(closed.values()) - max(reduced.values()) < 12 * HOP_S


def no_body(raw: bytes) -> bytes:
    return b"\xc1" + raw


def false_state(raw: bytes) -> bytes:
    return encode(replace(decode_body(raw), state=Digest(bytes(32))))


@pytest.mark.parametrize("wrong", [no_body, false_state])
def test_wrong_proposals_one_after_the_other_are_passed_as_fast_as_votes_travel(wrong):
    """Two of seven sign what no member can vote for. Each of their views had its whole time before: 3 s,
    and 6 s.
    """
    settings = RunSettings(round=RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds"))
    swarm = VirtualSwarm(1, SwarmKnobs(PEERS, NetworkKnobs(HOP_S, HOP_S, jitter_s=0.0), run=settings))
    world, reduced, closed, disagreed = swarm.world, dict[str, float](), dict[str, float](), list[str]()

    def lies(node: VirtualComputer) -> None:
        machine = node.machine
        assert machine is not None
        handle = machine.handle

        def twisted(event: Event, now: float) -> list[Effect]:
            return [said_otherwise(node, effect) for effect in expand_broadcasts(handle(event, now))]

        machine.handle = twisted

    def said_otherwise(node: VirtualComputer, effect: Effect) -> Effect:
        if not isinstance(effect, Send) or not isinstance(effect.message, ProposalMessage) or closed:
            return effect
        message, raw = effect.message, wrong(effect.message.body)
        proposed = decode_statement(message.statement.body, node.name)
        signed = node.machine.notary.sign(replace(proposed, digest=vertex_id(raw)))
        return replace(effect, message=replace(message, statement=signed, body=raw))

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        match fact:
            case RoundBegan(round=round) if round == ROUND and not swarm.checkers.villains:
                agreement = node.machine.round.agreement
                liars = [agreement.proposer(view) for view in range(2)]
                swarm.checkers.villains = frozenset(liars)
                for name in liars:
                    lies(world.nodes[name])
            case PartsReduced(round=round) if round == ROUND:
                reduced[node.name] = now
            case RoundClosed(round=round) if round == ROUND:
                closed[node.name] = now
            case ProposalRejected():
                disagreed.append(fact.proposer)
            case _:
                pass

    world.watchers.append(watch)
    world.run(600, stop=lambda: len(closed) == PEERS)
    assert set(disagreed) == swarm.checkers.villains and len(closed) == PEERS
    assert max(closed.values()) - max(reduced.values()) < 12 * HOP_S
