"""Member roster: what the agreed membership means for one peer: standings, reachable peers, connections.

Derived from vertices only, so two peers with the same head and role have equal rosters.

Invariants:
- A client is never told to dial a client.
- Members that left stay connected for `LAST_WORDS_S`. Voters that a recovery put away are still dialed: they may
  run a fork.
Not responsible for: decisions on standings (policy/membership.py), which stand in the vertex.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.draw import draw_below
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.limits import COMMITTEE_MAX
from atoll.base.machine import Connect, Disconnect, Effect, SetTimer
from atoll.crypto.digest import digest
from atoll.crypto.signer import SignatureVerifier
from atoll.peer.events import MembershipChanged
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Extensions, JoinRequest, SignedStatement
from atoll.wire.messages.vertex import Member, Standing, VertexBody

# voters per reader that get a forwarded report in a large swarm: all but e^-8 receive it from another member
PASSED_ON = 8
# Members that left stay connected so long: an era may end with them and need their signature, which is on its way
# when they leave. A slow disk or link takes a second.
LAST_WORDS_S: Seconds = 5.0


class MemberRoster:
    """Roster of the newest vertex of `history`; `client`: the local peer takes part as one."""

    def __init__(self, me: PeerId, history: VertexChain, client: bool) -> None:
        self.me, self.history, self.client = me, history, client
        # standings by peer, cached for this head
        self._standings: tuple[Digest, dict[PeerId, Standing]] = ZERO_DIGEST, {}
        self._leavers: dict[int, frozenset[PeerId]] = {}  # round → members that left with its vertex just now

    @property
    def members(self) -> Sequence[Member]:
        return self.history.head_body.members

    def extensions_of(self, peer: PeerId) -> Extensions:
        """Extensions that this member's join added to its record."""
        return self.history.head_body.extensions_by_peer.get(peer, ())

    @property
    def mine(self) -> Member | None:
        """The local member, if there is one."""
        return next((m for m in self.members if m.peer == self.me), None)

    def came_after(self, at: int) -> bool:
        """True if the local peer was a present member, but not in every vertex after this round.

        Members drop parts that no present member lacks, so the parts to advance from this round's state may be
        gone.
        """
        bodies, mine = self.history.bodies, self.mine
        between = [bodies[r].members for r in range(at + 1, self.history.head) if r in bodies]
        was_here = (any(m.peer == self.me and m.is_present for m in members) for members in between)
        return mine is not None and not all(was_here)

    @property
    def voters(self) -> int:
        return sum(m.votes for m in self.members)

    def standing_of(self, peer: PeerId) -> Standing | None:
        """Standing of a peer, cached because it is needed for every message of a round."""
        head = self.history.head_id
        if self._standings[0] != head:
            self._standings = head, {m.peer: m.standing for m in self.members}
        return self._standings[1].get(peer)

    def within_reach(self) -> list[PeerId]:
        """Members that can be connected: all present ones, except that clients cannot dial each other."""
        members = [m for m in self.members if m.is_present]
        client = any(m.peer == self.me and m.role == "client" for m in members) or self.client
        return [m.peer for m in members if m.peer != self.me and not (client and m.role == "client")]

    def present(self) -> tuple[PeerId, ...]:
        """Reachable members and the local peer, in the order of the vertex."""
        reach = {self.me, *self.within_reach()}
        return tuple(m.peer for m in self.members if m.is_present and m.peer in reach)

    def contacts(self) -> list[Effect]:
        """Connections that follow the agreed membership."""
        members, present, sought = self.members, self.present(), self.put_away()
        effects: list[Effect] = [
            Connect(m.peer, m.addresses) for m in members if m.peer in present and m.peer != self.me
        ]
        effects += [Connect(m.peer, m.addresses) for m in members if m.peer in sought]
        kept = {*sought, *self._recent_leavers(), self.me} - {m.peer for m in members if m.standing == "expelled"}
        return effects + [Disconnect(m.peer) for m in members if not m.is_present and m.peer not in kept]

    def keep_leavers(self, left: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Keep the connections of members that left with the newest vertex, until the timer fires."""
        if not left:
            return []
        self._leavers[self.history.head] = frozenset(left)
        return [SetTimer(f"leavers/{self.history.head}", now + LAST_WORDS_S)]

    def disconnect_leavers(self, round: int) -> list[Effect]:
        """Close the connections of members that left with the vertex of this round and are not back."""
        left = self._leavers.pop(round, frozenset())
        present = {m.peer for m in self.members if m.is_present}
        kept = {*present, *self.put_away(), *self._recent_leavers(), self.me}
        return [Disconnect(peer) for peer in sorted(left - kept)]

    def _recent_leavers(self) -> set[PeerId]:
        return {peer for left in self._leavers.values() for peer in left}

    def put_away(self) -> set[PeerId]:
        """Voters that a recovery removed and that are not back: they may continue a fork unnoticed."""
        bodies = self.history.bodies
        if not self.history.head_body.epoch:
            return set()
        began = [r for r in bodies if r - 1 in bodies and bodies[r].epoch > bodies[r - 1].epoch]
        lost = {m.peer for r in began for m in bodies[r].members if not m.is_present}
        had = {m.peer for r in began for m in bodies[r - 1].members if m.votes}
        return {m.peer for m in self.members if m.standing == "away"} & lost & had - {self.me}

    def passes_on_to(self, signed: SignedStatement) -> list[PeerId]:
        """Voters that a report is forwarded to. In a large swarm each reader draws a few: its author sent it to all
        members, and a lie reported by all members would otherwise take a cubic number of messages.
        """
        voters = [m.peer for m in self.members if m.votes and m.peer not in (self.me, signed.signer)]
        if len(voters) <= COMMITTEE_MAX:
            return voters
        first = draw_below(signed.body, f"{self.me} passes on", len(voters))
        return (voters * 2)[first : first + PASSED_ON]


def change_of(before: Sequence[Member], after: Sequence[Member]) -> MembershipChanged | None:
    """The change from one membership to the next; None if they are equal."""
    if before == after:
        return None
    old = {m.peer for m in before if m.is_present}
    new = {m.peer for m in after if m.is_present}
    return MembershipChanged(joined=tuple(sorted(new - old)), left=tuple(sorted(old - new)), members=tuple(after))


def identities_in(body: VertexBody, verifier: SignatureVerifier) -> dict[PeerId, bytes]:
    """Public identities in JoinRequests; the membership holds their digests from then on."""
    found: dict[PeerId, bytes] = {}
    pinned = {m.peer: m.identity for m in body.members}
    for signed in body.reports:
        statement = decode_statement(signed.body, signed.signer)
        if isinstance(statement, JoinRequest):
            public = verifier.identity_of(statement.certificate)
            if public is not None and digest(public) == pinned.get(statement.peer):
                found[statement.peer] = public
    return found
