"""Noise handshakes as machines on bytes: two strangers end up with keys and with proof of who the other is.

`hybrid` is Noise XXhfs: X25519 and ML-KEM-768 together, so that recording today and computing tomorrow opens
nothing while either holds. Its payload is Atoll's: both identity keys sign role, transcript and static key.
`classical` is libp2p's plain Noise XX, for browsers and foreign peers where a run's policy allows them.

    -> e, e1                     initiator: ephemeral key, KEM key
    <- e, ee, ekem1, s, es       responder: ephemeral key, KEM ciphertext, static key, payload
    -> s, se                     initiator: static key, payload

Promises: whatever bytes arrive, the answer is a message, an `Established`, or a PeerFault after which the
machine is dead; the fault names nobody, because until the end anybody may be on the line and show anybody's
keys; lengths are judged before any work; no key leaves before the other side's identity holds.
Never does: fall back to a weaker suite, trust a peer id that the agreed membership knows with other keys, or
read beyond the message it was given.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.keys.identity import (
    DualSignature,
    Identity,
    PublicIdentity,
    canonical,
    ed25519_of_libp2p,
    libp2p_public_key,
    nobody_known,
    peer_id_of,
)
from atoll.keys.seal import BULK_REKEY_BYTES, TAG_BYTES, Aead, Opener, Seal

DH_BYTES: Final = 32
KEM_KEY_BYTES: Final = 1184
KEM_CIPHERTEXT_BYTES: Final = 1088
FRAME_MAX: Final = 65535  # bytes after libp2p's two-byte length, in handshake and transport alike
FRAME_PLAIN_MAX: Final = FRAME_MAX - TAG_BYTES

_HYBRID_DOMAIN = b"atoll/noise-identity/1\0"
_HYBRID_PROLOGUE = b"atoll/noise/1\0"
_CLASSICAL_DOMAIN = b"noise-libp2p-static-key:"
_BULK_LABEL = b"atoll/bulk-keys/1 "


class Role(Enum):
    """Who spoke first. The byte is signed, so that no payload can be sent back to its author."""

    INITIATOR = b"I"
    RESPONDER = b"R"

    @property
    def other(self) -> Role:
        return Role.RESPONDER if self is Role.INITIATOR else Role.INITIATOR


class Suite(msgspec.Struct, frozen=True):
    """A Noise pattern as a table: what each message carries, and how long its payload may be."""

    protocol: str  # what multistream-select negotiates
    name: bytes  # hashed into the transcript: one changed letter, and nobody understands us
    messages: tuple[tuple[str, ...], ...]
    payload_max: int  # bytes, of the second and third message; the first has none


# libp2p/specs #727 still renames its drafts: our protocol id and prologue carry a version of our own.
HYBRID: Final = Suite(
    protocol="/atoll/noise-xxhfs/1",
    name=b"Noise_XXhfs_25519+MLKEM768_ChaChaPoly_SHA256",
    messages=(("e", "e1"), ("e", "ee", "ekem1", "s", "es"), ("s", "se")),
    payload_max=6144,  # 5.4 kB of keys and signatures, and room for more suites
)
CLASSICAL: Final = Suite(
    protocol="/noise",
    name=b"Noise_XX_25519_ChaChaPoly_SHA256",
    messages=(("e",), ("e", "ee", "s", "es"), ("s", "se")),
    payload_max=4096,  # 100 bytes of identity; the rest is extensions that we skip
)
PREFERENCE: Final = (HYBRID.protocol, CLASSICAL.protocol)  # best first


@dataclass(frozen=True)
class Draws:
    """All randomness of one handshake. Only known-answer tests give other draws than these."""

    static: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate
    ephemeral: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate
    kem: Callable[[], MLKEM768PrivateKey] = MLKEM768PrivateKey.generate
    encapsulate: Callable[[bytes], tuple[bytes, bytes]] = field(  # public key -> (shared secret, ciphertext)
        default=lambda public: MLKEM768PublicKey.from_public_bytes(public).encapsulate()
    )


@dataclass(frozen=True)
class Established:
    """A connection both ends have proven themselves on.

    `send` and `receive` are Noise's own keys, for libp2p's frames. The bulk pair has keys of its own, so that a
    connection may turn into a bulk lane without one key ever serving two ciphers.
    """

    peer: PeerId
    identity: PublicIdentity | None  # None: a foreign peer, which has no vote and owns nothing
    role: Role  # ours
    suite: Suite
    handshake_hash: bytes  # the same at both ends and nowhere else: what further proofs may bind to
    send: Seal
    receive: Opener
    bulk_send: Seal
    bulk_receive: Opener
    suites: tuple[str, ...]  # what the other side says it offered
    muxers: tuple[str, ...]  # libp2p multiplexers the other side announced; none in the hybrid suite


# ---- opening a handshake -----------------------------------------------------------------------------------


def hybrid(
    role: Role,
    identity: Identity,
    *,
    network: bytes,
    expected: PeerId | None = None,
    known: Callable[[PeerId], PublicIdentity | None] = nobody_known,
    suites: tuple[str, ...] = (HYBRID.protocol,),
    aeads: tuple[Aead, ...] = tuple(Aead),
    draws: Draws = Draws(),
) -> Handshake:
    """A post-quantum handshake inside one network.

    `network` (a genesis digest, or another name everybody in it knows) is mixed in: other networks' handshakes
    fail at the first tag. `expected` is whom we dialled. `known` is the agreed membership: a peer it names must
    show exactly those keys. `suites` is what we offered in multistream-select, in clear: if the other side had
    offered better and somebody stripped it, its signed list shows it. `aeads` are our fast ciphers.
    """
    words = HybridWords(identity, known, suites, aeads)
    return Handshake(role, words, NoiseState(HYBRID, _HYBRID_PROLOGUE + network, role, draws), expected)


def classical(
    role: Role,
    identity: Identity,
    *,
    expected: PeerId | None = None,
    known: Callable[[PeerId], PublicIdentity | None] = nobody_known,
    muxers: tuple[str, ...] = (),
    draws: Draws = Draws(),
) -> Handshake:
    """libp2p's own handshake with a foreign peer. A peer that `known` names is refused: it can do better."""
    words = ClassicalWords(identity, known, muxers)
    return Handshake(role, words, NoiseState(CLASSICAL, b"", role, draws), expected)


