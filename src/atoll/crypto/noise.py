"""Noise handshakes as sans-IO machines: key agreement with mutual authentication.

Driving contract: the initiator calls `start` first; both ends pass one whole message at a time to `receive`.
They send what it returns, until `result` is set. After PeerFault drop the machine.

`hybrid` is Noise XXhfs with X25519 and ML-KEM-768: recorded traffic stays secret while either one is unbroken. Its
payload is Atoll's: both identity keys sign role, transcript and static key.
`classical` is libp2p's plain Noise XX, for browsers and foreign peers if a run's policy allows them.

`resumption` is Noise NNpsk0 with the secret of a `SessionTicket`: two short messages, both ends as authenticated as
in the session that made the ticket, and fresh X25519 keys.

    -> e, e1                     initiator: ephemeral key, KEM key
    <- e, ee, ekem1, s, es       responder: ephemeral key, KEM ciphertext, static key, payload
    -> s, se                     initiator: static key, payload

Invariants:
- For any bytes, the outcome is a message, a `NoiseHandshakeResult`, or a PeerFault after which the handshake is
  dead.
- The fault has no peer, since until the end any peer may be on the line and show any keys.
- Lengths are checked before any work. No key is returned before the remote identity is verified.
- A peer id with other keys than in the agreed membership is refused.
- A handshake never falls back to a weaker suite and never reads beyond the given message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.crypto.identity import (
    DualSignature,
    Identity,
    PublicIdentity,
    canonical,
    ed25519_of_libp2p,
    libp2p_public_key,
    no_peer_known,
    peer_id_of,
)
from atoll.crypto.noise_pattern import (
    CLASSICAL,
    HYBRID,
    RESUMPTION,
    HandshakeRandomness,
    HandshakeRole,
    NoiseHandshakePattern,
    NoiseState,
)
from atoll.crypto.protobuf import protobuf_field, protobuf_fields
from atoll.crypto.seal import BULK_REKEY_BYTES, AeadAlgorithm, ReceivingCipher, SendingCipher

_HYBRID_DOMAIN = b"atoll/noise-identity/1\0"
_HYBRID_PROLOGUE = b"atoll/noise/1\0"
_CLASSICAL_DOMAIN = b"noise-libp2p-static-key:"
_BULK_LABEL = b"atoll/bulk-keys/1 "
_RESUMPTION_PROLOGUE = b"atoll/resume/1\0"
_TICKET_LABEL = b"atoll/resume-ticket/1 "


@dataclass(frozen=True)
class NoiseHandshakeResult:
    """Keys and remote identity of a finished handshake.

    `send` and `receive` are Noise's own keys, for libp2p's frames. The bulk pair has separate keys, so a connection
    may become a bulk lane without using one key with two ciphers.
    """

    peer: PeerId
    identity: PublicIdentity | None  # None: a foreign peer, without a vote or parts
    role: HandshakeRole  # local role
    suite: NoiseHandshakePattern
    handshake_hash: bytes  # unique to this connection and equal at both ends, for further proofs to bind to
    send: SendingCipher
    receive: ReceivingCipher
    bulk_send: SendingCipher
    bulk_receive: ReceivingCipher
    tickets: tuple[SessionTicket, SessionTicket]  # for the next connection: to present and to accept
    suites: tuple[str, ...]  # suites that the remote offered, by its signed list
    muxers: tuple[str, ...]  # libp2p multiplexers that the remote announced; none in the hybrid suite


# ---- creating a handshake ----------------------------------------------------------------------------------


def hybrid(
    role: HandshakeRole,
    identity: Identity,
    *,
    network: bytes,
    expected: PeerId | None = None,
    known: Callable[[PeerId], PublicIdentity | None] = no_peer_known,
    suites: tuple[str, ...] = (HYBRID.protocol,),
    aeads: tuple[AeadAlgorithm, ...] = tuple(AeadAlgorithm),
    draws: HandshakeRandomness = HandshakeRandomness(),
) -> NoiseHandshake:
    """Create a post-quantum handshake inside one network.

    `network`: name of the network, such as a genesis digest; handshakes of other networks fail at the first tag.
    `expected`: the dialed peer. `known`: the agreed membership; a peer in it must show exactly its keys there.
    `suites`: the suites offered in clear by multistream-select. If an attacker removed a better one, the remote's
    signed list reveals it. `aeads`: local ciphers for the bulk lane.
    """
    authenticator = HybridAuthenticator(identity, known, suites, aeads)
    state = NoiseState(HYBRID, _HYBRID_PROLOGUE + network, role, draws)
    return NoiseHandshake(role, authenticator, state, expected)


def classical(
    role: HandshakeRole,
    identity: Identity,
    *,
    expected: PeerId | None = None,
    known: Callable[[PeerId], PublicIdentity | None] = no_peer_known,
    muxers: tuple[str, ...] = (),
    draws: HandshakeRandomness = HandshakeRandomness(),
) -> NoiseHandshake:
    """Create libp2p's own handshake with a foreign peer. A known member is refused: it must use `hybrid`."""
    authenticator = ClassicalAuthenticator(identity, known, muxers)
    return NoiseHandshake(role, authenticator, NoiseState(CLASSICAL, b"", role, draws), expected)


