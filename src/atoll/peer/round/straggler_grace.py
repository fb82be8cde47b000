"""Whether a round still waits for those who are training: where a quorum of updates is enough, and where an owner
has to say what it gives before anybody shows it a row.

Each peer counts for itself what it has heard; that some begin to share before others hurts nobody, since what
counts is agreed later (specs/round.md, acceptance).
Promises: the grace of an attempt begins once and has one end; without acceptance in genesis it never begins.
"""

from __future__ import annotations

from atoll.base.ids import Seconds
from atoll.policy.plan import RoundPlan

WORD_SHARE = 0.25  # of an owner's window, that is, until it has to say that it gives nothing


class StragglerGrace:
    """`now` is run time throughout."""

    def __init__(self) -> None:
        self.until: Seconds | None = None  # of this attempt; None: too few have committed

    def attempt_begins(self) -> None:
        self.until = None

    def begins(self, plan: RoundPlan, attempt: int, committed: int, now: Seconds) -> bool:
        """True at the moment at which so many commitments of settled trainers are enough."""
        enough = plan.quorum_of_updates
        if self.until is not None or enough is None or committed < enough:
            return False
        self.until = now + plan.grace_s(attempt)
        return True

    def ends(self, now: Seconds) -> None:
        """Its timer says so, a rounding error before the moment perhaps."""
        if self.until is not None:
            self.until = min(self.until, now)

    def is_over(self, now: Seconds) -> bool:
        return self.until is not None and now >= self.until


def word_until(plan: RoundPlan, attempt: int, now: Seconds) -> Seconds:
    """Where members may lie an owner is shown no row before it has said what it gives. It is given some of its
    window to say so, and the rest to gather; then it gives nothing. What misses a quorum waits for the next
    round anyway."""
    if plan.quorum_of_updates is not None:
        return now
    times = plan.times(attempt)
    return times.train_until + WORD_SHARE * (times.answer_until[0] - times.train_until)
