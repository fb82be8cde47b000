"""Recovery of results that other peers hold: an owner may have died while it sent its own.

An owner that takes over for a dead one receives the signed result, and requests the bytes from one holder after the
other.

Invariants:
- At most one holder per part is asked at a time, and none that is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Payload, Send
from atoll.protocol.allreduce.buffers import ReceivedResult
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.wire.messages.round import PartRequest
from atoll.wire.messages.statements import OwnerResult, SignedStatement


class ResultRecovery:
    """One peer's side of one attempt."""

    def __init__(self, plan: ReducePlan, gone: Callable[[PeerId], bool]) -> None:
        self.plan, self.gone = plan, gone
        self._known: dict[int, dict[PeerId, tuple[SignedStatement, OwnerResult]]] = {}  # part -> holder -> result
        self._fetching: dict[int, PeerId] = {}  # part -> holder that was asked

    def note_holder(self, holder: PeerId, signed: SignedStatement, answered: OwnerResult) -> list[Effect]:
        self._known.setdefault(answered.part, {}).setdefault(holder, (signed, answered))
        return self.request_bytes(answered.part)

    def request_bytes(self, part: int) -> list[Effect]:
        """Request from one holder, and from the next one if that one is gone."""
        if part not in self._known or (part in self._fetching and not self.gone(self._fetching[part])):
            return []
        self._fetching.pop(part, None)
        for holder, (_, answered) in sorted(self._known[part].items(), key=lambda item: item[0]):
            if not self.gone(holder):
                self._fetching[part] = holder
                request = PartRequest(self.plan.round, self.plan.attempt, self.plan.trace, answered.digest)
                return [Send(holder, request)]
        return []

    def holders(self, answered: OwnerResult) -> set[PeerId]:
        """Peers that have shown that they hold these bytes."""
        known = self._known.get(answered.part, {}).items()
        return {holder for holder, (_, result) in known if result.digest == answered.digest}

    def is_fetching(self, part: int) -> bool:
        return part in self._fetching

    def stop_fetching(self, part: int) -> None:
        self._fetching.pop(part, None)

    def result_of(self, payload: Payload) -> ReceivedResult | None:
        """The result with these bytes, if they were requested."""
        for part, holder in self._fetching.items():
            signed, answered = self._known[part][holder]
            if answered.digest == payload.digest:
                return ReceivedResult(signed, answered, payload)
        return None