# ---- the handshake -----------------------------------------------------------------------------------------


class Handshake:
    """One side of one handshake. The initiator calls `start` first; both feed `receive` until `result` is there."""

    def __init__(
        self, role: Role, words: HybridWords | ClassicalWords, noise: NoiseState, expected: PeerId | None
    ) -> None:
        self.role = role
        self.result: Established | None = None
        self._words, self._noise, self._expected = words, noise, expected
        self._dead = False

    def start(self) -> bytes:
        """The first message. Ours to send only as initiator, and only once."""
        assert self.role is Role.INITIATOR and self._noise.turn == 0
        return self._write()

    @property
    def next_bytes_max(self) -> int:
        """The longest message that can be right now; a longer frame need not be read to the end."""
        return 0 if self._dead or self.result is not None else self._noise.next_bytes()[1]

    def receive(self, message: bytes) -> bytes | None:
        """Take the other side's next message; the reply to send, if there is one. Raises PeerFault and dies."""
        if self._dead or self.result is not None:
            self._die()
            raise PeerFault("", "a handshake message after the handshake was over")
        assert (self._noise.turn % 2 == 0) == (self.role is Role.RESPONDER), "start() comes first"
        try:
            return self._advance(message)
        except InvalidTag:
            why = "other bytes than were sent, or another network"
        except ValueError as error:  # a low-order point, a bad KEM key, a payload that is not what it should be
            why = str(error)
        self._die()
        raise PeerFault("", f"handshake failed: {why}")

    def _advance(self, message: bytes) -> bytes | None:
        noise = self._noise
        payload = noise.read(message)
        if noise.turn == 1:
            return self._write()
        claim = self._words.read(self.role.other, noise.signed_hash, noise.remote_static, payload)
        if claim.peer == self._words.identity.peer:
            raise ValueError("this is myself: my own connection came back to me")
        if self._expected not in (None, claim.peer):
            raise ValueError(f"{claim.peer} answered where {self._expected} was expected")
        reply = self._write() if self.role is Role.INITIATOR else None
        self.result = self._establish(claim)
        return reply

    def _write(self) -> bytes:
        return self._noise.write(lambda signed_hash, static: self._words.write(self.role, signed_hash, static))

    def _establish(self, claim: Claim) -> Established:
        send, receive = self._noise.split()
        bulk_send, bulk_receive = self._noise.split(_BULK_LABEL + claim.aead.value.encode())
        if self.role is Role.RESPONDER:
            send, receive, bulk_send, bulk_receive = receive, send, bulk_receive, bulk_send
        return Established(
            peer=claim.peer,
            identity=claim.identity,
            role=self.role,
            suite=self._noise.suite,
            handshake_hash=self._noise.handshake_hash,
            send=Seal(send),
            receive=Opener(receive),
            bulk_send=Seal(bulk_send, claim.aead, rekey_bytes=BULK_REKEY_BYTES),
            bulk_receive=Opener(bulk_receive, claim.aead, rekey_bytes=BULK_REKEY_BYTES),
            suites=claim.suites,
            muxers=claim.muxers,
        )

    def _die(self) -> None:
        self._dead, self.result = True, None


