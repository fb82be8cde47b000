"""Rollback targets: whether an earlier state is stored here, and which vertex an order from an old round names.

An order with a vertex older than memory waits here for the disk, after both its signatures were checked: strangers
cause no disk reads. Holds a few orders, never a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, Seconds
from atoll.base.machine import Effect, RunTask, SetTimer
from atoll.peer.governance.orders import amends_in, goal_of, may_follow, word_holds
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.tasks import CheckStateStored, ReadVertices
from atoll.wire.codec import decode_body, decode_vertex, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import SignedStatement

AGAIN_S = 2.0  # seconds until a state that no member sent is requested again, while an order names it
READ_AT_ONCE = 4  # old vertices; one person signs such orders, one after the other


class RollbackTargets:
    def __init__(self, notary: StatementSigner) -> None:
        self.notary = notary
        self.waiting: dict[str, SignedStatement] = {}  # round, as text → the order that waits for its vertex
        self.fetching: set[Digest] = set()  # states being downloaded
        self.asked: set[Digest] = set()  # states requested from disk: each is read and hashed as a whole

    def find(self, state: Digest, anew: bool = False) -> list[Effect]:
        """Search this disk for the state, once unless `anew`; the result decides whether it is downloaded."""
        if state in self.asked and not anew:
            return []
        self.asked.add(state)
        return [RunTask(f"earlier/state/{state.hex()}", CheckStateStored(state))]

    def fetches(self, state: Digest) -> bool:
        """Note that the state is not on disk; True if a download has to start."""
        if state in self.fetching:
            return False
        self.fetching.add(state)
        return True

    def again(self, state: Digest, now: Seconds) -> list[Effect]:
        """Retry after a failed download."""
        return [SetTimer(f"earlier/state/{state.hex()}", now + AGAIN_S)]

    def read(self, signed: SignedStatement, pool: ReportPool) -> list[Effect]:
        """If this order of the recovery identity names a vertex that is not in memory, read it from disk."""
        for _, amend in amends_in([signed]):
            name = str(amend.round)
            known = pool.goal(amend.round) is not None or amend.back_to in pool.goals or name in self.waiting
            useful = -1 <= amend.round < pool.history.head and may_follow(pool.history, amend)
            if known or not useful or len(self.waiting) >= READ_AT_ONCE:
                continue
            history = pool.history
            holds = word_holds(signed, amend, self.notary, history.authority, history.head_body.members)
            if pool.opened(signed) is None or not holds:
                continue  # the pool reports the flaw
            self.waiting[name] = signed
            return [RunTask(f"earlier/vertex/{name}", ReadVertices(amend.round, 0))]
        return []

    def heard(self, name: str, kept: object, pool: ReportPool) -> SignedStatement | None:
        """The waiting order for a vertex read from disk, to be processed again; None if it names another vertex."""
        signed = self.waiting.pop(name, None)
        for data in cast("Sequence[bytes]", kept or ()):
            try:
                raw = decode_vertex(data).body
                goal = goal_of(decode_body(raw), vertex_id(raw))
            except PeerFault:
                return None  # damaged; `atoll verify` names it
            if signed is None or all(amend.back_to != goal.id for _, amend in amends_in([signed])):
                return None  # processed again it would be looked up forever
            pool.goals[goal.id] = goal
            return signed
        return None

    def settle(self, pool: ReportPool) -> set[Digest]:
        """Forget targets without a valid order; returns states that need not be downloaded any more."""
        if not (pool.goals or self.fetching or self.asked):
            return set()
        wanted = pool.wanted_back()
        ids, states = {amend.back_to for amend in wanted}, {amend.state for amend in wanted}
        pool.goals = {id: goal for id, goal in pool.goals.items() if id in ids}
        self.asked &= states
        unwanted, self.fetching = self.fetching - states, self.fetching & states
        return unwanted
