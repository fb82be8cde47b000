"""A voter that says two things in one slot is expelled by the next vertex, wherever members may lie."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Send
from atoll.keys.digest import digest
from atoll.node.settings import RunSettings
from atoll.policy.plan import QuorumRule, RoundSettings
from atoll.sim.swarm import Swarm, SwarmKnobs, honest, peer_name
from atoll.sim.villains import Twist, Villain
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import Propose, Voted
from atoll.wire.messages.statements import Proposed, Vote

LIAR = peer_name(2)


def votes_twice(villain: Villain, send: Send) -> list[Effect]:
    """Both votes to everybody."""
    if not isinstance(send.message, Voted):
        return [send]
    vote = decode_statement(send.message.statement.body, villain.peer.me)
    assert isinstance(vote, Vote)
    other = villain.notary.sign(replace(vote, digest=digest(vote.digest)))
    return [send, replace(send, message=replace(send.message, statement=other))]


def proposes_twice(villain: Villain, send: Send) -> list[Effect]:
    if not isinstance(send.message, Propose):
        return [send]
    proposed = decode_statement(send.message.statement.body, villain.peer.me)
    assert isinstance(proposed, Proposed)
    other = villain.notary.sign(replace(proposed, digest=digest(b"another body")))
    return [send, replace(send, message=replace(send.message, statement=other, body=b"another body"))]


def run_with(twist: Twist | None, rule: QuorumRule, until: float = 60.0) -> dict[PeerId, str]:
    """Standing of everybody after a minute of four members' training."""
    knobs = SwarmKnobs(4, run=RunSettings(round=RoundSettings(inner_steps=20, first_train_s=10, quorum=rule)))

    def make(*of) -> Villain:
        assert twist is not None
        return Villain(honest(*of), twist)

    swarm = Swarm(1, knobs, {2: make} if twist is not None else None)
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
