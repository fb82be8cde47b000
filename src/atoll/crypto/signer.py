"""The door through which everybody signs and checks statements.

The real world puts Ed25519 or ML-DSA-65 session keys certified by Ed25519 + ML-DSA-65 identities behind it
(`crypto/identity.py`); the virtual world a keyed hash with charged CPU time. Protocols know only this door.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from atoll.base.ids import PeerId, Seconds

VoteKind = Literal["ed25519", "ml-dsa-65"]  # of session keys; genesis says which (specs/identity.md)


class Validity(NamedTuple):
    """When a session certificate holds: from which epoch of the run on, and between two wall-clock times."""

    epoch: int
    not_before_s: Seconds
    not_after_s: Seconds


class Signer(Protocol):
    """One peer's session: signs round statements, lives as long as its certificate."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def vote_key(self) -> bytes:
        """The public session key that the membership record holds."""
        ...

    @property
    def certificate(self) -> bytes:
        """The identity's signed word that `vote_key` speaks for `peer` in this run."""
        ...

    def sign(self, data: bytes) -> bytes: ...

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that nobody without this session's key can tell; the same whenever it is asked, also after a
        restart."""
        ...


@dataclass(frozen=True)
class IdentitySigner:
    """One peer's long-lived identity: its public half, and the word of all its keys. It takes a millisecond."""

    identity: bytes  # as `SignatureVerifier.identity_holds` reads it
    sign: Callable[[bytes], bytes]  # of data that begins with a domain of its own


class SignatureVerifier(Protocol):
    def holds(self, vote_key: bytes, data: bytes, signature: bytes) -> bool:
        """True if `signature` is over `data` by the owner of `vote_key`. Never raises on strangers' bytes."""
        ...

    def certifies(self, certificate: bytes, peer: PeerId, vote_key: bytes, run: bytes) -> bool:
        """True if the certificate binds `vote_key` to `peer` for this run. Never raises on strangers' bytes."""
        ...

    def identity_of(self, certificate: bytes) -> bytes | None:
        """The long-lived public identity that signed this certificate; None if it does not hold."""
        ...

    def validity_of(self, certificate: bytes) -> Validity | None:
        """When this certificate holds; None if it does not hold at all."""
        ...

    def identity_holds(self, identity: bytes, data: bytes, signature: bytes) -> bool:
        """True if this long-lived public identity signed `data`, with every key it has. Never raises."""
        ...
