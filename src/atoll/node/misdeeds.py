"""What others did wrong in a round, and what of it the members are told.

    Caught      a proof: two words that contradict each other, an answer that nobody could honestly give
    Complaint   a voice: it owed us something that did not come, and not for the first time
Promises: only who votes accuses, and nobody is proven a liar where members are believed. Never punishes: words go
before the members, and a vertex that holds them has consequences.
"""

from __future__ import annotations

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact
from atoll.node.facts import Accused, Lapsed
from atoll.node.patience import Patience
from atoll.policy.plan import RoundPlan
from atoll.policy.trust import Strikes
from atoll.policy.windows import patience_shown
from atoll.protocol.consensus.facts import Equivocation
from atoll.protocol.reduce.run import Reduce
from atoll.protocol.reduce.witness import Contradicted, Lied
from atoll.wire.messages.statements import Caught, Complaint, Signed


class Misdeeds:
    """`votes`: I have a vote in this round."""

    def __init__(self, plan: RoundPlan, votes: bool, strikes: Strikes) -> None:
        self.plan, self.votes, self.strikes = plan, votes, strikes

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
