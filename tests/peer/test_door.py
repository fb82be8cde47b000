"""The door of a private run: a refusal ends no peer that it should not, and a stranger reads nothing."""

from __future__ import annotations

import msgspec
import pytest

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import (
    Effect,
    Emit,
    LinkDown,
    LinkUp,
    Message,
    Received,
    RunTask,
    Send,
    Start,
    TaskDone,
    TimerFired,
    expand_broadcasts,
)
from atoll.capabilities import CAPABILITIES
from atoll.crypto.digest import digest, manifest_of
from atoll.peer import operator_commands
from atoll.peer.events import JoinRejected
from atoll.peer.membership.admission import REFUSALS_MAX, DesiredRole
from atoll.peer.peer import Peer
from atoll.peer.settings import RunSettings
from atoll.policy.plan import QuorumRule, RoundSettings
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import encode
from atoll.wire.messages.audits import ExhibitRequest
from atoll.wire.messages.history import (
    ChunkRequest,
    EraSignaturesRequest,
    ManifestRequest,
    VerticesRequest,
    VerticesResponse,
)
from atoll.wire.messages.membership import Hello, JoinRefused, Ping
from atoll.wire.messages.preference import PreferenceRequest
from atoll.wire.messages.round import PartRequest
from atoll.wire.messages.statements import JoinRequest
from atoll.wire.messages.vertex import Vertex, VertexBody
from atoll.wire.ticket import Ticket

STRANGER, NOW = PeerId("stranger"), 60.0
VOTERS = [peer_name(index) for index in range(4)]


def swarm_of(rule: QuorumRule = "two-thirds", **more: object) -> VirtualSwarm:
    """Four voters that trained for 20 s."""
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum=rule)
    swarm = VirtualSwarm(1, SwarmKnobs(4, run=msgspec.structs.replace(RunSettings(round=plan), **more)))
    swarm.world.run(20.0)
    return swarm


def machine(swarm: VirtualSwarm, index: int = 0) -> Peer:
    found = swarm.world.nodes[peer_name(index)].machine
    assert found is not None
    return found


def facts(effects: list[Effect]) -> list[JoinRejected]:
    return [e.fact for e in effects if isinstance(e, Emit) and isinstance(e.fact, JoinRejected)]


def said_to(peer: PeerId, effects: list[Effect]) -> list[Message]:
    return [e.message for e in expand_broadcasts(effects) if isinstance(e, Send) and e.to == peer]


def hear(peer: Peer, by: PeerId, message: Message, now: Seconds = NOW) -> list[Effect]:
    return peer.handle(Received(by, message), now)


def follow(peer: Peer, **changes: object) -> None:
    """The history grows by a vertex with these changes."""
    assert peer.history is not None
    before = peer.history.head_body
    body = msgspec.structs.replace(before, round=before.round + 1, parent=peer.history.head_id, **changes)
    peer.history.restore(Vertex(encode(body), None))


def stand(body: VertexBody, who: PeerId, standing: str) -> dict[str, object]:
    line = body.members[0]
    others = tuple(m for m in body.members if m.peer != who)
    return {"members": (*others, msgspec.structs.replace(line, peer=who, standing=standing))}


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["majority", "two-thirds"])
def test_no_refusal_ends_a_member(rule: QuorumRule):
    """Neither a stranger's nor those of all other voters, however often they come."""
    founder = machine(swarm_of(rule))
    for by in (STRANGER, *VOTERS[1:]) * 9:
        assert facts(hear(founder, by, JoinRefused("E-JOIN-01"))) == []


def joiner(swarm: VirtualSwarm) -> tuple[Peer, Seconds]:
    """A joiner with the whole history from the first voter and a ticket that no vertex holds, sending its first
    join.
    """
    lost = Peer(
        swarm.run_id,
        VirtualSigner(STRANGER),
        VirtualSignatureVerifier(),
        DesiredRole("trainer"),
        None,
        VOTERS[:1],
        capabilities=CAPABILITIES,
    )
    for event in (Start({}), *(LinkUp(peer) for peer in VOTERS)):
        lost.handle(event, NOW)
    history = machine(swarm).history
    assert history is not None
    hear(lost, VOTERS[0], VerticesResponse(history.vertices_from(-1, 2**20), history.head))
    return lost, NOW


