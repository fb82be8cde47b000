"""Equivocation where members may lie: two statements in one slot expel their author by the next vertex."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Fact, Send
from atoll.crypto.digest import digest
from atoll.peer.events import RoundAttemptFailed, RoundClosed
from atoll.peer.settings import RunSettings
from atoll.policy.plan import QuorumRule, RoundSettings
from atoll.simulation.adversaries.byzantine import ByzantineMember, Twist, equivocate, villain
from atoll.simulation.adversaries.lying_owners import two_promises
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, honest, peer_name
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import ProposalMessage, UpdateCommitmentMessage, VoteMessage
from atoll.wire.messages.statements import Proposal, Vote

LIAR = peer_name(2)


def votes_twice(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Both votes to all members."""
    if not isinstance(send.message, VoteMessage):
        return [send]
    vote = decode_statement(send.message.statement.body, villain.peer.me)
    assert isinstance(vote, Vote)
    other = villain.notary.sign(replace(vote, digest=digest(vote.digest)))
    return [send, replace(send, message=replace(send.message, statement=other))]


def proposes_twice(villain: ByzantineMember, send: Send) -> list[Effect]:
    if not isinstance(send.message, ProposalMessage):
        return [send]
    proposed = decode_statement(send.message.statement.body, villain.peer.me)
    assert isinstance(proposed, Proposal)
    other = villain.notary.sign(replace(proposed, digest=digest(b"another body")))
    return [send, replace(send, message=replace(send.message, statement=other, body=b"another body"))]


def commits_twice(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Half of the members receive a commitment to an update that never comes."""
    return equivocate(villain, send) if isinstance(send.message, UpdateCommitmentMessage) else [send]


def run_with(twist: Twist | None, rule: QuorumRule, until: float = 60.0) -> dict[PeerId, str]:
    """Standings after a minute of training by four members."""
    knobs = SwarmKnobs(4, run=RunSettings(round=RoundSettings(inner_steps=20, first_train_s=10, quorum=rule)))

    def make(*of) -> ByzantineMember:
        assert twist is not None
        return ByzantineMember(honest(*of), twist)

    swarm = VirtualSwarm(1, knobs, {2: make} if twist is not None else None)
    swarm.world.run(until)
    assert min(swarm.heads()) >= 3
    machine = swarm.world.nodes[peer_name(0)].machine
    assert machine is not None and machine.history is not None
    return {m.peer: m.standing for m in machine.history.head_body.members}


@pytest.mark.parametrize("twist", [votes_twice, proposes_twice])
def test_who_says_two_things_in_one_slot_is_expelled(twist: Twist):
    """Three honest members go on without it; none of them loses its place."""
    standing = run_with(twist, "two-thirds")
    assert standing.pop(LIAR) == "expelled"
    assert set(standing.values()) == {"member"}


def test_where_members_trust_each_other_nobody_is_judged():
    """A folder that runs twice is an accident there, and its owner stays a member."""
    assert run_with(votes_twice, "majority")[LIAR] == "member"


# ---- two commitments ---------------------------------------------------------------------------------------


def lengths_beside(twist: Twist | None, rule: QuorumRule) -> tuple[list[float], dict[PeerId, str], int]:
    """Virtual seconds of each of eight rounds of seven members, two of them liars; standings; failed attempts."""
    knobs = SwarmKnobs(7, run=RunSettings(round=RoundSettings(inner_steps=20, first_train_s=10, quorum=rule)))
    swarm = VirtualSwarm(1, knobs, {place: villain(twist) for place in (2, 5)} if twist is not None else None)
    closed: dict[int, float] = {}
    failed: list[Fact] = []

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            closed[fact.round] = now
        failed.extend([fact] if isinstance(fact, RoundAttemptFailed) else [])

    swarm.world.watchers.append(watch)
    swarm.world.run(300.0, stop=lambda: min(swarm.heads()) >= 7)
    ends = [0.0, *(closed[round] for round in range(8))]
    machine = swarm.honest[0].machine
    assert machine is not None and machine.history is not None
    standing = {m.peer: m.standing for m in machine.history.head_body.members}
    return [after - before for before, after in pairwise(ends)], standing, len(failed)


@pytest.mark.parametrize("twist", [equivocate, two_promises])
def test_who_commits_to_two_updates_is_expelled_and_costs_nobody_a_second(twist: Twist):
    """Two of seven tell each half another update. One disturbed round at most; all others are as long as ever."""
    undisturbed, _, _ = lengths_beside(None, "two-thirds")
    lengths, standing, failed = lengths_beside(twist, "two-thirds")
    assert [standing.pop(peer_name(place)) for place in (2, 5)] == ["expelled", "expelled"]
    assert set(standing.values()) == {"member"} and not failed
    assert max(lengths[1:]) <= max(undisturbed) + 1.0


def test_where_members_trust_each_other_two_updates_of_one_are_waited_for_by_nobody():
    """It stays a member, and the round ends without its rows that match neither commitment."""
    undisturbed, _, _ = lengths_beside(None, "majority")
    lengths, standing, failed = lengths_beside(commits_twice, "majority")
    assert set(standing.values()) == {"member"} and not failed
    assert max(lengths) <= max(undisturbed) + 1.0
