"""Authority over a run: decides which signed orders for the whole run hold.

Invariants:
- A verdict depends on the order and the roster alone, so all peers agree on it.
Not responsible for: the time of an order (peer/governance/orders.py), and duties of voters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from atoll.crypto.signer import SignatureVerifier
from atoll.wire.messages.vertex import Member


class SignedOrder(NamedTuple):
    """One order for a whole run, and its signature."""

    command: Literal["recover", "attest", "rollback", "pause", "amend"]  # attest: sign an era for absent signers
    content: bytes  # signed bytes: domain, run, and what is ordered
    signature: bytes


class Authority(Protocol):
    """Rule that decides who may change a whole run."""

    @property
    def identities(self) -> tuple[bytes, ...]:
        """Public identities that may sign orders; empty: nothing can be ordered."""
        ...

    def allows(self, order: SignedOrder, roster: Sequence[Member]) -> bool:
        """Whether the order holds for a run with these members."""
        ...


@dataclass(frozen=True)
class FounderAuthority:
    """The identity that genesis names may order everything; empty: no identity may."""

    identity: bytes
    verifier: SignatureVerifier

    @property
    def identities(self) -> tuple[bytes, ...]:
        return (self.identity,) if self.identity else ()

    def allows(self, order: SignedOrder, roster: Sequence[Member]) -> bool:
        return bool(self.identity) and self.verifier.identity_holds(self.identity, order.content, order.signature)
