"""What others did wrong in a round, and what of it the members are told.

    Caught      a proof: two words that contradict each other, an answer that nobody could honestly give
    Complaint   a voice: it owed us something that did not come, and not for the first time
    ShowRow     a row that cannot be read, shown to those who judge it (`verification/malformed_updates/machine.py`)
Promises: only who votes accuses, and nobody is proven a liar where members are believed. Never punishes: words go
before the members, and a vertex that holds them has consequences.
"""

from __future__ import annotations

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Fact, RunTask
from atoll.peer.events import MemberAccused, OwnerFault
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import ExhibitRow
from atoll.policy.fault_tolerance import OwnerStrikes
from atoll.policy.timeouts import patience_shown
from atoll.protocol.agreement.events import Equivocation
from atoll.protocol.allreduce.cross_check import OwnerContradicted, OwnerLied
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.events import RowUndecodable
from atoll.wire.messages.statements import Accusation, OwnerComplaint, SignedStatement


class MisbehaviorReporter:
    """`votes`: I have a vote in this round."""

    def __init__(self, ground: RoundContext, me: PeerId, votes: bool, strikes: OwnerStrikes) -> None:
        self.ground, self.plan, self.me, self.votes, self.strikes = ground, ground.plan, me, votes, strikes
        self.unreadable: set[PeerId] = set()  # whose row I could not read, and show to the others

    def proven(self, by: OwnerLied | OwnerContradicted | Equivocation) -> list[Fact]:
        """A room below found it."""
        match by:
            case OwnerLied(peer=peer, statement=lie):
                return self._accuse(peer, Accusation(lie))
            case OwnerContradicted(peer=peer, first=first, second=second):
                return self._accuse(peer, Accusation(first, second))
            case Equivocation(evidence=proof):
                return self.two_words(proof.first, proof.second)

    def two_words(self, first: SignedStatement, second: SignedStatement) -> list[Fact]:
        """Of one peer where one is all that it has: they are their own proof."""
        return self._accuse(first.signer, Accusation(first, second)) if self.plan.may_lie else []

    def garbage(self, garbage: RowUndecodable, reduce: AllReduce) -> list[Effect]:
        """Where members may lie a row that I could not read is shown to the others, once in a round of each author;
        a sum that was handed on is nobody's alone."""
        peer, ground = garbage.peer, self.ground
        row = reduce.unread.pop((garbage.part, peer), None)
        judged = self.plan.may_lie and self.votes and peer != self.me
        if row is None or row.statement is None or not judged or peer in self.unreadable:
            return []
        self.unreadable.add(peer)
        place = self.plan.round, ground.parent.trained, ground.shares
        work = ExhibitRow(*place, row.statement, garbage.part, row.path, row.payload)
        return [RunTask(f"unreadable/show/{self.plan.round}/{peer}", work)]

    def lapses(self, reduce: AllReduce, patience: AdaptiveTimeout, now: Seconds) -> list[Fact]:
        """Who owed us something that did not come: noted, and told when it is not the first time."""
        plan, facts = reduce.plan, list[Fact]()
        # what is seen before owners stop gathering is none of patience
        over = [moment for moment in (plan.gather_until(0, 1), plan.answer_until[0]) if now >= moment]
        had_s = patience.had(over[-1]) if over else 0.0
        weight = patience_shown(had_s, plan.window_s, self.plan.settings.owner_s) if over else 1.0
        for peer, why in reduce.lapses(now).items():
            facts.append(OwnerFault(peer=peer, why=why))
            if self.strikes.note(peer, self.plan.round, weight):
                facts += self._accuse(peer, OwnerComplaint(self.plan.round, peer, why))
        return facts

    def _accuse(self, peer: PeerId, statement: Accusation | OwnerComplaint) -> list[Fact]:
        return [MemberAccused(peer=peer, statement=statement)] if self.votes else []
