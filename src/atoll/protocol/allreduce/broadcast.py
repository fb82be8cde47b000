"""Answers on their way down: who has one from me, who may have missed it, and of whom I ask for one that I miss.

Answers go to those whose rows came up through me. Whoever takes over for a dead owner is told that I hold what it
answered, and so are those who had theirs through a link that broke.
Never gives or shows anybody the same answer twice, unless it was away or asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId
from atoll.protocol.allreduce.buffers import ReceivedResult
from atoll.protocol.allreduce.routing import AttemptRouting


class ResultBroadcast:
    """One peer's side of one attempt. Says to whom; what is sent is the reduce's business."""

    def __init__(self, route: AttemptRouting, unheard: Callable[[PeerId], bool]) -> None:
        self.route, self.me, self.gone, self.unheard = route, route.me, route.gone, unheard
        self.given: set[tuple[int, PeerId]] = set()  # (part, to whom I sent its answer)
        self.shown: set[tuple[int, PeerId]] = set()  # (part, whom I told that I hold the answer)
        self.asked: set[tuple[int, PeerId]] = set()  # (part, whom I asked for an answer that somebody gone owes me)
        self.back: set[PeerId] = set()  # who came back or late: what it held it may have lost

    def below(self, held: ReceivedResult, holders: set[PeerId]) -> list[PeerId]:
        """All that have an answer from me, as soon as I hold it; not these, who showed me that they do."""
        part, owner = held.answered.part, held.statement.signer
        have = holders - self.back
        near = [peer for peer in self.route.within_reach(part, owner) if peer not in have]
        return [peer for peer in near if self.route.serves(part, owner, peer)]

    def to_show(self, held: ReceivedResult) -> list[PeerId]:
        """Who is to be told now that I hold this, and counts as told from here on."""
        return [*self._next_owner(held), *self._below_the_unheard(held)]

    def _next_owner(self, held: ReceivedResult) -> list[PeerId]:
        """I hold what a dead owner answered: whoever takes over need not wait for my row, and can have it."""
        part, owner = held.answered.part, self.route.owner[held.answered.part]
        if owner in (self.me, held.statement.signer) or (part, owner) in self.shown:
            return []
        self.shown.add((part, owner))
        return [owner]

    def _below_the_unheard(self, held: ReceivedResult) -> list[PeerId]:
        """Who had the answer from me, for others as well, may never have had it: our link broke. They have it from
        me, if they wish; they hear whom they wait for, and would ask nobody else."""
        part, owner = held.answered.part, held.statement.signer
        children = self.route.plan.topology.parts[part].children
        if not any((part, parent) in self.given and self.unheard(parent) for parent in children):
            return []
        had = self.given | self.shown
        near = [peer for peer in self.route.within_reach(part, owner) if (part, peer) not in had]
        new = [peer for peer in near if self.route.serves(part, owner, peer) and not self.gone(peer)]
        self.shown.update((part, peer) for peer in new)
        return new

    def source(self, part: int) -> PeerId | None:
        """The answer was to come through somebody who is gone: who is next above shall send it to me, if I have not
        asked it yet."""
        parent = self.route.plan.topology.parts[part].parents.get(self.me)
        if parent is None or parent == self.route.above(part, self.me):
            return None
        source = self.route.target(part)
        if source == self.me or (part, source) in self.asked:
            return None
        self.asked.add((part, source))
        return source
