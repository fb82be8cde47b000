"""What a voter must remember across a crash: nothing in here may ever be said differently.

The first statement per slot counts, so what was voted, proposed and timed out is kept, with the certificate that
the last timeout spoke of and the body of every certificate that binds me. Bounded: slots of finished views are
dropped, since no word is said in them any more, and all other bodies but the newest that I voted for.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest
from atoll.wire.messages.statements import QuorumCertificate, Stage


class VoterState(msgspec.Struct, array_like=True):
    prepare: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    commit: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    proposed: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    timed_out: int = -1  # every view up to this one is over for me
    claimed: QuorumCertificate | None = None  # the highest prepare certificate that my last timeout spoke of
    high: QuorumCertificate | None = None  # the highest prepare certificate I have seen
    bodies: dict[Digest, bytes] = msgspec.field(default_factory=dict[Digest, bytes])  # of these, and the newest

    @staticmethod
    def recall(kept: bytes | None) -> VoterState:
        return _SAID.decode(kept) if kept else VoterState()

    def keep(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def view(self) -> int:
        """Where I go on: after all views that are over for me, and before none that I spoke in."""
        return max([self.timed_out + 1, *self.prepare, *self.commit, *self.proposed])

    def otherwise(self, stage: Stage, view: int, digest: Digest) -> bool:
        """In this slot I voted for something else; the first statement counts, also across a restart."""
        slots = self.prepare if stage == "prepare" else self.commit
        return slots.get(view, digest) != digest

    def time_out(self, view: int) -> None:
        self.timed_out, self.claimed = view, self.high
        for slots in (self.prepare, self.commit, self.proposed):
            for old in [v for v in slots if v < view]:
                del slots[old]

    def raise_high(self, certificate: QuorumCertificate, body: bytes) -> bool:
        """Remember the certificate, with its body, if it is the highest; False if it is not."""
        if self.high is not None and self.high.view >= certificate.view:
            return False
        self.high = certificate
        self.remember(certificate.digest, body)
        return True

    def remember(self, digest: Digest, body: bytes) -> None:
        """I voted for this one. Of those before it whoever is bound to one must find it with me, and no other."""
        binding = {
            c.digest: self.bodies[c.digest] for c in (self.claimed, self.high) if c and c.digest in self.bodies
        }
        self.bodies = binding | {digest: body}


_SAID = msgspec.msgpack.Decoder(VoterState)
