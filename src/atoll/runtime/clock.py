"""System clock of the driver: wall time at process start, monotonic from then on, also through a suspend.

Deadlines and run time are compared between computers, so the clock starts at wall time. It never jumps back when
the wall clock is set. Only tickets and joins read wall time itself.
"""

from __future__ import annotations

import time

from atoll.base.ids import Seconds

wall = time.time
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # advances while the computer sleeps


class SystemClock:
    def __init__(self) -> None:
        self._wall_at_start = wall()
        self._boot_at_start = time.clock_gettime(_BOOT)

    def now(self) -> Seconds:
        return self._wall_at_start + time.clock_gettime(_BOOT) - self._boot_at_start

    def monotonic_at(self, when: Seconds) -> Seconds:
        """Time of the event loop at `when`; a suspend in between makes it stale."""
        return time.monotonic() + (when - self.now())
