"""Token bucket for uploads, shared by all connections of this peer.

Every written byte takes a token, on either lane; only bulk bytes wait for theirs.

Invariants, as long as handshakes and control messages alone stay below the rate:
- In any t seconds at most rate x (t + BURST_S) bytes leave; at very low rates, rate x t and two packets.
- Waiting connections are served in turn: about rate x QUANTUM_S bytes each, at least one packet.
- A control message is never delayed.
- One timer runs, and only while a connection waits.
Not counted: headers of TCP and IP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.base.ids import Seconds

QUANTUM_S: Seconds = 0.02  # length of one turn: 50 wake-ups per second at any rate
QUANTUM_MIN_BYTES = 1400  # a packet: smaller writes would send more headers than data
BURST_S: Seconds = 0.1  # credit saved while idle: a loop that is busy this long loses no rate
DEBT_MAX_S: Seconds = 5.0  # longest delay of bulk by a flood of control messages, such as replies to strangers
NAP_MIN_S: Seconds = 0.001  # a timer that fires a rounding error early must not fire in a loop


class UploadLimiter:
    """Made and used inside one running event loop. A rate of 0 is no cap."""

    def __init__(self, upload_bytes_s: int) -> None:
        self._bytes_s = upload_bytes_s
        self._quantum_bytes = max(QUANTUM_MIN_BYTES, upload_bytes_s * QUANTUM_S)
        self._burst_bytes = max(2 * self._quantum_bytes, upload_bytes_s * BURST_S)
        self._loop = asyncio.get_running_loop()
        self._tokens_bytes = self._burst_bytes
        self._filled_at = self._loop.time()
        self._waiting: dict[Callable[[], None], None] = {}  # callbacks in the order of their turns
        self._turn: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def count(self, written_bytes: int) -> None:
        """Charge bytes that went to a connection."""
        if self._bytes_s:
            self._fill()
            self._tokens_bytes = max(self._tokens_bytes - written_bytes, -DEBT_MAX_S * self._bytes_s)

    def acquire(self, size_bytes: int, retry: Callable[[], None]) -> int:
        """Number of these bytes that may leave now. 0: another connection's turn; `retry` is called later."""
        if not self._bytes_s:
            return size_bytes
        self._fill()
        has_turn, self._turn = self._turn == retry, None
        if (self._waiting and not has_turn) or self._tokens_bytes < min(size_bytes, self._quantum_bytes):
            self._waiting.setdefault(retry)
            self._set_timer()
            return 0
        return min(size_bytes, int(self._tokens_bytes))

    def close(self) -> None:
        """Drop all callbacks."""
        self._waiting.clear()
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _fill(self) -> None:
        now = self._loop.time()
        self._tokens_bytes += (now - self._filled_at) * self._bytes_s
        self._tokens_bytes = min(self._tokens_bytes, self._burst_bytes)
        self._filled_at = now

    def _set_timer(self) -> None:
        if self._waiting and self._timer is None:
            missing_s = (self._quantum_bytes - self._tokens_bytes) / self._bytes_s
            self._timer = self._loop.call_later(max(missing_s, NAP_MIN_S), self._serve)

    def _serve(self) -> None:
        """Call waiting connections in turn. One that ended or has nothing to send takes no tokens."""
        self._timer = None
        self._fill()
        while self._waiting and self._tokens_bytes >= self._quantum_bytes:
            self._turn = next(iter(self._waiting))
            del self._waiting[self._turn]
            self._turn()
            self._turn = None
        self._set_timer()
