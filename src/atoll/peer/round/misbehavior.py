"""What others did wrong in a round, and what of it the members are told.

    Caught      a proof: two words that contradict each other, an answer that nobody could honestly give
    Complaint   a voice: it owed us something that did not come, and not for the first time
    ShowRow     a row that cannot be read, shown to those who judge it (`verification/malformed_updates/machine.py`)
Promises: only who votes accuses, and nobody is proven a liar where members are believed. Never punishes: words go
before the members, and a vertex that holds them has consequences.
"""

from __future__ import annotations

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Ask, Effect, Fact
from atoll.peer.events import Accused, Lapsed
from atoll.peer.round.adaptive_timeout import Patience
from atoll.peer.round.context import Ground
from atoll.peer.tasks import ShowRow
from atoll.policy.fault_tolerance import Strikes
from atoll.policy.timeouts import patience_shown
from atoll.protocol.agreement.events import Equivocation
from atoll.protocol.allreduce.cross_check import Contradicted, Lied
from atoll.protocol.allreduce.engine import Reduce
from atoll.protocol.allreduce.events import Garbage
from atoll.wire.messages.statements import Caught, Complaint, Signed


class Misdeeds:
    """`votes`: I have a vote in this round."""

    def __init__(self, ground: Ground, me: PeerId, votes: bool, strikes: Strikes) -> None:
        self.ground, self.plan, self.me, self.votes, self.strikes = ground, ground.plan, me, votes, strikes
        self.unreadable: set[PeerId] = set()  # whose row I could not read, and show to the others

    def proven(self, by: Lied | Contradicted | Equivocation) -> list[Fact]:
        """A room below found it."""
        match by:
            case Lied(peer=peer, statement=lie):
                return self._accuse(peer, Caught(lie))
            case Contradicted(peer=peer, first=first, second=second):
                return self._accuse(peer, Caught(first, second))
            case Equivocation(evidence=proof):
                return self.two_words(proof.first, proof.second)

    def two_words(self, first: Signed, second: Signed) -> list[Fact]:
        """Of one peer where one is all that it has: they are their own proof."""
        return self._accuse(first.signer, Caught(first, second)) if self.plan.may_lie else []

    def garbage(self, garbage: Garbage, reduce: Reduce) -> list[Effect]:
        """Where members may lie a row that I could not read is shown to the others, once in a round of each author;
        a sum that was handed on is nobody's alone."""
        peer, ground = garbage.peer, self.ground
        row = reduce.unread.pop((garbage.part, peer), None)
        judged = self.plan.may_lie and self.votes and peer != self.me
        if row is None or row.statement is None or not judged or peer in self.unreadable:
            return []
        self.unreadable.add(peer)
        place = self.plan.round, ground.parent.trained, ground.shares
        work = ShowRow(*place, row.statement, garbage.part, row.path, row.payload)
        return [Ask(f"unreadable/show/{self.plan.round}/{peer}", work)]

    def lapses(self, reduce: Reduce, patience: Patience, now: Seconds) -> list[Fact]:
        """Who owed us something that did not come: noted, and told when it is not the first time."""
        plan, facts = reduce.plan, list[Fact]()
        # what is seen before owners stop gathering is none of patience
        over = [moment for moment in (plan.gather_until(0, 1), plan.answer_until[0]) if now >= moment]
        had_s = patience.had(over[-1]) if over else 0.0
        weight = patience_shown(had_s, plan.window_s, self.plan.settings.owner_s) if over else 1.0
        for peer, why in reduce.lapses(now).items():
            facts.append(Lapsed(peer=peer, why=why))
            if self.strikes.note(peer, self.plan.round, weight):
                facts += self._accuse(peer, Complaint(self.plan.round, peer, why))
        return facts

    def _accuse(self, peer: PeerId, statement: Caught | Complaint) -> list[Fact]:
        return [Accused(peer=peer, statement=statement)] if self.votes else []
