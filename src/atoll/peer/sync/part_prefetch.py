"""Requests the parts of the next round while the state of this one is made, so that no link idles in between.

Only for a member that follows rounds that others closed, where parts are large. One round ahead at most.
Invariants:
- Each part is requested once here; the round goes on from there, and repeats requests.
- Only parts that the next vertex names are taken: one round's at most are in memory here.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Payload, Send
from atoll.peer.round.candidate import opened
from atoll.peer.round.part_exchange import PartArrivalTime, PartRequests, PrefetchedParts
from atoll.policy.plan import RoundPlan
from atoll.wire.messages.round import PartRequest, PartResponse
from atoll.wire.messages.vertex import VertexBody


class PartPrefetch:
    """`pace`: how long parts take to arrive."""

    def __init__(self, pace: PartArrivalTime) -> None:
        self.pace, self.parts = pace, PrefetchedParts()

    def request(self, plan: RoundPlan, body: VertexBody, holders: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Request all parts of this vertex from the first of these holders. `now` is run time."""
        named = [opened(signed).digest for signed in body.parts if signed is not None]
        wanted = dict.fromkeys(named if holders else ())
        coming = {part: PartRequests(now, now, times=1, first_at=now, holders=holders[:1]) for part in wanted}
        self.parts = PrefetchedParts(plan.round, coming=coming)
        return [Send(holders[0], PartRequest(plan.round, body.attempt, plan.trace, part)) for part in coming]

    def receive(self, message: PartResponse, payload: Payload | None, now: Seconds) -> bool:
        """Hold a requested part; False if it was not requested here."""
        if message.round != self.parts.round or payload is None or payload.digest not in self.parts.coming:
            return False
        self.parts.here[payload.digest] = payload
        self.pace.took(now - self.parts.coming.pop(payload.digest).last_at)
        return True

    def take(self) -> PrefetchedParts:
        """What was requested for the round that begins."""
        found = self.parts
        self.drop()
        return found

    def drop(self) -> None:
        """Forget the parts: the peer goes on elsewhere."""
        self.parts = PrefetchedParts(self.parts.round)
