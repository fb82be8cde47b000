"""Departures and disputed cases of a run, read from its vertices, each with its kind of evidence.

    two statements  a pair that one peer signed for one slot: it proves itself, and the walk has judged it
    an audit        findings of drawn auditors, with the names of the judged blobs: a reader with such a blob
                    judges it again (`verification/offline_judge.py`), by the work that follows from the vertices
    a row           reports of members that could not decode a committed row, with the name of the blob that
                    shows it: judged again like exhibits
    voices          reports of enough members that one of them is honest: testimony
    own report      a farewell, or an order of the recovery identity

Invariants:
- Every member that left or was expelled is listed, at its vertex.
- Every audit with a doubted member is listed, whatever the outcome. Memory holds one line per doubt.
Not responsible for: judging blobs, contacting peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import tag_of
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import JudgeMalformedRow, JudgeReplay, JudgeSumOpening
from atoll.policy.findings import AGAINST
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import VerifiedReport, convicted, suspicions_needed
from atoll.protocol.history.chain import VertexChain
from atoll.verification.replay_audit.policy import AuditCase, AuditLedger, Key, key_of
from atoll.verification.sum_check.policy import SumSpotCheck
from atoll.verification.task_builder import keys_of, row_work, work_for
from atoll.wire.codec import statement_in
from atoll.wire.evidence import slot_of
from atoll.wire.messages.statements import (
    Accusation,
    AuditReport,
    ChangedSettings,
    Commitment,
    Finding,
    LeaveReport,
    OwnerComplaint,
    RollbackOrder,
    SignedStatement,
    SuspicionReport,
)
from atoll.wire.messages.vertex import VertexBody

ROWS = -1  # in place of an opening's number: malformed rows of that round

Ground: TypeAlias = Literal["two words", "audit", "row", "voices", "own word", "unsaid"]


class AuditorFinding(msgspec.Struct, frozen=True):
    """One auditor's finding."""

    auditor: PeerId
    finding: Finding
    round: int  # round of the vertex that holds it
    exhibit: Digest | None  # judged blob; None: not named


@dataclass
class DisputedCase:
    """One audit or opening with a doubted member, or malformed rows of a round."""

    round: int  # checked round
    peer: PeerId
    what: str  # drawn part of it
    needed: int  # reports against it that refute it
    work: (
        JudgeReplay | JudgeSumOpening | JudgeMalformedRow | None
    )  # without its blob; None: the vertices for it are lost
    keys: Mapping[PeerId, bytes]  # keys of the members of that round
    tuned: ChangedSettings | UnsetType  # numbers in force
    said: dict[PeerId, AuditorFinding] = field(default_factory=dict[PeerId, AuditorFinding])
    outcome: str = "open"
    vertex: int | None = None
    """For rows: the last vertex with reports about them. They count with reports about its other rows there."""

    @property
    def counted(self) -> list[AuditorFinding]:
        """Reports that decide the outcome: all reports against it, or those of one vertex."""
        return [one for one in self.against if self.vertex is None or one.round == self.vertex]

    @property
    def against(self) -> list[AuditorFinding]:
        return [one for one in self.said.values() if one.finding in AGAINST]

    @property
    def exhibits(self) -> list[Digest]:
        """Judged blobs, each once: one if the member showed the same blob to all."""
        return list(dict.fromkeys(one.exhibit for one in self.said.values() if one.exhibit is not None))


class ExpulsionReason(msgspec.Struct, frozen=True):
    ground: Ground
    what: str  # text for people
    round: int | None = None  # audited round


UNSAID = ExpulsionReason(
    "unsaid", "no report says why: it was not here when a new epoch began, or a vertex is lost here"
)


class MemberDeparture(msgspec.Struct, frozen=True):
    """A member that is out from this vertex on."""

    round: int
    peer: PeerId
    standing: Literal["expelled", "away"]
    reasons: tuple[ExpulsionReason, ...]


