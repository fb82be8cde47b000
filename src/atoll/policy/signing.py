"""Signing policy of a run: sizes of keys in member lines, signatures in bodies and votes in proposals.

Genesis fixes the kind of session keys. Ed25519 is short. ML-DSA-65 (FIPS 204) resists future forgers of Ed25519,
with keys of 1,952 bytes and signatures of 3,309. Bodies, certificates and proposals get longer but their frame does
not, so fewer members fit (`policy/vertex_capacity.py`).

Invariants:
- A run of ML-DSA-65 accepts only such keys.
Not responsible for: the content of a key (`crypto/`).
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
class VoteSignatureScheme:
    kind: VoteKind = "ed25519"
    voters_most: int = COMMITTEE_MOST  # voters of one round, at most

    def takes(self, vote_key: bytes) -> bool:
        """True if this may be a session key. With Ed25519 only its length is checked: simulated keys are names."""
        if self.kind == "ml-dsa-65":
            return len(vote_key) == MLDSA65_KEY_BYTES
        return len(vote_key) <= VOTE_KEY_BYTES_MAX

    @property
    def key_bytes_max(self) -> int:
        """Largest key in a member line, with the extra byte of a longer header."""
        return MLDSA65_KEY_BYTES + 1 if self.kind == "ml-dsa-65" else VOTE_KEY_BYTES_MAX

    @property
    def signature_bytes(self) -> int:
        return MLDSA65_SIGNATURE_BYTES if self.kind == "ml-dsa-65" else ED25519_SIGNATURE_BYTES

    @property
    def longer_bytes(self) -> int:
        """Bytes of a signature beyond one of Ed25519, which `base/limits.py` assumes."""
        return self.signature_bytes - ED25519_SIGNATURE_BYTES

    @property
    def commit_bytes_max(self) -> int:
        """Largest commitment with its signature, in bytes."""
        return COMMIT_BYTES_MAX + self.longer_bytes

    @property
    def body_bytes_max(self) -> int:
        """Largest body: a proposal also carries a timeout and a vote of every voter."""
        return BODY_BYTES_MAX - 2 * self.voters_most * self.longer_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes of a body without its reports."""
        return self.body_bytes_max - REPORTS_BYTES_MAX


ED25519 = VoteSignatureScheme()
MLDSA65 = VoteSignatureScheme("ml-dsa-65")
