"""The room of early words: what members said about rounds that I have not reached.

Holds so many messages and bytes and no more, so many of one sender and no more: a flood displaces its own words
first. Of whom something was dropped it remembers the name and the newest round, so that the sender can be asked
to say it again. Never judges: whoever may speak, and how far ahead, is decided before.
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
        self.dropped: dict[PeerId, int] = {}  # the newest round of which words of this peer were dropped

    def __len__(self) -> int:
        return len(self.waiting)

    def remember(self, event: Received) -> None:
        """Until its round begins, or until there is no room for it."""
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
        """Too early and too much to remember."""
        if event.sender in self.dropped or len(self.dropped) < PEERS_MAX:
            self.dropped[event.sender] = max(_round(event), self.dropped.get(event.sender, 0))

    def take(self) -> deque[Received]:
        """Everything that waits, in the order in which it came; the room is empty then."""
        waiting, self.waiting, self.size_bytes = self.waiting, deque[Received](), 0
        self.count_of.clear()
        return waiting

    def unheard(self, round: int) -> list[PeerId]:
        """Whose words of this round, which begins, were dropped; what was dropped of older ones is forgotten."""
        asked = [peer for peer, newest in self.dropped.items() if newest == round]
        self.dropped = {peer: newest for peer, newest in self.dropped.items() if newest > round}
        return asked


def _round(event: Received) -> int:
    assert isinstance(event.message, RoundMessage)
    return event.message.round


def _size_bytes(event: Received) -> int:
    assert isinstance(event.message, RoundMessage)
    return len(encode(event.message)) + (event.payload.size_bytes if event.payload is not None else 0)