class DisputeHistory:
    """Fold over all vertices in order; the ledger must have read each one before."""

    def __init__(self) -> None:
        self.doubts: dict[Key, DisputedCase] = {}
        self.departures: list[MemberDeparture] = []
        self.drawn = 0  # audited rounds of trainers
        self.findings = Counter[str]()  # auditors' findings

    def follow(
        self,
        body: VertexBody,
        before: VertexBody | None,
        history: VertexChain,
        ledgers: LedgerSet,
        genesis: RunSettings,
    ) -> None:
        if (docket := ledgers.find(AuditLedger)) is not None:
            self._follow_audits(body, history, docket, genesis)
        self._follow_rows(body, before, history, genesis)
        was = {m.peer: m for m in before.members} if before is not None else {}
        for m in body.members:
            old = was.get(m.peer)
            left = m.standing == "away" and old is not None and old.is_present
            if left or (m.standing == "expelled" and (old is None or old.standing != "expelled")):
                standing = "away" if left else "expelled"
                reasons = tuple(_reasons(body, m.peer)) or (UNSAID,)
                self.departures.append(MemberDeparture(body.round, m.peer, standing, reasons))

    def _follow_audits(
        self, body: VertexBody, history: VertexChain, docket: AuditLedger, genesis: RunSettings
    ) -> None:
        self.drawn += sum(isinstance(c, AuditCase) and c.round == body.round for c in docket.cases.values())
        for _, word in docket.news(body):
            if word.opening is UNSET:
                self.findings[word.finding] += 1
            case = docket.cases[key_of(word)]
            if case.against and case.key not in self.doubts:
                self.doubts[case.key] = _doubt(case, history, genesis)
            if (doubt := self.doubts.get(case.key)) is not None:
                doubt.said = {
                    by: AuditorFinding(by, what, at, case.judged.get(by)) for by, (at, what) in case.said.items()
                }
                doubt.outcome = case.outcome

    def _follow_rows(
        self, body: VertexBody, before: VertexBody | None, history: VertexChain, genesis: RunSettings
    ) -> None:
        voters = sum(m.votes for m in before.members) if before is not None else 0
        needed = suspicions_needed(voters, genesis.round.quorum)
        voices = [
            VerifiedReport(s.signer, said) for s in body.reports if isinstance(said := statement_in(s), Accusation)
        ]
        liars, _ = convicted(voices, before.members if before is not None else (), genesis.round.quorum)
        out = {m.peer for m in body.members if m.standing == "expelled"}
        for signed, caught, commit in _unreadable(body):
            key = commit.round, caught.answer.signer, ROWS
            if key not in self.doubts:
                work, what = row_work(commit, key[1], history, genesis), f"a row of its round {commit.round}"
                self.doubts[key] = DisputedCase(*key[:2], what, needed, work, *_of_round(commit.round, history))
            exhibit = None if caught.exhibit is UNSET else caught.exhibit
            said = AuditorFinding(signed.signer, "mismatch", body.round, exhibit)
            doubt = self.doubts[key]
            doubt.said[signed.signer] = said
            doubt.vertex, doubt.needed = body.round, needed
            doubt.outcome = "refuted" if doubt.peer in liars & out else "open"


def _unreadable(body: VertexBody) -> Iterator[tuple[SignedStatement, Accusation, Commitment]]:
    """Accusations of malformed rows in this vertex, and the commitments to these rows."""
    for signed in body.reports:
        said = statement_in(signed)
        if isinstance(said, Accusation) and said.other is None:
            commit = statement_in(said.answer)
            if isinstance(commit, Commitment):
                yield signed, said, commit


def _of_round(round: int, history: VertexChain) -> tuple[Mapping[PeerId, bytes], ChangedSettings | UnsetType]:
    """The round's member keys, and its numbers in force."""
    parent = history.bodies.get(round - 1)
    return keys_of(round, history), parent.tuned if parent is not None else UNSET


def _doubt(case: AuditCase | SumSpotCheck, history: VertexChain, genesis: RunSettings) -> DisputedCase:
    if isinstance(case, AuditCase):
        what = f"segment {case.segment} of its round {case.round}"
    else:
        blocks = ", ".join(map(str, case.blocks))
        what = f"blocks {blocks} of its answer of part {case.answered.part} in round {case.round}"
    work = work_for(case, ZERO_DIGEST, history, genesis)
    return DisputedCase(case.round, case.peer, what, case.needed, work, *_of_round(case.round, history))


def _reasons(body: VertexBody, peer: PeerId) -> Iterator[ExpulsionReason]:
    """Evidence in this vertex against a member that it removes, or the member's own report."""
    voices: dict[str, set[PeerId]] = {}
    audited: dict[int, set[PeerId]] = {}
    unread: dict[int, set[PeerId]] = {}
    for signed in body.reports:
        match statement_in(signed):
            case Accusation(answer=answer, other=other) if answer.signer == peer:
                said = statement_in(answer)
                kind, slot = (tag_of(said), slot_of(said)) if said is not None else ("statement", None)
                where = f"of round {slot[1]}" if slot is not None else ""
                if other is not None:
                    yield ExpulsionReason(
                        "two words", f"it signed two different statements ({kind} {where}) for one slot"
                    )
                elif isinstance(said, Commitment):
                    unread.setdefault(said.round, set()).add(signed.signer)
                else:
                    voices.setdefault(f"that its {kind} {where} is a lie", set()).add(signed.signer)
            case AuditReport(round=round, peer=whose, finding=finding) if whose == peer and finding in AGAINST:
                audited.setdefault(round, set()).add(signed.signer)
            case OwnerComplaint(peer=whose, why=why) if whose == peer:
                voices.setdefault(f"that as an owner it failed them ({why})", set()).add(signed.signer)
            case SuspicionReport(peer=whose) if whose == peer:
                voices.setdefault("that they heard nothing from it", set()).add(signed.signer)
            case LeaveReport() if signed.signer == peer:
                yield ExpulsionReason("own word", "it said farewell")
            case RollbackOrder() as amend if peer in amend.sent_away:
                yield ExpulsionReason("own word", "the founder sent it away for good")
            case _:
                pass
    for round, who in audited.items():
        yield ExpulsionReason("audit", f"words of auditors against its round {round}: {len(who)}", round)
    for round, who in unread.items():
        yield ExpulsionReason(
            "row", f"words of members that a row of its round {round} cannot be read: {len(who)}", round
        )
    for what, who in voices.items():
        yield ExpulsionReason("voices", f"words of members {what}: {len(who)}")
