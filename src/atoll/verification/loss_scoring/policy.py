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

from typing import Literal

from atoll.base.ids import PeerId
from atoll.policy.duplicate_updates import alike_in
from atoll.policy.reputation import WorkFindings
from atoll.verification.review_ledger import DrawnUpdateReview, Numbers, ReviewLedger, ReviewVerdict
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import VertexBody

NAT = 1_000_000  # falls travel in millionths
FALL_MOST = 10**9 * NAT
# standard errors: one in 44 authors that learned from other samples gains that much more on its own
ERRORS_LEAST = 2

Falls = tuple[int, ...]  # millionths of a nat: on own samples, on others, standard error of the difference
Opinion = Literal["taught", "hollow", "unclear"]


def opinion_of(falls: Falls) -> Opinion:
    """Verdict of a score. Hollow: no improvement on its author's own samples, or no more there than on others."""
    if len(falls) != 3:
        return "hollow"
    own, others, error = falls
    if own <= 0 or own <= others:
        return "hollow"
    return "taught" if own - others > ERRORS_LEAST * error else "unclear"


class ScoringCase(DrawnUpdateReview):
    """One scored update; the vertex that drew it also draws the samples."""

    @property
    def falls(self) -> Falls | None:
        """Median of each number over all reports; None while too few have reported.

        A scorer that was shown nothing reports the least value. Numbers in the author's favor get lower medians,
        numbers against it upper ones. Of an even number of reports the worse one counts, so silence gains nothing.
        """
        if 2 * len(self.said) <= len(self.judges):
            return None
        words = [falls or (-FALL_MOST, FALL_MOST, 0) for falls in self.said.values()]
        own, others, error = (sorted(numbers) for numbers in zip(*words, strict=True))
        low, high = (len(words) - 1) // 2, len(words) // 2
        return own[low], others[high], error[high]


class ScoreLedger(ReviewLedger[ScoringCase]):
    """The scored updates of recent rounds."""

    check, duty, case_type = "score", "score members", ScoringCase
    what, unit = "update that is being scored", "falls"

    def are_valid(self, numbers: Numbers) -> bool:
        fits = len(numbers) in (0, 3) and all(-FALL_MOST <= fall <= FALL_MOST for fall in numbers)
        return fits and (not numbers or numbers[2] >= 0)

    def verdict(self, case: ScoringCase) -> ReviewVerdict | None:
        if (falls := case.falls) is None:
            return None
        opinion = opinion_of(falls)
        against = case.authors if opinion == "hollow" else ()
        return ReviewVerdict(case.round, case.authors, opinion, against, numbers=falls)

    def chance(self, commit: Commitment, peer: PeerId, body: VertexBody) -> float:
        """A copy teaches samples that its author was not assigned, so it is always scored."""
        if commit.steps < 1:
            return 0.0
        is_copy = any(peer in peers for peers in alike_in(body))
        return 1.0 if is_copy else super().chance(commit, peer, body)

    def findings(self, head: int) -> WorkFindings:
        settled = self.settled if head == self.head else ()
        taught = frozenset(score.authors[0] for score in settled if score.opinion == "taught")
        return super().findings(head) | WorkFindings(taught)
