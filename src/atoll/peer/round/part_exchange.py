"""Exchange of combined parts by digest within a round.

Invariants:
- A peer receives the same bytes at most `PART_GIVEN_MAX` times in `PART_GIVEN_S` seconds.
- The same bytes are requested rarely and from one peer after the other: sending twice makes no slow link faster.
  A requested part is requested from another peer once the first one is gone, or after twice the time that parts
  took so far; while parts arrive, no part is late.
Not responsible for: the content of parts, choosing which ones are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import PART_GIVEN_MAX, PART_GIVEN_S
from atoll.base.machine import Effect, Lane, Payload, Send, SetTimer
from atoll.peer.round.adaptive_timeout import PART_LATE_S, AdaptiveTimeout
from atoll.policy.plan import RoundPlan
from atoll.wire.messages.round import PartRequest, PartResponse

SLOWEST_BYTES_S = 250_000  # 2 Mbit/s: a part that comes over such a link is waited for
PACE_KEPT = 0.8  # of the usual time after a faster part


class PartArrivalTime:
    """How long requested parts take to arrive. It outlives rounds: a peer that catches up requests all parts."""

    def __init__(self) -> None:
        self.usual_s: Seconds = 0.0

    def took(self, seconds: Seconds) -> None:
        self.usual_s = max(seconds, PACE_KEPT * self.usual_s)


class MissingPart(NamedTuple):
    digest: Digest
    size_bytes: int
    is_coming: bool  # its owner may still send it
    is_requested: bool  # the all-reduce has requested it
    only_shown: bool  # owners show the local peer their results, and send bytes on request


@dataclass
class PartRequests:
    """Requests of one missing part."""

    last_at: Seconds  # time of the last request, or when the part was first missing
    due_at: Seconds  # time of the next request, if it follows the sharing time
    times: int = 0
    first_at: Seconds | None = None
    holders: Sequence[PeerId] = ()  # asked last


@dataclass
class PrefetchedParts:
    """Parts of one round that were requested before it began."""

    round: int = -1
    here: dict[Digest, Payload] = field(default_factory=dict[Digest, Payload])
    coming: dict[Digest, PartRequests] = field(default_factory=dict[Digest, PartRequests])


class ReducedPartExchange:
    """`held`: combined parts of this round by digest; the dict's creator serves them after the round.

    `follows_arrivals`: an owner has several parts, which come one after the other. So the arrivals tell whether a
    part is late, and not the time to the first one. With one part per owner the next arrival tells nothing: such
    waits cost rounds when messages were lost, and honest owners looked guilty (simulated).
    """

    def __init__(
        self,
        plan: RoundPlan,
        patience: AdaptiveTimeout,
        held: dict[Digest, Payload],
        pace: PartArrivalTime,
        follows_arrivals: bool,
    ) -> None:
        self.plan, self.patience, self.held, self.pace = plan, patience, held, pace
        self.follows_arrivals = follows_arrivals
        self._given: Counter[tuple[PeerId, Digest]] = Counter()  # parts and bodies sent since `given_since`
        # start of this attempt or of the last minute: a group's attempts may never end
        self.given_since: Seconds = 0.0
        self._asked: dict[Digest, PartRequests] = {}  # parts that are missing
        self.slow_link_s: Seconds = 0.0  # how long a missing part may take on a slow link

    def attempt_begins(self, now: Seconds) -> None:
        self._given.clear()
        self.given_since = now

    def give(self, to: PeerId, wish: PartRequest, payload: Payload | None, now: Seconds) -> list[Effect]:
        if now - self.given_since >= PART_GIVEN_S:
            self.attempt_begins(now)
        slot = (to, wish.digest)
        if payload is None or self._given[slot] >= PART_GIVEN_MAX:
            return []
        self._given[slot] += 1
        return [Send(to, PartResponse(wish.round, wish.attempt, wish.trace, wish.digest), Lane.BULK, payload)]

    def want(
        self, attempt: int, missing: Iterable[MissingPart], holders: Sequence[PeerId], now: Seconds
    ) -> list[Effect]:
        """Request late parts from these holders in turn.

        A proposal outruns the parts that it names, so parts that may be on their way are not requested at once.
        """
        effects: list[Effect] = []
        for part in missing:
            asked = self._asked.get(part.digest)
            if asked is None:
                late_at = now + self.patience.overdue(now) if part.is_coming else now
                asked = self._asked[part.digest] = PartRequests(now, late_at)
            if self.follows_arrivals and part.is_requested and not asked.times:
                asked.times, asked.first_at, asked.last_at = 1, now, now
            if self.follows_arrivals:
                # longer than the wait for another request
                self.slow_link_s = max(self.slow_link_s, part.size_bytes / SLOWEST_BYTES_S, 3 * self.pace.usual_s)
            due = self._due(part, asked, holders, now)
            if now < due:
                effects.append(SetTimer(f"round/{self.plan.round}/parts", due))
                continue
            # from the second time on, as the first holder may not have it
            copies = min(len(holders), 1 if asked.times == 0 else 2)
            asked.holders = [holders[(asked.times + k) % len(holders)] for k in range(copies)]
            asked.due_at = now + self.patience.retry_after(asked.times, now)
            asked.times, asked.last_at = asked.times + 1, now
            asked.first_at = now if asked.first_at is None else asked.first_at
            wish = PartRequest(self.plan.round, attempt, self.plan.trace, part.digest)
            effects += [Send(holder, wish) for holder in asked.holders]
        return effects

    def take_over(self, parts: PrefetchedParts) -> None:
        self.held.update(parts.here)
        self._asked.update(parts.coming)

    def has_requested(self, digest: Digest) -> bool:
        """True if the part is here or on its way."""
        return digest in self.held or (digest in self._asked and self._asked[digest].times > 0)

    def came(self, digest: Digest, now: Seconds) -> None:
        """Note that a part arrived, requested or not."""
        asked = self._asked.pop(digest, None)
        if asked is not None and asked.first_at is not None:
            self.pace.took(now - asked.first_at)

    def _due(self, part: MissingPart, asked: PartRequests, holders: Sequence[PeerId], now: Seconds) -> Seconds:
        """Run time of the next request."""
        if not self.follows_arrivals:
            return asked.due_at
        has_left = bool(asked.holders) and set(asked.holders).isdisjoint(holders)
        if has_left or not (asked.times or part.is_coming):
            return now
        expected_at = asked.last_at
        if asked.times:
            expected_at += max(self.patience.retry_after(asked.times - 1, now), 2 * self.pace.usual_s)
        return expected_at + PART_LATE_S if part.only_shown else self.patience.overdue_at(expected_at, now)

    def keep_only(self, needed: set[Digest]) -> None:
        for old in self.held.keys() - needed:
            del self.held[old]
