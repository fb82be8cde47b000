"""How the members of a run sign, and what that takes: keys in lines, signatures in bodies, votes in proposals.

Genesis says by which keys sessions sign. Ed25519 is short. ML-DSA-65 (FIPS 204) withstands whoever can forge
Ed25519 some day, with keys of 1,952 and signatures of 3,309 bytes: bodies, certificates and proposals get longer,
their frame does not, so fewer members find room (`policy/vertex_capacity.py`).
Promises: a run of ML-DSA-65 takes such keys only. Never looks at a key beyond its length: `crypto/` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.limits import (
    BODY_BYTES_MAX,
    COMMIT_BYTES_MAX,
    COMMITTEE_MOST,
    REPORTS_BYTES_MAX,
    VOTE_KEY_BYTES_MAX,
)
from atoll.crypto.identity import ED25519_SIGNATURE_BYTES, MLDSA65_KEY_BYTES, MLDSA65_SIGNATURE_BYTES
from atoll.crypto.signer import VoteKind


@dataclass(frozen=True)
class SigningPolicy:
    kind: VoteKind = "ed25519"
    voters_most: int = COMMITTEE_MOST  # of one round

    def takes(self, vote_key: bytes) -> bool:
        """Could this be a session's key here? Where Ed25519 signs only length counts: simulated keys are names."""
        if self.kind == "ml-dsa-65":
            return len(vote_key) == MLDSA65_KEY_BYTES
        return len(vote_key) <= VOTE_KEY_BYTES_MAX

    @property
    def key_bytes_max(self) -> int:
        """Of a key in a member's line, with what its head is longer than that of a short one."""
        return MLDSA65_KEY_BYTES + 1 if self.kind == "ml-dsa-65" else VOTE_KEY_BYTES_MAX

    @property
    def signature_bytes(self) -> int:
        return MLDSA65_SIGNATURE_BYTES if self.kind == "ml-dsa-65" else ED25519_SIGNATURE_BYTES

    @property
    def longer_bytes(self) -> int:
        """Than one of Ed25519, for which the bounds in `base/limits.py` stand."""
        return self.signature_bytes - ED25519_SIGNATURE_BYTES

    @property
    def commit_bytes_max(self) -> int:
        """Of a commitment and its signature."""
        return COMMIT_BYTES_MAX + self.longer_bytes

    @property
    def body_bytes_max(self) -> int:
        """A proposal carries a timeout and a vote of every voter beside it."""
        return BODY_BYTES_MAX - 2 * self.voters_most * self.longer_bytes

    @property
    def room_bytes(self) -> int:
        """Of a body, for all but its reports."""
        return self.body_bytes_max - REPORTS_BYTES_MAX


ED25519 = SigningPolicy()
MLDSA65 = SigningPolicy("ml-dsa-65")
