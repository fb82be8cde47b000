"""Earlier states that the run may go back to: is it here, and which vertex does an old round's word mean?

Asks the disk, and says what has to be fetched. A word that names a vertex older than memory holds waits here for
the disk, after both its signatures were checked: strangers make nobody read. Holds a few words, never a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, Seconds
from atoll.base.machine import Effect, RunTask, SetTimer
from atoll.peer.governance.orders import amends_in, goal_of, may_follow, word_holds
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.tasks import FindState, ReadVertices
from atoll.wire.codec import decode_body, decode_vertex, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import SignedStatement

AGAIN_S = 2.0  # a state that nobody gave is asked for again after so long, while somebody wants to go back to it
READ_AT_ONCE = 4  # old vertices; one person says such words, one after the other


class RollbackTargets:
    def __init__(self, notary: StatementSigner) -> None:
        self.notary = notary
        self.waiting: dict[str, SignedStatement] = {}  # round, as text -> the word that waits for its vertex
        self.fetching: set[Digest] = set()  # states on their way from members
        self.asked: set[Digest] = set()  # states that the disk was asked for: each is read and hashed as a whole

    def find(self, state: Digest, anew: bool = False) -> list[Effect]:
        """Look for it on this disk, once unless `anew`; the answer says whether it must be fetched."""
        if state in self.asked and not anew:
            return []
        self.asked.add(state)
        return [RunTask(f"earlier/state/{state.hex()}", FindState(state))]

    def fetches(self, state: Digest) -> bool:
        """It is not here: True if it has to be asked for, False if it is on its way."""
        if state in self.fetching:
            return False
        self.fetching.add(state)
        return True

    def again(self, state: Digest, now: Seconds) -> list[Effect]:
        """It could not be fetched."""
        return [SetTimer(f"earlier/state/{state.hex()}", now + AGAIN_S)]

    def read(self, signed: SignedStatement, pool: ReportPool, recovery: bytes) -> list[Effect]:
        """If this is the recovery identity's word and names a vertex that is not in memory, look on disk."""
        for _, amend in amends_in([signed]):
            name = str(amend.round)
            known = pool.goal(amend.round) is not None or amend.back_to in pool.goals or name in self.waiting
            useful = -1 <= amend.round < pool.history.head and may_follow(pool.history, amend)
            if known or not useful or len(self.waiting) >= READ_AT_ONCE:
                continue
            if pool.opened(signed) is None or not word_holds(signed, amend, self.notary, recovery):
                continue  # the pool says whose fault that is
            self.waiting[name] = signed
            return [RunTask(f"earlier/vertex/{name}", ReadVertices(amend.round, 0))]
        return []

    def heard(self, name: str, kept: object, pool: ReportPool) -> SignedStatement | None:
        """The disk answered: the word that waited, to be heard again; None if it names no such vertex."""
        signed = self.waiting.pop(name, None)
        for data in cast("Sequence[bytes]", kept or ()):
            try:
                raw = decode_vertex(data).body
                goal = goal_of(decode_body(raw), vertex_id(raw))
            except PeerFault:
                return None  # damaged; `atoll verify` names it
            if signed is None or all(amend.back_to != goal.id for _, amend in amends_in([signed])):
                return None  # heard again it would be looked up again, for ever
            pool.goals[goal.id] = goal
            return signed
        return None

    def settle(self, pool: ReportPool) -> set[Digest]:
        """What nobody wants to go back to any more is forgotten; these states need not come."""
        if not (pool.goals or self.fetching or self.asked):
            return set()
        wanted = pool.wanted_back()
        ids, states = {amend.back_to for amend in wanted}, {amend.state for amend in wanted}
        pool.goals = {id: goal for id, goal in pool.goals.items() if id in ids}
        self.asked &= states
        unwanted, self.fetching = self.fetching - states, self.fetching & states
        return unwanted
