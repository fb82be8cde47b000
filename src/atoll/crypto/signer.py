"""Interfaces for signing and verification; protocols depend only on these.

Implementations: Ed25519 or ML-DSA-65 session keys, certified by Ed25519 + ML-DSA-65 identities
(`crypto/identity.py`), and in simulations a keyed hash with charged CPU time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from atoll.base.ids import PeerId, Seconds

VoteKind = Literal["ed25519", "ml-dsa-65"]  # kind of session keys, fixed in genesis (specs/identity.md)


class Validity(NamedTuple):
    """Validity of a session certificate: from an epoch of the run on, between two wall-clock times in seconds."""

    epoch: int
    not_before_s: Seconds
    not_after_s: Seconds


class Signer(Protocol):
    """Session of one peer, which signs round statements while its certificate is valid."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def vote_key(self) -> bytes:
        """Public session key, as in the membership record."""
        ...

    @property
    def certificate(self) -> bytes:
        """Certificate by the identity that `vote_key` signs for `peer` in this run."""
        ...

    def sign(self, data: bytes) -> bytes: ...

    def secret(self, purpose: bytes) -> bytes:
        """Secret for this purpose, 32 bytes: derived from the session key and equal after a restart."""
        ...


@dataclass(frozen=True)
class IdentitySigner:
    """Long-lived identity of one peer; a signature by all its keys takes about 1 ms."""

    identity: bytes  # public identity, as read by `SignatureVerifier.identity_holds`
    sign: Callable[[bytes], bytes]  # signs data that begins with its own domain


class SignatureVerifier(Protocol):
    """Verifier of signatures and session certificates. No method raises on untrusted bytes."""

    def holds(self, vote_key: bytes, data: bytes, signature: bytes) -> bool:
        """Whether `signature` is a signature over `data` by `vote_key`."""
        ...

    def certifies(self, certificate: bytes, peer: PeerId, vote_key: bytes, run: bytes) -> bool:
        """Whether the certificate binds `vote_key` to `peer` for this run."""
        ...

    def identity_of(self, certificate: bytes) -> bytes | None:
        """Long-lived public identity that signed this certificate; None if it is invalid."""
        ...

    def validity_of(self, certificate: bytes) -> Validity | None:
        """Validity of this certificate; None if it is invalid."""
        ...

    def identity_holds(self, identity: bytes, data: bytes, signature: bytes) -> bool:
        """Whether this long-lived public identity signed `data` with all of its keys."""
        ...
