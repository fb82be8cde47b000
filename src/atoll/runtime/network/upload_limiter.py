"""A cap on what this peer uploads: one token bucket, shared by all its connections.

Every byte written to a socket takes a token, on whatever lane; only bulk bytes have to wait for theirs.
Promises: over any t seconds no more than rate x (t + BURST_S) bytes leave, or at very low rates two packets more
than rate x t, handshakes and control messages included, as long as these alone stay below the rate; connections
that wait are served in turn, about rate x QUANTUM_S bytes each and never less than a packet. TCP's and IP's own
headers are not counted.
Never delays a control message, never polls: there is one timer, and only while somebody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.base.ids import Seconds

QUANTUM_S: Seconds = 0.02  # what one connection is given in its turn: 50 wake-ups a second, whatever the rate
QUANTUM_MIN_BYTES = 1400  # a packet: smaller writes would send more headers than data
BURST_S: Seconds = 0.1  # what is saved up while nobody sends: a loop that is busy for so long loses no rate
DEBT_MAX_S: Seconds = 5.0  # a flood of control messages, say answers to strangers, holds bulk up no longer
NAP_MIN_S: Seconds = 0.001  # a timer that is a rounding error early must not fire in a circle


class UploadLimiter:
    """Made and used inside one running event loop. A rate of 0 is no cap."""

    def __init__(self, upload_bytes_s: int) -> None:
        self._bytes_s = upload_bytes_s
        self._quantum_bytes = max(QUANTUM_MIN_BYTES, upload_bytes_s * QUANTUM_S)
        self._burst_bytes = max(2 * self._quantum_bytes, upload_bytes_s * BURST_S)
        self._loop = asyncio.get_running_loop()
        self._tokens_bytes = self._burst_bytes
        self._filled_at = self._loop.time()
        self._waiting: dict[Callable[[], None], None] = {}  # in the order of their turns
        self._turn: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def count(self, written_bytes: int) -> None:
        """These bytes went to a socket."""
        if self._bytes_s:
            self._fill()
            self._tokens_bytes = max(self._tokens_bytes - written_bytes, -DEBT_MAX_S * self._bytes_s)

    def ask(self, size_bytes: int, again: Callable[[], None]) -> int:
        """How many of these bytes may leave now. 0: not your turn, `again` is called when it is."""
        if not self._bytes_s:
            return size_bytes
        self._fill()
        mine, self._turn = self._turn == again, None
        if (self._waiting and not mine) or self._tokens_bytes < min(size_bytes, self._quantum_bytes):
            self._waiting.setdefault(again)
            self._set_timer()
            return 0
        return min(size_bytes, int(self._tokens_bytes))

    def close(self) -> None:
        """Nobody is called any more."""
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
        """Call those who wait, in turn; who is gone or has nothing left to send takes nothing."""
        self._timer = None
        self._fill()
        while self._waiting and self._tokens_bytes >= self._quantum_bytes:
            self._turn = next(iter(self._waiting))
            del self._waiting[self._turn]
            self._turn()
            self._turn = None
        self._set_timer()
