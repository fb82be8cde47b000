"""Passive bandwidth estimation: rates of this computer's links, from transfers that happen anyway.

A span between two samples counts for a link only if bulk waited at both its ends: then the network set the pace.
Acknowledged bytes count, so kernel buffers do not inflate the rate.

- Uplink: the maximum over recent spans. Slower spans may reflect a slow receiver.
- Per peer: the mean over the spans of one round, the last in which any bulk waited. Distant peers share one link,
  and only rates of the same time add up to its capacity.
- A link that never makes bulk wait for a whole span stays unknown; plans need no more.
Not responsible for: probing. Nothing is sent to measure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import BandwidthMeasured

SPANS = 64  # recent spans that count: half a minute of uploading


class BandwidthEstimator:
    def __init__(self) -> None:
        self._before: tuple[Seconds, Mapping[PeerId, tuple[int, bool]]] | None = None
        self._all: deque[float] = deque(maxlen=SPANS)
        self._round: int | None = None  # round of the rates per peer
        self._to: dict[PeerId, tuple[int, Seconds]] = {}  # per peer: bytes, and the time during which bulk waited

    def look(
        self, now: Seconds, uploading: Mapping[PeerId, tuple[int, bool]], round: int | None
    ) -> BandwidthMeasured | None:
        """`uploading` has per peer: bytes acknowledged so far, and whether bulk waits. None: no new rate."""
        before, self._before = self._before, (now, uploading)
        self._to = {peer: carried for peer, carried in self._to.items() if peer in uploading}
        if before is None or now <= before[0]:
            return None
        span_s, total = now - before[0], 0.0
        waited = False
        for peer, (acked_bytes, waiting) in uploading.items():
            acked_before, waiting_before = before[1].get(peer, (acked_bytes, False))
            left = max(0, acked_bytes - acked_before)  # negative if a connection ended, since its count is gone
            total += left / span_s
            if left and waiting and waiting_before:
                waited = True
                if round != self._round:
                    self._round, self._to = round, {}
                carried_bytes, carried_s = self._to.get(peer, (0, 0.0))
                self._to[peer] = carried_bytes + left, carried_s + span_s
        if not waited:
            return None
        self._all.append(total)
        to = tuple((peer, carried / time_s) for peer, (carried, time_s) in sorted(self._to.items()))
        return BandwidthMeasured(max(self._all), to, self._round)
