"""What a voter must remember across a crash: nothing in here may ever be said differently.

The first statement per slot counts, so what was voted, proposed and timed out is kept, with the certificate that
the last timeout spoke of and the bodies that may be certified. Bounded: slots of finished views are dropped, since
no word is said in them any more, and of the bodies only the newest stay.

Known limit: a liar may keep a certificate to itself and show it when all who voted for its body have dropped that;
then nobody may propose anything else, and the round ends no more. It takes BODIES_KEPT further views in which there
was a body to vote for and no quorum of votes was heard; and each view in vain is longer than the one before.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest
from atoll.wire.messages.statements import Certificate, Stage

BODIES_KEPT = 32  # that a voter keeps durably of those it voted for in one round: with 4, two attempts were enough


class Said(msgspec.Struct, array_like=True):
    prepare: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    commit: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    proposed: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    timed_out: int = -1  # every view up to this one is over for me
    claimed: Certificate | None = None  # the highest prepare certificate that my last timeout spoke of
    high: Certificate | None = None  # the highest prepare certificate I have seen
    bodies: dict[Digest, bytes] = msgspec.field(default_factory=dict[Digest, bytes])  # that I voted for, and high's

    @staticmethod
    def recall(kept: bytes | None) -> Said:
        return _SAID.decode(kept) if kept else Said()

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

    def raise_high(self, certificate: Certificate) -> bool:
        """Remember the certificate if it is the highest; False if it is not."""
        if self.high is not None and self.high.view >= certificate.view:
            return False
        self.high = certificate
        return True

    def remember(self, digest: Digest, bodies: dict[Digest, bytes]) -> None:
        """What I voted for may be certified without my knowing, and then nobody may propose anything else."""
        if digest in bodies:
            self.bodies[digest] = bodies[digest]
        high = self.high.digest if self.high is not None else None
        for old in [d for d in self.bodies if d != high][:-BODIES_KEPT]:
            del self.bodies[old]


_SAID = msgspec.msgpack.Decoder(Said)
