"""Message log of one session: messages are numbered, kept until acknowledged, and repeated on the next connection.

Numbers are implicit: the messages of a connection follow the count that their receiver stated on it.

Invariants:
- A message is accepted at most once, and in the order of sending.
- At most `queue_bytes` wait and `UNACKED_MAX` bytes are kept. Beyond the latter the session cannot continue.
Not responsible for: connections (control_channel.py), authentication (crypto/session_tickets.py).
"""

from __future__ import annotations

from collections import deque

from atoll.base.errors import PeerFault
from atoll.base.limits import MIB

COUNT_BYTES = 8
UNACKED_MAX = 8 * MIB  # an honest remote leaves at most its window, one message and `ACK_BYTES` unacknowledged
ACK_MESSAGES, ACK_BYTES = 64, MIB // 16  # received since the last acknowledgment, when the next one is due


class ResendQueue:
    """Both directions of one session."""

    def __init__(self, session_id: bytes, queue_bytes: int) -> None:
        self.session_id = session_id
        self.waiting: deque[bytes] = deque()  # not sent yet, so still without a number
        self.dropped = 0
        self.received = 0  # messages accepted; the number of the next one
        self.is_intact = True  # every unacknowledged message is kept
        self._queue_bytes, self._waiting_bytes = queue_bytes, 0
        self._unacked: deque[bytes] = deque()
        self._unacked_bytes = 0
        self._sent = 0  # number of the next message to send
        self._due_messages = self._due_bytes = 0

    @property
    def can_continue(self) -> bool:
        return self.is_intact and self.session_id != b""

    # ---- out ----

    def push(self, message: bytes) -> None:
        self.waiting.append(message)
        self._waiting_bytes += len(message)
        while self._waiting_bytes > self._queue_bytes:
            self._pop_waiting()
            self.dropped += 1

    def move_waiting(self, other: ResendQueue) -> None:
        while self.waiting:
            other.push(self._pop_waiting())

    def take(self) -> bytes:
        """The next message to send, kept until it is acknowledged."""
        message = self._pop_waiting()
        self._sent += 1
        if self.is_intact:
            self._unacked.append(message)
            self._unacked_bytes += len(message)
            if self._unacked_bytes > UNACKED_MAX:
                self.is_intact = False
                self._unacked.clear()
        return message

    def acknowledge(self, count: int) -> None:
        """The remote has accepted `count` messages of this session."""
        if count > self._sent:
            raise PeerFault("", f"acknowledged {count} messages of {self._sent}")
        while self._unacked and count > self._sent - len(self._unacked):
            self._unacked_bytes -= len(self._unacked.popleft())

    def repeat_from(self, count: int) -> deque[bytes]:
        """Messages that the remote has not accepted, where it has accepted `count`."""
        self.acknowledge(count)
        if count != self._sent - len(self._unacked):
            raise ConnectionResetError("messages of this session were lost")
        return deque(self._unacked)

    def _pop_waiting(self) -> bytes:
        message = self.waiting.popleft()
        self._waiting_bytes -= len(message)
        return message

    # ---- in ----

    def accept(self, number: int, size_bytes: int) -> bool:
        """True if this message is new; False if another connection has brought it already."""
        assert number <= self.received
        if number < self.received:
            return False
        self.received += 1
        self._due_messages += 1
        self._due_bytes += size_bytes
        return True

    def take_due_ack(self) -> bytes | None:
        """The acknowledgment to send now, if one is due."""
        if self._due_messages < ACK_MESSAGES and self._due_bytes < ACK_BYTES:
            return None
        return self.state_count()

    def state_count(self) -> bytes:
        self._due_messages = self._due_bytes = 0
        return self.received.to_bytes(COUNT_BYTES, "big")
