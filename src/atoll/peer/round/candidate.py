"""Values of a round before agreement: received commitments, local measurements and candidate bodies.

Not responsible for: anything that outlives the round, or that does not follow from signed bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.peer.governance.orders import amend_of
from atoll.policy.plan import RoundPlan
from atoll.wire.codec import decode_body, decode_statement
from atoll.wire.messages.statements import BaseStatement, Commitment, OwnerResult, RollbackOrder, SignedStatement
from atoll.wire.messages.vertex import VertexBody


class StateStep(BaseStatement, frozen=True, tag="StateStep"):
    """One transition of the shared state: combined parts, and the counters of the members that count."""

    parts: tuple[Digest | None, ...]
    steps: int  # longest of any worker: the position in the learning-rate schedule
    samples: int  # sum over all contributors


@dataclass
class CandidateVertex:
    """A vertex body under check, or the final one that the local peer still has to reach."""

    id: Digest
    body: VertexBody
    answers: tuple[OwnerResult | None, ...]
    step: StateStep
    back: RollbackOrder | None = None  # rollback to an earlier state, which the parts then do not move
    final: bool = False
    view: int = -1  # view of the proposal
    state: Digest | None = None


@dataclass(frozen=True)
class LocalMeasurements:
    """Measurements of the local clock and links, for the next commitment."""

    offset_s: Seconds = 0.0  # local clock minus run time
    links: bytes = b""  # encoded link report, see policy/links


@dataclass
class CommitmentCache:
    """Commitments received in one attempt."""

    of: dict[PeerId, tuple[Commitment, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[Commitment, SignedStatement]]
    )
    giving: set[PeerId] = field(default_factory=set[PeerId])  # authors in `of` that have an update

    def hear(self, peer: PeerId, commit: Commitment, signed: SignedStatement) -> None:
        self.of[peer] = (commit, signed)
        if commit.parts > 0:
            self.giving.add(peer)


def trial_of(id: Digest, raw: bytes, plan: RoundPlan) -> CandidateVertex:
    """Candidate of a body that was checked or has a certificate."""
    body = decode_body(raw)
    commits = [c for c in (decode_statement(s.body, s.signer) for s in body.commits) if isinstance(c, Commitment)]
    answers = tuple(None if s is None else opened(s) for s in body.parts)
    return CandidateVertex(id, body, answers, step_of(body.parts, commits, plan), amend_of(body))


def step_of(parts: Sequence[SignedStatement | None], commits: Sequence[Commitment], plan: RoundPlan) -> StateStep:
    """The state step of these results over the updates of these commitments."""
    digests = tuple(None if s is None else opened(s).digest for s in parts)
    # an update that spans failed rounds has more steps than planned; the schedule advances by one round
    steps = min(max((c.steps for c in commits), default=0), plan.steps)
    most = plan.samples_most
    return StateStep(digests, steps, sum(c.samples if most is None else min(c.samples, most) for c in commits))


def opened(signed: SignedStatement) -> OwnerResult:
    """The owner result in a statement with a signature that was checked before."""
    statement = decode_statement(signed.body, signed.signer)
    assert isinstance(statement, OwnerResult)
    return statement


def named_in(parts: Sequence[SignedStatement | None]) -> set[PeerId]:
    """Contributors of any of these results."""
    return {p for s in parts if s is not None for p in opened(s).contributors}
