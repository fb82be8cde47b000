"""Rows that come to an owner around broken links: two do not hear each other, and others hear both.

An owner that lacks rows of those whom it does not hear, or has heard nothing of, asks the other owners for them,
once each, and waits a little: where somebody died instead, nobody has them. Who hands rows on goes without those
that go around it, once their owner is told that others hear them (`Heard`): silence alone does not tell a broken
link from a death. Whoever stands in for all owners, or would else have no answer, asks everybody, and for the rows
of the dead as well: by their names, from whoever holds them.
Never asks for what is on its way by itself, never waits twice for the same silence.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Send
from atoll.protocol.allreduce.buffers import PartAccumulator
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.routing import AttemptRouting
from atoll.wire.messages.round import RowRequest

LAST_PATIENCE = 4  # times as long as a detour may take where all are asked: whole rows come of it, from anybody


class RowReroute:
    """One peer's side of one attempt."""

    def __init__(self, me: PeerId, route: AttemptRouting, around: ReduceEnvironment) -> None:
        self.me, self.route = me, route
        self.commit_of, self.awaits = around.commit_of, around.awaits
        self.gone, self.unheard = around.gone, around.unheard
        self.pulled: set[tuple[int, PeerId]] = set()  # (part, whose row I asked other owners for)
        self.goes_on_at: dict[int, Seconds] = {}  # where all rows of a part are here but those of who is gone
        self.there: set[tuple[int, PeerId]] = set()  # (part, who deals with others than me): others hear it

    @property
    def plan(self) -> ReducePlan:
        """With the windows that I go by."""
        return self.route.plan

    def behind(self, part: int, gather: PartAccumulator) -> list[PeerId]:
        """Whose rows I lack because we do not hear each other: the next owner has them, since I am gone for them.
        As a last resort also those of who is gone for good: some owner may have had them before it gave up.

        Perhaps I do not know their commitments either; these come with the rows. A parent's has those below it.
        """
        if gather.below is not None:
            return []  # its owner alone takes them
        tree, dead = self.plan.topology.parts[part], self._dead_were_heard(part, gather)
        lacked = [p for p in self.plan.listeners if p not in gather.names]
        silent = [p for p in lacked if self._maybe_cut_off(p) or (dead and self.gone(p))]
        late = [p for p in silent if p in self.plan.givers and self.route.through(part, p) not in gather.rows]
        return [p for p in late if self._gives(part, p) or self.awaits(part, gather.names, tree.below(p))]

    def _maybe_cut_off(self, peer: PeerId) -> bool:
        """From me alone. Where owners watch each other also whoever has said nothing to me: our link may just have
        broken, the other owners of my part have its row, and without it I would seem to leave it out."""
        watched = self.plan.witnesses > 0
        return self.unheard(peer) or (watched and self.commit_of(peer) is None and not self.gone(peer))

    def last_resort(self, part: int, gather: PartAccumulator) -> bool:
        """Owners before me are gone or gave up, or what I have makes no answer: everybody is asked, for all that I
        lack. Who combines a part with others from the beginning has its rows from the beginning."""
        owners, index = self.plan.owners(part), gather.owner_index
        if self.plan.weighs:
            return False  # which rows count is agreed on first
        gave_up = index > self.plan.witnesses and any((part, o) in self.route.declined for o in owners[:index])
        return index >= len(owners) or gave_up or not self.plan.enough(gather.names)

    def _dead_were_heard(self, part: int, gather: PartAccumulator) -> bool:
        """By somebody who is left, and whose turn it was before mine: it may have rows whose authors are gone."""
        if not self.last_resort(part, gather):
            return False
        before = self.plan.takers(part)[: max(gather.owner_index, len(self.plan.owners(part)))]
        return any(peer != self.me and not self.gone(peer) for peer in before)

    def _gives(self, part: int, peer: PeerId) -> bool:
        """As far as I know."""
        commit = self.commit_of(peer)
        return commit is None or commit.parts > part

    def wait(self, part: int, gather: PartAccumulator, now: Seconds) -> list[Effect] | None:
        """All rows are here but those behind broken links: ask for these, and wait a little. None: no longer."""
        behind = self.behind(part, gather)
        lost = self.last_resort(part, gather) and any(map(self.gone, behind))
        if behind and now >= self.without_the_gone_at(part, now, LAST_PATIENCE if lost else 1):
            there = {(part, peer) for peer in behind} & self.there
            if not there:
                return None
            # a death is noticed by one after the other: do they still hear it?
            self.goes_on_at[part] = now + self.plan.others_rows_s
            self.there -= there
            self.pulled -= there
        return self.pull(part, behind, of_all=lost) if behind else None

    def without_the_gone_at(self, part: int, now: Seconds, times: int = 1) -> Seconds:
        """When I go on without the rows of those who are gone: other owners may have them, where links broke."""
        return self.goes_on_at.setdefault(part, now + times * self.plan.others_rows_s)

    def moments(self) -> Iterable[Seconds]:
        """At which I go on without them."""
        return self.goes_on_at.values()

    def pull(self, part: int, authors: Iterable[PeerId], of_all: bool = False) -> list[Effect]:
        """Ask the other owners of a part for rows, or everybody, once each."""
        plan, effects = self.plan, list[Effect]()
        asked = plan.listeners if of_all else plan.owners(part)
        others = [peer for peer in asked if peer != self.me and not self.gone(peer)]
        for author in authors:
            if (part, author) not in self.pulled:
                self.pulled.add((part, author))
                wish = RowRequest(plan.round, plan.attempt, plan.trace, part, author)
                effects += [Send(owner, wish) for owner in others]
        return effects

    def pull_sums(self, part: int, gather: PartAccumulator) -> list[Effect]:
        """I wait for rows that may come through somebody whom I do not hear: others have its sum."""
        parents = self.plan.topology.parts[part].children
        behind = self.behind(part, gather) if parents else ()
        return self.pull(part, [p for p in behind if p in parents and self.route.above(part, p) is None])

    def through_me(self, part: int) -> frozenset[PeerId]:
        """Whose rows I hand on, but for those that go around a link that is broken."""
        tree = self.plan.topology.parts[part]
        around = [tree.below(peer) | {peer} for of, peer in self.there if of == part]
        return self.route.below[part].difference(*around)
