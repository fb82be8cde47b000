"""Signatures of the simulator: a keyed hash behind the interface of the real ones, or the real ones.

A keyed hash is unforgeable in a simulation because villains sign through their own signer only. The stand-in
for ML-DSA-65 has its length, and its worlds can be replayed; real ML-DSA signatures are randomized. `RealKeys` uses
sessions certified by Ed25519 + ML-DSA-65 identities, which tests the interface itself; its peers are named as in
the real world.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from atoll.base.draw import draw_bytes
from atoll.base.ids import PeerId
from atoll.crypto.identity import (
    MLDSA65_KEY_BYTES,
    MLDSA65_SIGNATURE_BYTES,
    Identity,
    SessionSigner,
    SessionVerifier,
    VotePrivateKey,
    kind_of_key,
    public_bytes,
    signature_bytes,
)
from atoll.crypto.signer import IdentitySigner, SignatureVerifier, Signer, Validity, VoteKind

FOR_EVER = Validity(0, float("-inf"), float("inf"))
_SECRET = b"the world's own secret"


def peer_name(index: int) -> PeerId:
    return PeerId(f"p{index:04d}")


class WorldKeys(Protocol):
    """Names and keys of the peers of one world, by their index."""

    @property
    def verifier(self) -> SignatureVerifier: ...

    def name(self, index: int) -> PeerId: ...

    def vote_key(self, index: int) -> bytes: ...

    def identity(self, index: int) -> bytes:
        """Public long-lived identity, as `identity_holds` reads it."""
        ...

    def signer(self, index: int, run: bytes, session: int = 0) -> Signer:
        """Signer of a session; a peer that loses its disk begins another session."""
        ...

    def vouch(self, peer: PeerId) -> IdentitySigner:
        """Long-lived identity of a peer of this world."""
        ...


class VirtualKeys:
    def __init__(self, votes: VoteKind = "ed25519") -> None:
        self.votes: VoteKind = votes
        self.verifier = VirtualSignatureVerifier()

    def name(self, index: int) -> PeerId:
        return peer_name(index)

    def vote_key(self, index: int) -> bytes:
        return VirtualSigner(self.name(index), votes=self.votes).vote_key

    def identity(self, index: int) -> bytes:
        return self.name(index).encode()

    def signer(self, index: int, run: bytes, session: int = 0) -> Signer:
        return VirtualSigner(self.name(index), session, self.votes)

    def vouch(self, peer: PeerId) -> IdentitySigner:
        identity = peer.encode()
        return IdentitySigner(identity, lambda data: sign_as_identity(identity, data))


class RealKeys:
    """Identities and sessions drawn from a seed, so that a world with real keys can be replayed too.

    With ML-DSA-65 sessions it cannot: their signatures are randomized, and vertices contain them.
    """

    def __init__(self, seed: int, votes: VoteKind = "ed25519") -> None:
        self.votes: VoteKind = votes
        self.seed = seed.to_bytes(8, "big", signed=True)
        self.verifier = SessionVerifier()
        self._identities: dict[int, Identity] = {}
        self._sessions: dict[tuple[int, int], SessionSigner] = {}

    def name(self, index: int) -> PeerId:
        return self._identity(index).peer

    def vote_key(self, index: int) -> bytes:
        return self._session_key(index).public_key().public_bytes_raw()

    def identity(self, index: int) -> bytes:
        return public_bytes(self._identity(index).public)

    def signer(self, index: int, run: bytes, session: int = 0) -> Signer:
        one = index, session
        if one not in self._sessions:  # stored on disk in the real world: a restarted peer continues its session
            self._sessions[one] = SessionSigner.certified(
                self._identity(index),
                run,
                epoch=0,
                not_before_s=0,
                not_after_s=2**31,
                generate=lambda: self._session_key(index, session),
            )
        return self._sessions[one]

    def vouch(self, peer: PeerId) -> IdentitySigner:
        identity = next(i for i in self._identities.values() if i.peer == peer)
        return IdentitySigner(public_bytes(identity.public), lambda data: signature_bytes(identity.sign(data)))

    def _identity(self, index: int) -> Identity:
        if index not in self._identities:
            seeds = draw_bytes(self.seed, f"identity/{index}", 64)
            self._identities[index] = Identity.from_seeds(seeds[:32], seeds[32:])
        return self._identities[index]

    def _session_key(self, index: int, session: int = 0) -> VotePrivateKey:
        seed = draw_bytes(self.seed, f"session/{index}/{session}" if session else f"session/{index}", 32)
        if self.votes == "ml-dsa-65":
            return MLDSA65PrivateKey.from_seed_bytes(seed)
        return Ed25519PrivateKey.from_private_bytes(seed)


class VirtualSigner:
    def __init__(self, peer: PeerId, session: int = 0, votes: VoteKind = "ed25519") -> None:
        self.peer = peer
        self.vote_key = f"{peer}#{session}".encode()
        if votes == "ml-dsa-65":
            self.vote_key = self.vote_key.ljust(MLDSA65_KEY_BYTES, b"\0")
        self.certificate = b"certified " + self.vote_key

    def sign(self, data: bytes) -> bytes:
        return _mark(self.vote_key, data)

    def secret(self, purpose: bytes) -> bytes:
        return draw_bytes(_SECRET + self.vote_key, purpose.hex(), 32)


class VirtualSignatureVerifier:
    def holds(self, vote_key: bytes, data: bytes, signature: bytes) -> bool:
        return signature == _mark(vote_key, data)

    def certifies(self, certificate: bytes, peer: PeerId, vote_key: bytes, run: bytes) -> bool:
        return certificate == b"certified " + vote_key and vote_key.startswith(f"{peer}#".encode())

    def identity_of(self, certificate: bytes) -> bytes | None:
        name, mark, _ = certificate.removeprefix(b"certified ").partition(b"#")
        return name if mark else None

    def validity_of(self, certificate: bytes) -> Validity | None:
        return FOR_EVER

    def identity_holds(self, identity: bytes, data: bytes, signature: bytes) -> bool:
        return signature == _mark(identity, data)


def sign_as_identity(identity: bytes, data: bytes) -> bytes:
    """Long-lived signature of the simulator, which `identity_holds` accepts."""
    return _mark(identity, data)


def _mark(vote_key: bytes, data: bytes) -> bytes:
    salt = blake2b(vote_key, digest_size=16).digest()
    mark = blake2b(data, key=_SECRET, salt=salt, digest_size=16).digest()
    return mark if kind_of_key(vote_key) == "ed25519" else mark.ljust(MLDSA65_SIGNATURE_BYTES, b"\0")
