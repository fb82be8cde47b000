"""Rows that I hold and others ask me for: whoever doubts an answer, combines it too, or does not hear their author.

Who asks too early is answered when the row is here, or when it has said what it gives itself: reveal follows
commitment. Never opens one row to one peer more often than it may get lost, never remembers more wishes than the
plan has rows of parts that I may answer for, one of each owner or reserve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Lane, Send
from atoll.protocol.allreduce.buffers import StoredRow
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.wire.messages.round import PartialSum, ReachabilityHint, RowResponse

OPENED_MAX = 2  # times that one row is opened to one peer: it may be lost once

Wish = tuple[int, PeerId]  # (part, whose row)


class RowServer:
    """One peer's side of one attempt."""

    def __init__(
        self,
        plan: ReducePlan,
        me: PeerId,
        mine: Container[int],
        gone: Callable[[PeerId], bool],
        may_see: Callable[[PeerId], bool],
    ) -> None:
        """`mine`: the parts that I may have to answer for."""
        self.plan, self.me, self.mine, self.gone, self.may_see = plan, me, mine, gone, may_see
        self.opened: Counter[tuple[int, PeerId, PeerId]] = Counter()  # (part, whose row, to whom): how often
        self.wanted: dict[Wish, list[PeerId]] = {}  # owners that asked me for a row before I had it
        self.unshown: dict[PeerId, set[Wish]] = {}  # that it asked for too early

    def ask(self, sender: PeerId, part: int, author: PeerId, row: StoredRow | None) -> list[Effect]:
        """`row`: if it is here, and rows may be opened."""
        plan = self.plan
        if sender not in plan.hearers or self.opened[part, author, sender] >= OPENED_MAX:
            return []
        if not self.may_see(sender):
            mine = author == self.me and 0 <= part < plan.parts
            if mine or self._may_come(part, author):
                self.unshown.setdefault(sender, set()).add((part, author))
            return []
        if row is not None:
            return self._open(sender, part, author, row)
        if self._may_come(part, author) and (sender in plan.owners(part) or sender in plan.reserves):
            askers = self.wanted.setdefault((part, author), [])
            askers += [sender] if sender not in askers else []
            if plan.topology.parts[part].parents and not self.gone(author):
                return [Send(sender, ReachabilityHint(plan.round, plan.attempt, plan.trace, part, author))]
        return []

    def _may_come(self, part: int, author: PeerId) -> bool:
        """This row, to me."""
        mine = part in self.mine or (self.me in self.plan.reserves and 0 <= part < self.plan.parts)
        return mine and author in self.plan.hearers

    def came(self, part: int, author: PeerId, row: StoredRow | None) -> list[Effect]:
        """Send a row that is here now to the peers that requested it before."""
        if row is None:
            return []
        askers = self.wanted.pop((part, author), ())
        return [effect for to in askers for effect in self._open(to, part, author, row)]

    def now_seen(self) -> list[tuple[PeerId, int, PeerId]]:
        """What those asked for who may see it now, forgotten here: (who, part, whose row)."""
        may = [peer for peer in self.unshown if self.may_see(peer)]
        return [(peer, part, author) for peer in may for part, author in sorted(self.unshown.pop(peer))]

    def _open(self, to: PeerId, part: int, author: PeerId, row: StoredRow) -> list[Effect]:
        plan = self.plan
        if row.handed and to not in plan.takers(part):
            return []
        self.opened[part, author, to] += 1
        if row.statement is not None:
            message = RowResponse(plan.round, plan.attempt, plan.trace, part, row.path, row.statement)
        else:
            index, names = plan.takers(part).index(to), tuple(sorted(row.names))
            message = PartialSum(plan.round, plan.attempt, plan.trace, part, index, row.weight, names, author)
        return [Send(to, message, Lane.BULK, row.payload)]
