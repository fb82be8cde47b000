"""Whose update is scored, by whom, and what scorers' words mean: all from agreed vertices, in whole numbers.

The vertex that closes a round holds every commitment, so its id draws which updates are scored and who scores them.
Each scorer signs how far the loss fell along the update: on samples that its author was told to learn from, and on
others. When all have spoken, or time is up, the medians of their words say whether it taught the model what it was
to teach; the next vertex makes that part of the author's record. Promises: the same at every peer that holds the
same vertices; the first word of a scorer counts; a minority of the drawn moves no median beyond an honest word.
Bounded by its window. Never asks anybody, never measures, never expels: a score is a statistic and no proof.
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
from atoll.policy.reputation import audit_factor, by_tier, scores_of
from atoll.verification.case import CHANCES
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, ScoreReport
from atoll.wire.messages.vertex import VertexBody

NAT = 1_000_000  # falls travel in millionths
FALL_MOST = 10**9 * NAT
ERRORS_LEAST = 2  # standard errors: one in 44 who learned from other samples gains so much more on its own

Key = tuple[int, PeerId]  # the round, whose update
Falls = tuple[int, ...]  # millionths of a nat: on own samples, on others, standard error of the difference
Opinion = Literal["taught", "hollow", "unclear"]


def scorers_drawn(voters: int, rule: QuorumRule) -> int:
    """Three at least, and so many that those who may lie are fewer than half, as far as that is cheap."""
    liars = (voters - 1) // 3 if rule == "two-thirds" else 1
    return min(2 * max(1, liars) + 1, SCORERS_MOST)


def opinion_of(falls: Falls) -> Opinion:
    """What a score says. Hollow: no step forward on its author's own samples, or none beyond that on others."""
    if len(falls) != 3:
        return "hollow"
    own, others, error = falls
    if own <= 0 or own <= others:
        return "hollow"
    return "taught" if own - others > ERRORS_LEAST * error else "unclear"


@dataclass
class ScoringCase:
    """One update that is scored: what was drawn, what its author had committed to, and who has said what since."""

    round: int
    peer: PeerId
    commit: Commitment
    scorers: tuple[PeerId, ...]
    vertex: Digest  # that drew it, and draws the samples
    said: dict[PeerId, Falls] = field(default_factory=dict[PeerId, Falls])

    @property
    def key(self) -> Key:
        return self.round, self.peer

    @property
    def priority(self) -> int:
        """The same at all scorers: where there is more to score than they can, they score the same few."""
        return draw_below(self.vertex, f"first {self.peer}", CHANCES)

    @property
    def falls(self) -> Falls | None:
        """What its scorers say together: of each number the median; None while too few have spoken.

        Who was shown nothing found as little as there is. Lower medians of what speaks for the author, upper ones
        of what speaks against: of an even number of words the worse one, so that silence buys nothing.
        """
        if 2 * len(self.said) <= len(self.scorers):
            return None
        words = [falls or (-FALL_MOST, FALL_MOST, 0) for falls in self.said.values()]
        own, others, error = (sorted(numbers) for numbers in zip(*words, strict=True))
        low, high = (len(words) - 1) // 2, len(words) // 2
        return own[low], others[high], error[high]

    def over(self, head: int) -> bool:
        """Nobody is waited for any more, as of this round's vertex."""
        return len(self.said) == len(self.scorers) or head - self.round >= SCORE_OPEN


@dataclass(frozen=True)
class SettledScore:
    """What became of one case."""

    round: int
    peer: PeerId
    falls: Falls
    opinion: Opinion


class ScoreLedger(Ledger[ScoreReport]):
    """The scored updates of recent rounds; forgets what is over."""

    report, duty, is_about_member = ScoreReport, "score members", True

    def __init__(self, share: float, rule: QuorumRule) -> None:
        self.share = share
        self.rule: QuorumRule = rule
        self.cases: dict[Key, ScoringCase] = {}
        self.settled: tuple[SettledScore, ...] = ()  # by the head: the next vertex makes them part of records
        self.head = -2
        self.lost = -2  # the newest round whose vertex is not here: what was drawn up to it is taken at its word

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Take in all vertices up to the head that are at hand."""
        if not self.share or head <= self.head:
            return
        for round in range(max(self.head + 1, head - 2 * SCORE_OPEN), head + 1):
            self.head, self.settled = round - 1, ()  # words in a vertex were judged by the one before
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
            # above 1: always; a copy teaches what its author was not told to learn from
            share = 1.0 if peer in copied else self.share * audit_factor(scores, peer)
            if draw_below(vertex, f"scored? {peer}", CHANCES) >= share * CHANCES:
                continue
            others = [p for p in shuffled(vertex, f"scorers of {peer}", able) if p != peer]
            drawn = tuple(by_tier(others, scores)[: scorers_drawn(voters, self.rule)])
            if drawn:
                case = ScoringCase(body.round, peer, commit, drawn, vertex)
                self.cases[case.key] = case

    def problem(self, by: PeerId, report: ScoreReport) -> str | None:
        """None if this may stand in the next vertex."""
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

    def settled_outcomes(self) -> list[str]:
        return [case.opinion for case in self.settled]

    def lose(self, round: int) -> None:
        """The vertex of this round is lost: nothing is known of whom it drew, and of what was said there."""
        self.lost, self.cases, self.settled = round, {}, ()
