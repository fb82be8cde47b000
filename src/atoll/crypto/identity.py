"""Peer identity: an Ed25519 and an ML-DSA-65 key that certify each other, and certified session keys.

The Ed25519 key gives the libp2p peer id. The ML-DSA-65 key protects it against future forgers of classical
signatures. So everything that must last (certificates, and through them membership) carries both signatures. Round
statements are signed by a short-lived session key (`SessionSigner`), Ed25519 or ML-DSA-65, which both identity keys
certify for one run.

Invariants:
- No signature made here can pass for another kind of statement.
- Every certificate has exactly one encoding.
- Untrusted bytes give False or None, never an exception.
- Without ML-DSA and ML-KEM no identity is created.
Not responsible for: files, clocks, wiping secrets from memory (Python cannot guarantee it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Final, TypeVar

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey, MLDSA65PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

from atoll.base.errors import UNREADABLE, AtollError, UsageError
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import PEERS_MAX
from atoll.crypto.signer import Validity, VoteKind

ED25519_KEY_BYTES: Final = 32
ED25519_SIGNATURE_BYTES: Final = 64
MLDSA65_KEY_BYTES: Final = 1952
MLDSA65_SIGNATURE_BYTES: Final = 3309
SEED_BYTES: Final = 32  # seed of either key; seeds are stored, expanded keys are not
CERTIFICATE_BYTES_MAX: Final = 12288  # a session has 5.5 kB, with an ML-DSA-65 vote key 10.7; more is not decoded

_SESSION_DOMAIN = b"atoll/session/1\0"
_POSSESSION_DOMAIN = b"atoll/session-possession/1\0"
_SIGNED_DOMAIN = b"atoll/session-signed/1\0"
_SECRET_DOMAIN = b"atoll/session-secret/1\0"

EdKey = Annotated[bytes, msgspec.Meta(min_length=ED25519_KEY_BYTES, max_length=ED25519_KEY_BYTES)]
EdSignature = Annotated[bytes, msgspec.Meta(min_length=ED25519_SIGNATURE_BYTES, max_length=ED25519_SIGNATURE_BYTES)]
MlKey = Annotated[bytes, msgspec.Meta(min_length=MLDSA65_KEY_BYTES, max_length=MLDSA65_KEY_BYTES)]
VoteKey = Annotated[bytes, msgspec.Meta(min_length=ED25519_KEY_BYTES, max_length=MLDSA65_KEY_BYTES)]
VoteSignature = Annotated[
    bytes, msgspec.Meta(min_length=ED25519_SIGNATURE_BYTES, max_length=MLDSA65_SIGNATURE_BYTES)
]
VotePrivateKey = Ed25519PrivateKey | MLDSA65PrivateKey
MlSignature = Annotated[bytes, msgspec.Meta(min_length=MLDSA65_SIGNATURE_BYTES, max_length=MLDSA65_SIGNATURE_BYTES)]

T = TypeVar("T")


# ---- peer ids ----------------------------------------------------------------------------------------------

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUE = {character: value for value, character in enumerate(_BASE58)}
_PUBLIC_KEY_HEAD = bytes.fromhex("08011220")  # protobuf PublicKey: type (1) Ed25519 = 1, data (2) of 32 bytes
_MULTIHASH_HEAD = bytes.fromhex("0024")  # identity "hash" of 36 bytes: the key itself
PEER_ID_BYTES: Final = len(_MULTIHASH_HEAD) + len(_PUBLIC_KEY_HEAD) + ED25519_KEY_BYTES
PEER_ID_CHARACTERS: Final = 52  # every Ed25519 peer id has this length, and begins with 12D3KooW


def libp2p_public_key(ed25519: bytes) -> bytes:
    """The protobuf `PublicKey` message of libp2p for an Ed25519 key, 36 bytes."""
    assert len(ed25519) == ED25519_KEY_BYTES
    return _PUBLIC_KEY_HEAD + ed25519


def ed25519_of_libp2p(message: bytes) -> bytes:
    """Decode the Ed25519 key in a libp2p `PublicKey` message. Raises ValueError for other keys and other bytes."""
    if len(message) != len(_PUBLIC_KEY_HEAD) + ED25519_KEY_BYTES or not message.startswith(_PUBLIC_KEY_HEAD):
        raise ValueError("not an Ed25519 public key in libp2p's encoding")
    return message[len(_PUBLIC_KEY_HEAD) :]


def peer_id_bytes(ed25519: bytes) -> bytes:
    """Multihash of a peer id. It contains the whole key, so ids need no look-up."""
    return _MULTIHASH_HEAD + libp2p_public_key(ed25519)


def peer_id_of(ed25519: bytes) -> PeerId:
    """Peer id '12D3KooW…': base58 of the multihash. Base58 writes its first byte, zero, as a leading '1'."""
    number, digits = int.from_bytes(peer_id_bytes(ed25519), "big"), ""
    while number:
        number, value = divmod(number, 58)
        digits = _BASE58[value] + digits
    return PeerId("1" + digits)


def ed25519_of(peer: str) -> bytes:
    """Public key of a textual peer id. Raises ValueError unless the id is in its canonical form."""
    if len(peer) != PEER_ID_CHARACTERS or not _BASE58_VALUE.keys() >= set(peer):
        raise ValueError(f"{peer[:60]!r} is not a peer id; they look like 12D3KooW… and have 52 characters")
    number = 0
    for character in peer:
        number = number * 58 + _BASE58_VALUE[character]
    if number.bit_length() > 8 * PEER_ID_BYTES:
        raise ValueError(f"{peer!r} is not the peer id of an Ed25519 key")
    multihash = number.to_bytes(PEER_ID_BYTES, "big")
    if not multihash.startswith(_MULTIHASH_HEAD):
        raise ValueError(f"{peer!r} is not the peer id of an Ed25519 key")
    return ed25519_of_libp2p(multihash[len(_MULTIHASH_HEAD) :])


# ---- public records ----------------------------------------------------------------------------------------


class DualSignature(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signatures by both identity keys, valid only together."""

    ed25519: EdSignature
    mldsa65: MlSignature


