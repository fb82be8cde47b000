"""View timer: the last view of an attempt, and when the current view is over.

Inside an attempt voters propose in turn, one view each. A view ends when its proposer is gone, when its proposal is
wrong, when too few voters have not given it up, or when a decision was possible for long enough. The clock ends all
views of an attempt, so that voters that lost each other meet again.

Invariants:
- Every view ends. The wait for a decision follows the time that sharing took, and doubles after each failure.
Not responsible for: closing a view; the round does that, and it is always safe.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId, Seconds
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.policy.plan import RoundPlan
from atoll.protocol.agreement.interface import ConsensusEngine

TURNS_WITHOUT_CLOCK = 4  # turns of every proposer in one attempt without a clock
VIEW_S = 3.0  # seconds for a decision once one is possible, or twice the time that sharing took if that is longer
VIEWS_GROWING = 8  # views over by time, after which the wait grows no more


class ViewTimer:
    """`now` is run time throughout."""

    def __init__(
        self,
        plan: RoundPlan,
        agreement: ConsensusEngine,
        patience: AdaptiveTimeout,
        me: PeerId,
        gone: Callable[[PeerId], bool],
    ) -> None:
        self.plan, self.agreement, self.patience = plan, agreement, patience
        self.me, self.gone = me, gone
        self._timed: tuple[int, Seconds] = (-1, 0.0)  # a view, and the time until which it may decide
        self._given_up = 0  # views over by time
        self.refused = -1  # last view with a proposal rejected here
        # last view over by time; leaving it may take a while where a quorum is asked first
        self._last_given_up = -1

    def last_of(self, attempt: int) -> int:
        """Last view of an attempt: one view per voter; the clock ends them all at once."""
        return (attempt + 1) * len(self.plan.committee) - 1

    def attempt_due(self, now: Seconds) -> int:
        """The attempt that is due by the clock.

        Without one, all voters propose in turn several times before it advances.
        """
        if self.plan.has_clock:
            return self.plan.attempt_at(now)
        return self.agreement.view // (TURNS_WITHOUT_CLOCK * len(self.plan.committee))

    def is_over(self, attempt: int, shared: bool, busy: bool, begun: bool, now: Seconds) -> bool:
        """True if the current view is over. `shared`: nothing is left to share.

        `busy`: the others wait for the local peer. `begun`: a decision is possible.
        """
        who, view = self.agreement.silent_proposer, self.agreement.view
        if self.plan.has_clock and view == self.last_of(attempt):
            return False  # the clock ends it: the views of the next attempt begin with its share phase
        if view == self.refused:
            return True
        if who is not None and who != self.me and shared and self.gone(who):
            return True
        if gave_up := self.agreement.voters_timed_out:
            no_votes = gave_up.union(p for p in self.plan.committee if p != self.me and self.gone(p))
            if len(no_votes) > self.plan.tolerated:
                return True  # the rest are too few, and should meet in a later view
        return self._had_its_time(view, busy, begun, now)

    def _had_its_time(self, view: int, busy: bool, begun: bool, now: Seconds) -> bool:
        """True if the view had its time: twice that of the last one, counted from when a decision was possible.

        A view with a proposal must end as well: voters that gave it up earlier no longer vote, and the rest may be
        too few.
        """
        if busy:
            self._timed = (-1, 0.0)
        elif self._timed[0] != view and begun:
            time_s = max(VIEW_S, 2 * self.patience.elapsed(now)) * 2 ** min(self._given_up, VIEWS_GROWING)
            self._timed = view, now + time_s
        over = self._timed[0] == view and now >= self._timed[1]
        if over and view != self._last_given_up:
            self._given_up += 1
            self._last_given_up = view
        return over
