"""Passive bandwidth estimation: rates of this computer's links, from transfers that happen anyway.

A driver samples every link's acknowledged bytes, so kernel buffers do not inflate a rate, and whether bulk waits.

- Uplink: the fastest span of each round, and of the last rounds the median. A span is long, as acknowledgments come
  in bursts. Bulk waited all the time for more than half of the peers that got some since none waited.
- If that is no more than half of all peers, other senders may fill their downlinks. Then the uplink has at least
  the span's rate, and at most that times all peers per waiting one. A known rate between these bounds stays.
- Per peer: the mean over the time of one round in which bulk waited, the last such round. Distant peers share one
  link, and only rates of the same time add up to its capacity.
- A member that never makes bulk wait so long has no known rate; plans need no more. A known rate stays.

Not responsible for: probing. Nothing is sent to measure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median_high

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import BandwidthMeasured

SPAN_S: Seconds = 2.0  # bursts of 0.3 s, which full queues on both ways make, change the rate of a span by 15 %
ROUNDS = 3  # a single round with other traffic changes nothing; a slower link is known after the second


class BandwidthEstimator:
    def __init__(self) -> None:
        self._before: tuple[Seconds, Mapping[PeerId, tuple[int, bool]]] | None = None
        self._span_bytes, self._span_s = 0, 0.0  # of the current span
        self._hides = 1.0  # by which factor full downlinks may hide the uplink in the current span
        self._fastest: deque[tuple[int | None, float]] = deque(maxlen=ROUNDS)  # round, its fastest span
        self._served: set[PeerId] = set()  # peers that got bulk since none waited for the last time
        self._round: int | None = None  # round of the rates per peer
        self._to: dict[PeerId, tuple[int, Seconds]] = {}  # per peer: bytes, and the time during which bulk waited

    @property
    def uplink_bytes_s(self) -> float | None:
        """None: never seen at its limit."""
        return median_high(rate for _, rate in self._fastest) if self._fastest else None

    def sample(
        self, now: Seconds, uploading: Mapping[PeerId, tuple[int, bool]], round: int | None
    ) -> BandwidthMeasured | None:
        """`uploading` has per peer: bytes acknowledged so far, and whether bulk waits. None: no new rate."""
        before, self._before = self._before, (now, uploading)
        self._to = {peer: carried for peer, carried in self._to.items() if peer in uploading}
        if before is None or now <= before[0]:
            return None
        if not any(waiting for _, waiting in before[1].values()):
            self._served = set()
        passed_s, total_bytes, waiting_peers = now - before[0], 0, 0
        for peer, (acked_bytes, waiting) in uploading.items():
            acked_before, waiting_before = before[1].get(peer, (acked_bytes, False))
            left = max(0, acked_bytes - acked_before)  # negative if a connection ended, since its count is gone
            total_bytes += left
            self._served.update([peer] if left else [])
            if acked_bytes and waiting and waiting_before:
                waiting_peers += 1
                if round != self._round:
                    self._round, self._to = round, {}
                carried_bytes, carried_s = self._to.get(peer, (0, 0.0))
                self._to[peer] = carried_bytes + left, carried_s + passed_s
        peers = sum(acked_bytes > 0 for acked_bytes, _ in uploading.values())
        hides = 1.0 if 2 * waiting_peers > peers else peers / max(1, waiting_peers)
        is_tail = 2 * waiting_peers <= len(self._served)  # only slow receivers are left
        self._extend_span(total_bytes, 0.0 if is_tail else passed_s, hides, round)
        if not waiting_peers:
            return None
        to = tuple((peer, carried / time_s) for peer, (carried, time_s) in sorted(self._to.items()))
        return BandwidthMeasured(self.uplink_bytes_s, to, self._round)

    def _extend_span(self, total_bytes: int, waited_s: Seconds, hides: float, round: int | None) -> None:
        if not waited_s or hides != self._hides:
            self._span_bytes, self._span_s, self._hides = 0, 0.0, hides
        if not waited_s:
            return
        self._span_bytes, self._span_s = self._span_bytes + total_bytes, self._span_s + waited_s
        if self._span_s < SPAN_S:
            return
        rate, known = self._span_bytes / self._span_s, self.uplink_bytes_s
        self._span_bytes, self._span_s = 0, 0.0
        if hides > 1:
            if known is not None and rate <= known <= rate * hides:
                return
            rate = rate if known is not None and rate > known else rate * hides
        if self._fastest and self._fastest[-1][0] == round:
            rate = max(rate, self._fastest.pop()[1])
        self._fastest.append((round, rate))
