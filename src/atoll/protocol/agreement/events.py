"""What the agreement of one round tells the round: what to judge, when to propose, what is final, who lied.

The vocabulary of the narrow door (`door.py`) between a machine and whoever runs it; values only.
"""

from __future__ import annotations

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact
from atoll.wire.evidence import Evidence
from atoll.wire.messages.statements import QuorumCertificate


class ProposalReceived(Fact, frozen=True, kw_only=True, tag="Judge"):
    """A proposal that may be voted for, if its content is right: call `approve(digest)` when it is."""

    phase = "agree"
    view: int
    digest: Digest
    body: bytes


class MayPropose(Fact, frozen=True, kw_only=True, tag="Free"):
    """I am the proposer of this view and may propose any body."""

    phase = "agree"
    view: int


class BodyMissing(Fact, frozen=True, kw_only=True, tag="Lacking"):
    """A certificate, or a ballot, names a body that is not here, and not on its way: ask for it, `learn_body`."""

    phase = "agree"
    view: int
    digest: Digest


class BodyPrepared(Fact, frozen=True, kw_only=True, tag="Prepared"):
    phase = "agree"
    view: int
    digest: Digest


class BodyDecided(Fact, frozen=True, kw_only=True, tag="Decided"):
    """Final. `body` is None if the certificate came before the bytes did.

    A host acts on it as on a Send: once the Keeps before it are durable.
    """

    phase = "agree"
    view: int
    digest: Digest
    body: bytes | None
    certificate: QuorumCertificate


class Equivocation(Fact, frozen=True, kw_only=True, tag="Equivocation"):
    """Two different statements by one signer for one slot: anyone can check the evidence (`wire/evidence.py`)."""

    phase = "agree"
    peer: PeerId
    evidence: Evidence
