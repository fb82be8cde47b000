"""Straggler grace period: how long a round still waits for trainers after a quorum of updates is committed.

Each peer counts what it received. If some begin to share earlier no harm follows, since what counts is agreed later
(specs/round.md, acceptance).

Invariants:
- The grace of an attempt begins once and has one end; it never begins without `sync.quorum`, acceptance in genesis.
"""

from __future__ import annotations

from atoll.base.ids import Seconds
from atoll.policy.plan import RoundPlan

WORD_SHARE = 0.25  # share of an owner's window until it has to commit or pass


class StragglerGrace:
    """`now` is run time throughout."""

    def __init__(self) -> None:
        self.until: Seconds | None = None  # end of this attempt's grace; None: too few have committed

    def attempt_begins(self) -> None:
        self.until = None

    def begins(self, plan: RoundPlan, attempt: int, committed: int, now: Seconds) -> bool:
        """Start the grace period once this many commitments of settled trainers are enough; True at that moment."""
        enough = plan.quorum_of_updates
        if self.until is not None or enough is None or committed < enough:
            return False
        self.until = now + plan.grace_s(attempt)
        return True

    def ends(self, now: Seconds) -> None:
        """End the grace when its timer fires, perhaps a rounding error before its end."""
        if self.until is not None:
            self.until = min(self.until, now)

    def is_over(self, now: Seconds) -> bool:
        return self.until is not None and now >= self.until


def word_until(plan: RoundPlan, attempt: int, now: Seconds) -> Seconds:
    """Time until which an owner must commit or pass, where members may lie and it receives no row before.

    It gets `WORD_SHARE` of its window for that and the rest to gather. A member that misses a quorum waits for the
    next round anyway.
    """
    if plan.quorum_of_updates is not None:
        return now
    times = plan.times(attempt)
    return times.train_until + WORD_SHARE * (times.answer_until[0] - times.train_until)