# ---- what the payloads say ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """What the other side's payload says, after it was verified."""

    peer: PeerId
    identity: PublicIdentity | None
    aead: Aead
    suites: tuple[str, ...] = ()
    muxers: tuple[str, ...] = ()


Names = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(min_length=1, max_length=8)]


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who I am and what I offered, best first. Names that the other side does not know are skipped."""

    identity: PublicIdentity
    suites: Names
    aeads: Names


class HybridPayload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`offer` is kept as its exact bytes, because those are what was signed."""

    offer: Annotated[bytes, msgspec.Meta(max_length=HYBRID.payload_max)]
    signature: DualSignature


class HybridWords:
    """Atoll's payload: both identity keys sign role, transcript, static key and offer.

    libp2p signs the static key alone. That signature is shown to everybody whom a peer ever talked to, so
    whoever breaks X25519 could compute the static key from one recorded handshake and show the signature again.
    """

    def __init__(
        self,
        identity: Identity,
        known: Callable[[PeerId], PublicIdentity | None],
        suites: tuple[str, ...],
        aeads: tuple[Aead, ...],
    ) -> None:
        assert HYBRID.protocol in suites and aeads
        self.identity, self._known = identity, known
        self._suites, self._aeads = suites, aeads

    def write(self, role: Role, signed_hash: bytes, static: bytes) -> bytes:
        names = tuple(aead.value for aead in self._aeads)
        offer = _ENCODER.encode(Offer(self.identity.public, self._suites, names))
        signature = self.identity.sign(_hybrid_signed(role, signed_hash, static, offer))
        return _ENCODER.encode(HybridPayload(offer, signature))

    def read(self, role: Role, signed_hash: bytes, static: bytes, data: bytes) -> Claim:
        payload = canonical(data, HybridPayload, HYBRID.payload_max)
        offer = canonical(payload.offer, Offer, HYBRID.payload_max) if payload else None
        if payload is None or offer is None:
            raise ValueError("the payload is not an identity and an offer")
        identity, peer = offer.identity, offer.identity.peer
        if not identity.holds(_hybrid_signed(role, signed_hash, static, payload.offer), payload.signature):
            raise ValueError(f"{peer} did not sign this handshake with both identity keys")
        if self._known(peer) not in (None, identity):
            raise ValueError(f"{peer} comes with another ML-DSA key than the agreed membership holds")
        if next((suite for suite in self._suites if suite in offer.suites), None) != HYBRID.protocol:
            raise ValueError(f"{peer} offered {offer.suites}; somebody stripped the best we both have")
        aead = next((aead for aead in Aead if aead in self._aeads and aead.value in offer.aeads), None)
        if aead is None:
            raise ValueError(f"{peer} offers only ciphers that we do not have: {offer.aeads}")
        return Claim(peer, identity, aead, suites=offer.suites)


