"""Commit, then reveal, where members may lie: who may be shown a row, and what a first word binds to.

Nobody that trains is shown a row of a round before it has said in it what it gives, or that it gives nothing. So
what it commits to was made of no row that an honest member sent to it. Attempts share the same updates again, so
the first word binds in all of them: to that update, or to none.
Promises: where members trust each other everybody may see everything, and nothing binds. Never signs, never sends.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.policy.plan import RoundPlan
from atoll.wire.codec import decode_statement
from atoll.wire.evidence import two_updates
from atoll.wire.messages.statements import Commitment, SignedStatement

UNDER_WAY = "its training was not over when the others began to share"
BOUND = "it has said something else of this round before, and can no more give that"


class CommitRevealGate:
    """`said`: my own durable words, of lives before, too."""

    def __init__(self, plan: RoundPlan, me: PeerId, said: Mapping[str, bytes]) -> None:
        self.plan, self.me, self.said = plan, me, said
        self.attempt = 0
        self.first: dict[
            PeerId, tuple[Commitment, SignedStatement]
        ] = {}  # of each, in the earliest attempt that I heard of
        self.withheld: set[PeerId] = set()  # who would have been shown a row: they are asked for their word

    def attempt_begins(self, attempt: int) -> None:
        self.attempt, self.withheld = attempt, set()

    def may_see(self, peer: PeerId) -> bool:
        """Rows of others than its own. A word to a later attempt alone leaves open what it gives in this one."""
        if not self.plan.may_lie or peer == self.me or peer not in self.plan.givers:
            return True
        if peer in self.first and self.first[peer][0].attempt <= self.attempt:
            return True
        self.withheld.add(peer)
        return False

    def contradicted(self, commit: Commitment, signed: SignedStatement) -> SignedStatement | None:
        """What its author said in another attempt, if that and this are two updates. To be told of every word."""
        if not self.plan.may_lie:
            return None
        first, other = self.first.setdefault(signed.signer, (commit, signed))
        self.withheld.discard(signed.signer)
        if commit.attempt < first.attempt:
            self.first[signed.signer] = commit, signed
        return other if two_updates(first, commit) else None

    def bound(self, commit: Commitment) -> Commitment | None:
        """What I would say; a pass if I said something else of this round before, in a life before mostly. None: my
        clock was ahead then, and after a pass of this attempt what I said of a later one would be a lie."""
        words = (commit, passing(commit.round, commit.attempt, BOUND))
        mine = self._mine() if self.plan.may_lie else []
        return next((word for word in words if not any(two_updates(said, word) for said in mine)), None)

    def _mine(self) -> list[Commitment]:
        names = [name.split("/") for name in self.said]
        mine = ["/".join(n) for n in names if n[1] == str(self.plan.round) and n[-1] == "commit"]
        said = (decode_statement(self.said[name], self.me) for name in mine)
        return [word for word in said if isinstance(word, Commitment)]


def passing(round: int, attempt: int, why: str) -> Commitment:
    """I give nothing, for this reason."""
    return Commitment(round, attempt, ZERO_DIGEST, 0, 0, 0, 0.0, 0.0, 0, why[:200])
