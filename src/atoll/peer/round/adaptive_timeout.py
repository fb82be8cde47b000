"""Adaptive timeouts of a round: waits for parts and for decisions, scaled by how long its sharing took.

Every wait has a minimum and doubles after each failure, so the same rules fit fast and slow networks, runs with a
clock and groups without. Views use the same measure (`view_timer.py`).

Invariants:
- Every wait ends, and no wait matters for safety.
Not responsible for: sending requests.
"""

from __future__ import annotations

from atoll.base.ids import Seconds

PART_LATE_S = 0.3  # seconds after a proposal until a combined part that it names is late
AGAIN_S = 1.0  # seconds before the same part is requested again, at least
REPAIR_S = 6.0  # seconds without parts of a decided round before the whole state is fetched
REPAIR_MAX_S = 60.0  # seconds, the most when that wait follows the sharing time on slow links


class AdaptiveTimeout:
    """`now` is run time throughout."""

    def __init__(self) -> None:
        self._shared_at: Seconds | None = None  # start of this attempt's sharing
        self._first_s: Seconds | None = None  # from then to the first combined part
        self._gap_s: Seconds = 0.0  # longest time between two parts after it
        self._shared_s: Seconds | None = None  # from then to the last combined part
        self._patience_s: Seconds = REPAIR_S  # wait for parts of the decided round
        self._progress_at: Seconds = 0.0  # time of the decision or of its latest part

    # ---- what happens ------------------------------------------------------------------------------------

    def attempt_begins(self) -> None:
        self._shared_at = self._first_s = self._shared_s = None
        self._gap_s = 0.0

    def sharing_begins(self, now: Seconds) -> None:
        self._shared_at = now

    def part_came(self, now: Seconds) -> None:
        """Note a part sent by its owner without a request."""
        if self._first_s is None:
            self._first_s = self.elapsed(now)
        else:
            self._gap_s = max(self._gap_s, now - self._progress_at)
        self.progressed(now)

    def progressed(self, now: Seconds) -> None:
        self._progress_at = now

    def sharing_ended(self, now: Seconds) -> None:
        self._shared_s = self.elapsed(now)

    def decided(self, now: Seconds) -> None:
        self._progress_at = now
        self._patience_s = min(max(REPAIR_S, self.elapsed(now)), REPAIR_MAX_S)

    # ---- what follows ------------------------------------------------------------------------------------

    @property
    def sharing(self) -> bool:
        return self._shared_at is not None

    def time_left(self, until: Seconds) -> Seconds:
        """Seconds that owners had until then, counted from the local start of sharing."""
        return until - self._shared_at if self._shared_at is not None else 0.0

    def elapsed(self, now: Seconds) -> Seconds:
        """Seconds that this attempt's sharing took, or has taken so far.

        What is on its way may take as long again.
        """
        if self._shared_s is not None:
            return self._shared_s
        return now - self._shared_at if self._shared_at is not None else 0.0

    def overdue(self, now: Seconds) -> Seconds:
        """Seconds after which an expected part is late, where each owner has one part.

        Measured by the first part: a lost message makes the last one late on the fastest link.
        """
        return max(PART_LATE_S, self._part_s(now))

    def overdue_at(self, since: Seconds, now: Seconds) -> Seconds:
        """Run time at which a part is late that was expected at `since`.

        While parts arrive, no part is late: on a slow link they come one after the other. The wait is twice the
        longest gap between parts; before the second part, half the time to the first.
        """
        usual_s = 2 * self._gap_s or self._part_s(now)
        return max(since, self._progress_at) + max(PART_LATE_S, usual_s)

    def retry_after(self, times: int, now: Seconds) -> Seconds:
        """Seconds to wait for a part that was requested this many times."""
        return max(AGAIN_S, self._part_s(now)) * 2**times

    def gives_up(self, now: Seconds, part_s: Seconds) -> bool:
        """True if the parts of the decided round do not arrive; one of them takes `part_s` on a slow link."""
        return now - self._progress_at > max(self._patience_s, min(part_s, REPAIR_MAX_S))

    def _part_s(self, now: Seconds) -> Seconds:
        return (self._first_s if self._first_s is not None else self.elapsed(now)) / 2
