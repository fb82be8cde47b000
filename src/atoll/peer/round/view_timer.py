"""The views of a round: which is the last of an attempt, and when one has had its time.

Inside an attempt voters propose in turn, a view each. A view ends when whoever may propose in it is gone, when
what was proposed is wrong, when those who gave it up leave too few, or when there was something to decide for long
enough; and all of an attempt by the clock, so that voters that lost each other meet again.
Promises: no view lasts for ever; the wait for a decision is measured by what the round took so far, and doubles
when it was in vain. Never closes one: the round does, and that is always safe.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId, Seconds
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.policy.plan import RoundPlan
from atoll.protocol.agreement.interface import ConsensusEngine

TURNS_WITHOUT_CLOCK = 4  # of all proposers in one attempt
VIEW_S = 3.0  # for a decision once there is something to decide, or twice as long as the sharing took
VIEWS_GROWING = 8  # views that had their time, after which it grows no more


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
        self._timed: tuple[int, Seconds] = (-1, 0.0)  # a view, and until when it may be decided
        self._given_up = 0  # that had their time
        self.refused = -1  # the last one whose proposal I found wrong
        self._last_given_up = -1  # leaving it may take a while, where a quorum is asked first

    def last_of(self, attempt: int) -> int:
        """Each attempt has one view per voter; the clock ends them all at once."""
        return (attempt + 1) * len(self.plan.committee) - 1

    def attempt_due(self, now: Seconds) -> int:
        """By the clock. Where there is none all propose in turn, and in turn again, before all is sent anew."""
        if self.plan.has_clock:
            return self.plan.attempt_at(now)
        return self.agreement.view // (TURNS_WITHOUT_CLOCK * len(self.plan.committee))

    def is_over(self, attempt: int, shared: bool, busy: bool, begun: bool, now: Seconds) -> bool:
        """The one that the agreement is in. `shared`: there is nothing left to share.

        `busy`: the others wait for me, not I for them. `begun`: there is something to decide.
        """
        who, view = self.agreement.waiting_for, self.agreement.view
        if self.plan.has_clock and view == self.last_of(attempt):
            return False  # the clock ends it: the views of the next attempt begin with its share phase
        if view == self.refused:
            return True
        if who is not None and who != self.me and shared and self.gone(who):
            return True
        if gave_up := self.agreement.gave_up:
            no_votes = gave_up.union(p for p in self.plan.committee if p != self.me and self.gone(p))
            if len(no_votes) > self.plan.tolerated:
                return True  # the rest are too few, and should meet in a later one
        return self._had_its_time(view, busy, begun, now)

    def _had_its_time(self, view: int, busy: bool, begun: bool, now: Seconds) -> bool:
        """Each may take twice as long as the last that had its time, counted from when it had begun.

        Also with a proposal here a view must end: those who gave it up before that came vote no more, and the rest
        may be too few.
        """
        if busy:
            self._timed = (-1, 0.0)
        elif self._timed[0] != view and begun:
            time_s = max(VIEW_S, 2 * self.patience.took(now)) * 2 ** min(self._given_up, VIEWS_GROWING)
            self._timed = view, now + time_s
        over = self._timed[0] == view and now >= self._timed[1]
        if over and view != self._last_given_up:
            self._given_up += 1
            self._last_given_up = view
        return over
