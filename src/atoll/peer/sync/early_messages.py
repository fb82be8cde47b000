"""Early message buffer: messages for rounds that have not begun here.

Bounded by message count, bytes and messages per sender. When full, the oldest message is dropped; a sender over its
quota loses its own. The buffer remembers senders of dropped messages and the newest round, for a resend request.

Not responsible for: who may send, and how many rounds ahead.
"""

from __future__ import annotations

from collections import Counter, deque

from atoll.base.ids import PeerId
from atoll.base.limits import EARLY_BYTES_MAX, EARLY_MESSAGES_MAX, EARLY_PER_SENDER_MAX, PEERS_MAX
from atoll.base.machine import Received
from atoll.wire.codec import encode
from atoll.wire.messages.round import RoundMessage


class EarlyMessageBuffer:
    def __init__(self) -> None:
        self.waiting: deque[Received] = deque()
        self.count_of: Counter[PeerId] = Counter()
        self.size_bytes = 0
        self.dropped: dict[PeerId, int] = {}  # sender → newest round with a dropped message

    def __len__(self) -> int:
        return len(self.waiting)

    def remember(self, event: Received) -> None:
        """Store a message until its round begins or it is displaced."""
        if self.count_of[event.sender] >= EARLY_PER_SENDER_MAX:
            self.drop(event)
            return
        self.waiting.append(event)
        self.count_of[event.sender] += 1
        self.size_bytes += _size_bytes(event)
        while len(self.waiting) > EARLY_MESSAGES_MAX or self.size_bytes > EARLY_BYTES_MAX:
            oldest = self.waiting.popleft()
            self.count_of[oldest.sender] -= 1
            self.size_bytes -= _size_bytes(oldest)
            self.drop(oldest)

    def drop(self, event: Received) -> None:
        """Note a message that is too early or does not fit."""
        if event.sender in self.dropped or len(self.dropped) < PEERS_MAX:
            self.dropped[event.sender] = max(_round(event), self.dropped.get(event.sender, 0))

    def take(self) -> deque[Received]:
        """Remove and return all messages, in order of arrival."""
        waiting, self.waiting, self.size_bytes = self.waiting, deque[Received](), 0
        self.count_of.clear()
        return waiting

    def unheard(self, round: int) -> list[PeerId]:
        """Senders of dropped messages of this round, which begins; those of older rounds are forgotten."""
        asked = [peer for peer, newest in self.dropped.items() if newest == round]
        self.dropped = {peer: newest for peer, newest in self.dropped.items() if newest > round}
        return asked


def _round(event: Received) -> int:
    assert isinstance(event.message, RoundMessage)
    return event.message.round


def _size_bytes(event: Received) -> int:
    assert isinstance(event.message, RoundMessage)
    return len(encode(event.message)) + (event.payload.size_bytes if event.payload is not None else 0)
