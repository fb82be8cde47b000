"""Retransmission of an attempt's messages: requested from peers that were ahead, granted to peers that ask.

A peer that sends parts of a later attempt is asked for them again when that attempt begins here.

Invariants:
- Each peer receives a full retransmission at most once per attempt: it is many bytes, a request is cheap.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Send
from atoll.policy.plan import RoundPlan
from atoll.wire.messages.round import ResendRequest


class RetransmissionRequests:
    def __init__(self, plan: RoundPlan, members: Container[PeerId]) -> None:
        self.plan, self.members = plan, members
        self.attempt = 0
        self.too_early: set[PeerId] = set()  # senders of parts of an attempt that has not begun here
        self.told: set[PeerId] = set()  # peers that received this attempt's messages a second time

    def attempt_begins(self, attempt: int) -> None:
        self.attempt, self.told = attempt, set()

    def ask(self, peers: Iterable[PeerId]) -> list[Effect]:
        """Ask peers that were ahead for the messages dropped here."""
        wish = ResendRequest(self.plan.round, self.attempt, self.plan.trace)
        return [Send(peer, wish) for peer in sorted(peers)]

    def ask_the_early(self) -> list[Effect]:
        early, self.too_early = self.too_early, set()
        return self.ask(early)

    def tells(self, peer: PeerId) -> bool:
        """True for a member's first request in this attempt."""
        if peer in self.told or peer not in self.members:
            return False
        self.told.add(peer)
        return True
