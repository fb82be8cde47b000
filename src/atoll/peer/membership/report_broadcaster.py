"""What I tell the members: signed, sent to whom it concerns, and pooled here like everybody's words.

    tell      to all within reach: a vertex shall hold it, or it changes whom they wait for
    accuse    a proof is told to all; a voice that only counts, in a large swarm, to those who write the vertex
    suspect   whom I do not hear; said anew as long as the silence lasts
    again     what may have been lost, or came to somebody who could not believe it yet

Promises: a proof that is known already is told to nobody. Never judges a word (policy/membership does, at
everybody)
and never acts on one: `pool` does, with mine as with others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Send, tag_of
from atoll.peer.run_view import RunView
from atoll.policy.membership import only_counts
from atoll.protocol.membership.failure_detector import FailureDetector
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.membership import MemberReport
from atoll.wire.messages.statements import (
    Accusation,
    LeaveReport,
    OwnerComplaint,
    SignedStatement,
    Statement,
    SuspicionReport,
)

WRITERS_TOLD = 8  # of a large swarm's voters, in turn: where a third lies all of them do so in 1 of 10,000 rounds
WORDS_AGAIN_S = 3.0  # between words that wait for their vertex and the same words again


class ReportBroadcaster:
    """`known`: asked for once there is genesis. `writers`: so many who are next to write this round's vertex."""

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

    def tell(self, statement: Statement, now: Seconds) -> list[Effect]:
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
        # everybody begins to watch by the words of those who always do: all others' words only count
        watches = peer in self._heartbeat.chosen
        return self._to_all(signed, now) if watches else self._voice(signed, now)

    def round_begins(self, now: Seconds) -> list[Effect]:
        """A suspicion is good for some rounds. Whom I alone did not hear all that time may be dead by now: without
        my word others' would be too few for ever. In a large swarm other writers may hear my voices now."""
        pool, heartbeat = self._known().pool, self._heartbeat
        if pool.crowded:
            return self._to_writers(pool.my_voices(heartbeat.gone, now + heartbeat.offset_s))
        settled = {s.signer for s in pool.of_kind(tag_of(LeaveReport))} | pool.suspected_by(self._me)
        silent, refused = heartbeat.silent - settled, heartbeat.refused - settled
        words = [(peer, "refused" if peer in refused else "silent") for peer in sorted(silent | refused)]
        return [effect for peer, why in words for effect in self.suspect(peer, why, now)]

    def again(self, now: Seconds) -> list[Effect]:
        """Those of the recovery identity and about states, while they wait for their vertex: who was behind could
        not believe them yet, and a leader that stays would never hear what was lost on its way."""
        if now < self._said_again + WORDS_AGAIN_S:
            return []
        self._said_again = now
        known = self._known()
        return [Send(p, MemberReport(word)) for word in known.pool.my_words() for p in known.roster.within_reach()]

    def _to_all(self, signed: SignedStatement, now: Seconds) -> list[Effect]:
        message = MemberReport(signed)
        sends: list[Effect] = [Send(p, message) for p in self._known().roster.within_reach()]
        return sends + self._pool(self._me, signed, now)

    def _voice(self, signed: SignedStatement, now: Seconds) -> list[Effect]:
        if not self._known().pool.crowded:
            return self._to_all(signed, now)
        return self._pool(self._me, signed, now) + self._to_writers([signed])

    def _to_writers(self, voices: Sequence[SignedStatement]) -> list[Effect]:
        """To the first ones in turn, since some are gone and some are liars."""
        return [Send(p, MemberReport(signed)) for signed in voices for p in self._writers(WRITERS_TOLD)]
