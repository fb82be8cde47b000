"""Ledger of update reviews: drawn updates, drawn judges and their reports, from agreed vertices alone.

Invariants:
- Every peer that holds the same vertices gets the same cases and verdicts, in whole numbers.
- The first report of a judge counts.
- Memory is bounded by the window.
Not responsible for: which updates are drawn, and what reports mean; the subclasses define both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

from atoll.base.draw import draw_below, shuffled
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SCORE_OPEN, SCORERS_MOST
from atoll.policy.ledger import CapabilityLedger
from atoll.policy.plan import QuorumRule
from atoll.policy.reputation import by_tier, scores_of
from atoll.verification.case import CHANCES
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, RedundancyReport, ScoreReport
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

    def over(self, head: int) -> bool:
        """True if the vertex of this round ends the wait for reports."""
        return len(self.said) == len(self.judges) or head - self.round >= SCORE_OPEN


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
R = TypeVar("R", bound=ScoreReport | RedundancyReport)


class ReviewLedger(CapabilityLedger[R], Generic[R, C]):
    """The reviewed updates of recent rounds; drops cases that are over."""

    what: ClassVar[str]  # updates of a case, as a refusal states them
    unit: ClassVar[str]  # numbers of a report, as a refusal states them

    def __init__(self, share: float, rule: QuorumRule) -> None:
        self.share = share
        self.rule: QuorumRule = rule
        self.cases: dict[Key, C] = {}
        self.settled: tuple[Any, ...] = ()  # verdicts at the head; the next vertex adds them to records
        self.head = -2
        self.lost = -2  # newest round without a vertex here; reports on draws up to it are accepted unchecked

    @abstractmethod
    def numbers_in(self, report: R) -> Numbers: ...

    @abstractmethod
    def are_valid(self, numbers: Numbers) -> bool: ...

    @abstractmethod
    def verdict(self, case: C) -> Any:
        """The verdict on a case that is over; None if there is none."""

    @abstractmethod
    def open_cases(self, round: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Add the cases that the vertex of this round opens; it may be lacking."""

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
            said = statement_in(signed)
            if not isinstance(said, self.report):
                continue
            report = cast("R", said)
            case = self.cases.get((report.round, report.peer))
            if case is not None and self.problem(signed.signer, report) is None:
                case.said.setdefault(signed.signer, self.numbers_in(report))

    def _settle(self) -> None:
        over = [case for case in self.cases.values() if case.over(self.head)]
        for case in over:
            del self.cases[case.key]
        self.settled = tuple(verdict for case in over if (verdict := self.verdict(case)) is not None)

    def problem(self, by: PeerId, report: R) -> str | None:
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
        return None if self.are_valid(self.numbers_in(report)) else f"holds {self.unit} that are none"

    def settled_outcomes(self) -> list[str]:
        return [verdict.opinion for verdict in self.settled]

    def lose(self, round: int) -> None:
        """The vertex of this round is lost, with its draws and reports."""
        self.lost, self.cases, self.settled = round, {}, ()
