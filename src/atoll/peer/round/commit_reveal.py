"""Commit-reveal gate, where members may lie: which peers may receive rows, and what the first commitment binds to.

A trainer receives no row of a round before it has committed to an update or to none. So its update was made from no
row that an honest member sent to it. Attempts share the same updates again, so the first commitment binds in all
of them.

Invariants:
- Where members trust each other every peer may receive every row, and nothing binds.
Not responsible for: signing or sending.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.policy.plan import RoundPlan
from atoll.wire.codec import decode_statement
from atoll.wire.evidence import commits_to_two_updates
from atoll.wire.messages.statements import Commitment, SignedStatement

UNDER_WAY = "its training was not over when the others began to share"
BOUND = "it has said something else of this round before, and can no more give that"


class CommitRevealGate:
    """`said`: the local peer's durable statements, those before a restart included."""

    def __init__(self, plan: RoundPlan, me: PeerId, said: Mapping[str, bytes]) -> None:
        self.plan, self.me, self.said = plan, me, said
        self.attempt = 0
        self.first: dict[
            PeerId, tuple[Commitment, SignedStatement]
        ] = {}  # first commitment of each peer, from the earliest attempt received
        self.withheld: set[PeerId] = set()  # peers that would have received a row, to be asked for their commitment

    def attempt_begins(self, attempt: int) -> None:
        self.attempt, self.withheld = attempt, set()

    def may_receive(self, peer: PeerId) -> bool:
        """True if this peer may receive rows of others.

        A commitment to a later attempt only does not bind it in this one.
        """
        if not self.plan.may_lie or peer == self.me or peer not in self.plan.givers:
            return True
        if peer in self.first and self.first[peer][0].attempt <= self.attempt:
            return True
        self.withheld.add(peer)
        return False

    def contradicted(self, commit: Commitment, signed: SignedStatement) -> SignedStatement | None:
        """The author's commitment to another attempt if the two name different updates.

        Called with every commitment.
        """
        if not self.plan.may_lie:
            return None
        first, other = self.first.setdefault(signed.signer, (commit, signed))
        self.withheld.discard(signed.signer)
        if commit.attempt < first.attempt:
            self.first[signed.signer] = commit, signed
        return other if commits_to_two_updates(first, commit) else None

    def bound(self, commit: Commitment) -> Commitment | None:
        """The commitment to send: this one, or a pass if it contradicts an earlier one, mostly from before a
        restart.

        None if both would: the local clock was ahead then, and after a pass of this attempt the later one would be
        a lie.
        """
        words = (commit, passing(commit.round, commit.attempt, BOUND))
        mine = self._mine() if self.plan.may_lie else []
        return next((word for word in words if not any(commits_to_two_updates(said, word) for said in mine)), None)

    def _mine(self) -> list[Commitment]:
        names = [name.split("/") for name in self.said]
        mine = ["/".join(n) for n in names if n[1] == str(self.plan.round) and n[-1] == "commit"]
        said = (decode_statement(self.said[name], self.me) for name in mine)
        return [word for word in said if isinstance(word, Commitment)]


def passing(round: int, attempt: int, why: str) -> Commitment:
    """A commitment to no update, with its reason."""
    return Commitment(round, attempt, ZERO_DIGEST, 0, 0, 0, 0.0, 0.0, 0, why[:200])
