"""Words of an attempt that are said twice: by those who were ahead of me, and by me to those who ask.

Who sends parts of an attempt that I have not begun is asked for them again when I begin it; who asks me is told
everything once more. Never says it all to anybody twice in an attempt: the words are many bytes, asking is cheap.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Send
from atoll.policy.plan import RoundPlan
from atoll.wire.messages.round import ResendRequest


class Retransmission:
    def __init__(self, plan: RoundPlan, members: Container[PeerId]) -> None:
        self.plan, self.members = plan, members
        self.attempt = 0
        self.too_early: set[PeerId] = set()  # who sent parts of an attempt that I had not begun
        self.told: set[PeerId] = set()  # who was told everything of this attempt a second time

    def attempt_begins(self, attempt: int) -> None:
        self.attempt, self.told = attempt, set()

    def ask(self, peers: Iterable[PeerId]) -> list[Effect]:
        """These peers were ahead of me, and I dropped what they said."""
        wish = ResendRequest(self.plan.round, self.attempt, self.plan.trace)
        return [Send(peer, wish) for peer in sorted(peers)]

    def ask_the_early(self) -> list[Effect]:
        early, self.too_early = self.too_early, set()
        return self.ask(early)

    def tells(self, peer: PeerId) -> bool:
        """It asks: true once per attempt, and for members."""
        if peer in self.told or peer not in self.members:
            return False
        self.told.add(peer)
        return True
