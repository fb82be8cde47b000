"""Session tickets: the handshake that they replace, and every doubt that ends in a refusal."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace as changed

from atoll.base.errors import PeerFault
from atoll.crypto import noise
from atoll.crypto.identity import Identity, PublicIdentity
from atoll.crypto.noise import NoiseHandshake, NoiseHandshakeResult, SessionTicket
from atoll.crypto.noise_pattern import RESUMPTION, HandshakeRandomness, HandshakeRole, NoiseState
from atoll.crypto.session_tickets import TICKET_S, TicketStore

NETWORK = b"network 1"
INITIATOR, RESPONDER = HandshakeRole.INITIATOR, HandshakeRole.RESPONDER


def whole(alice: Identity, bob: Identity) -> tuple[NoiseHandshakeResult, NoiseHandshakeResult]:
    one, other = (
        noise.hybrid(INITIATOR, alice, network=NETWORK),
        noise.hybrid(RESPONDER, bob, network=NETWORK),
    )
    answer = other.receive(one.start())
    assert answer is not None
    last = one.receive(answer)
    assert last is not None and other.receive(last) is None
    assert one.result is not None and other.result is not None
    return one.result, other.result


def ends(
    alice: Identity, bob: Identity, shown: SessionTicket, found: SessionTicket, network: bytes = NETWORK
) -> tuple[NoiseHandshake, NoiseHandshake]:
    return (
        noise.resumption(INITIATOR, alice, shown, network=NETWORK),
        noise.resumption(RESPONDER, bob, found, network=network),
    )


def resumed(one: NoiseHandshake, other: NoiseHandshake) -> tuple[NoiseHandshakeResult, NoiseHandshakeResult]:
    answer = other.receive(one.start())
    assert answer is not None and one.receive(answer) is None
    assert one.result is not None and other.result is not None
    return one.result, other.result


def test_the_pattern_agrees_with_an_independent_implementation():
    """NNpsk0 by noiseprotocol 0.3.1: prologue, pre-shared key and both ephemeral keys are fixed."""

    def draws(byte: int) -> HandshakeRandomness:
        return HandshakeRandomness(ephemeral=lambda: X25519PrivateKey.from_private_bytes(bytes([byte]) * 32))

    psk = bytes(range(32))
    one = NoiseState(RESUMPTION, b"prologue", INITIATOR, draws(0x11), psk)
    other = NoiseState(RESUMPTION, b"prologue", RESPONDER, draws(0x22), psk)
    first = one.write(lambda *_: b"")
    assert first.hex() == (
        "7b4e909bbe7ffe44c465a220037d608ee35897d31ef972f07f74892cb0f73f134d20c3bf602d4e87c676529fa3a83a94"
    )
    assert other.next_bytes() == (48, 48) and other.read(first) == b""
    second = other.write(lambda *_: b"")
    assert second.hex() == (
        "0faa684ed28867b97f4a6a2dee5df8ce974e76b7018e3f22a1c4cf2678570f20a1b43fdc1b1af6d494303ba98c28441b"
    )
    assert one.read(second) == b""
    hashed = "9e83a07c480e237d34baa8c38de8bc5938b2c3181ba08ea1e5288463c9f9e3cd"
    assert one.handshake_hash.hex() == other.handshake_hash.hex() == hashed
    sending, receiving = one.split()
    assert sending.hex() == "db72db7b88aa6a8223bac741154c7881c10c92ab4a4b7a9c36d0f107e18695a4"
    assert receiving.hex() == "3963f3cddd9ae1ba54b5617120c40b1292120b671eb5ccbd9ce7b550122eec41"


def test_both_ends_derive_the_same_tickets_and_a_resumed_connection_the_next_ones(alice: Identity, bob: Identity):
    """Both may dial. No ticket, key or transcript comes twice; identities are those of the whole handshake."""
    at_alice, at_bob = whole(alice, bob)
    seen = set[bytes]()
    for _ in range(3):
        (shown, accepted), (shown_by_bob, found) = at_alice.tickets, at_bob.tickets
        assert (shown.identifier, shown.secret) == (found.identifier, found.secret)
        assert (accepted.identifier, accepted.secret) == (shown_by_bob.identifier, shown_by_bob.secret)
        new = {shown.identifier, shown.secret, accepted.identifier, accepted.secret, at_alice.handshake_hash}
        assert len(new) == 5 and not seen & new
        seen |= new
        at_alice, at_bob = resumed(*ends(alice, bob, shown, found))
        assert (at_alice.peer, at_alice.identity) == (bob.peer, bob.public)
        assert (at_bob.peer, at_bob.identity) == (alice.peer, alice.public)
        assert at_bob.receive.open(at_alice.send.seal(b"word")) == b"word"


def test_one_ticket_shown_twice_gives_other_keys(alice: Identity, bob: Identity):
    """The store forbids it; if it happened, fresh ephemeral keys would still keep every nonce unique."""
    at_alice, at_bob = whole(alice, bob)
    once, again = (resumed(*ends(alice, bob, at_alice.tickets[0], at_bob.tickets[1])) for _ in range(2))
    assert once[0].send.seal(b"word") != again[0].send.seal(b"word")


def test_a_wrong_secret_network_or_key_is_refused(alice: Identity, bob: Identity, mallory: Identity):
    at_alice, at_bob = whole(alice, bob)
    shown, found = at_alice.tickets[0], at_bob.tickets[1]
    stolen_name = SessionTicket(shown.identifier, bytes(32), shown.remote)
    for one, other in (
        ends(mallory, bob, stolen_name, found),
        ends(alice, bob, shown, found, network=b"network 2"),
        (
            noise.resumption(INITIATOR, alice, shown, network=NETWORK),
            noise.resumption(
                RESPONDER, bob, found, network=NETWORK, known={alice.peer: _with_other_key(alice)}.get
            ),
        ),
    ):
        with pytest.raises(PeerFault) as fault:
            other.receive(one.start())
        assert fault.value.who == "" and other.result is None


def _with_other_key(identity: Identity) -> PublicIdentity:
    return changed(identity.public, mldsa65=bytes(len(identity.public.mldsa65)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_ticket_is_used_once_by_each_end(alice: Identity, bob: Identity):
    at_alice, at_bob = whole(alice, bob)
    ours, theirs = TicketStore(Clock()), TicketStore(Clock())
    ours.keep(at_alice)
    theirs.keep(at_bob)
    shown = ours.take_for(bob.peer)
    assert shown is not None and ours.take_for(bob.peer) is None
    found = theirs.find(shown.identifier)
    assert found is not None and theirs.find(shown.identifier) == found  # not proven yet
    theirs.spend(found)
    assert theirs.find(shown.identifier) is None
    assert theirs.take_for(alice.peer) is not None  # that of the other direction


def test_tickets_expire_and_end_with_their_session(alice: Identity, bob: Identity):
    at_alice, at_bob = whole(alice, bob)
    clock = Clock()
    store = TicketStore(clock)
    identifier = at_bob.tickets[1].identifier
    store.keep(at_bob)
    clock.now = TICKET_S - 1
    assert store.find(identifier) is not None
    clock.now = TICKET_S
    assert store.find(identifier) is None and store.take_for(alice.peer) is None
    store.keep(at_bob)
    store.discard(alice.peer)
    assert store.find(identifier) is None
    store.keep(at_bob)
    store.keep(whole(alice, bob)[1])
    assert store.find(identifier) is None  # a newer connection replaced them
    assert at_alice.tickets[0].secret not in repr(at_alice.tickets[0]).encode()