class PublicIdentity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Both public keys of a peer. A signature by both over both proves that they belong together."""

    ed25519: EdKey
    mldsa65: MlKey

    @property
    def peer(self) -> PeerId:
        return peer_id_of(self.ed25519)

    def holds(self, data: bytes, signature: DualSignature) -> bool:
        """Whether both keys signed `data`, which begins with its domain. Never raises on untrusted bytes."""
        try:
            Ed25519PublicKey.from_public_bytes(self.ed25519).verify(signature.ed25519, data)
            MLDSA65PublicKey.from_public_bytes(self.mldsa65).verify(signature.mldsa65, data)
        except (InvalidSignature, ValueError):
            return False
        return True


class SessionGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Content of a session certificate: this vote key signs for this identity, in one run, for a limited time.

    The times are wall-clock seconds. They are checked when a peer joins, never when votes are counted: peers with
    different clocks must count alike.
    """

    identity: PublicIdentity
    vote_key: VoteKey
    run: Annotated[bytes, msgspec.Meta(max_length=64)]
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    not_before_s: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    not_after_s: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]

    def valid_at(self, now_wall_s: Seconds) -> bool:
        return self.not_before_s <= now_wall_s <= self.not_after_s


class SessionCertificate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signed session grant. `session` holds the exact signed bytes.

    `possession` is the vote key's own signature. Without it, a peer could certify another peer's vote key as its
    own and claim that peer's votes.
    """

    session: Annotated[bytes, msgspec.Meta(max_length=CERTIFICATE_BYTES_MAX)]
    possession: VoteSignature
    signature: DualSignature


_ENCODER = msgspec.msgpack.Encoder()
_SESSION_CERTIFICATE = msgspec.msgpack.Decoder(SessionCertificate)
_SESSION = msgspec.msgpack.Decoder(SessionGrant)
_DUAL_SIGNATURE = msgspec.msgpack.Decoder(DualSignature)
_PUBLIC_IDENTITY = msgspec.msgpack.Decoder(PublicIdentity)


def canonical(data: bytes, kind: msgspec.msgpack.Decoder[T], bytes_max: int) -> T | None:
    """Decode `data` if it is the only encoding of its value; None for all other bytes."""
    if len(data) > bytes_max:
        return None
    try:
        value = kind.decode(data)
    except UNREADABLE:
        return None
    return value if _ENCODER.encode(value) == data else None


def open_session_certificate(certificate: bytes) -> SessionGrant | None:
    """Return the certificate's content if both identity keys and the vote key have signed it; None otherwise."""
    opened = canonical(certificate, _SESSION_CERTIFICATE, CERTIFICATE_BYTES_MAX)
    if opened is None:
        return None
    session = canonical(opened.session, _SESSION, CERTIFICATE_BYTES_MAX)
    if session is None or not _vote_holds(session.vote_key, _POSSESSION_DOMAIN + opened.session, opened.possession):
        return None
    return session if session.identity.holds(_SESSION_DOMAIN + opened.session, opened.signature) else None


