"""Answers that others say they hold: an owner may have died while it gave its own.

Whoever takes over for a dead owner is shown what that one had answered, and fetches the bytes from one holder after
the other. Never asks two for the same part at once, nor anybody who is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Payload, Send
from atoll.protocol.allreduce.buffers import ReceivedResult
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.wire.messages.round import PartRequest
from atoll.wire.messages.statements import OwnerResult, SignedStatement

Word = tuple[SignedStatement, OwnerResult]


class ResultRecovery:
    def __init__(self, plan: ReducePlan, gone: Callable[[PeerId], bool]) -> None:
        self.plan, self.gone = plan, gone
        self.heard: dict[int, dict[PeerId, Word]] = {}  # part -> who says that it holds its answer
        self.fetching: dict[int, PeerId] = {}  # from whom

    def note(self, holder: PeerId, signed: SignedStatement, answered: OwnerResult) -> list[Effect]:
        self.heard.setdefault(answered.part, {}).setdefault(holder, (signed, answered))
        return self.fetch(answered.part)

    def fetch(self, part: int) -> list[Effect]:
        """Ask one holder, and the next one when that one is gone."""
        if part not in self.heard or (part in self.fetching and not self.gone(self.fetching[part])):
            return []
        self.fetching.pop(part, None)
        for holder, (_, answered) in sorted(self.heard[part].items(), key=lambda item: item[0]):
            if not self.gone(holder):
                self.fetching[part] = holder
                wish = PartRequest(self.plan.round, self.plan.attempt, self.plan.trace, answered.digest)
                return [Send(holder, wish)]
        return []

    def holders(self, answered: OwnerResult) -> set[PeerId]:
        """Who says that it holds this very answer."""
        said = self.heard.get(answered.part, {}).items()
        return {holder for holder, (_, word) in said if word.digest == answered.digest}

    def fetches(self, part: int) -> bool:
        return part in self.fetching

    def done(self, part: int) -> None:
        """Its answer is here, from wherever."""
        self.fetching.pop(part, None)

    def completed_by(self, payload: Payload) -> ReceivedResult | None:
        """The answer whose bytes these are, if I asked for them."""
        for part, holder in self.fetching.items():
            signed, answered = self.heard[part][holder]
            if answered.digest == payload.digest:
                return ReceivedResult(signed, answered, payload)
        return None