@pytest.mark.parametrize(("rule", "needed"), [("majority", 1), ("two-thirds", 2)])
def test_a_joiner_ends_once_more_voters_than_may_lie_refused_it_again_and_again(rule: QuorumRule, needed: int):
    """The text is the joiner's own; strangers and one voter twice count for nothing."""
    lost, now = joiner(swarm_of(rule))
    told: list[JoinRejected] = []
    for _ in range(REFUSALS_MAX):
        assert told == []
        now += 3.5
        lost.handle(TimerFired("beat"), now)  # it says its join again
        for by in (STRANGER, *VOTERS[: needed - 1] * 2):
            assert facts(hear(lost, by, JoinRefused("E-JOIN-04"), now)) == []
        told = facts(hear(lost, VOTERS[needed - 1], JoinRefused("E-JOIN-04"), now))
        assert facts(hear(lost, VOTERS[3], JoinRefused("E-JOIN-04"), now)) == []  # that join is answered
    assert [(fact.code, fact.what) for fact in told] == [("E-JOIN-04", "this ticket has expired")]


def test_a_joiner_asks_for_membership_once_its_computer_is_known_to_fit():
    """It catches up meanwhile, but no heartbeat sends its join. A refusal by its computer ends its requests."""
    late, now = joiner(swarm_of())
    late.admission.asked = None, -1e9  # as before its first join
    operator_commands.postpone(late)
    late.handle(TimerFired("beat"), now + 4)
    assert late.admission.asked[0] is None
    sent = operator_commands.seek_role(late, now + 5)
    assert late.admission.asked == (JoinRequest, now + 5) and sent
    operator_commands.withdraw(late)
    late.handle(TimerFired("beat"), now + 10)
    assert late.admission.asked == (JoinRequest, now + 5)


def test_before_genesis_only_the_dialed_peer_refuses():
    lost = Peer(
        digest(b"run"),
        VirtualSigner(STRANGER),
        VirtualSignatureVerifier(),
        DesiredRole("trainer"),
        None,
        VOTERS[:1],
        capabilities=CAPABILITIES,
    )
    lost.handle(Start({}), NOW)
    told: list[JoinRejected] = []
    for k in range(REFUSALS_MAX):
        assert told == []
        lost.handle(TimerFired("beat"), NOW + 2 * k)
        assert facts(hear(lost, VOTERS[1], JoinRefused("E-JOIN-01"), NOW + 2 * k)) == []
        told = facts(hear(lost, VOTERS[0], JoinRefused("E-JOIN-01"), NOW + 2 * k))
    assert [fact.by for fact in told] == [VOTERS[0]] and "used up" in told[0].what


def test_a_visitor_that_is_turned_away_later_ends():
    """It sends no join: all its messages are requests, and its ticket may be revoked meanwhile."""
    swarm = swarm_of("majority")
    lost = Peer(
        swarm.run_id,
        VirtualSigner(STRANGER),
        VirtualSignatureVerifier(),
        DesiredRole("visitor"),
        None,
        VOTERS[:1],
        capabilities=CAPABILITIES,
    )
    for event in (Start({}), *(LinkUp(peer) for peer in VOTERS)):
        lost.handle(event, NOW)
    history = machine(swarm).history
    assert history is not None
    hear(lost, VOTERS[0], VerticesResponse(history.vertices_from(-1, 2**20), history.head))
    state = history.head_body.state
    assert said_to(STRANGER, hear(machine(swarm), STRANGER, ManifestRequest(state))) == [JoinRefused("E-JOIN-01")]
    told = [facts(hear(lost, VOTERS[0], JoinRefused("E-JOIN-01"))) for _ in range(REFUSALS_MAX)]
    assert [len(found) for found in told] == [0] * (REFUSALS_MAX - 1) + [1]


# ---- reading -----------------------------------------------------------------------------------------------


def asks(peer: Peer) -> list[Message]:
    assert peer.history is not None
    state = peer.history.head_body.state
    want: list[Message] = [VerticesRequest(-1), VerticesRequest(3), ManifestRequest(state), ChunkRequest(state, 0)]
    return [
        *want,
        EraSignaturesRequest(1, ()),
        ExhibitRequest(1),
        PreferenceRequest("x", 0, state),
        Ping(NOW, 0),
        part(state),
    ]


def part(state: bytes) -> Message:
    return PartRequest(1, 0, "", digest(state))


