"""Broadcast of results down the trees: recipients of results, and the source of a result that is overdue.

A result goes to the peers with rows that came up through the local peer. An owner that takes over for a dead one
receives the statement of the result that the dead owner gave, and so do peers behind a link that broke.

Invariants:
- A peer receives or is shown the same result at most once, unless it was away or requests it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import UNSET

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import MIB
from atoll.base.machine import Effect, Lane, Send
from atoll.protocol.allreduce.buffers import ReceivedResult
from atoll.protocol.allreduce.routing import AttemptRouting
from atoll.wire.messages.round import PartResult, ResendRequest
from atoll.wire.messages.statements import AgreedWeights

SHOWN_BYTES = 4 * MIB  # size of a round's results from which on peers that may be behind get no bytes unasked


class ResultBroadcast:
    """One peer's side of one attempt."""

    def __init__(
        self,
        route: AttemptRouting,
        unheard: Callable[[PeerId], bool],
        weighings: Mapping[Digest, AgreedWeights],
        takes_part: Callable[[PeerId], bool],
    ) -> None:
        """`weighings`: agreed weights by the digest that results name; empty with a plain mean.

        `takes_part`: whether a peer commits to an update of this attempt, as far as known.
        """
        self.route, self.me, self.gone, self.unheard = route, route.me, route.gone, unheard
        self.weighings, self.takes_part = weighings, takes_part
        self.given: set[tuple[int, PeerId]] = set()  # (part, recipient of its bytes)
        self.shown: set[tuple[int, PeerId]] = set()  # (part, recipient of its statement)
        self.asked: set[tuple[int, PeerId]] = set()  # (part, peer asked for a result that a gone peer owed)
        self.back: set[PeerId] = set()  # peers that came back or late, and may have lost what they held

    # ---- messages ------------------------------------------------------------------------------------------

    def message(self, held: ReceivedResult) -> PartResult:
        plan = self.route.plan
        weighing = self.weighings.get(held.result.rows, UNSET)
        return PartResult(plan.round, plan.attempt, plan.trace, held.statement, weighing)

    def send(self, to: PeerId, held: ReceivedResult) -> Send:
        """The result with its bytes."""
        self.given.add((held.result.part, to))
        return Send(to, self.message(held), Lane.BULK, held.payload)

    def give(self, to: PeerId, held: ReceivedResult) -> Send:
        """The result with its bytes, except a large one to an observer, or to a newcomer without an update.

        It may still download a state, and bytes that it cannot use yet would take its link. It requests them when
        it follows the round, which costs it a round trip.
        """
        plan = self.route.plan
        is_settled = to in plan.recipient_set and to not in plan.unsettled
        may_be_behind = not is_settled and not self.takes_part(to)
        is_large = held.result.size_bytes * plan.parts >= SHOWN_BYTES
        return self.show(to, held) if may_be_behind and is_large else self.send(to, held)

    def show(self, to: PeerId, held: ReceivedResult) -> Send:
        """The signed statement alone: the local peer holds the bytes."""
        return Send(to, self.message(held))

    def serve(self, results: Mapping[int, ReceivedResult], to: PeerId) -> list[Send]:
        """Those of these results that the peer gets from the local peer."""
        due = [held for part, held in results.items() if self.route.serves(part, held.statement.signer, to)]
        return [self.give(to, held) for held in due]

    def answer_already(self, results: Mapping[int, ReceivedResult], part: int, to: PeerId) -> list[Send]:
        """Send the result, if it is here: the peer turned to the local peer because another owner is gone."""
        if not 0 <= part < self.route.plan.parts:
            return []
        held = results.get(part)
        if held is None:
            # closed without a result: the peer may have noticed a death first, and gets the result later
            self.route.senders.setdefault(part, set()).add(to)
            return []
        return [] if (part, to) in self.given else [self.send(to, held)]

    # ---- recipients ----------------------------------------------------------------------------------------

    def recipients(self, held: ReceivedResult, holders: set[PeerId]) -> list[PeerId]:
        """Peers that get this result from the local peer, except `holders`, which have shown that they hold it."""
        part, owner = held.result.part, held.statement.signer
        have = holders - self.back
        near = [peer for peer in self.route.possible_recipients(part, owner) if peer not in have]
        return [peer for peer in near if self.route.serves(part, owner, peer)]

    def show_due(self, held: ReceivedResult) -> list[Effect]:
        """Show the result to peers that wait for it without need; each counts as informed from here on."""
        return [self.show(peer, held) for peer in (*self._next_owner(held), *self._below_the_unheard(held))]

    def _next_owner(self, held: ReceivedResult) -> list[PeerId]:
        """The owner that takes over for the dead signer: it need not wait for rows, and can fetch the bytes."""
        part, owner = held.result.part, self.route.owner[held.result.part]
        if owner in (self.me, held.statement.signer) or (part, owner) in self.shown:
            return []
        self.shown.add((part, owner))
        return [owner]

    def _below_the_unheard(self, held: ReceivedResult) -> list[PeerId]:
        """Peers below a parent with a broken link to the local peer.

        The parent may never have received the result. The peers below it hear it, and would request from no other.
        """
        part, owner = held.result.part, held.statement.signer
        children = self.route.plan.topology.parts[part].children
        if not any((part, parent) in self.given and self.unheard(parent) for parent in children):
            return []
        had = self.given | self.shown
        near = [peer for peer in self.route.possible_recipients(part, owner) if (part, peer) not in had]
        new = [peer for peer in near if self.route.serves(part, owner, peer) and not self.gone(peer)]
        self.shown.update((part, peer) for peer in new)
        return new

    # ---- sources -------------------------------------------------------------------------------------------

    def request_past_the_gone(self, part: int) -> list[Effect]:
        """If the parent that owes a result is gone, request it once from the next peer above."""
        plan = self.route.plan
        parent = plan.topology.parts[part].parents.get(self.me)
        if parent is None or parent == self.route.parent_of(part, self.me):
            return []
        source = self.route.target(part)
        if source == self.me or (part, source) in self.asked:
            return []
        self.asked.add((part, source))
        return [Send(source, ResendRequest(plan.round, plan.attempt, plan.trace))]
