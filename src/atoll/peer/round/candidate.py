"""What a round holds while it is not agreed: the commitments it heard, what it says in its own, and the bodies it
checks. Values, and what follows from signed bytes alone; never anything that lasts longer than the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.peer.governance.orders import amend_of
from atoll.policy.plan import RoundPlan
from atoll.wire.codec import decode_body, decode_statement
from atoll.wire.messages.statements import Commitment, OwnerResult, RollbackOrder, SignedStatement, Statement
from atoll.wire.messages.vertex import VertexBody


class StateStep(Statement, frozen=True, tag="Step"):
    """What turns one shared state into the next: combined parts, and the counters of those who count."""

    parts: tuple[Digest | None, ...]
    steps: int  # of one worker, the longest: the position of the learning-rate schedule
    samples: int  # that all contributors learned from


@dataclass
class Candidate:
    """A body that I am checking, or that is final and that I am catching up with."""

    id: Digest
    body: VertexBody
    answers: tuple[OwnerResult | None, ...]
    step: StateStep
    back: RollbackOrder | None = None  # it goes back to an earlier state, which its parts then do not move
    final: bool = False
    view: int = -1  # in which it was proposed to me
    state: Digest | None = None


@dataclass(frozen=True)
class LocalMeasurements:
    """What a peer knows about itself and its links, for its next commitment."""

    offset_s: Seconds = 0.0  # of its clock from run time
    links: bytes = b""  # a report of policy/links


@dataclass
class CommitmentCache:
    """Commitments heard in one attempt."""

    of: dict[PeerId, tuple[Commitment, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[Commitment, SignedStatement]]
    )
    giving: set[PeerId] = field(default_factory=set[PeerId])  # of those, the ones who have an update

    def hear(self, peer: PeerId, commit: Commitment, signed: SignedStatement) -> None:
        self.of[peer] = (commit, signed)
        if commit.parts > 0:
            self.giving.add(peer)


def trial_of(id: Digest, raw: bytes, plan: RoundPlan) -> Candidate:
    """Of a body that was checked, or that a certificate stands for."""
    body = decode_body(raw)
    commits = [c for c in (decode_statement(s.body, s.signer) for s in body.commits) if isinstance(c, Commitment)]
    answers = tuple(None if s is None else opened(s) for s in body.parts)
    return Candidate(id, body, answers, step_of(body.parts, commits, plan), amend_of(body))


def step_of(parts: Sequence[SignedStatement | None], commits: Sequence[Commitment], plan: RoundPlan) -> StateStep:
    """What these answers, of the updates of these commitments, make of the state."""
    digests = tuple(None if s is None else opened(s).digest for s in parts)
    # an update that spans failed rounds stands for more steps than the plan gave; the schedule goes on by one
    steps = min(max((c.steps for c in commits), default=0), plan.steps)
    most = plan.samples_most
    return StateStep(digests, steps, sum(c.samples if most is None else min(c.samples, most) for c in commits))


def opened(signed: SignedStatement) -> OwnerResult:
    """An Answered whose signature was checked when the body or the message was."""
    statement = decode_statement(signed.body, signed.signer)
    assert isinstance(statement, OwnerResult)
    return statement


def named_in(parts: Sequence[SignedStatement | None]) -> set[PeerId]:
    """Who counted in any of these answers."""
    return {p for s in parts if s is not None for p in opened(s).contributors}
