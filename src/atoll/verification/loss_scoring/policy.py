"""Loss score verdicts: drawn updates, drawn scorers and the medians of their reports, from vertices alone.

The vertex that closes a round holds every commitment, so its id draws scored updates and their scorers. Each scorer
signs how far the loss fell along the update: on samples that its author was assigned, and on others. When all
scorers have reported, or time is up, the medians say whether the update taught the model its samples. The next
vertex makes that part of the author's record.

Invariants:
- Every peer that holds the same vertices gets the same verdicts, in whole numbers.
- The first report of a scorer counts.
- A minority of the drawn scorers moves no median beyond an honest report.
- Memory is bounded by the window.
Not responsible for: requesting, measuring, expelling; a score is a statistic and no proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from atoll.base.draw import draw_below, shuffled
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SCORE_OPEN, SCORERS_MOST
from atoll.policy.duplicate_updates import alike_in
from atoll.policy.ledger import Ledger
from atoll.policy.plan import QuorumRule
from atoll.policy.reputation import WorkFindings, audit_factor, by_tier, scores_of
from atoll.verification.case import CHANCES
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, ScoreReport
from atoll.wire.messages.vertex import VertexBody

NAT = 1_000_000  # falls travel in millionths
FALL_MOST = 10**9 * NAT
# standard errors: one in 44 authors that learned from other samples gains that much more on its own
ERRORS_LEAST = 2

Key = tuple[int, PeerId]  # round and author of the update
Falls = tuple[int, ...]  # millionths of a nat: on own samples, on others, standard error of the difference
Opinion = Literal["taught", "hollow", "unclear"]


def scorers_drawn(voters: int, rule: QuorumRule) -> int:
    """Number of scorers: at least three, and enough that liars are less than half, as far as that is cheap."""
    liars = (voters - 1) // 3 if rule == "two-thirds" else 1
    return min(2 * max(1, liars) + 1, SCORERS_MOST)


def opinion_of(falls: Falls) -> Opinion:
    """Verdict of a score. Hollow: no improvement on its author's own samples, or no more there than on others."""
    if len(falls) != 3:
        return "hollow"
    own, others, error = falls
    if own <= 0 or own <= others:
        return "hollow"
    return "taught" if own - others > ERRORS_LEAST * error else "unclear"


@dataclass
class ScoringCase:
    """One scored update: its draw, its author's commitment, and the reports so far."""

    round: int
    peer: PeerId
    commit: Commitment
    scorers: tuple[PeerId, ...]
    vertex: Digest  # vertex that drew the update, and draws the samples
    said: dict[PeerId, Falls] = field(default_factory=dict[PeerId, Falls])

    @property
    def key(self) -> Key:
        return self.round, self.peer

    @property
    def priority(self) -> int:
        """Equal at all scorers: if there are more updates than they can score, they score the same ones."""
        return draw_below(self.vertex, f"first {self.peer}", CHANCES)

    @property
    def falls(self) -> Falls | None:
        """Median of each number over all reports; None while too few have reported.

        A scorer that was shown nothing reports the least value. Numbers in the author's favor get lower medians,
        numbers against it upper ones. Of an even number of reports the worse one counts, so silence gains nothing.
        """
        if 2 * len(self.said) <= len(self.scorers):
            return None
        words = [falls or (-FALL_MOST, FALL_MOST, 0) for falls in self.said.values()]
        own, others, error = (sorted(numbers) for numbers in zip(*words, strict=True))
        low, high = (len(words) - 1) // 2, len(words) // 2
        return own[low], others[high], error[high]

    def over(self, head: int) -> bool:
        """True if the vertex of this round ends the wait for reports."""
        return len(self.said) == len(self.scorers) or head - self.round >= SCORE_OPEN


@dataclass(frozen=True)
class SettledScore:
    """Verdict on one case."""

    round: int
    peer: PeerId
    falls: Falls
    opinion: Opinion


class ScoreLedger(Ledger[ScoreReport]):
    """The scored updates of recent rounds; drops cases that are over."""

    report, duty, is_about_member = ScoreReport, "score members", True

    def __init__(self, share: float, rule: QuorumRule) -> None:
        self.share = share
        self.rule: QuorumRule = rule
        self.cases: dict[Key, ScoringCase] = {}
        self.settled: tuple[SettledScore, ...] = ()  # verdicts at the head; the next vertex adds them to records
        self.head = -2
        self.lost = -2  # newest round without a vertex here; reports on draws up to it are accepted unchecked

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
                self._open(ids[round], bodies[round])

    def _hear(self, body: VertexBody) -> None:
        for signed in body.reports:
            said = statement_in(signed)
            case = self.cases.get((said.round, said.peer)) if isinstance(said, ScoreReport) else None
            if isinstance(said, ScoreReport) and case is not None and self.problem(signed.signer, said) is None:
                case.said.setdefault(signed.signer, said.falls)

    def _settle(self) -> None:
        over = [case for case in self.cases.values() if case.over(self.head)]
        for case in over:
            del self.cases[case.key]
        known = ((case, case.falls) for case in over)
        self.settled = tuple(
            SettledScore(case.round, case.peer, falls, opinion_of(falls))
            for case, falls in known
            if falls is not None
        )

    def _open(self, vertex: Digest, body: VertexBody) -> None:
        voters = sum(m.votes for m in body.members)
        able = [m.peer for m in body.members if m.votes and m.standing == "member"]
        scores, copied = scores_of(body), {peer for peers in alike_in(body) for peer in peers}
        for signed in body.commits:
            commit, peer = statement_in(signed), signed.signer
            if (
                not isinstance(commit, Commitment)
                or commit.steps < 1
                or not commit.parts
                or commit.late is not None
            ):
                continue
            # above 1: always; a copy teaches samples that its author was not assigned
            share = 1.0 if peer in copied else self.share * audit_factor(scores, peer)
            if draw_below(vertex, f"scored? {peer}", CHANCES) >= share * CHANCES:
                continue
            others = [p for p in shuffled(vertex, f"scorers of {peer}", able) if p != peer]
            drawn = tuple(by_tier(others, scores)[: scorers_drawn(voters, self.rule)])
            if drawn:
                case = ScoringCase(body.round, peer, commit, drawn, vertex)
                self.cases[case.key] = case

    def problem(self, by: PeerId, report: ScoreReport) -> str | None:
        """None if this report may stand in the next vertex."""
        if self.head - SCORE_OPEN <= report.round <= self.lost:
            return None
        case = self.cases.get((report.round, report.peer))
        if case is None:
            return "is of no update that is being scored"
        if by not in case.scorers:
            return "is not by one who was drawn"
        if by in case.said:
            return "was said already"
        fits = len(report.falls) in (0, 3) and all(-FALL_MOST <= fall <= FALL_MOST for fall in report.falls)
        return None if fits and (not report.falls or report.falls[2] >= 0) else "holds falls that are none"

    def findings(self, head: int) -> WorkFindings:
        settled = self.settled if head == self.head else ()
        taught = frozenset(score.peer for score in settled if score.opinion == "taught")
        return WorkFindings(taught, frozenset(score.peer for score in settled if score.opinion == "hollow"))

    def settled_outcomes(self) -> list[str]:
        return [case.opinion for case in self.settled]

    def lose(self, round: int) -> None:
        """The vertex of this round is lost, with its draws and reports."""
        self.lost, self.cases, self.settled = round, {}, ()