class ClassicalWords:
    """libp2p's payload: the Ed25519 identity key signs the static key, in protobuf.

    Fields (libp2p/specs noise): identity_key = 1, identity_sig = 2, extensions = 4 { stream_muxers = 2 }.
    """

    def __init__(
        self,
        identity: Identity,
        known: Callable[[PeerId], PublicIdentity | None],
        muxers: tuple[str, ...],
    ) -> None:
        self.identity, self._known, self._muxers = identity, known, muxers

    def write(self, role: Role, signed_hash: bytes, static: bytes) -> bytes:
        payload = protobuf_field(1, libp2p_public_key(self.identity.public.ed25519))
        payload += protobuf_field(2, self.identity.sign_classical(_CLASSICAL_DOMAIN + static))
        if self._muxers:
            names = b"".join(protobuf_field(2, muxer.encode()) for muxer in self._muxers)
            payload += protobuf_field(4, names)
        return payload

    def read(self, role: Role, signed_hash: bytes, static: bytes, data: bytes) -> Claim:
        fields = dict(protobuf_fields(data))  # where a field comes twice, protobuf lets the last one count
        key, signature = fields.get(1, b""), fields.get(2, b"")
        ed25519 = ed25519_of_libp2p(key)
        peer = peer_id_of(ed25519)
        try:
            Ed25519PublicKey.from_public_bytes(ed25519).verify(signature, _CLASSICAL_DOMAIN + static)
        except InvalidSignature:
            raise ValueError(f"{peer} did not sign its static key with its identity key") from None
        if self._known(peer) is not None:
            raise ValueError(f"{peer} is a member with an ML-DSA key and must not come by the classical suite")
        muxers = tuple(name.decode() for number, name in protobuf_fields(fields.get(4, b"")) if number == 2)
        return Claim(peer, None, Aead.CHACHA20_POLY1305, muxers=muxers)


def _hybrid_signed(role: Role, signed_hash: bytes, static: bytes, offer: bytes) -> bytes:
    """Role, hash and key have fixed lengths, so that no two handshakes sign the same bytes."""
    return _HYBRID_DOMAIN + role.value + signed_hash + static + offer


_ENCODER = msgspec.msgpack.Encoder()


# ---- Noise itself ------------------------------------------------------------------------------------------

_TOKEN_BYTES = {
    "e": DH_BYTES,
    "e1": KEM_KEY_BYTES,  # in the first message, before there is a key: in clear, without a tag
    "ekem1": KEM_CIPHERTEXT_BYTES + TAG_BYTES,
    "s": DH_BYTES + TAG_BYTES,
}


