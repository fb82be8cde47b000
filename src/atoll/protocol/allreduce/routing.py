"""Routing of one attempt: the owner in charge of each part, the parent of each peer, and the recipients of results.

A topology gives all places at the start of an attempt. If an owner is late, gone or unable, its turn passes to the
next owner in the plan; if all owners of a part are gone, to the reserves. If a parent is gone, its children go to
the nearest ancestor that is left. This class keeps what was observed, and answers from it and the plan alone.
What a peer sends to many goes first to the peers behind it in the plan, as policy/topology_cost assumes: in one
common order, all would send to the same peer at a time and wait for its downlink.

Invariants:
- It never sends and never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from atoll.base.ids import PeerId, Seconds
from atoll.protocol.allreduce.plan import ReducePlan


class AttemptRouting:
    """One peer's view of one attempt."""

    def __init__(self, plan: ReducePlan, me: PeerId, gone: Callable[[PeerId], bool]) -> None:
        self.plan, self.me, self.gone = plan, me, gone
        self.turn = [0] * plan.parts  # owner index in charge, by part
        self.owner = [
            tree.owners[0] for tree in plan.topology.parts
        ]  # the peer in charge; the last if none is left
        self.declined: set[tuple[int, PeerId]] = set()  # (part, owner that cannot combine it)
        self.absent: frozenset[PeerId] = frozenset()  # owners that take no part in this attempt
        self.patience: dict[tuple[int, PeerId], Seconds] = {}  # (part, owner at work on it) -> not late before
        self.senders: dict[int, set[PeerId]] = {}  # senders of rows: they know best which peer they need
        self.below: dict[int, frozenset[PeerId]] = {}  # authors with rows that come through the local peer
        for part, tree in enumerate(plan.topology.parts):
            if me != tree.owners[0] and (below := tree.below(me)):
                self.below[part] = below

    def parts_in_send_order(self) -> list[int]:
        """All parts in the order of the local rows: first one part of each owner, from the owner behind."""
        earlier, turns = Counter[PeerId](), list[tuple[int, int, int]]()
        for part, tree in enumerate(self.plan.topology.parts):
            to = tree.parents.get(self.me, tree.owners[0])
            turns.append((earlier[to], self._places_behind(to), part))
            earlier[to] += 1
        return [part for _, _, part in sorted(turns)]

    def others(self) -> tuple[PeerId, ...]:
        """All other listeners, from the one behind the local peer."""
        listeners, here = self.plan.recipients, self.plan.place.get(self.me, -1)
        return listeners[here + 1 :] + listeners[: max(here, 0)]

    def _places_behind(self, peer: PeerId) -> int:
        """Places from the local peer to this one, in circular plan order."""
        place = self.plan.place
        return (place.get(peer, 0) - place.get(self.me, 0)) % len(place)

    # ---- upwards -------------------------------------------------------------------------------------------

    def pass_turn(self, part: int, now: Seconds) -> bool:
        """Pass the turn over owners that will not answer any more; False if no owner or reserve is left."""
        owners, turn = self.plan.topology.parts[part].owners, self.turn[part]
        index = self._next(part, owners, turn, now)
        if self.plan.reserves and index >= len(owners):
            # checked even if an owner is heard at this moment: a dead peer may just have been heard once more
            owners = self.plan.owners_and_reserves(part)
            index = self._next(part, owners, index, now)
            if self._is_abandoned(part, owners[:index]):
                index = len(owners)
        if index != turn:  # checked for each part at each message, and hardly ever so
            self.turn[part], self.owner[part] = index, owners[min(index, len(owners) - 1)]
        return index < len(owners)

    def _is_abandoned(self, part: int, passed: Sequence[PeerId]) -> bool:
        """Whether all owners declined, and so did a reserve in its turn, which requested the rows of all peers."""
        count = len(self.plan.owners(part))
        declined = [(part, taker) in self.declined for taker in passed]
        return all(declined[:count]) and any(declined[count:])

    def is_reserves_turn(self, part: int) -> bool:
        """Whether no owner of this part answers any more, in the view of the local peer."""
        return self.turn[part] >= len(self.plan.owners(part))

    def next_after_unheard(self, part: int, unheard: Callable[[PeerId], bool]) -> list[PeerId]:
        """The reserve after the one in charge, if a reserve was passed over that others may hear.

        It gets the local row for the reserve in charge, and returns its result, if those two are cut off.
        """
        reserves = self.plan.owners_and_reserves(part)[len(self.plan.owners(part)) :]
        passed = self.turn[part] - len(self.plan.owners(part))
        if not any(map(unheard, reserves[:passed])):
            return []
        return [peer for peer in reserves[passed + 1 :] if peer != self.me and not self.gone(peer)][:1]

    def _is_cut_off(self) -> bool:
        """Whether the local peer hears too few to stand in: if members may lie, a majority decides."""
        plan = self.plan
        gone = sum(peer != self.me and self.gone(peer) for peer in plan.recipients)
        return plan.may_lie and 2 * gone >= len(plan.recipients)

    def _next(self, part: int, owners: Sequence[PeerId], index: int, now: Seconds) -> int:
        """The first index from this one with an owner that may still answer."""
        while index < len(owners):
            late = now >= max(self.plan.until(index), self.patience.get((part, owners[index]), 0.0))
            if owners[index] == self.me:
                lost = index >= len(self.plan.owners(part)) and self._is_cut_off()
            else:
                lost = self.gone(owners[index])
            if not late and not lost and not self.is_excused(part, owners[index]):
                break
            index += 1
        return index

    def is_excused(self, part: int, owner: PeerId) -> bool:
        """Whether the owner declined this part, or takes no part in this attempt."""
        return (part, owner) in self.declined or owner in self.absent

    def returned_owners(self, part: int) -> list[PeerId]:
        """Owners that were passed over as gone, and are heard again, in rounds without a clock.

        Only the local row ends their wait there. With a clock their window ends it, and the next owner answers.
        """
        if self.plan.has_clock:
            return []
        passed = self.plan.topology.parts[part].owners[: self.turn[part]]
        return [o for o in passed if o != self.me and not self.gone(o) and (part, o) not in self.declined]

    def parent_of(self, part: int, peer: PeerId) -> PeerId | None:
        """The nearest ancestor that is there to hand on this peer's row. None: the peer sends to the owner."""
        parents = self.plan.topology.parts[part].parents
        above = parents.get(peer)
        while above is not None and ((above != self.me and self.gone(above)) or (part, above) in self.declined):
            above = parents.get(above)
        return above

    def last_relay(self, part: int, peer: PeerId) -> PeerId:
        """The peer that brings this peer's row to the owner: itself, or the last relay."""
        above = self.parent_of(part, peer)
        while above is not None and peer != self.me:
            peer, above = above, self.parent_of(part, above)
        return peer

    def relays_between(self, part: int, peer: PeerId) -> list[PeerId]:
        """Relays between the local peer and the sender of a row, which may still wait for it."""
        parents, found = self.plan.topology.parts[part].parents, list[PeerId]()
        above = parents.get(peer)
        while above is not None and above != self.me:
            found.append(above)
            above = parents.get(above)
        return [between for between in found if not self.gone(between)]

    def target(self, part: int) -> PeerId:
        """The parent that hands on the local row, or the owner in charge."""
        above = self.parent_of(part, self.me)
        return above if above is not None else self.owner[part]

    # ---- downwards -----------------------------------------------------------------------------------------

    def serves(self, part: int, owner: PeerId, peer: PeerId) -> bool:
        """Whether this peer gets the result from the local peer.

        A parent serves the peers below it; the owner in charge serves all peers without a parent.
        """
        if peer in (self.me, owner):
            return False
        above = self.parent_of(part, peer)
        in_charge = self.me in (owner, self.owner[part])
        return above == self.me or (above is None and in_charge) or peer in self.senders.get(part, ())

    def possible_recipients(self, part: int, owner: PeerId) -> Sequence[PeerId]:
        """All peers that the local peer may have to serve: mostly none, for peers that own and relay nothing."""
        if self.me in (owner, self.owner[part]):
            return self.others()
        near = self.below.get(part, frozenset()) | self.senders.get(part, set())
        return sorted(near & self.plan.recipient_set, key=self._places_behind)
