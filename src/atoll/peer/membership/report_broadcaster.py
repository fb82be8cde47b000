"""Report broadcaster: signs the local peer's reports, sends them to members and adds them to its pool.

    tell      to all reachable members: a vertex shall hold it, or it changes what they wait for
    accuse    a proof goes to all; a report that only counts goes to the next proposers in a large swarm
    suspect   a silent peer; repeated while it is silent
    again     what may be lost, or reached a member that could not verify it yet

Invariants:
- A proof that is already known is not sent again.
Not responsible for: judging a report (policy/membership.py), acting on one; `pool` does that for all authors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Broadcast, Effect, Send, tag_of
from atoll.peer.run_view import RunView
from atoll.policy.membership import only_counts
from atoll.protocol.membership.failure_detector import FailureDetector
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import (
    Accusation,
    BaseStatement,
    LeaveReport,
    OwnerComplaint,
    SignedStatement,
    SuspicionReport,
)

# next proposers that receive a report in a large swarm: with a third liars, all 8 lie in 1 of 10,000 rounds
WRITERS_TOLD = 8
WORDS_AGAIN_S = 3.0  # seconds before reports without a vertex are repeated


class ReportBroadcaster:
    """`known`: the run view, once genesis is known. `writers`: the next proposers of this round's vertex."""

    def __init__(
        self,
        notary: StatementSigner,
        known: Callable[[], RunView],
        heartbeat: FailureDetector,
        writers: Callable[[int], list[PeerId]],
        pool: Callable[[PeerId, SignedStatement, Seconds], list[Effect]],
    ) -> None:
        self._notary, self._me = notary, notary.me
        self._known, self._heartbeat, self._writers, self._pool = known, heartbeat, writers, pool
        self._said_again: Seconds = 0.0

    def broadcast(self, statement: BaseStatement, now: Seconds) -> list[Effect]:
        return self._to_all(self._notary.sign(statement), now)

    def accuse(self, statement: Accusation | OwnerComplaint, now: Seconds) -> list[Effect]:
        signed = self._notary.sign(statement)
        if isinstance(statement, Accusation) and self._known().pool.proves(statement):
            return self._pool(self._me, signed, now)
        return self._voice(signed, now) if only_counts(statement) else self._to_all(signed, now)

    def suspect(self, peer: PeerId, why: str, now: Seconds) -> list[Effect]:
        known = self._known()
        mine = known.roster.mine
        if mine is None or not mine.votes:
            return []
        reason = "refused" if why == "refused" else "silent"
        signed = self._notary.sign(SuspicionReport(known.history.head + 1, peer, reason))
        # suspicions by a peer's fixed watchers make all members watch it; others' only count
        watches = peer in self._heartbeat.chosen
        return self._to_all(signed, now) if watches else self._voice(signed, now)

    def round_begins(self, now: Seconds) -> list[Effect]:
        """Repeat suspicions, which expire after some rounds, and send voices to this round's proposers in a
        large swarm.

        A peer that only the local one missed may be dead by now; without its repeated suspicion the others' could
        be too few.
        """
        pool, heartbeat = self._known().pool, self._heartbeat
        if pool.crowded:
            return self._to_writers(pool.my_voices(heartbeat.is_gone, now + heartbeat.offset_s))
        settled = {s.signer for s in pool.of_kind(tag_of(LeaveReport))} | pool.suspected_by(self._me)
        silent, refused = heartbeat.silent - settled, heartbeat.refused - settled
        words = [(peer, "refused" if peer in refused else "silent") for peer in sorted(silent | refused)]
        return [effect for peer, why in words for effect in self.suspect(peer, why, now)]

    def again(self, now: Seconds) -> list[Effect]:
        """Repeat operator orders and reports about states while they wait for their vertex.

        A member that was behind could not verify them yet, and a stable leader would never receive a lost one.
        """
        if now < self._said_again + WORDS_AGAIN_S:
            return []
        self._said_again = now
        known = self._known()
        return [self._broadcast(word) for word in known.pool.my_words()]

    def _to_all(self, signed: SignedStatement, now: Seconds) -> list[Effect]:
        return [self._broadcast(signed), *self._pool(self._me, signed, now)]

    def _broadcast(self, signed: SignedStatement) -> Broadcast:
        return Broadcast("reports", ReportMessage(signed), tuple(self._known().roster.within_reach()))

    def _voice(self, signed: SignedStatement, now: Seconds) -> list[Effect]:
        if not self._known().pool.crowded:
            return self._to_all(signed, now)
        return self._pool(self._me, signed, now) + self._to_writers([signed])

    def _to_writers(self, voices: Sequence[SignedStatement]) -> list[Effect]:
        """Send to the next few proposers, since some are gone and some may lie."""
        return [Send(p, ReportMessage(signed)) for signed in voices for p in self._writers(WRITERS_TOLD)]
