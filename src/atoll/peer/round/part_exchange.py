"""Exchange of combined parts by digest within a round.

Invariants:
- A peer receives the same bytes at most `PART_GIVEN_MAX` times in `PART_GIVEN_S` seconds.
- The same bytes are requested rarely and from one peer after the other: sending twice makes no slow link faster.
Not responsible for: the content of parts, choosing which ones are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import PART_GIVEN_MAX, PART_GIVEN_S
from atoll.base.machine import Effect, Lane, Payload, Send, SetTimer
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.policy.plan import RoundPlan
from atoll.wire.messages.round import PartRequest, PartResponse


class PartExchange:
    """`held`: combined parts of this round by digest; the dict's creator serves them after the round."""

    def __init__(self, plan: RoundPlan, patience: AdaptiveTimeout, held: dict[Digest, Payload]) -> None:
        self.plan, self.patience, self.held = plan, patience, held
        self._given: Counter[tuple[PeerId, Digest]] = Counter()  # parts and bodies sent since `given_since`
        # start of this attempt or of the last minute: a group's attempts may never end
        self.given_since: Seconds = 0.0
        self._asked: dict[Digest, tuple[int, Seconds]] = {}  # (requests so far, time of the next one)

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
        self, attempt: int, missing: Iterable[tuple[Digest, bool]], holders: Sequence[PeerId], now: Seconds
    ) -> list[Effect]:
        """Request late parts, given as (digest, is it on its way?), from these holders in turn.

        A proposal outruns the parts that it names, so parts that may be on their way are not requested at once.
        """
        effects: list[Effect] = []
        for digest, coming in missing:
            times, due = self._asked.get(digest, (0, now + self.patience.overdue(now) if coming else now))
            if now < due:
                self._asked[digest] = times, due
                effects.append(SetTimer(f"round/{self.plan.round}/parts", due))
                continue
            self._asked[digest] = times + 1, now + self.patience.retry_after(times, now)
            wish = PartRequest(self.plan.round, attempt, self.plan.trace, digest)
            # from the second time on, as the first holder may not have it
            copies = min(len(holders), 1 if times == 0 else 2)
            effects += [Send(holders[(times + k) % len(holders)], wish) for k in range(copies)]
        return effects

    def keep_only(self, needed: set[Digest]) -> None:
        for old in self.held.keys() - needed:
            del self.held[old]