class NoiseState:
    """The Noise state machine for one suite, without identities: tokens, transcript, chaining key."""

    def __init__(self, suite: Suite, prologue: bytes, role: Role, draws: Draws) -> None:
        self.suite, self.turn = suite, 0
        self._initiator, self._draws = role is Role.INITIATOR, draws
        self._symmetric = _Symmetric(suite.name, prologue)
        self._private = {"s": draws.static()}
        self._public: dict[str, X25519PublicKey] = {}
        self._kem: MLKEM768PrivateKey | None = None
        self._kem_public = b""
        self.signed_hash = b""  # transcript just before the last payload: what that payload signs
        self.remote_static = b""

    @property
    def handshake_hash(self) -> bytes:
        return self._symmetric.transcript

    def next_bytes(self) -> tuple[int, int]:
        """Shortest and longest next message."""
        shortest = sum(_TOKEN_BYTES.get(token, 0) for token in self.suite.messages[self.turn])
        if self.turn == 0:
            return shortest, shortest
        return shortest + TAG_BYTES, shortest + TAG_BYTES + self.suite.payload_max

    def write(self, payload: Callable[[bytes, bytes], bytes]) -> bytes:
        """The next message. `payload` is given the transcript hash and our static key, to sign them."""
        message = b"".join(self._write_token(token) for token in self.suite.messages[self.turn])
        if self.turn:
            static = self._private["s"].public_key().public_bytes_raw()
            message += self._symmetric.encrypt(payload(self._symmetric.transcript, static))
        else:
            message += self._symmetric.encrypt(b"")  # nothing yet to encrypt with, nothing to say
        self.turn += 1
        return message

    def read(self, message: bytes) -> bytes:
        """The payload of the next message. Raises ValueError or InvalidTag, and is of no use afterwards."""
        shortest, longest = self.next_bytes()
        if not shortest <= len(message) <= longest:
            raise ValueError(f"message {self.turn + 1} has {len(message)} bytes; {shortest} to {longest} can be")
        at = 0
        for token in self.suite.messages[self.turn]:
            end = at + _TOKEN_BYTES.get(token, 0)
            self._read_token(token, message[at:end])
            at = end
        self.signed_hash = self._symmetric.transcript
        self.turn += 1
        return self._symmetric.decrypt(message[at:])

    def split(self, label: bytes = b"") -> tuple[bytes, bytes]:
        """Two keys, initiator's direction first. Noise's own have no label; other labels give unrelated keys."""
        assert self.turn == len(self.suite.messages)
        return self._symmetric.split(label)

    def _write_token(self, token: str) -> bytes:
        symmetric = self._symmetric
        match token:
            case "e":
                self._private["e"] = self._draws.ephemeral()
                public = self._private["e"].public_key().public_bytes_raw()
                symmetric.mix_hash(public)
                return public
            case "e1":
                self._kem = self._draws.kem()
                return symmetric.encrypt(self._kem.public_key().public_bytes_raw())
            case "ekem1":
                secret, ciphertext = self._draws.encapsulate(self._kem_public)
                encrypted = symmetric.encrypt(ciphertext)  # before MixKey: the other order breaks every vector
                symmetric.mix_key(secret)
                return encrypted
            case "s":
                return symmetric.encrypt(self._private["s"].public_key().public_bytes_raw())
            case _:
                self._mix_dh(token)
                return b""

    def _read_token(self, token: str, data: bytes) -> None:
        symmetric = self._symmetric
        match token:
            case "e":
                symmetric.mix_hash(data)
                self._public["e"] = X25519PublicKey.from_public_bytes(data)
            case "e1":
                self._kem_public = symmetric.decrypt(data)
            case "ekem1":
                assert self._kem is not None
                ciphertext = symmetric.decrypt(data)
                symmetric.mix_key(self._kem.decapsulate(ciphertext))
            case "s":
                self.remote_static = symmetric.decrypt(data)
                self._public["s"] = X25519PublicKey.from_public_bytes(self.remote_static)
            case _:
                self._mix_dh(token)

    def _mix_dh(self, token: str) -> None:
        """`es` is the initiator's e with the responder's s: each side reads the letters from its own end."""
        mine, theirs = token if self._initiator else reversed(token)
        self._symmetric.mix_key(self._private[mine].exchange(self._public[theirs]))