def resumption(
    role: HandshakeRole,
    identity: Identity,
    ticket: SessionTicket,
    *,
    network: bytes,
    known: Callable[[PeerId], PublicIdentity | None] = no_peer_known,
    draws: HandshakeRandomness = HandshakeRandomness(),
) -> NoiseHandshake:
    """Create the handshake that resumes the session of this ticket. The caller uses a ticket once."""
    state = NoiseState(
        RESUMPTION, _RESUMPTION_PROLOGUE + ticket.identifier + network, role, draws, psk=ticket.secret
    )
    return NoiseHandshake(role, SessionResumptionAuthenticator(identity, known, ticket), state, ticket.remote.peer)


# ---- the handshake -----------------------------------------------------------------------------------------


class NoiseHandshake:
    """One end of a handshake. The initiator calls `start` first; both ends call `receive` until `result` is set."""

    def __init__(
        self,
        role: HandshakeRole,
        authenticator: HybridAuthenticator | ClassicalAuthenticator | SessionResumptionAuthenticator,
        noise: NoiseState,
        expected: PeerId | None,
    ) -> None:
        self.role = role
        self.result: NoiseHandshakeResult | None = None
        self._authenticator, self._noise, self._expected = authenticator, noise, expected
        self._dead = False

    def start(self) -> bytes:
        """Return the first message. Called once, by the initiator only."""
        assert self.role is HandshakeRole.INITIATOR and self._noise.turn == 0
        return self._write()

    @property
    def next_bytes_max(self) -> int:
        """Longest valid next message, in bytes; a longer frame can be refused unread."""
        return 0 if self._dead or self.result is not None else self._noise.next_bytes()[1]

    def receive(self, message: bytes) -> bytes | None:
        """Process the remote's next message and return the reply, if any. A PeerFault ends the handshake."""
        if self._dead or self.result is not None:
            self._terminate()
            raise PeerFault("", "handshake message after the end of the handshake")
        assert (self._noise.turn % 2 == 0) == (self.role is HandshakeRole.RESPONDER), "start() comes first"
        try:
            return self._advance(message)
        except InvalidTag:
            why = "bytes were changed, or the remote is in another network"
        except ValueError as error:  # a low-order point, an invalid KEM key or payload
            why = str(error)
        self._terminate()
        raise PeerFault("", f"handshake failed: {why}")

    def _advance(self, message: bytes) -> bytes | None:
        noise = self._noise
        payload = noise.read(message)
        if noise.turn == 1 and noise.suite is not RESUMPTION:
            return self._write()
        claim = self._authenticator.read(self.role.other, noise.signed_hash, noise.remote_static, payload)
        if claim.peer == self._authenticator.identity.peer:
            raise ValueError("the remote is the local peer itself")
        if self._expected not in (None, claim.peer):
            raise ValueError(f"{claim.peer} answered where {self._expected} was expected")
        reply = None if noise.is_finished else self._write()
        self.result = self._establish(claim)
        return reply

    def _write(self) -> bytes:
        sign = self._authenticator.write
        return self._noise.write(lambda signed_hash, static: sign(self.role, signed_hash, static))

    def _establish(self, claim: VerifiedRemotePeer) -> NoiseHandshakeResult:
        send, receive = self._noise.split()
        bulk_send, bulk_receive = self._noise.split(_BULK_LABEL + claim.aead.value.encode())
        if self.role is HandshakeRole.RESPONDER:
            send, receive, bulk_send, bulk_receive = receive, send, bulk_receive, bulk_send
        return NoiseHandshakeResult(
            peer=claim.peer,
            identity=claim.identity,
            role=self.role,
            suite=self._noise.suite,
            handshake_hash=self._noise.handshake_hash,
            send=SendingCipher(send),
            receive=ReceivingCipher(receive),
            bulk_send=SendingCipher(bulk_send, claim.aead, rekey_bytes=BULK_REKEY_BYTES),
            bulk_receive=ReceivingCipher(bulk_receive, claim.aead, rekey_bytes=BULK_REKEY_BYTES),
            tickets=(self._ticket(self.role, claim), self._ticket(self.role.other, claim)),
            suites=claim.suites,
            muxers=claim.muxers,
        )

    def _ticket(self, presenter: HandshakeRole, claim: VerifiedRemotePeer) -> SessionTicket:
        return SessionTicket(*self._noise.split(_TICKET_LABEL + presenter.value), claim)

    def _terminate(self) -> None:
        self._dead, self.result = True, None


