"""Uplink of rows: sends the local row of each part to its owners, and hands on sums of the rows below.

Invariants:
- A row goes to a peer at most once, except after `resend`.
- A relay hands on one sum per part: its own row and the rows below it.
- No row is sent to a peer that may not see it yet (reveal follows commitment).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Lane, Send
from atoll.protocol.allreduce.attempt import ONWARD, AttemptState
from atoll.protocol.allreduce.buffers import GatheredRow
from atoll.protocol.allreduce.tasks import RowsCombined
from atoll.wire.messages.round import PartialSum, PartReductionDeclined, RowContribution


class RowUplink:
    """One peer's side of one attempt."""

    def __init__(self, state: AttemptState, row_targets: Callable[[int], Sequence[PeerId]]) -> None:
        """`row_targets(part)`: the peers that get the local row now, if they have not had it."""
        self.state, self.route, self.row_targets = state, state.route, row_targets
        self._sent: set[tuple[int, PeerId]] = set()  # (part, recipient of its row)

    def contribute_part(self, part: int) -> list[Effect]:
        """Send the local row up the tree; if the local peer is a relay, the row goes into its sum."""
        if not self.state.has_local_row(part) or not self.state.takes_row(part, self.state.me):
            return []
        relay = self.state.relays.get(part)
        if relay is None or (part, self.state.me) in self.route.declined:
            new = [to for to in self.row_targets(part) if (part, to) not in self._sent]
            return [effect for to in new for effect in self._send_row(part, to)]
        if not relay.closed:
            relay.add(self.state.me, self.state.local_row(part))
        return []

    def resend(self, to: PeerId) -> list[Effect]:
        """Send again the rows that this peer had, if their parts are still open."""
        open_parts = [part for part, target in sorted(self._sent) if target == to and self._is_open(part)]
        return [effect for part in open_parts for effect in self._row_to(part, to)]

    def hand_on(self, part: int, now: Seconds) -> list[Effect]:
        """Combine the rows below into one sum when all are here, or at the relay's deadline; then send it."""
        relay = self.state.relays.get(part)
        if relay is None:
            return []
        if relay.closed:
            targets = self.row_targets(part) if relay.done is not None else ()
            return [effect for to in targets for effect in self._send_row(part, to)]
        awaited_below = self.state.reroute.awaited_below(part)
        due = now >= self.state.plan.gather_until(0, 2)
        if not relay.rows or (not due and self.state.environment.is_awaited(part, relay.names, awaited_below)):
            return []
        relay.closed = True
        return [self.state.combine(part, relay, "on", onward=True)]

    def store_sum(self, part: int, result: RowsCombined) -> None:
        """Keep the computed sum of a relay."""
        assert result.payload is not None
        relay = self.state.relays[part]
        counted = [relay.rows[sender] for sender in result.counted]
        names = frozenset(name for held in counted for name in held.names)
        relay.done = GatheredRow(names, sum(held.weight for held in counted), result.payload)
        relay.rows.clear()

    def return_late_row(self, sender: PeerId, message: RowContribution | PartialSum) -> list[Effect]:
        """Decline a row that came after the sum was closed, so that it goes past this relay to its owner."""
        plan, part = self.state.plan, message.part
        relay = self.state.relays.get(part) if message.owner_index == ONWARD else None
        if relay is None or not relay.closed or sender in relay.names or part in self.state.answers:
            return []
        return [Send(sender, PartReductionDeclined(plan.round, plan.attempt, plan.trace, part))]

    def _is_open(self, part: int) -> bool:
        return part not in self.state.answers and part not in self.state.missing

    def _send_row(self, part: int, to: PeerId) -> list[Effect]:
        state = self.state
        if part in state.missing or (part, to) in self._sent or not state.environment.can_see_rows(to):
            return []
        self._sent.add((part, to))
        if to != state.me:
            return self._row_to(part, to)
        relay = state.relays.get(part)
        row = relay.done if relay is not None and relay.done is not None else state.local_row(part)
        state.stand_in(part).add(state.me, row)
        return []

    def _row_to(self, part: int, to: PeerId) -> list[Effect]:
        state, plan, relay = self.state, self.state.plan, self.state.relays.get(part)
        owners = plan.owners(part) if to in plan.owners(part) else plan.owners_and_reserves(part)
        index = owners.index(to) if to in owners and self.route.parent_of(part, state.me) != to else ONWARD
        if relay is not None and relay.done is not None:
            done = relay.done
            names = tuple(sorted(done.names))
            handed = PartialSum(plan.round, plan.attempt, plan.trace, part, index, done.weight, names)
            return [Send(to, handed, Lane.BULK, done.payload)]
        if state.update is None or part >= len(state.update.parts):
            return []
        path = state.update.path(part)
        message = RowContribution(plan.round, plan.attempt, plan.trace, part, index, path, state.update.statement)
        return [Send(to, message, Lane.BULK, state.update.parts[part])]
