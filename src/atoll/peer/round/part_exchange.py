"""The combined parts of a round by name: given to whoever lacks them, asked of those who have them.

Promises: one peer is given the same bytes a few times, however often it asks; the same bytes are asked for rarely,
and of one peer after the other, since a slow link is not made faster by sending everything twice.
Never looks into a part, never decides which ones matter.
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
    """`held`: combined parts of this round by digest; whoever made the dict serves them when the round is over."""

    def __init__(self, plan: RoundPlan, patience: AdaptiveTimeout, held: dict[Digest, Payload]) -> None:
        self.plan, self.patience, self.held = plan, patience, held
        self._given: Counter[tuple[PeerId, Digest]] = Counter()  # parts and bodies since then, how often
        self.given_since: Seconds = 0.0  # this attempt began, or the last minute: a group's attempts do not end
        self._asked: dict[Digest, tuple[int, Seconds]] = {}  # how often, when it is due again

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
        """Ask for (digest, is it on its way here?) what is late, of these holders in turn.

        A proposal outruns the bytes it is about, so they are not asked for at once while they may be on their way.
        """
        effects: list[Effect] = []
        for digest, coming in missing:
            times, due = self._asked.get(digest, (0, now + self.patience.late(now) if coming else now))
            if now < due:
                self._asked[digest] = times, due
                effects.append(SetTimer(f"round/{self.plan.round}/parts", due))
                continue
            self._asked[digest] = times + 1, now + self.patience.again(times, now)
            wish = PartRequest(self.plan.round, attempt, self.plan.trace, digest)
            copies = min(len(holders), 1 if times == 0 else 2)  # the second time, the first one may not have it
            effects += [Send(holders[(times + k) % len(holders)], wish) for k in range(copies)]
        return effects

    def keep_only(self, needed: set[Digest]) -> None:
        for old in self.held.keys() - needed:
            del self.held[old]
