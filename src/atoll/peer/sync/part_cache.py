"""Cache of combined parts of recent rounds, for members that are behind.

While a member is behind, rounds that memory has no room for move to the disk: the member fetches a state first, and
meanwhile the others agree on several rounds.

Invariants:
- Beside the current round it holds at most `ROUNDS_KEPT` rounds, in memory `HELD_BYTES_MAX` bytes or one round, on
  the disk `ROUNDS_ON_DISK` rounds.
- A peer receives one part a few times only: a closed round has no new attempts that would reset the count.
"""

from __future__ import annotations

from collections import Counter

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import HELD_BYTES_MAX, PART_GIVEN_MAX, ROUNDS_KEPT, ROUNDS_ON_DISK
from atoll.base.machine import Effect, Lane, Payload, RunTask, Send, TaskDone, TaskFailed
from atoll.peer.tasks import MovePartsToDisk
from atoll.wire.messages.round import PartRequest, PartResponse


class RecentPartCache:
    def __init__(self) -> None:
        self.held: dict[int, dict[Digest, Payload]] = {}  # by round
        self.given: Counter[tuple[int, PeerId, Digest]] = Counter()  # times sent
        self.moving: int | None = None  # round on its way to the disk
        self.on_disk: set[int] = set()

    def begin(self, round: int) -> dict[Digest, Payload]:
        """Storage for the parts of a round that begins; older rounds beyond the bounds are dropped."""
        kept: dict[int, dict[Digest, Payload]] = {}
        size_bytes = files = 0
        for r in sorted(self.held, reverse=True):
            if r <= round - ROUNDS_KEPT:
                break
            if r in self.on_disk:
                files += 1
                fits = files <= ROUNDS_ON_DISK
            else:
                size_bytes += self._size_of(r)
                # the newest is held whatever its size: a member just behind needs no whole state
                fits = size_bytes <= HELD_BYTES_MAX or not kept or r == self.moving
            if not fits:
                break
            kept[r] = self.held[r]
        self._set(kept)
        return self.held.setdefault(round, {})

    def move_to_disk(self, round: int) -> list[Effect]:
        """Move the newest round before this one if memory has no room for several: a member is behind."""
        newest = max((r for r in self.held if r < round), default=None)
        if newest is None or newest in self.on_disk or self.moving is not None:
            return []
        if ROUNDS_ON_DISK * self._size_of(newest) <= HELD_BYTES_MAX:
            return []
        self.moving = newest
        return [RunTask(f"parts/{newest}", MovePartsToDisk(tuple(self.held[newest].values())))]

    def on_moved(self, event: TaskDone | TaskFailed) -> list[Effect]:
        round, self.moving = self.moving, None
        if round in self.held and isinstance(event, TaskDone):
            self.held[round] = {part.digest: part for part in event.result}
            self.on_disk.add(round)
        return []

    def keep_only(self, round: int) -> None:
        self._set({round: self.held.get(round, {})})

    def give(self, sender: PeerId, wish: PartRequest) -> list[Effect]:
        payload, slot = self.held.get(wish.round, {}).get(wish.digest), (wish.round, sender, wish.digest)
        if payload is None or self.given[slot] >= PART_GIVEN_MAX:
            return []
        self.given[slot] += 1
        answer = PartResponse(wish.round, wish.attempt, wish.trace, wish.digest)
        return [Send(sender, answer, Lane.BULK, payload)]

    def _set(self, held: dict[int, dict[Digest, Payload]]) -> None:
        self.held = held
        self.on_disk &= held.keys()
        self.given = Counter({key: times for key, times in self.given.items() if key[0] in held})

    def _size_of(self, round: int) -> int:
        return sum(part.size_bytes for part in self.held[round].values())
