"""The driver's clock: wall time when the process started, monotonic from then on, forward over a suspend.

Deadlines and run time are compared between computers, so the clock starts at wall time; it never jumps backwards
when somebody sets the wall clock. Only tickets and joins read wall time itself.
"""

from __future__ import annotations

import time

from atoll.base.ids import Seconds

wall = time.time
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the computer sleeps


class SystemClock:
    def __init__(self) -> None:
        self._wall_at_start = wall()
        self._boot_at_start = time.clock_gettime(_BOOT)

    def now(self) -> Seconds:
        return self._wall_at_start + time.clock_gettime(_BOOT) - self._boot_at_start

    def monotonic_at(self, when: Seconds) -> Seconds:
        """The event loop's clock at this time, as far as one can know before the next suspend."""
        return time.monotonic() + (when - self.now())
