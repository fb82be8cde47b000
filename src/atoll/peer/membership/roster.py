"""What the agreed membership means for one peer: who may speak, whom it reaches, whom it looks for.

Reads vertices and nothing else, so two peers with one head and one role see one roster. Promises: a client is never
told to dial a client; who left is forgotten, but whom a recovery took for gone is sought, since it may go on
elsewhere. Never judges who deserves what: that is `policy/membership.py`'s, and stands in the vertex.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.draw import draw_below
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import COMMITTEE_MAX
from atoll.base.machine import Connect, Disconnect, Effect
from atoll.crypto.digest import digest
from atoll.crypto.signer import SignatureVerifier
from atoll.peer.events import MembershipChanged
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import JoinRequest, SignedStatement
from atoll.wire.messages.vertex import Member, Standing, VertexBody

PASSED_ON = 8  # voters of a large swarm to whom each reader passes a report on: all but e^-8 hear it of somebody


class MemberRoster:
    """As of the newest vertex of `history`; `client`: I take part as one."""

    def __init__(self, me: PeerId, history: VertexChain, client: bool) -> None:
        self.me, self.history, self.client = me, history, client
        self._standings: tuple[Digest, dict[PeerId, Standing]] = ZERO_DIGEST, {}  # as of this head

    @property
    def members(self) -> Sequence[Member]:
        return self.history.head_body.members

    @property
    def mine(self) -> Member | None:
        """My own line, if there is one."""
        return next((m for m in self.members if m.peer == self.me), None)

    def came_after(self, at: int) -> bool:
        """I am present, and was not in every vertex after this round. Members let go of the parts that
        nobody present lacks, so what I would need to go on from this round's state is maybe nowhere any more."""
        bodies, mine = self.history.bodies, self.mine
        between = [bodies[r].members for r in range(at + 1, self.history.head) if r in bodies]
        was_here = (any(m.peer == self.me and m.present for m in members) for members in between)
        return mine is not None and mine.present and not all(was_here)

    @property
    def voters(self) -> int:
        return sum(m.votes for m in self.members)

    def standing_of(self, peer: PeerId) -> Standing | None:
        """Asked with every message of a round."""
        head = self.history.head_id
        if self._standings[0] != head:
            self._standings = head, {m.peer: m.standing for m in self.members}
        return self._standings[1].get(peer)

    def within_reach(self) -> list[PeerId]:
        """Members that I can have a connection to: all that are present, but clients cannot dial each other."""
        members = [m for m in self.members if m.present]
        client = any(m.peer == self.me and m.role == "client" for m in members) or self.client
        return [m.peer for m in members if m.peer != self.me and not (client and m.role == "client")]

    def present(self) -> tuple[PeerId, ...]:
        """Who is within reach, and I, in the order of the vertex."""
        reach = {self.me, *self.within_reach()}
        return tuple(m.peer for m in self.members if m.present and m.peer in reach)

    def contacts(self) -> list[Effect]:
        """Connections follow the agreed membership."""
        members, present = self.members, self.present()
        effects: list[Effect] = [
            Connect(m.peer, m.addresses) for m in members if m.peer in present and m.peer != self.me
        ]
        sought = self.put_away()
        effects += [Connect(m.peer, m.addresses) for m in members if m.peer in sought]
        away = (m.peer for m in members if not m.present and m.peer not in sought)
        return effects + [Disconnect(peer) for peer in away if peer != self.me]

    def put_away(self) -> set[PeerId]:
        """Whom the recovery took for gone, and who is not back: they may go on elsewhere, and nobody would know."""
        bodies = self.history.bodies
        if not self.history.head_body.epoch:
            return set()
        began = [r for r in bodies if r - 1 in bodies and bodies[r].epoch > bodies[r - 1].epoch]
        lost = {m.peer for r in began for m in bodies[r].members if not m.present}
        had = {m.peer for r in began for m in bodies[r - 1].members if m.votes}
        return {m.peer for m in self.members if m.standing == "away"} & lost & had - {self.me}

    def passes_on_to(self, signed: SignedStatement) -> list[PeerId]:
        """Voters to whom a report goes on. In a large swarm each reader draws a few: its author told everybody, and
        a lie that all members report would else cost the cube of their number in messages.
        """
        voters = [m.peer for m in self.members if m.votes and m.peer not in (self.me, signed.signer)]
        if len(voters) <= COMMITTEE_MAX:
            return voters
        first = draw_below(signed.body, f"{self.me} passes on", len(voters))
        return (voters * 2)[first : first + PASSED_ON]


def change_of(before: Sequence[Member], after: Sequence[Member]) -> MembershipChanged | None:
    """Who came and who went; None where not even a line of the membership is another."""
    if before == after:
        return None
    old = {m.peer for m in before if m.present}
    new = {m.peer for m in after if m.present}
    return MembershipChanged(joined=tuple(sorted(new - old)), left=tuple(sorted(old - new)), members=tuple(after))


def identities_in(body: VertexBody, verifier: SignatureVerifier) -> dict[PeerId, bytes]:
    """Joins bring the long-lived public identities whose digests the membership holds from then on."""
    found: dict[PeerId, bytes] = {}
    pinned = {m.peer: m.identity for m in body.members}
    for signed in body.reports:
        statement = decode_statement(signed.body, signed.signer)
        if isinstance(statement, JoinRequest):
            public = verifier.identity_of(statement.certificate)
            if public is not None and digest(public) == pinned.get(statement.peer):
                found[statement.peer] = public
    return found
