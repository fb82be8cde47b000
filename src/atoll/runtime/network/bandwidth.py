"""How fast this computer's links carry what it sends: learned from the transfers that happen anyway.

A span between two looks counts for a link only if bulk was waiting for it at both ends of the span: then the
network, and nothing else, set the pace. Counts what receivers have acknowledged, so what sits in the kernel's
buffers does not flatter it. Of this computer's own link the fastest of the recent spans is taken: in others a slow
receiver may have been all that was left. Of each peer it is the mean over the spans of one round, the last in which
anybody made bulk wait: peers far away share one link, and only rates of the same time add up to what it carries. A
link that never makes bulk wait for a whole span stays unknown, and that is all that plans want to know of it. Never
sends anything to find out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import BandwidthMeasured

SPANS = 64  # recent ones that count; half a minute of uploading


class BandwidthEstimator:
    def __init__(self) -> None:
        self._before: tuple[Seconds, Mapping[PeerId, tuple[int, bool]]] | None = None
        self._all: deque[float] = deque(maxlen=SPANS)
        self._round: int | None = None  # in which the rates to single peers were measured
        self._to: dict[PeerId, tuple[int, Seconds]] = {}  # bytes, and the time in which something waited

    def look(
        self, now: Seconds, uploading: Mapping[PeerId, tuple[int, bool]], round: int | None
    ) -> BandwidthMeasured | None:
        """Per peer: bytes acknowledged so far, and whether some bulk waits. Answers if something was learned."""
        before, self._before = self._before, (now, uploading)
        self._to = {peer: carried for peer, carried in self._to.items() if peer in uploading}
        if before is None or now <= before[0]:
            return None
        span_s, total = now - before[0], 0.0
        waited = False
        for peer, (acked_bytes, waiting) in uploading.items():
            acked_before, waiting_before = before[1].get(peer, (acked_bytes, False))
            left = max(0, acked_bytes - acked_before)  # below 0: a connection ended, and its count with it
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