# ---- payloads ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifiedRemotePeer:
    """Verified content of the remote's payload."""

    peer: PeerId
    identity: PublicIdentity | None
    aead: AeadAlgorithm
    suites: tuple[str, ...] = ()
    muxers: tuple[str, ...] = ()


@dataclass(frozen=True)
class SessionTicket:
    """Single-use right to resume a session. Both ends derive it, so it never crosses the network."""

    identifier: bytes  # sent in clear
    secret: bytes = field(repr=False)
    remote: VerifiedRemotePeer


Names = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(min_length=1, max_length=8)]


class HandshakeOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Identity and offered suites and ciphers, best first. A receiver skips unknown names."""

    identity: PublicIdentity
    suites: Names
    aeads: Names


class SignedHandshakeOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signed offer. `offer` holds the exact signed bytes."""

    offer: Annotated[bytes, msgspec.Meta(max_length=HYBRID.payload_max)]
    signature: DualSignature


_OFFER = msgspec.msgpack.Decoder(HandshakeOffer)
_HYBRID_PAYLOAD = msgspec.msgpack.Decoder(SignedHandshakeOffer)


class HybridAuthenticator:
    """Writer and verifier of Atoll's payload: both identity keys sign role, transcript, static key and offer.

    libp2p signs the static key alone, and every remote receives that signature. An attacker that breaks X25519
    could compute the static key from one recorded handshake and reuse the signature.
    """

    def __init__(
        self,
        identity: Identity,
        known: Callable[[PeerId], PublicIdentity | None],
        suites: tuple[str, ...],
        aeads: tuple[AeadAlgorithm, ...],
    ) -> None:
        assert HYBRID.protocol in suites and aeads
        self.identity, self._known = identity, known
        self._suites, self._aeads = suites, aeads

    def write(self, role: HandshakeRole, signed_hash: bytes, static: bytes) -> bytes:
        names = tuple(aead.value for aead in self._aeads)
        offer = _ENCODER.encode(HandshakeOffer(self.identity.public, self._suites, names))
        signature = self.identity.sign(_hybrid_signed_bytes(role, signed_hash, static, offer))
        return _ENCODER.encode(SignedHandshakeOffer(offer, signature))

    def read(self, role: HandshakeRole, signed_hash: bytes, static: bytes, data: bytes) -> VerifiedRemotePeer:
        payload = canonical(data, _HYBRID_PAYLOAD, HYBRID.payload_max)
        offer = canonical(payload.offer, _OFFER, HYBRID.payload_max) if payload else None
        if payload is None or offer is None:
            raise ValueError("payload is not an identity and an offer")
        identity, peer = offer.identity, offer.identity.peer
        if not identity.holds(_hybrid_signed_bytes(role, signed_hash, static, payload.offer), payload.signature):
            raise ValueError(f"{peer} did not sign this handshake with both identity keys")
        if self._known(peer) not in (None, identity):
            raise ValueError(f"{peer} has another ML-DSA key in the agreed membership")
        if next((suite for suite in self._suites if suite in offer.suites), None) != HYBRID.protocol:
            raise ValueError(f"{peer} offered {offer.suites}; the best common suite was stripped on the way")
        aead = next((aead for aead in AeadAlgorithm if aead in self._aeads and aead.value in offer.aeads), None)
        if aead is None:
            raise ValueError(f"{peer} offers only unsupported ciphers: {offer.aeads}")
        return VerifiedRemotePeer(peer, identity, aead, suites=offer.suites)


