"""Cache of combined parts of recent rounds, for members that are behind.

Invariants:
- Beside the current round it holds at most `ROUNDS_KEPT` rounds, and `HELD_BYTES_MAX` bytes or one round.
- A peer receives one part a few times only: a closed round has no new attempts that would reset the count.
"""

from __future__ import annotations

from collections import Counter

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import HELD_BYTES_MAX, PART_GIVEN_MAX, ROUNDS_KEPT
from atoll.base.machine import Effect, Lane, Payload, Send
from atoll.wire.messages.round import PartRequest, PartResponse

ROUNDS_HELD_LEAST = 1  # round held whatever its size: a member just behind needs no whole state


class RecentPartCache:
    def __init__(self) -> None:
        self.held: dict[int, dict[Digest, Payload]] = {}  # by round
        self.given: Counter[tuple[int, PeerId, Digest]] = Counter()  # times sent

    def begin(self, round: int) -> dict[Digest, Payload]:
        """Storage for the parts of a round that begins; older rounds beyond the bounds are dropped."""
        kept: dict[int, dict[Digest, Payload]] = {}
        size = 0
        for r in sorted(self.held, reverse=True):
            size += sum(p.size_bytes for p in self.held[r].values())
            if r <= round - ROUNDS_KEPT or (size > HELD_BYTES_MAX and len(kept) >= ROUNDS_HELD_LEAST):
                break
            kept[r] = self.held[r]
        self.held = kept
        self.given = Counter({key: times for key, times in self.given.items() if key[0] in kept})
        return self.held.setdefault(round, {})

    def keep_only(self, round: int) -> None:
        self.held = {round: self.held.get(round, {})}

    def give(self, sender: PeerId, wish: PartRequest) -> list[Effect]:
        payload, slot = self.held.get(wish.round, {}).get(wish.digest), (wish.round, sender, wish.digest)
        if payload is None or self.given[slot] >= PART_GIVEN_MAX:
            return []
        self.given[slot] += 1
        answer = PartResponse(wish.round, wish.attempt, wish.trace, wish.digest)
        return [Send(sender, answer, Lane.BULK, payload)]
