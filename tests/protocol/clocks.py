"""Clocks as computers have them: each runs a little fast or slow all the time, and now and then one is set.

A host never sees the time of its world. It reads its clock; a timer waits for as long as its clock then says, and
counts on while the clock is set, so it fires when the clock shows another time than the one it was set for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DRIFT = 0.05  # of the time that passes; a quartz is off by a ten-thousandth of that, a busy virtual machine may be
SET_S = (0.3, 3.0, 10.0)  # how wrong a clock is at most, once it was set: by a time server, by hand, after a sleep


@dataclass
class Clock:
    ahead_s: float = 0.0  # of the world's time, when that was nought
    rate: float = 1.0  # seconds that it shows per second that passes

    @staticmethod
    def drifting(draw: random.Random, drift: float = DRIFT, ahead_s: float = 0.0) -> Clock:
        return Clock(ahead_s, 1.0 + draw.uniform(-drift, drift))

    def shows(self, world_s: float) -> float:
        return self.ahead_s + self.rate * world_s

    def wait_s(self, until: float, world_s: float) -> float:
        """How long a timer that is set now waits for its clock to show this; never no time at all, so that one that
        fires a rounding too early is not set for the same moment again."""
        return max(1e-6, (until - self.shows(world_s)) / self.rate)

    def set(self, draw: random.Random, world_s: float) -> None:
        """Forward or back, to something near the world's time."""
        wrong_s = draw.choice(SET_S)
        self.ahead_s += world_s + draw.uniform(-wrong_s, wrong_s) - self.shows(world_s)
