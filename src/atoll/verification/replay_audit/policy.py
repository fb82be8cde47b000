"""Audit ledger: the drawn trainers, segments and auditors, and the meaning of verdicts, all from agreed vertices.

The vertex that closes a round holds every commitment. Its id draws the audited trainers, their segments, and the
order of their auditors. If two commitments name one update, both members are audited: a copy of another's root is
no work, and its author cannot show any.
One auditor has the first turn. Others follow if the one before contradicts the trainer, or is silent for
`AUDIT_TURN` rounds. In a small swarm all needed auditors then have their turn at once, since a liar counts in every
vertex until the end. In a large swarm as many follow as are against already: one false report shall not cost
dozens of replays. An audit goes on while those against are at least as many as those for. It ends when enough are
against that one of them is honest, and never with fewer than two.
Invariants:
- All peers with the same vertices have the same ledger.
- The first report of an auditor counts.
Not responsible for: sending requests, reading exhibits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from atoll.base.draw import draw_below, shuffled
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId
from atoll.base.limits import AUDIT_ROUNDS, AUDIT_TURN, SEGMENT_STEPS
from atoll.policy.capability_terms import SumCheckTerms
from atoll.policy.duplicate_updates import alike_in
from atoll.policy.findings import AGAINST, voices_needed
from atoll.policy.ledger import CapabilityLedger
from atoll.policy.plan import QuorumRule
from atoll.policy.reputation import audit_factor, by_tier, scores_of
from atoll.verification.case import CHANCES, NOTHING, SpotCheck
from atoll.verification.sum_check.policy import SumSpotCheck, openings_of
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import AuditReport, Commitment, Finding
from atoll.wire.messages.vertex import VertexBody

FEW = 4  # most findings needed in a small swarm: up to twelve voters
Key: TypeAlias = tuple[int, PeerId] | tuple[int, PeerId, int]  # round, checked peer; for an opening also its number


def drawn_segment(vertex: Digest, peer: PeerId, steps: int, share: float) -> int | None:
    """The audited segment of a peer's round of `steps` steps, None for most.

    `vertex` closes the round: its id is unknown until it holds every commitment.
    """
    if steps < 1 or draw_below(vertex, f"audited? {peer}", CHANCES) >= share * CHANCES:
        return None
    return draw_below(vertex, f"audited segment of {peer}", -(-steps // SEGMENT_STEPS))


@dataclass
class AuditCase(SpotCheck):
    """One audit: the drawn segment, the trainer's commitment, and the findings since."""

    round: int
    peer: PeerId
    segment: int
    commit: Commitment
    order: tuple[PeerId, ...]  # possible auditors, as drawn
    needed: int  # findings against it that refute it
    said: dict[PeerId, tuple[int, Finding]] = field(default_factory=dict[PeerId, tuple[int, Finding]])
    judged: dict[PeerId, Digest] = field(default_factory=dict[PeerId, Digest])

    @property
    def key(self) -> tuple[int, PeerId]:
        return self.round, self.peer

    def asked(self, head: int, ahead: Mapping[PeerId, Finding] = NOTHING) -> tuple[PeerId, ...]:
        """Auditors that have to replay the segment, as of this round's vertex; none once it is settled.

        A turn of several is over when three of four have reported; later reports count all the same.
        """
        said = self.with_words(head, ahead)
        began, against, agreeing, heard = self.round, 0, 0, 0
        while heard < len(self.order) and against < self.needed and agreeing <= against:
            missing = self.needed - against
            several = missing if self.needed <= FEW else min(against, missing)
            together = self.order[heard : heard + (several if against else 1)]
            told = [said[auditor] for auditor in together if auditor in said]
            silent = len(together) - len(told)
            if silent * 4 > len(together) and head - began < AUDIT_TURN:
                return tuple(auditor for auditor in together if auditor not in said)
            began = began + AUDIT_TURN if silent * 4 > len(together) else max([began, *(at for at, _ in told)])
            against += sum(finding in AGAINST for _, finding in told)
            agreeing += sum(finding == "accepted" for _, finding in told)
            heard += len(together)
        return ()


def key_of(report: AuditReport) -> Key:
    """The case that a report is about."""
    if report.opening is msgspec.UNSET:
        return report.round, report.peer
    return report.round, report.peer, report.opening