# ---- secrets -----------------------------------------------------------------------------------------------

_FILE_MAGIC = b"atoll identity\n"
_FILE_VERSION = 1
_CHECK_BYTES = 8
_FILE_BYTES = len(_FILE_MAGIC) + 1 + 2 * SEED_BYTES + _CHECK_BYTES


class Identity:
    """Both private keys of a peer. Its text form shows only the peer id."""

    def __init__(self, ed25519: Ed25519PrivateKey, mldsa65: MLDSA65PrivateKey) -> None:
        self._ed25519, self._mldsa65 = ed25519, mldsa65
        self.public = PublicIdentity(
            ed25519.public_key().public_bytes_raw(), mldsa65.public_key().public_bytes_raw()
        )
        self.peer = self.public.peer

    @classmethod
    def generate(cls) -> Identity:
        """Create a new identity from the operating system's randomness."""
        require_post_quantum()
        return cls(Ed25519PrivateKey.generate(), MLDSA65PrivateKey.generate())

    @classmethod
    def from_seeds(cls, ed25519_seed: bytes, mldsa65_seed: bytes) -> Identity:
        require_post_quantum()
        return cls(
            Ed25519PrivateKey.from_private_bytes(ed25519_seed),
            MLDSA65PrivateKey.from_seed_bytes(mldsa65_seed),
        )

    @classmethod
    def from_bytes(cls, data: bytes, place: str = "this") -> Identity:
        """Decode the bytes of `to_bytes`. Raises UsageError with a code if they are other bytes or damaged.

        `place` names their file in errors.
        """
        if not data.startswith(_FILE_MAGIC):
            raise UsageError(
                "E-KEY-01",
                f"{place} is not an Atoll identity",
                cause="another file was copied there, or its disk changed bytes",
                fix="restore it from a backup, or move it away to start as a new peer",
            )
        version = data[len(_FILE_MAGIC) : len(_FILE_MAGIC) + 1]
        if version not in (b"", bytes([_FILE_VERSION])):
            raise UsageError(
                "E-KEY-03",
                f"{place} is an identity of format {version[0]}; this Atoll reads format {_FILE_VERSION}",
                cause="a newer Atoll wrote it",
                fix="install a newer Atoll in the way that this one was installed",
            )
        body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if len(data) != _FILE_BYTES or blake3(body).digest(length=_CHECK_BYTES) != check:
            raise UsageError(
                "E-KEY-02",
                f"{place} is a damaged identity ({len(data)} bytes, {_FILE_BYTES} expected, or a wrong checksum)",
                cause="it was cut short or changed after it was written",
                fix="restore it from a backup, or move it away to start as a new peer",
            )
        seeds = body[len(_FILE_MAGIC) + 1 :]
        return cls.from_seeds(seeds[:SEED_BYTES], seeds[SEED_BYTES:])

    def to_bytes(self) -> bytes:
        """Seeds, version and checksum, 88 bytes. A reader of them can act as this peer."""
        seeds = self._ed25519.private_bytes_raw() + self._mldsa65.private_bytes_raw()
        body = _FILE_MAGIC + bytes([_FILE_VERSION]) + seeds
        return body + blake3(body).digest(length=_CHECK_BYTES)

    def sign(self, data: bytes) -> DualSignature:
        """Sign with both keys. `data` begins with its own domain: a text that ends with a version and \\0."""
        return DualSignature(self._ed25519.sign(data), self._mldsa65.sign(data))

    def sign_classical(self, data: bytes) -> bytes:
        """Sign with the Ed25519 key alone, for tickets (which must fit a QR code) and foreign libp2p peers."""
        return self._ed25519.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer})"


