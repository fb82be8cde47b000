"""Invitations of hostile voters: no number halts a run, and no signed invitation counts twice."""

from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import PEERS_MAX
from atoll.base.machine import Received
from atoll.peer.peer import Peer
from atoll.peer.round.context import context_after
from atoll.peer.settings import RunSettings
from atoll.policy.membership import VerifiedReport
from atoll.policy.plan import RoundSettings
from atoll.policy.ticket_check import TICKET_EXPIRED
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import JoinRequest, SignedStatement, TicketInvite
from atoll.wire.messages.vertex import IssuedTicketRecord
from atoll.wire.ticket import ticket_id

FOUNDER, VOTER, STRANGER = peer_name(0), peer_name(3), PeerId("stranger")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()
TICKET = ticket_id(KEY)


@pytest.fixture
def swarm() -> VirtualSwarm:
    """Four voters that trained for 20 s."""
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds")
    swarm = VirtualSwarm(1, SwarmKnobs(4, run=RunSettings(round=plan)))
    swarm.world.run(20.0)
    return swarm


def machines(swarm: VirtualSwarm) -> list[Peer]:
    found = [swarm.world.nodes[peer_name(index)].machine for index in range(4)]
    return [machine for machine in found if machine is not None]


def heads(swarm: VirtualSwarm) -> list[int]:
    return [machine.history.head for machine in machines(swarm) if machine.history is not None]


def signed(swarm: VirtualSwarm, by: PeerId, uses: int, expires_s: float) -> SignedStatement:
    notary = StatementSigner(swarm.run_id, VirtualSigner(by), VirtualSignatureVerifier())
    return notary.sign(TicketInvite(TICKET, KEY, "trainer", uses, expires_s))


def spread(swarm: VirtualSwarm, report: SignedStatement, by: PeerId) -> None:
    """All members receive the report from this peer; then three rounds pass."""
    for machine in machines(swarm):
        machine.handle(Received(by, ReportMessage(report)), swarm.world.now)
    before = min(heads(swarm))
    until = swarm.world.now + 120.0
    while min(heads(swarm)) < before + 3 and swarm.world.now < until:
        swarm.world.run(swarm.world.now + 5.0)


def uses_left(swarm: VirtualSwarm) -> list[int]:
    history = machines(swarm)[0].history
    assert history is not None
    return [t.uses_left for t in history.head_body.tickets if t.ticket == TICKET]


@pytest.mark.parametrize(
    ("uses", "expires_s"),
    [(1, float("nan")), (1, float("inf")), (1, -1.0), (1, 2.0**54), (-1, 1e6), (PEERS_MAX + 1, 1e6), (2**63, 1e6)],
)
def test_an_invitation_with_a_number_out_of_bounds_is_not_decoded(uses: int, expires_s: float):
    with pytest.raises(PeerFault):
        decode_statement(encode(TicketInvite(TICKET, KEY, "trainer", uses, expires_s)), VOTER)


def test_no_voter_halts_a_run_by_an_invitation_that_never_equals_itself(swarm: VirtualSwarm):
    before = heads(swarm)
    spread(swarm, signed(swarm, VOTER, 1, float("nan")), VOTER)
    assert min(heads(swarm)) >= max(before) + 2 and uses_left(swarm) == []


def test_a_revoked_ticket_stays_revoked_when_a_stranger_repeats_the_invitation(swarm: VirtualSwarm):
    """The signed invitation stands in the history, where any reader could copy and send it again."""
    invited = signed(swarm, FOUNDER, 1, 1e6)
    spread(swarm, invited, FOUNDER)
    assert uses_left(swarm) == [1]
    spread(swarm, signed(swarm, FOUNDER, 0, 1e6), FOUNDER)
    assert uses_left(swarm) == [0]
    spread(swarm, invited, STRANGER)
    assert uses_left(swarm) == [0]


def test_voters_refuse_a_join_by_an_expired_ticket_whoever_proposes_it(swarm: VirtualSwarm):
    """The time of the parent is agreed, so all voters come to the same answer."""
    machine = machines(swarm)[0]
    assert machine.round is not None
    ground, ticket = machine.round.ground, swarm.invite(FOUNDER)
    signer = VirtualSigner(STRANGER)
    proof, head = ticket.redeem(STRANGER), ground.plan.head
    join = JoinRequest(STRANGER, signer.vote_key, signer.certificate, (), "trainer", "", head, proof)
    for left_s, why in ((1.0, None), (-1.0, TICKET_EXPIRED)):
        use = IssuedTicketRecord(ticket.id, ticket.key, "trainer", 1, ground.parent.time_s + left_s)
        parent = replace(ground.parent, tickets=(use,))
        judged = context_after(ground.settings, ground.plan, parent, machine.pool.recent(), swarm.run_id)
        assert judged.admissible(VerifiedReport(STRANGER, join), parent.time_s) == why


def test_a_run_begins_with_members_whose_votes_are_not_earned_yet(swarm: VirtualSwarm):
    """Before training no member earns a vote, so waiting for votes would never end once the founder is gone."""
    machine = machines(swarm)[0]
    assert machine.round is not None
    ground = machine.round.ground
    lines = tuple(
        replace(m, role="trainer" if k < 2 else "apprentice") for k, m in enumerate(ground.parent.members)
    )
    parent = replace(ground.parent, trained=0, members=lines)
    for standing, begins in (("member", True), ("new", False), ("unaudited", False)):
        members = (*lines[:3], replace(lines[3], standing=standing))
        plan = dataclasses.replace(ground.plan, members=members)
        settings = replace(ground.settings, start_peers=4)
        made = context_after(settings, plan, parent, machine.pool.recent(), swarm.run_id)
        assert (made.topology is not None) == begins
