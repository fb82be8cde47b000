"""Rows served on request: to peers that doubt a result, that combine the part too, or that do not hear the author.

A request that comes too early is served when the row is here, or when the requester has committed: reveal follows
commitment.

Invariants:
- A row goes to the same peer at most ROW_SENDS_MAX times.
- Open requests are bounded by the rows of parts that the local peer may answer for, one per owner or reserve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Lane, Send
from atoll.protocol.allreduce.buffers import GatheredRow
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.wire.messages.round import PartialSum, RowReroutedHint, RowResponse

ROW_SENDS_MAX = 2  # of one row to one peer: it may be lost once

RowId = tuple[int, PeerId]  # (part, author)


class RowServer:
    """One peer's side of one attempt."""

    def __init__(
        self,
        plan: ReducePlan,
        me: PeerId,
        own_parts: Container[int],
        gone: Callable[[PeerId], bool],
        may_see: Callable[[PeerId], bool],
    ) -> None:
        """`own_parts`: the parts that the local peer may have to answer for."""
        self.plan, self.me, self.own_parts, self.gone, self.may_see = plan, me, own_parts, gone, may_see
        self.waiting: dict[RowId, list[PeerId]] = {}  # owners that requested a row before it was here
        self._sends: Counter[tuple[int, PeerId, PeerId]] = Counter()  # (part, author, recipient)
        self.hidden: dict[PeerId, set[RowId]] = {}  # requests of peers that have not committed yet

    def answer_request(self, sender: PeerId, part: int, author: PeerId, row: GatheredRow | None) -> list[Effect]:
        """`row`: the row, if it is here and the attempt has begun."""
        plan = self.plan
        if sender not in plan.recipient_set or self._sends[part, author, sender] >= ROW_SENDS_MAX:
            return []
        if not self.may_see(sender):
            own = author == self.me and 0 <= part < plan.parts
            if own or self._may_come(part, author):
                self.hidden.setdefault(sender, set()).add((part, author))
            return []
        if row is not None:
            return self._send(sender, part, author, row)
        if self._may_come(part, author) and (sender in plan.owners(part) or sender in plan.reserves):
            requesters = self.waiting.setdefault((part, author), [])
            requesters += [sender] if sender not in requesters else []
            if plan.topology.parts[part].parents and not self.gone(author):
                return [Send(sender, RowReroutedHint(plan.round, plan.attempt, plan.trace, part, author))]
        return []

    def _may_come(self, part: int, author: PeerId) -> bool:
        """Whether this row may still arrive at the local peer."""
        own = part in self.own_parts or (self.me in self.plan.reserves and 0 <= part < self.plan.parts)
        return own and author in self.plan.recipient_set

    def serve_waiting(self, part: int, author: PeerId, row: GatheredRow | None) -> list[Effect]:
        """Send a row that is here now to the peers that requested it before."""
        if row is None:
            return []
        requesters = self.waiting.pop((part, author), ())
        return [effect for to in requesters for effect in self._send(to, part, author, row)]

    def pop_visible(self) -> list[tuple[PeerId, int, PeerId]]:
        """Kept requests of peers that may see rows now, as (requester, part, author)."""
        may = [peer for peer in self.hidden if self.may_see(peer)]
        return [(peer, part, author) for peer in may for part, author in sorted(self.hidden.pop(peer))]

    def _send(self, to: PeerId, part: int, author: PeerId, row: GatheredRow) -> list[Effect]:
        plan = self.plan
        if row.handed and to not in plan.owners_and_reserves(part):
            return []
        self._sends[part, author, to] += 1
        if row.statement is not None:
            message = RowResponse(plan.round, plan.attempt, plan.trace, part, row.path, row.statement)
        else:
            index, names = plan.owners_and_reserves(part).index(to), tuple(sorted(row.names))
            message = PartialSum(plan.round, plan.attempt, plan.trace, part, index, row.weight, names, author)
        return [Send(to, message, Lane.BULK, row.payload)]
