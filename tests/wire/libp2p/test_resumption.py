"""Resumption on the wire: a ticket replaces the handshake, and every doubt leads back to the whole one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.crypto.noise_pattern import HYBRID, RESUMPTION, HandshakeRole
from atoll.crypto.session_tickets import TICKET_S, TicketStore
from atoll.wire.libp2p.connection import Libp2pConnection, Libp2pTerms
from atoll.wire.libp2p.events import ConnectionReady

from .libp2p_pair import ALICE, BOB, Pair, pair, terms

WHOLE_BYTES = 5000  # a hybrid handshake takes more at either end, a resumption less


class Acquainted:
    """Alice and Bob with tickets of one connection."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alice = terms(ALICE, tickets=TicketStore(lambda: self.now))
        self.bob = terms(BOB, tickets=TicketStore(lambda: self.now))
        self.meet(HYBRID.protocol)

    def meet(self, suite: str) -> Pair:
        both = pair(self.alice, self.bob).run()
        for me, events in ((self.alice, both.events[0]), (self.bob, both.events[1])):
            assert me.tickets is not None
            me.tickets.keep(ready(events, suite).established)
        assert (len(both.carried[1]) < WHOLE_BYTES) == (suite == RESUMPTION.protocol)
        return both


def ready(events: list, suite: str) -> ConnectionReady:
    (found,) = [event for event in events if isinstance(event, ConnectionReady)]
    assert found.established.suite.protocol == suite
    return found


def test_every_connection_makes_the_ticket_of_the_next():
    story = Acquainted()
    for _ in range(3):
        both = story.meet(RESUMPTION.protocol)
        assert both.events[0][0].established.peer == BOB.peer and both.events[1][0].established.peer == ALICE.peer


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
@settings(max_examples=20)
def test_however_the_wire_cuts_the_bytes_the_session_resumes(cuts: list[int]):
    story = Acquainted()
    both = pair(story.alice, story.bob)
    both.cuts = itertools.cycle(cuts)
    both.run()
    ready(both.events[0], RESUMPTION.protocol)
    ready(both.events[1], RESUMPTION.protocol)


@pytest.mark.parametrize("doubt", ["expired", "session over", "no tickets", "used by this end"])
def test_a_refused_ticket_leads_to_the_whole_handshake_on_the_same_connection(doubt: str):
    story = Acquainted()
    assert story.alice.tickets is not None and story.bob.tickets is not None
    match doubt:
        case "expired":
            both = pair(story.alice, story.bob)
            story.now = TICKET_S
        case "session over":
            story.bob.tickets.discard(ALICE.peer)
            both = pair(story.alice, story.bob)
        case "no tickets":
            both = pair(story.alice, terms(BOB))
        case _:
            pair(story.alice, story.bob)
            both = pair(story.alice, story.bob)
    both.run()
    ready(both.events[0], HYBRID.protocol)
    ready(both.events[1], HYBRID.protocol)


def bob_hears(me: Libp2pTerms, data: bytes) -> tuple[Libp2pConnection, list]:
    bob = Libp2pConnection(HandshakeRole.RESPONDER, me)
    return bob, bob.receive(data)


def test_a_replay_of_a_used_ticket_is_answered_by_a_whole_handshake():
    """The replayer has recorded all that Alice sent; Bob opens nothing, and ends at the first wrong message."""
    story = Acquainted()
    recorded = bytes(story.meet(RESUMPTION.protocol).carried[0])
    with pytest.raises(PeerFault):
        bob_hears(story.bob, recorded)
    story.meet(RESUMPTION.protocol)  # and the session's next ticket is untouched


def test_a_replay_of_a_ticket_that_never_arrived_opens_nothing_either():
    """Stopped on the way and replayed later, the first message gets Bob's answer, which only Alice can use."""
    story = Acquainted()
    alice = Libp2pConnection(HandshakeRole.INITIATOR, story.alice, expected=BOB.peer)
    first = b"".join(alice.take_outgoing())
    listener, _ = bob_hears(story.bob, first)
    answer = b"".join(listener.take_outgoing())
    alice.receive(answer)
    recorded = first + b"".join(alice.take_outgoing())
    replayed, events = bob_hears(story.bob, recorded)
    assert events == [] and b"".join(replayed.take_outgoing())
    with pytest.raises(PeerFault):
        replayed.receive(bytes(2) + bytes(100))
    both = pair(story.alice, story.bob).run()
    ready(both.events[1], HYBRID.protocol)  # the replay has used it up: Alice falls back


def test_a_wrong_secret_costs_its_connection_and_not_the_ticket():
    """An identifier read from the wire is worth nothing."""
    story = Acquainted()
    alice = Libp2pConnection(HandshakeRole.INITIATOR, story.alice, expected=BOB.peer)
    negotiation = b"".join(alice.take_outgoing())
    listener, _ = bob_hears(story.bob, negotiation)
    alice.receive(b"".join(listener.take_outgoing()))
    first = b"".join(alice.take_outgoing())
    forged = bytearray(first)
    forged[-1] ^= 1
    stranger, _ = bob_hears(story.bob, negotiation)
    with pytest.raises(PeerFault):
        stranger.receive(bytes(forged))
    listener.receive(first)
    alice.receive(b"".join(listener.take_outgoing()))
    listener.receive(b"".join(alice.take_outgoing()))
    assert story.bob.tickets is not None and story.bob.tickets.take_for(ALICE.peer) is not None
    assert story.bob.tickets.find(first[2:34]) is None  # used by Alice


def test_a_ticket_opens_no_connection_to_another_peer():
    """Carol listens where Bob did: she refuses the unknown ticket, and the whole handshake names her."""
    story = Acquainted()
    carol = terms(type(BOB).from_seeds(b"c" * 32, b"C" * 32), tickets=TicketStore(lambda: 0.0))
    with pytest.raises(PeerFault, match="answered where"):
        pair(story.alice, carol).run()
