"""How fast a round goes at this peer, and how long it therefore waits: for parts, and for what was decided.

Every wait is measured by what the round itself took so far, with a least time, and doubles when it was in vain: so
the same rules hold on a fast network and a slow one, in a run with a clock and in a group without. Views are waited
for by the same measure (`views.py`).
Promises: no wait is for ever, and none of them matters for safety. Never asks anybody anything.
"""

from __future__ import annotations

from atoll.base.ids import Seconds

PART_LATE_S = 0.3  # after a proposal, the combined parts that it names should be here
AGAIN_S = 1.0  # before the same part is asked for again
REPAIR_S = 6.0  # a decided round whose parts nobody serves for this long is caught up by the whole state
REPAIR_MAX_S = 60.0  # or for as long as its sharing took, where links are slow; at most this


class AdaptiveTimeout:
    """`now` is run time throughout."""

    def __init__(self) -> None:
        self._shared_at: Seconds | None = None  # this attempt's sharing began
        self._first_s: Seconds | None = None  # from then to the first combined part
        self._shared_s: Seconds | None = None  # from then to the last
        self._patience_s: Seconds = REPAIR_S  # for the parts of the decided round
        self._progress_at: Seconds = 0.0  # it was decided, or another of its parts came

    # ---- what happens --------------------------------------------------------------------------------------

    def attempt_begins(self) -> None:
        self._shared_at = self._first_s = self._shared_s = None

    def sharing_begins(self, now: Seconds) -> None:
        self._shared_at = now

    def part_came(self, now: Seconds) -> None:
        """From its owner, unasked."""
        self.progressed(now)
        if self._first_s is None:
            self._first_s = self.took(now)

    def progressed(self, now: Seconds) -> None:
        self._progress_at = now

    def sharing_ended(self, now: Seconds) -> None:
        self._shared_s = self.took(now)

    def decided(self, now: Seconds) -> None:
        self._progress_at = now
        self._patience_s = min(max(REPAIR_S, self.took(now)), REPAIR_MAX_S)

    # ---- what follows --------------------------------------------------------------------------------------

    @property
    def sharing(self) -> bool:
        return self._shared_at is not None

    def had(self, until: Seconds) -> Seconds:
        """How long owners had by then: from when this attempt's sharing began here."""
        return until - self._shared_at if self._shared_at is not None else 0.0

    def took(self, now: Seconds) -> Seconds:
        """How long this attempt's sharing took, or has taken so far: what is on its way may take as long again."""
        if self._shared_s is not None:
            return self._shared_s
        return now - self._shared_at if self._shared_at is not None else 0.0

    def late(self, now: Seconds) -> Seconds:
        """After how long a part that should come is late.

        Measured by the first of them: a lost message makes the last one late on the fastest link.
        """
        return max(PART_LATE_S, self._part_s(now))

    def again(self, times: int, now: Seconds) -> Seconds:
        """How long a part that was asked for so many times is waited for."""
        return max(AGAIN_S, self._part_s(now)) * 2**times

    def gives_up(self, now: Seconds) -> bool:
        """The parts of the decided round do not come."""
        return now - self._progress_at > self._patience_s

    def _part_s(self, now: Seconds) -> Seconds:
        return (self._first_s if self._first_s is not None else self.took(now)) / 2