def answers(peer: Peer, by: PeerId = STRANGER) -> set[str]:
    """Effects of all requests: kinds of messages, and disk jobs."""
    effects = [effect for message in asks(peer) for effect in hear(peer, by, message)]
    left = [e for e in effects if type(e).__name__ not in ("Send", "Broadcast", "SetTimer")]
    return {type(message).__name__ for message in said_to(by, effects)} | {type(e).__name__ for e in left}


ALL = {"VerticesResponse", "PingReply", "RunTask"}


def shown(swarm: VirtualSwarm, ticket: Ticket, who: PeerId = STRANGER) -> list[Message]:
    peer = machine(swarm)
    effects = peer.handle(LinkUp(who), NOW)
    assert [m.head for m in said_to(who, effects) if isinstance(m, Hello)] == [-2]
    return said_to(who, hear(peer, who, Hello(swarm.run_id, -2, ticket.redeem(who))))


def test_a_stranger_reads_nothing_of_a_private_run():
    """Any request gets a refusal and no work is done for it; its hello reveals no round."""
    swarm = swarm_of()
    assert answers(machine(swarm)) == {"JoinRefused"}
    (first,) = said_to(STRANGER, machine(swarm).handle(LinkUp(STRANGER), NOW))
    assert isinstance(first, Hello) and first.head == -2


@pytest.mark.parametrize("open_run", [{"public": True}, {"open_to_all": True}])
def test_a_public_run_is_read_by_all(open_run: dict[str, bool]):
    assert answers(machine(swarm_of(**open_run))) == ALL


def test_a_ticket_lets_its_holder_read_until_it_is_revoked_used_up_or_the_link_is_gone():
    swarm = swarm_of()
    ticket, peer = swarm.invite(VOTERS[0]), machine(swarm)
    swarm.world.run(40.0)
    assert peer.history is not None
    (use,) = peer.history.head_body.tickets
    (hello,) = shown(swarm, ticket)
    assert isinstance(hello, Hello) and hello.head == peer.history.head
    assert answers(peer) == ALL
    other = PeerId("other")  # a redemption is good for the peer that it names, and for no other
    peer.handle(LinkUp(other), NOW)
    assert hear(peer, other, Hello(swarm.run_id, -2, ticket.redeem(STRANGER))) == []
    assert answers(peer, other) == {"JoinRefused"}
    for left in ((), (msgspec.structs.replace(use, expires_s=NOW - 1),)):
        follow(peer, tickets=left)
        assert answers(peer) == {"JoinRefused"}
        follow(peer, tickets=(use,))
        assert answers(peer) == ALL
    peer.handle(LinkDown(STRANGER, refused=False), NOW)
    assert answers(peer) == {"JoinRefused"}


def test_what_the_disk_brings_after_a_ticket_was_revoked_does_not_leave():
    swarm = swarm_of()
    ticket, peer = swarm.invite(VOTERS[0]), machine(swarm)
    swarm.world.run(40.0)
    shown(swarm, ticket)
    assert peer.history is not None
    (ask,) = [
        e for e in hear(peer, STRANGER, ManifestRequest(peer.history.head_body.state)) if isinstance(e, RunTask)
    ]
    follow(peer, tickets=())
    assert said_to(STRANGER, peer.handle(TaskDone(ask.job, manifest_of(b"state")), NOW)) == []


def test_a_member_that_is_away_reads_and_an_expelled_one_is_shown_its_end_and_no_more():
    swarm = swarm_of()
    peer = machine(swarm)
    assert peer.history is not None
    follow(peer, **stand(peer.history.head_body, STRANGER, "away"))
    away = peer.history.head
    assert answers(peer) == ALL
    follow(peer, **stand(peer.history.head_body, STRANGER, "expelled"))
    for _ in range(2):
        follow(peer)
    for k, first in enumerate((away, away + 1, away + 3)):
        told = said_to(STRANGER, hear(peer, STRANGER, VerticesRequest(first), NOW + 2 * k))
        again = said_to(STRANGER, hear(peer, STRANGER, VerticesRequest(first), NOW + 2 * k + 0.5))
        assert again == [JoinRefused("E-JOIN-03")]  # a question costs decoding: once a second
        vertices = [m for m in told if isinstance(m, VerticesResponse)]
        assert JoinRefused("E-JOIN-03") in told and all(m.head <= away + 1 for m in vertices)
        assert bool(vertices) == (first <= away + 1)
    assert answers(peer) == {"JoinRefused"}
