"""Who stands where in a reduce right now: whose turn a part is, who hands my row on, whom I give its answer.

A topology says where everybody stands when an attempt begins. An owner that is late, gone or unable passes its turn
to the next in the plan, and where all owners of a part are gone it is the reserves' turn; whoever lost its parent
climbs to the nearest above that is left. What was seen of that is kept here, and every question is answered from it
and the plan alone. What a peer has for many goes first to those behind it in the plan, as policy/topology_cost
reckons:
in one order for all, everybody would send to the same one at a time and wait for its downlink. Never sends, never
waits.
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
        self.turn = [0] * plan.parts  # owner index that I currently look to, per part
        self.owner = [tree.owners[0] for tree in plan.topology.parts]  # and who that is; the last if none is left
        self.declined: set[tuple[int, PeerId]] = set()  # (part, who cannot combine it)
        self.absent: frozenset[PeerId] = frozenset()  # who is not in this attempt: owes no answer
        self.patience: dict[tuple[int, PeerId], Seconds] = {}  # (part, who is at work on it): not late before
        self.senders: dict[int, set[PeerId]] = {}  # whose rows came to me: they know best whom they need
        self.below: dict[int, frozenset[PeerId]] = {}  # whose rows come through me on their way to the owner
        for part, tree in enumerate(plan.topology.parts):
            if me != tree.owners[0] and (below := tree.below(me)):
                self.below[part] = below

    def parts_in_turn(self) -> list[int]:
        """All parts as my rows leave: the first one for everybody, beginning behind me, then the second ones."""
        earlier, turns = Counter[PeerId](), list[tuple[int, int, int]]()
        for part, tree in enumerate(self.plan.topology.parts):
            to = tree.parents.get(self.me, tree.owners[0])
            turns.append((earlier[to], self._behind_me(to), part))
            earlier[to] += 1
        return [part for _, _, part in sorted(turns)]

    def others(self) -> tuple[PeerId, ...]:
        """Everybody else who gets answers, beginning behind me."""
        listeners, here = self.plan.listeners, self.plan.place.get(self.me, -1)
        return listeners[here + 1 :] + listeners[: max(here, 0)]

    def _behind_me(self, peer: PeerId) -> int:
        """So many places, all round."""
        place = self.plan.place
        return (place.get(peer, 0) - place.get(self.me, 0)) % len(place)

    # ---- upwards -------------------------------------------------------------------------------------------

    def pass_turn(self, part: int, now: Seconds) -> bool:
        """Look past the owners that will not answer any more; False if nobody is left."""
        owners, turn = self.plan.topology.parts[part].owners, self.turn[part]
        index = self._next(part, owners, turn, now)
        if self.plan.reserves and index >= len(owners):
            # not asked whether all are gone at this moment, since who died may just have been heard once more
            owners = self.plan.takers(part)
            index = self._next(part, owners, index, now)
            if self._nobody_can(part, owners[:index]):
                index = len(owners)
        if index != turn:  # asked for every part at every word, and hardly ever so
            self.turn[part], self.owner[part] = index, owners[min(index, len(owners) - 1)]
        return index < len(owners)

    def _nobody_can(self, part: int, passed: Sequence[PeerId]) -> bool:
        """All owners declined, and so did a reserve in its turn, who asked everybody for their rows."""
        count = len(self.plan.owners(part))
        declined = [(part, taker) in self.declined for taker in passed]
        return all(declined[:count]) and any(declined[count:])

    def stand_in_may(self, part: int) -> bool:
        """As far as I see no owner of this part answers any more."""
        return self.turn[part] >= len(self.plan.owners(part))

    def behind_the_unheard(self, part: int, unheard: Callable[[PeerId], bool]) -> list[PeerId]:
        """I passed a reserve over that others may hear: who comes after the one that I look to has my row for it,
        and its answer for me, should these two not hear each other either."""
        reserves = self.plan.takers(part)[len(self.plan.owners(part)) :]
        passed = self.turn[part] - len(self.plan.owners(part))
        if not any(map(unheard, reserves[:passed])):
            return []
        return [peer for peer in reserves[passed + 1 :] if peer != self.me and not self.gone(peer)][:1]

    def _cut_off(self) -> bool:
        """Where members may lie nothing is decided without most of them: who hears few stands in for nobody."""
        plan = self.plan
        gone = sum(peer != self.me and self.gone(peer) for peer in plan.listeners)
        return plan.may_lie and 2 * gone >= len(plan.listeners)

    def _next(self, part: int, owners: Sequence[PeerId], index: int, now: Seconds) -> int:
        """The first from this index on that may still answer."""
        while index < len(owners):
            late = now >= max(self.plan.until(index), self.patience.get((part, owners[index]), 0.0))
            if owners[index] == self.me:
                lost = index >= len(self.plan.owners(part)) and self._cut_off()
            else:
                lost = self.gone(owners[index])
            if not late and not lost and not self.excused(part, owners[index]):
                break
            index += 1
        return index

    def excused(self, part: int, owner: PeerId) -> bool:
        """It has said that it cannot combine this part, or is not in this attempt at all."""
        return (part, owner) in self.declined or owner in self.absent

    def returned(self, part: int) -> list[PeerId]:
        """Owners that I passed over as gone, and hear again: where rounds have no clock, nothing but my row would
        end their wait for it. Elsewhere their window does, and the next owner answers."""
        if self.plan.has_clock:
            return []
        passed = self.plan.topology.parts[part].owners[: self.turn[part]]
        return [o for o in passed if o != self.me and not self.gone(o) and (part, o) not in self.declined]

    def above(self, part: int, peer: PeerId) -> PeerId | None:
        """The nearest above a peer that is there to hand its row on; None: it deals with the owner."""
        parents = self.plan.topology.parts[part].parents
        above = parents.get(peer)
        while above is not None and ((above != self.me and self.gone(above)) or (part, above) in self.declined):
            above = parents.get(above)
        return above

    def through(self, part: int, peer: PeerId) -> PeerId:
        """Who brings this peer's row to the owner: itself, or the last that hands it on."""
        above = self.above(part, peer)
        while above is not None and peer != self.me:
            peer, above = above, self.above(part, above)
        return peer

    def passed(self, part: int, peer: PeerId) -> list[PeerId]:
        """Who stands between me and a peer whose row came to me, and may wait for it."""
        parents, found = self.plan.topology.parts[part].parents, list[PeerId]()
        above = parents.get(peer)
        while above is not None and above != self.me:
            found.append(above)
            above = parents.get(above)
        return [between for between in found if not self.gone(between)]

    def target(self, part: int) -> PeerId:
        """Whoever hands my row on, or the owner whose turn it is."""
        above = self.above(part, self.me)
        return above if above is not None else self.owner[part]

    # ---- downwards -----------------------------------------------------------------------------------------

    def serves(self, part: int, owner: PeerId, peer: PeerId) -> bool:
        """I give the answer to those whose rows come through me; the owner in charge, to all without a parent."""
        if peer in (self.me, owner):
            return False
        above = self.above(part, peer)
        in_charge = self.me in (owner, self.owner[part])
        return above == self.me or (above is None and in_charge) or peer in self.senders.get(part, ())

    def within_reach(self, part: int, owner: PeerId) -> Sequence[PeerId]:
        """All that I may have to serve: most peers are in charge of nothing and have nobody below them."""
        if self.me in (owner, self.owner[part]):
            return self.others()
        near = self.below.get(part, frozenset()) | self.senders.get(part, set())
        return sorted(near & self.plan.hearers, key=self._behind_me)
