"""Events of a consensus engine: proposal to judge, turn to propose, missing body, decision, equivocation.

Values only. `interface.py` has the calls that go the other way.
"""

from __future__ import annotations

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact
from atoll.wire.evidence import Evidence
from atoll.wire.messages.statements import QuorumCertificate


class ProposalReceived(Fact, frozen=True, kw_only=True, tag="ProposalReceived"):
    """A proposal that awaits judgment. If its content is right, the round calls `approve(digest)`."""

    phase = "agree"
    view: int
    digest: Digest
    body: bytes


class LocalProposerTurnBegan(Fact, frozen=True, kw_only=True, tag="LocalProposerTurnBegan"):
    """The local peer is the proposer of this view and may propose any body."""

    phase = "agree"
    view: int


class VertexBodyMissing(Fact, frozen=True, kw_only=True, tag="VertexBodyMissing"):
    """A certificate or ballot names a body that is neither here nor under way.

    The round fetches the body and calls `learn_body`.
    """

    phase = "agree"
    view: int
    digest: Digest


class PrepareQuorumReached(Fact, frozen=True, kw_only=True, tag="PrepareQuorumReached"):
    """A quorum of prepare votes names this body."""

    phase = "agree"
    view: int
    digest: Digest


class BodyDecided(Fact, frozen=True, kw_only=True, tag="BodyDecided"):
    """The final body. `body` is None if the certificate arrived before the bytes.

    The driver acts on it as on a Send: after the preceding `Persist` effects are durable.
    """

    phase = "agree"
    view: int
    digest: Digest
    body: bytes | None
    certificate: QuorumCertificate


class Equivocation(Fact, frozen=True, kw_only=True, tag="Equivocation"):
    """Two different statements by one signer for one slot; any peer can check the evidence (`wire/evidence.py`)."""

    phase = "agree"
    peer: PeerId
    evidence: Evidence