class AuditLedger(CapabilityLedger[AuditReport]):
    """The audits and openings of recent rounds; forgets those older than AUDIT_ROUNDS."""

    report, duty, is_about_member = AuditReport, "audit members", True

    def __init__(self, share: float, rule: QuorumRule, terms: SumCheckTerms | None = None) -> None:
        self.share, self.terms = share, terms
        self.rule: QuorumRule = rule
        self.cases: dict[Key, AuditCase | SumSpotCheck] = {}
        self.head = -2
        self.lost = -2  # newest round without a vertex here: reports about draws up to it are believed

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Take in all vertices up to the head that are at hand."""
        if head <= self.head:
            return
        for round in range(max(self.head + 1, head - AUDIT_ROUNDS), head + 1):
            if round in bodies:
                self._hear(round, bodies[round])
                self._open(ids[round], bodies[round])
        self.head = head
        before = bodies.get(head - 1)  # reports that expelled a member in this vertex are still news
        gone = {m.peer for m in before.members if m.standing == "expelled"} if before is not None else set[PeerId]()
        live = {key: case for key, case in self.cases.items() if key[0] > head - AUDIT_ROUNDS}
        self.cases = {key: case for key, case in live.items() if case.peer not in gone}

    def _open(self, vertex: Digest, body: VertexBody) -> None:
        if self.terms is not None:
            self.cases.update((o.key, o) for o in openings_of(vertex, body, self.terms, self.rule))
        if self.share:
            self._audit(vertex, body, self._share_after(body))

    def _share_after(self, body: VertexBody) -> float:
        """The audit share of genesis, or the one agreed since: the draw of a vertex goes by its own numbers."""
        tuned = body.tuned
        return self.share if tuned is UNSET or tuned.to.audit_rate is UNSET else tuned.to.audit_rate

    def _audit(self, vertex: Digest, body: VertexBody, usual: float) -> None:
        voters = sum(m.votes for m in body.members)
        able = [m.peer for m in body.members if m.votes and m.standing == "member"]
        needed, scores = voices_needed(voters, self.rule), scores_of(body)
        said = ((signed.signer, statement_in(signed)) for signed in body.commits)
        claims = {
            peer: commit for peer, commit in said if isinstance(commit, Commitment) and commit.claimed is not None
        }
        settled = {m.peer for m in body.members if m.standing == "member"}
        copied = {peer for peers in alike_in(body) for peer in peers}  # only chains show which of them copied
        for peer, commit in claims.items():
            if commit.weight == 0 and peer not in settled:
                continue  # its update moved nothing: an update that cannot be replayed never does
            share = 1.0 if peer in copied else usual * audit_factor(scores, peer)  # from 1: always
            segment = drawn_segment(vertex, peer, commit.steps, share)
            if segment is None:
                continue
            order = by_tier([p for p in shuffled(vertex, f"auditors of {peer}", able) if p != peer], scores)
            case = AuditCase(body.round, peer, segment, commit, tuple(order[: 2 * needed - 1]), needed)
            self.cases[case.key] = case

    def _hear(self, round: int, body: VertexBody) -> None:
        for signed in body.reports:
            report = statement_in(signed)
            if isinstance(report, AuditReport) and (case := self.cases.get(key_of(report))) is not None:
                case.hear(signed.signer, report, round)

    def news(self, body: VertexBody) -> list[tuple[PeerId, AuditReport]]:
        """Findings that this vertex is the first to hold, with their auditors. Call it after `follow`."""
        found: list[tuple[PeerId, AuditReport]] = []
        for signed in body.reports:
            report = statement_in(signed)
            if not isinstance(report, AuditReport) or (case := self.cases.get(key_of(report))) is None:
                continue
            if case.said.get(signed.signer, (-1, ""))[0] == body.round:
                found.append((signed.signer, report))
        return found

    def problem(self, by: PeerId, report: AuditReport) -> str | None:
        """None if this report may stand in the next vertex, else the reason.

        Reports against a member may be repeated until they count or the audit is over: accusers must not fill
        vertices.
        """
        case = self.cases.get(key_of(report))
        if report.exhibit is not UNSET and len(report.exhibit) != DIGEST_BYTES:
            return "names no blob"
        if self.head - AUDIT_ROUNDS < report.round <= self.lost:
            return None
        if case is None:
            return "is of no audit that is open"
        if by not in case.order:
            return "is not by one who was drawn"
        if not case.asked(self.head) and case.against < case.needed:
            return "is of an audit that is over"
        if isinstance(case, SumSpotCheck) and report.finding not in AGAINST and not case.against:
            return "says that nothing is wrong, which is not in doubt"
        may_repeat = self.rule == "two-thirds" and report.finding in AGAINST
        if by not in case.said or (may_repeat and case.repeats(by, report)):
            return None
        return "was said already"

    def must_repeat(self, report: AuditReport) -> bool:
        """Whether all members repeat this finding against a member until enough auditors agree."""
        return report.finding in AGAINST

    def lose(self, round: int) -> None:
        self.lost = round
