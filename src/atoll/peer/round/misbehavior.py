"""Misbehavior reports: turns faults observed in a round into statements for the members.

    Accusation       a proof: two contradicting statements, or a result that no honest owner could send
    OwnerComplaint   a voice: an owner failed its duty, and not for the first time
    BuildMalformedRowEvidence  an undecodable row, sent to its judges (`verification/malformed_updates`)

Invariants:
- Only voters accuse, and no member is proven a liar where members are trusted.
Not responsible for: punishment, which follows from a vertex that holds the statements.
"""

from __future__ import annotations

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Fact, RunTask
from atoll.peer.events import MemberAccused, PartOwnerFaultObserved
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import BuildMalformedRowEvidence
from atoll.policy.fault_tolerance import OwnerStrikes
from atoll.policy.timeouts import patience_shown
from atoll.protocol.agreement.events import Equivocation
from atoll.protocol.allreduce.cross_check import FalseOwnerResultProven, OwnerContradicted
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.events import RowDecodeFailed
from atoll.wire.messages.statements import Accusation, OwnerComplaint, SignedStatement


class MisbehaviorReporter:
    """`votes`: the local peer has a vote in this round."""

    def __init__(self, ground: RoundContext, me: PeerId, votes: bool, strikes: OwnerStrikes) -> None:
        self.ground, self.plan, self.me, self.votes, self.strikes = ground, ground.plan, me, votes, strikes
        self.unreadable: set[PeerId] = set()  # authors of rows that did not decode here and are shown to the others

    def proven(self, by: FalseOwnerResultProven | OwnerContradicted | Equivocation) -> list[Fact]:
        """Accusations that follow from evidence of a lower component."""
        match by:
            case FalseOwnerResultProven(peer=peer, statement=lie):
                return self._accuse(peer, Accusation(lie))
            case OwnerContradicted(peer=peer, first=first, second=second):
                return self._accuse(peer, Accusation(first, second))
            case Equivocation(evidence=proof):
                return self.two_words(proof.first, proof.second)

    def two_words(self, first: SignedStatement, second: SignedStatement) -> list[Fact]:
        """An accusation by two contradicting statements of one peer, which are their own proof."""
        return self._accuse(first.signer, Accusation(first, second)) if self.plan.may_lie else []

    def garbage(self, garbage: RowDecodeFailed, reduce: AllReduce) -> list[Effect]:
        """Show an undecodable row to the others where members may lie, once per author and round.

        A forwarded sum has no single author and is not shown.
        """
        peer, ground = garbage.peer, self.ground
        row = reduce.undecodable_rows.pop((garbage.part, peer), None)
        judged = self.plan.may_lie and self.votes and peer != self.me
        if row is None or row.statement is None or not judged or peer in self.unreadable:
            return []
        self.unreadable.add(peer)
        place = self.plan.round, ground.parent.trained, ground.shares
        work = BuildMalformedRowEvidence(*place, row.statement, garbage.part, row.path, row.payload)
        return [RunTask(f"malformed/show/{self.plan.round}/{peer}", work)]

    def lapses(self, reduce: AllReduce, patience: AdaptiveTimeout, now: Seconds) -> list[Fact]:
        """Owner faults of this round; an owner that fails repeatedly is also reported to the members."""
        plan, facts = reduce.plan, list[Fact]()
        # what was observed before owners stop gathering does not count as waiting time
        over = [moment for moment in (plan.gather_until(0, 1), plan.answer_until[0]) if now >= moment]
        had_s = patience.time_left(over[-1]) if over else 0.0
        weight = patience_shown(had_s, plan.window_s, self.plan.settings.owner_s) if over else 1.0
        for peer, why in reduce.lapses(now).items():
            facts.append(PartOwnerFaultObserved(peer=peer, why=why))
            if self.strikes.note(peer, self.plan.round, weight):
                facts += self._accuse(peer, OwnerComplaint(self.plan.round, peer, why))
        return facts

    def _accuse(self, peer: PeerId, statement: Accusation | OwnerComplaint) -> list[Fact]:
        return [MemberAccused(peer=peer, statement=statement)] if self.votes else []