def require_post_quantum() -> None:
    """Raise AtollError if ML-DSA-65 or ML-KEM-768 is unavailable. No weaker mode exists."""
    try:
        MLDSA65PrivateKey.from_seed_bytes(bytes(32))
        MLKEM768PrivateKey.from_seed_bytes(bytes(64))
    except UnsupportedAlgorithm as why:
        raise AtollError(
            "E-KEY-04",
            "this Python has no post-quantum cryptography, and Atoll does not start without it",
            cause=f"`cryptography` was built against a library without ML-KEM or ML-DSA ({why})",
            fix='pip install --force-reinstall --only-binary :all: "cryptography>=50"',
        ) from None


# ---- sessions ----------------------------------------------------------------------------------------------


def new_vote_key(kind: VoteKind) -> VotePrivateKey:
    return MLDSA65PrivateKey.generate() if kind == "ml-dsa-65" else Ed25519PrivateKey.generate()


def kind_of_key(vote_key: bytes) -> VoteKind:
    return "ml-dsa-65" if len(vote_key) == MLDSA65_KEY_BYTES else "ed25519"


class SessionSigner:
    """`Signer` with a short-lived vote key, certified by both identity keys.

    The key is Ed25519, or ML-DSA-65 if votes must resist quantum forgers by themselves, with signatures 52 times as
    long. The length of the public key tells the kind.

    The caller must store `to_bytes()` durably. A restarted peer must continue with the vote key in the membership,
    or not sign until it has joined again.
    """

    def __init__(self, peer: PeerId, key: VotePrivateKey, certificate: bytes) -> None:
        self._peer, self._key, self._certificate = peer, key, certificate
        self._vote_key = key.public_key().public_bytes_raw()

    @classmethod
    def certified(
        cls,
        identity: Identity,
        run: bytes,
        *,
        epoch: int,
        not_before_s: int,
        not_after_s: int,
        generate: Callable[[], VotePrivateKey] = Ed25519PrivateKey.generate,
    ) -> SessionSigner:
        """Create a session key for this run, valid between two wall-clock times in seconds."""
        assert not_before_s <= not_after_s
        key = generate()
        vote_key = key.public_key().public_bytes_raw()
        session = _ENCODER.encode(SessionGrant(identity.public, vote_key, run, epoch, not_before_s, not_after_s))
        certificate = SessionCertificate(
            session, key.sign(_POSSESSION_DOMAIN + session), identity.sign(_SESSION_DOMAIN + session)
        )
        return cls(identity.peer, key, _ENCODER.encode(certificate))

    @classmethod
    def from_bytes(cls, data: bytes) -> SessionSigner:
        """Decode the bytes of `to_bytes`. Raises UsageError if they are invalid."""
        session = open_session_certificate(data[SEED_BYTES:])
        if session is not None:
            classical = kind_of_key(session.vote_key) == "ed25519"
            of_seed = Ed25519PrivateKey.from_private_bytes if classical else MLDSA65PrivateKey.from_seed_bytes
            key = of_seed(data[:SEED_BYTES])
            if key.public_key().public_bytes_raw() == session.vote_key:
                return cls(session.identity.peer, key, data[SEED_BYTES:])
        raise UsageError(
            "E-KEY-05",
            "the stored session key of this peer is damaged",
            cause="the state directory was changed or cut short",
            fix="remove the stored session; the peer joins again with a new one",
        )

    def to_bytes(self) -> bytes:
        return self._key.private_bytes_raw() + self._certificate

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def private_key(self) -> VotePrivateKey:
        """The private vote key, for another certificate of the same key."""
        return self._key

    @property
    def vote_key(self) -> bytes:
        return self._vote_key

    @property
    def certificate(self) -> bytes:
        return self._certificate

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(_SIGNED_DOMAIN + data)

    def secret(self, purpose: bytes) -> bytes:
        return blake3(_SECRET_DOMAIN + self._key.private_bytes_raw() + purpose).digest()

    def __repr__(self) -> str:
        return f"SessionSigner({self._peer})"


