"""Rerouting of rows around broken links: two peers do not hear each other, and others hear both.

An owner that lacks rows of peers that it does not hear requests them from the other owners, once each, and waits
briefly: if the author died instead, no owner has its row. A relay goes on without rows that go around it, once
their owner knows that others hear the author (`RowReroutedHint`): silence alone does not tell a broken link from a
death. A last-resort owner requests rows from all peers, also rows of the dead, by author.

Invariants:
- A row that is on its way by itself is not requested.
- The same silence is waited for at most once.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Send
from atoll.protocol.allreduce.buffers import PartRowCollector
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.routing import AttemptRouting
from atoll.wire.messages.round import RowRequest

LAST_RESORT_WAITS = 4  # times a usual wait, if all peers are asked: whole rows may come from any of them


class BrokenLinkRerouter:
    """One peer's side of one attempt."""

    def __init__(self, me: PeerId, route: AttemptRouting, around: ReduceEnvironment) -> None:
        self.me, self.route = me, route
        self.commit_of, self.awaits = around.commitment_of, around.is_awaited
        self.gone, self.unheard = around.is_gone, around.is_unheard
        self.requested: set[tuple[int, PeerId]] = set()  # (part, author of a row requested from other owners)
        self.heard_elsewhere: set[tuple[int, PeerId]] = set()  # (part, author that others hear)
        self._deadlines: dict[int, Seconds] = {}  # end of the wait for rows of gone peers, by part

    @property
    def plan(self) -> ReducePlan:
        """The agreed plan, with the windows of this peer."""
        return self.route.plan

    # ---- which rows ----------------------------------------------------------------------------------------

    def behind_broken_links(self, part: int, gather: PartRowCollector) -> list[PeerId]:
        """Authors with missing rows that the next owner may have, because the author takes the local peer for gone.

        As a last resort also authors that are gone for good: an owner may have had their rows before it gave up.
        Their commitments may be unknown here, and come with the rows. A relay's sum holds the rows below it.
        """
        if gather.below is not None:
            return []  # its owner alone takes them
        tree, dead = self.plan.topology.parts[part], self._dead_may_be_held(part, gather)
        lacked = [p for p in self.plan.recipients if p not in gather.names]
        silent = [p for p in lacked if self._may_be_cut_off(p) or (dead and self.gone(p))]
        late = [p for p in silent if p in self.plan.authors and self.route.last_relay(part, p) not in gather.rows]
        return [p for p in late if self._may_give(part, p) or self.awaits(part, gather.names, tree.below(p))]

    def _may_be_cut_off(self, peer: PeerId) -> bool:
        """Whether others may hear a peer that the local peer does not hear.

        With witnesses also a peer without a commitment here: the link may just have broken. The other owners of the
        part have its row, and without it the local peer would seem to leave it out.
        """
        watched = self.plan.witnesses > 0
        return self.unheard(peer) or (watched and self.commit_of(peer) is None and not self.gone(peer))

    def is_last_resort(self, part: int, gather: PartRowCollector) -> bool:
        """Whether the owners before are gone or gave up, or the rows here make no result.

        An owner that combines in parallel from the start has its rows from the start.
        """
        owners, index = self.plan.owners(part), gather.owner_index
        if self.plan.has_distance_weights:
            return False  # the rows that count are agreed on first
        gave_up = index > self.plan.witnesses and any((part, o) in self.route.declined for o in owners[:index])
        return index >= len(owners) or gave_up or not self.plan.is_enough(gather.names)

    def _dead_may_be_held(self, part: int, gather: PartRowCollector) -> bool:
        """Whether a live peer had its turn before the local peer: it may have rows of authors that are gone."""
        if not self.is_last_resort(part, gather):
            return False
        before = self.plan.owners_and_reserves(part)[: max(gather.owner_index, len(self.plan.owners(part)))]
        return any(peer != self.me and not self.gone(peer) for peer in before)

    def _may_give(self, part: int, peer: PeerId) -> bool:
        commit = self.commit_of(peer)
        return commit is None or commit.parts > part

    # ---- waiting -------------------------------------------------------------------------------------------

    def wait_for_rows(self, part: int, gather: PartRowCollector, now: Seconds) -> list[Effect] | None:
        """If only rows behind broken links are missing, request them and wait. None: wait no longer."""
        behind = self.behind_broken_links(part, gather)
        lost = self.is_last_resort(part, gather) and any(map(self.gone, behind))
        if behind and now >= self._deadline(part, now, LAST_RESORT_WAITS if lost else 1):
            elsewhere = {(part, peer) for peer in behind} & self.heard_elsewhere
            if not elsewhere:
                return None
            # peers notice a death one after the other: check whether others still hear the author
            self._deadlines[part] = now + self.plan.others_rows_s
            self.heard_elsewhere -= elsewhere
            self.requested -= elsewhere
        return self.request_rows(part, behind, of_all=lost) if behind else None

    def _deadline(self, part: int, now: Seconds, times: int) -> Seconds:
        """The time to go on without rows of gone peers; other owners may have them until then."""
        return self._deadlines.setdefault(part, now + times * self.plan.others_rows_s)

    def moments(self) -> Iterable[Seconds]:
        """Ends of all waits."""
        return self._deadlines.values()

    # ---- requests ------------------------------------------------------------------------------------------

    def request_rows(self, part: int, authors: Iterable[PeerId], of_all: bool = False) -> list[Effect]:
        """Request rows from the other owners of a part, or from all listeners, once for each author."""
        plan, effects = self.plan, list[Effect]()
        asked = plan.recipients if of_all else plan.owners(part)
        others = [peer for peer in asked if peer != self.me and not self.gone(peer)]
        for author in authors:
            if (part, author) not in self.requested:
                self.requested.add((part, author))
                request = RowRequest(plan.round, plan.attempt, plan.trace, part, author)
                effects += [Send(owner, request) for owner in others]
        return effects

    def request_sums(self, part: int, gather: PartRowCollector) -> list[Effect]:
        """Request the sums of relays that the local peer does not hear: others have them."""
        parents = self.plan.topology.parts[part].children
        behind = self.behind_broken_links(part, gather) if parents else ()
        relays = [p for p in behind if p in parents and self.route.parent_of(part, p) is None]
        return self.request_rows(part, relays)

    def awaited_below(self, part: int) -> frozenset[PeerId]:
        """Authors below the local relay, without those with rows that go around a broken link."""
        tree = self.plan.topology.parts[part]
        around = [tree.below(peer) | {peer} for of, peer in self.heard_elsewhere if of == part]
        return self.route.below[part].difference(*around)
