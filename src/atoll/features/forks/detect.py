"""Branches of one run: seen, kept and told, when a recovery began a new epoch while a quorum was alive.

`atoll recover` is for a quorum that is gone for good. Where it was only out of reach, both go on, and each puts the
other's members away, so nobody would ever notice. So whoever lives in a recovered epoch goes on looking for those
that the recovery put away, and when two branches meet each shows the other where it began.
Promises: a branch is believed like any vertex, by its certificate or the recovery identity's signature, after a
parent that we hold; who stands on one is no liar. At most BRANCHES_MAX are kept.
Never changes to another branch: what a member voted on one would contradict it on the other, since votes name
no epoch. Which one goes on is for people; a member changes with a new folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from atoll.base.ids import PeerId
from atoll.base.limits import BRANCHES_MAX, PEERS_MAX
from atoll.base.machine import Effect, Emit, Persist, Send
from atoll.peer.events import BranchSeen
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.messages.history import VerticesRequest, VerticesResponse
from atoll.wire.messages.vertex import Vertex

BACK = 64  # rounds in which another branch's beginning is looked for, where ours is the older epoch
KEPT = "branch/"


class ForkDetector:
    def __init__(self, history: VertexChain) -> None:
        self.history = history
        self.known: dict[int, Vertex] = {}  # by the round that they close; the first one seen
        self.asked: set[PeerId] = set()  # where its branch begins

    def restore(self, kept: Mapping[str, bytes]) -> None:
        for name in sorted(name for name in kept if name.startswith(KEPT)):
            vertex = decode_vertex(kept[name])
            self.known[decode_body(vertex.body).round] = vertex

    def beside(self, vertex: Vertex, who: PeerId, members: Sequence[PeerId] = ()) -> list[Effect]:
        """A vertex of a round that is over here: ours, mostly. PeerFault if it is another and forged.

        Another is told to our `members`, and its bringer is shown ours.
        """
        body = self.history.other(vertex, who)
        if body is None or body.round in self.known or len(self.known) >= BRANCHES_MAX:
            return []
        self.known[body.round] = vertex
        ours = self.history.vertices[body.round]
        fact = BranchSeen(
            round=body.round,
            epoch=body.epoch,
            vertex=vertex_id(vertex.body),
            members=tuple(m.peer for m in body.members if m.votes),
            recovered=vertex.certificate is None,
        )
        news, answer = VerticesResponse((vertex,), self.history.head), VerticesResponse((ours,), self.history.head)
        told = [Send(peer, news) for peer in members if peer != who]
        return [Persist(f"{KEPT}{body.round}", encode(vertex)), Emit(fact), *told, Send(who, answer)]

    def met(self, peer: PeerId, put_away: Set[PeerId]) -> list[Effect]:
        """Whom a recovery put away is here: it shows what it holds since. Where both have come equally far, nobody
        would ask anybody else."""
        if peer not in put_away or self.known:
            return []
        return [Send(peer, VerticesRequest(self._epoch_began()))]

    def _epoch_began(self) -> int:
        """With this round mine did, or with the oldest that memory can compare."""
        bodies, epoch = self.history.bodies, self.history.head_body.epoch
        oldest = min(bodies) + 1
        return min((r for r, body in bodies.items() if body.epoch == epoch and r >= oldest), default=oldest)

    def parts_us(self, vertex: Vertex, who: PeerId) -> list[Effect] | None:
        """What to say to whoever goes on after another vertex than ours, in another epoch; None if it does not.

        Asked once each: the answer shows where its branch begins, or it is not believed.
        """
        history, body = self.history, decode_body(vertex.body, who)
        head = history.head_body
        if body.round != history.head + 1 or body.parent == history.head_id or body.epoch == head.epoch:
            return None
        if self.known or who in self.asked or len(self.asked) >= PEERS_MAX:
            return []
        self.asked.add(who)
        oldest = min(history.bodies) + 1
        first = max(history.head + 1 - BACK, oldest) if body.epoch > head.epoch else self._epoch_began()
        return [Send(who, VerticesRequest(first))]