def no_peer_known(peer: PeerId) -> PublicIdentity | None:
    """Membership look-up before any membership is agreed: all peers are unknown."""
    return None


class SessionVerifier:
    """`SignatureVerifier` for real keys.

    A forger of Ed25519 can create valid certificates for another peer's id with its own ML-DSA key. So join checks
    (policy/membership) compare `identity_of` with the agreed membership.
    """

    REMEMBERED_MAX = PEERS_MAX  # cached certificates; each evicted one costs another ML-DSA check (0.2 ms)

    def __init__(self) -> None:
        self._opened: OrderedDict[bytes, SessionGrant] = OrderedDict()  # digest of a valid certificate -> content

    def holds(self, vote_key: bytes, data: bytes, signature: bytes) -> bool:
        return _vote_holds(vote_key, _SIGNED_DOMAIN + data, signature)

    def certifies(self, certificate: bytes, peer: PeerId, vote_key: bytes, run: bytes) -> bool:
        """See `SignatureVerifier`. Does not check the time: voters check `validity_of` when they admit a member."""
        session = self.session_of(certificate)
        if session is None or session.identity.peer != peer:
            return False
        return session.vote_key == vote_key and session.run == run

    def session_of(self, certificate: bytes) -> SessionGrant | None:
        """Content of a certificate; None if it is invalid."""
        if len(certificate) > CERTIFICATE_BYTES_MAX:
            return None
        name = blake3(certificate).digest()
        session = self._opened.get(name)
        if session is None:
            session = open_session_certificate(certificate)
            if session is None:
                return None
            self._opened[name] = session
            if len(self._opened) > self.REMEMBERED_MAX:
                self._opened.popitem(last=False)
        else:
            self._opened.move_to_end(name)
        return session

    def identity_of(self, certificate: bytes) -> bytes | None:
        session = self.session_of(certificate)
        return None if session is None else public_bytes(session.identity)

    def validity_of(self, certificate: bytes) -> Validity | None:
        session = self.session_of(certificate)
        return None if session is None else Validity(session.epoch, session.not_before_s, session.not_after_s)

    def identity_holds(self, identity: bytes, data: bytes, signature: bytes) -> bool:
        public = public_from_bytes(identity)
        both = canonical(signature, _DUAL_SIGNATURE, CERTIFICATE_BYTES_MAX)
        return public is not None and both is not None and public.holds(data, both)


def public_bytes(identity: PublicIdentity) -> bytes:
    """Encode a public identity for `identity_holds`."""
    return _ENCODER.encode(identity)


def public_from_bytes(data: bytes) -> PublicIdentity | None:
    """Decode the bytes of `public_bytes`; None if they are invalid."""
    return canonical(data, _PUBLIC_IDENTITY, CERTIFICATE_BYTES_MAX)


def signature_bytes(signature: DualSignature) -> bytes:
    """Encode a dual signature for `identity_holds`."""
    return _ENCODER.encode(signature)


def _vote_holds(vote_key: bytes, data: bytes, signature: bytes) -> bool:
    try:
        _public_key(vote_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=PEERS_MAX)  # decoding a key takes a fifth of the time of a signature check
def _public_key(vote_key: bytes) -> Ed25519PublicKey | MLDSA65PublicKey:
    kind = MLDSA65PublicKey if kind_of_key(vote_key) == "ml-dsa-65" else Ed25519PublicKey
    return kind.from_public_bytes(vote_key)
