"""Durable voter state: the statements that a voter must not contradict after a crash.

Invariants:
- The first statement per slot is kept: votes, proposals, timeouts, and the certificate claimed by the last timeout.
- The body of every binding certificate is kept, and the body voted for last.
- Bounded: slots of finished views are dropped, since the voter sends nothing more in them. All other bodies are
  dropped too.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest
from atoll.wire.messages.statements import QuorumCertificate, Stage


class VoterState(msgspec.Struct, array_like=True):
    prepare: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    commit: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    proposed: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    timed_out: int = -1  # last closed view; all earlier views are closed too
    claimed: QuorumCertificate | None = None  # highest prepare certificate at the time of the last timeout
    high: QuorumCertificate | None = None  # highest prepare certificate received or formed
    bodies: dict[Digest, bytes] = msgspec.field(
        default_factory=dict[Digest, bytes]
    )  # bodies of these two certificates, and the body voted for last

    @staticmethod
    def decode(kept: bytes | None) -> VoterState:
        return _STATE.decode(kept) if kept else VoterState()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def view(self) -> int:
        """The view to resume in: after all closed views, and not before a view with a statement of this voter."""
        return max([self.timed_out + 1, *self.prepare, *self.commit, *self.proposed])

    def conflicts(self, stage: Stage, view: int, digest: Digest) -> bool:
        """Whether this slot has a vote for another digest. The first statement counts, also across a restart."""
        slots = self.prepare if stage == "prepare" else self.commit
        return slots.get(view, digest) != digest

    def close_view(self, view: int) -> None:
        self.timed_out, self.claimed = view, self.high
        for slots in (self.prepare, self.commit, self.proposed):
            for old in [v for v in slots if v < view]:
                del slots[old]

    def raise_highest(self, certificate: QuorumCertificate, body: bytes) -> bool:
        """Store the certificate and its body if it is the highest so far. Returns whether it is."""
        if self.high is not None and self.high.view >= certificate.view:
            return False
        self.high = certificate
        self.remember_vote(certificate.digest, body)
        return True

    def remember_vote(self, digest: Digest, body: bytes) -> None:
        """Store a body that was voted for. Drops earlier bodies unless a certificate binds a voter to them.

        A bound voter must be able to fetch its body from here.
        """
        binding = {
            c.digest: self.bodies[c.digest] for c in (self.claimed, self.high) if c and c.digest in self.bodies
        }
        self.bodies = binding | {digest: body}


_STATE = msgspec.msgpack.Decoder(VoterState)