class ClassicalAuthenticator:
    """Writer and verifier of libp2p's payload: the Ed25519 identity key signs the static key, in protobuf.

    Fields (libp2p/specs noise): identity_key = 1, identity_sig = 2, extensions = 4 { stream_muxers = 2 }.
    """

    def __init__(
        self,
        identity: Identity,
        known: Callable[[PeerId], PublicIdentity | None],
        muxers: tuple[str, ...],
    ) -> None:
        self.identity, self._known, self._muxers = identity, known, muxers

    def write(self, role: HandshakeRole, signed_hash: bytes, static: bytes) -> bytes:
        payload = protobuf_field(1, libp2p_public_key(self.identity.public.ed25519))
        payload += protobuf_field(2, self.identity.sign_classical(_CLASSICAL_DOMAIN + static))
        if self._muxers:
            names = b"".join(protobuf_field(2, muxer.encode()) for muxer in self._muxers)
            payload += protobuf_field(4, names)
        return payload

    def read(self, role: HandshakeRole, signed_hash: bytes, static: bytes, data: bytes) -> VerifiedRemotePeer:
        fields = dict(_bytes_fields(data))  # the last value of a repeated field counts, as in protobuf
        key, signature = fields.get(1, b""), fields.get(2, b"")
        ed25519 = ed25519_of_libp2p(key)
        peer = peer_id_of(ed25519)
        try:
            Ed25519PublicKey.from_public_bytes(ed25519).verify(signature, _CLASSICAL_DOMAIN + static)
        except InvalidSignature:
            raise ValueError(f"{peer} did not sign its static key with its identity key") from None
        if self._known(peer) is not None:
            raise ValueError(f"{peer} is a member with an ML-DSA key and must not use the classical suite")
        muxers = tuple(name.decode() for number, name in _bytes_fields(fields.get(4, b"")) if number == 2)
        return VerifiedRemotePeer(peer, None, AeadAlgorithm.CHACHA20_POLY1305, muxers=muxers)


class SessionResumptionAuthenticator:
    """Identity of the remote as the session of a ticket proved it; the secret proves that session."""

    def __init__(
        self, identity: Identity, known: Callable[[PeerId], PublicIdentity | None], ticket: SessionTicket
    ) -> None:
        self.identity, self._known, self._remote = identity, known, ticket.remote

    def write(self, role: HandshakeRole, signed_hash: bytes, static: bytes) -> bytes:
        return b""

    def read(self, role: HandshakeRole, signed_hash: bytes, static: bytes, data: bytes) -> VerifiedRemotePeer:
        peer, identity = self._remote.peer, self._remote.identity
        if identity is None or self._known(peer) not in (None, identity):
            raise ValueError(f"{peer} has another ML-DSA key in the agreed membership")
        return self._remote


def _bytes_fields(data: bytes) -> list[tuple[int, bytes]]:
    return [(number, value) for number, value in protobuf_fields(data) if isinstance(value, bytes)]


def _hybrid_signed_bytes(role: HandshakeRole, signed_hash: bytes, static: bytes, offer: bytes) -> bytes:
    """Bytes to sign. Role, hash and key have fixed lengths, so no two handshakes sign the same bytes."""
    return _HYBRID_DOMAIN + role.value + signed_hash + static + offer


_ENCODER = msgspec.msgpack.Encoder()