class _Symmetric:
    """Noise's SymmetricState for SHA-256 and ChaCha20-Poly1305."""

    def __init__(self, name: bytes, prologue: bytes) -> None:
        self.transcript = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self._chain = self.transcript
        self._cipher: ChaCha20Poly1305 | None = None
        self._nonce = 0
        self.mix_hash(prologue)

    def mix_hash(self, data: bytes) -> None:
        self.transcript = hashlib.sha256(self.transcript + data).digest()

    def mix_key(self, secret: bytes) -> None:
        self._chain, key = _hkdf(self._chain, secret)
        self._cipher, self._nonce = ChaCha20Poly1305(key), 0

    def encrypt(self, plain: bytes) -> bytes:
        box = plain
        if self._cipher is not None:
            box = self._cipher.encrypt(self._next_nonce(), plain, self.transcript)
        self.mix_hash(box)
        return box

    def decrypt(self, box: bytes) -> bytes:
        plain = box
        if self._cipher is not None:
            plain = self._cipher.decrypt(self._next_nonce(), box, self.transcript)
        self.mix_hash(box)
        return plain

    def split(self, label: bytes) -> tuple[bytes, bytes]:
        return _hkdf(self._chain, label)

    def _next_nonce(self) -> bytes:
        self._nonce += 1
        return bytes(4) + (self._nonce - 1).to_bytes(8, "little")


def _hkdf(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """HKDF as Noise writes it, two outputs."""
    root = hmac.digest(chain, secret, "sha256")
    first = hmac.digest(root, b"\x01", "sha256")
    return first, hmac.digest(root, first + b"\x02", "sha256")


# ---- libp2p's frames and protobuf --------------------------------------------------------------------------


def framed(message: bytes) -> bytes:
    """A handshake message, or a box, behind its two-byte length."""
    assert len(message) <= FRAME_MAX
    return len(message).to_bytes(2, "big") + message


def seal_frames(seal: Seal, data: bytes | bytearray | memoryview) -> bytes:
    """Data of any length as frames of at most FRAME_MAX bytes each."""
    view = memoryview(data).cast("B")
    pieces = (view[at : at + FRAME_PLAIN_MAX] for at in range(0, len(view), FRAME_PLAIN_MAX))
    return b"".join(framed(seal.seal(piece)) for piece in pieces)


class Unframer:
    """Bytes as they arrive -> frames behind two-byte lengths. Whoever feeds it takes all whole frames at once."""

    def __init__(self, who: str = "") -> None:
        self._buffer, self._who = bytearray(), who

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    def next_frame(self, bytes_max: int = FRAME_MAX) -> bytes | None:
        """The next whole frame, or None until more was fed. PeerFault as soon as a longer one is announced."""
        if len(self._buffer) < 2:
            return None
        frame_bytes = int.from_bytes(self._buffer[:2], "big")
        if frame_bytes > bytes_max:
            raise PeerFault(self._who, f"announced a frame of {frame_bytes} bytes, {bytes_max} can be")
        if len(self._buffer) < 2 + frame_bytes:
            return None
        frame = bytes(self._buffer[2 : 2 + frame_bytes])
        del self._buffer[: 2 + frame_bytes]
        return frame

    def rest(self) -> bytes:
        """What was fed and is not part of a frame taken yet, for whoever reads on in another framing."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def protobuf_field(number: int, data: bytes) -> bytes:
    """One length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def protobuf_fields(data: bytes) -> list[tuple[int, bytes]]:
    """Every length-delimited field in order; others are skipped. ValueError where the bytes make no sense."""
    fields: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("a protobuf field without a number")
        match kind:
            case 0:
                _, at = _read_varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _read_varint(data, at)
                fields.append((number, data[at : at + size]))
                at += size
            case 5:
                at += 4
            case _:
                raise ValueError(f"a protobuf field of kind {kind}")
        if at > len(data):
            raise ValueError("a protobuf field that ends behind the message")
    return fields


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("a protobuf number that ends behind the message")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a protobuf number of more than 64 bits")
