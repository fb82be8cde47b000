"""Ledger of update reviews: drawn updates, drawn judges and their reports, from agreed vertices alone.

Invariants:
- Every peer that holds the same vertices gets the same cases and verdicts, in whole numbers.
- The first report of a judge counts.
- Memory is bounded by the window.
Not responsible for: what reports mean; the subclasses define it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from atoll.base.draw import draw_below, shuffled
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SCORE_OPEN, SCORERS_MOST
from atoll.policy.ledger import CapabilityLedger
from atoll.policy.plan import QuorumRule
from atoll.policy.reputation import WorkFindings, audit_factor, by_tier, scores_of
from atoll.verification.case import CHANCES
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import CheckReport, Commitment
from atoll.wire.messages.vertex import VertexBody

Key = tuple[int, PeerId]  # round, and first author
Numbers = tuple[int, ...]


@dataclass
class DrawnUpdateReview:
    """Updates of one round that are judged together, and the reports so far."""

    round: int
    authors: tuple[PeerId, ...]
    commits: tuple[Commitment, ...]  # of the authors
    judges: tuple[PeerId, ...]
    drawn: Digest  # draws the judges
    said: dict[PeerId, Numbers] = field(default_factory=dict[PeerId, Numbers])

    @property
    def key(self) -> Key:
        return self.round, self.authors[0]

    @property
    def priority(self) -> int:
        """Equal at all judges: if there are more cases than they can handle, they handle the same ones."""
        return draw_below(self.drawn, f"first {self.authors[0]}", CHANCES)

    def most_say(self, holds: Callable[[Numbers], bool]) -> bool:
        """Whether more than half of all drawn judges reported numbers of which this holds; silent ones did not."""
        return 2 * sum(holds(numbers) for numbers in self.said.values()) > len(self.judges)

    def over(self, head: int) -> bool:
        """True if the vertex of this round ends the wait for reports."""
        return len(self.said) == len(self.judges) or head - self.round >= SCORE_OPEN


@dataclass(frozen=True)
class ReviewVerdict:
    """Verdict on the updates of one case."""

    round: int
    authors: tuple[PeerId, ...]
    opinion: str  # one word, for people
    against: tuple[PeerId, ...] = ()  # authors whose next record shows useless work
    hid: tuple[PeerId, ...] = ()  # authors that did not show their update
    numbers: Numbers = ()  # the agreed numbers behind it, if the check has any


def judges_of(
    authors: tuple[PeerId, ...], drawn: Digest, label: str, body: VertexBody, rule: QuorumRule
) -> tuple[PeerId, ...]:
    """Judges of these authors as of this vertex: settled voters, members on probation last."""
    settled = [m.peer for m in body.members if m.votes and m.standing == "member"]
    others = [peer for peer in shuffled(drawn, label, settled) if peer not in authors]
    return tuple(by_tier(others, scores_of(body))[: judges_drawn(sum(m.votes for m in body.members), rule)])


def judges_drawn(voters: int, rule: QuorumRule) -> int:
    """Number of judges: at least three, and enough that liars are less than half, as far as that is cheap."""
    liars = (voters - 1) // 3 if rule == "two-thirds" else 1
    return min(2 * max(1, liars) + 1, SCORERS_MOST)


C = TypeVar("C", bound=DrawnUpdateReview)


class ReviewLedger(CapabilityLedger[CheckReport], Generic[C]):
    """The reviewed updates of recent rounds; drops cases that are over.

    A new check defines `check`, `duty`, `what`, `unit`, `case_type`, `are_valid` and `verdict`; `chance` if not all
    updates are equal. `verdict` names useless work in `against`: it lowers the next record. An author that showed
    nothing to most judges belongs in `hid`: it costs as much as any other silence.
    """

    report = CheckReport
    is_about_member = True
    what: ClassVar[str]  # updates of a case, as a refusal states them
    unit: ClassVar[str]  # numbers of a report, as a refusal states them
    case_type: type[C]

    def __init__(self, share: float, rule: QuorumRule) -> None:
        self.share = share
        self.rule: QuorumRule = rule
        self.cases: dict[Key, C] = {}
        self.settled: tuple[ReviewVerdict, ...] = ()  # at the head; the next vertex adds them to records
        self.head = -2
        self.lost = -2  # newest round without a vertex here; reports on draws up to it are accepted unchecked

    @abstractmethod
    def are_valid(self, numbers: Numbers) -> bool:
        """Whether a report may hold these numbers. A stranger sent them: their count is unchecked as well."""

    @abstractmethod
    def verdict(self, case: C) -> ReviewVerdict | None:
        """The verdict on a case that is over; None if there is none."""

    def chance(self, commit: Commitment, peer: PeerId, body: VertexBody) -> float:
        """Chance that this update is reviewed: higher for members on probation, as with audits. 1: always."""
        del commit
        return self.share * audit_factor(scores_of(body), peer)

    def open_cases(self, round: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Add the cases that the vertex of this round opens; it may be lacking. Its id draws them."""
        if round not in bodies:
            return
        vertex, body = ids[round], bodies[round]
        for signed in body.commits:
            commit, peer = statement_in(signed), signed.signer
            if not isinstance(commit, Commitment) or not commit.parts or commit.late is not None:
                continue
            if draw_below(vertex, f"{self.check}? {peer}", CHANCES) >= self.chance(commit, peer, body) * CHANCES:
                continue
            judges = judges_of((peer,), vertex, f"{self.check} of {peer}", body, self.rule)
            if judges:
                case = self.case_type(body.round, (peer,), (commit,), judges, vertex)
                self.cases[case.key] = case

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Apply all available vertices up to the head."""
        if not self.share or head <= self.head:
            return
        for round in range(max(self.head + 1, head - 2 * SCORE_OPEN), head + 1):
            # reports in a vertex were judged by the ledger of the vertex before
            self.head, self.settled = round - 1, ()
            if round in bodies:
                self._hear(bodies[round])
            self.head = round
            if round in bodies:
                self._settle()
            self.open_cases(round, ids, bodies)

    def _hear(self, body: VertexBody) -> None:
        for signed in body.reports:
            report = statement_in(signed)
            if not isinstance(report, CheckReport) or report.check != self.check:
                continue
            case = self.cases.get((report.round, report.peer))
            if case is not None and self.problem(signed.signer, report) is None:
                case.said.setdefault(signed.signer, report.numbers)

    def _settle(self) -> None:
        over = [case for case in self.cases.values() if case.over(self.head)]
        for case in over:
            del self.cases[case.key]
        self.settled = tuple(verdict for case in over if (verdict := self.verdict(case)) is not None)

    def problem(self, by: PeerId, report: CheckReport) -> str | None:
        """None if this report may stand in the next vertex."""
        if self.head - SCORE_OPEN <= report.round <= self.lost:
            return None
        case = self.cases.get((report.round, report.peer))
        if case is None:
            return f"is of no {self.what}"
        if by not in case.judges:
            return "is not by one who was drawn"
        if by in case.said:
            return "was said already"
        return None if self.are_valid(report.numbers) else f"holds {self.unit} that are none"

    def settled_outcomes(self) -> list[str]:
        return [verdict.opinion for verdict in self.settled]

    def findings(self, head: int) -> WorkFindings:
        settled = self.settled if head == self.head else ()
        return WorkFindings(
            hollow=frozenset(peer for verdict in settled for peer in verdict.against),
            hid=frozenset(peer for verdict in settled for peer in verdict.hid),
        )

    def lose(self, round: int) -> None:
        """The vertex of this round is lost, with its draws and reports."""
        self.lost, self.cases, self.settled = round, {}, ()
