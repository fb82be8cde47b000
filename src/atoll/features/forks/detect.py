"""Fork detection: two branches of one run, after a recovery began a new epoch while a quorum was alive.

`atoll recover` is for a quorum that is gone for good. If the quorum was only out of reach, both branches go on.
Each one removes the other's members, so neither would notice. Therefore a member of a recovered epoch keeps looking
for the removed members. When two branches meet, each shows the other where it began.

Invariants:
- A branch is accepted like any vertex: by its certificate or the recovery identity's signature, after a known
  parent.
- A member of another branch is no liar.
- At most `BRANCHES_MAX` branches are kept.
- A peer never changes branch: votes name no epoch, so its earlier votes would contradict those on the other branch.
Not responsible for: choosing a branch. People decide; a member changes with a new folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from atoll.base.ids import PeerId
from atoll.base.limits import BRANCHES_MAX, PEERS_MAX
from atoll.base.machine import Effect, Emit, Persist, Send
from atoll.peer.events import ForkBranchDetected
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.messages.history import VerticesRequest, VerticesResponse
from atoll.wire.messages.vertex import Vertex

BACK = 64  # rounds in which another branch's beginning is searched, if the local epoch is the older one
KEPT = "branch/"


class ChainSplitDetector:
    def __init__(self, history: VertexChain) -> None:
        self.history = history
        self.known: dict[int, Vertex] = {}  # by the round that they close; the first one seen
        self.asked: set[PeerId] = set()  # peers asked where their branch begins

    def restore(self, kept: Mapping[str, bytes]) -> None:
        for name in sorted(name for name in kept if name.startswith(KEPT)):
            vertex = decode_vertex(kept[name])
            self.known[decode_body(vertex.body).round] = vertex

    def check_past_vertex(self, vertex: Vertex, who: PeerId, members: Sequence[PeerId] = ()) -> list[Effect]:
        """Compare a vertex of a past round with the local one, mostly equal. PeerFault if it differs and is forged.

        A different one is announced to the local `members`, and its sender is shown the local one.
        """
        body = self.history.check_other_branch(vertex, who)
        if body is None or body.round in self.known or len(self.known) >= BRANCHES_MAX:
            return []
        self.known[body.round] = vertex
        ours = self.history.vertices[body.round]
        fact = ForkBranchDetected(
            round=body.round,
            epoch=body.epoch,
            vertex=vertex_id(vertex.body),
            members=tuple(m.peer for m in body.members if m.votes),
            recovered=vertex.certificate is None,
        )
        news, answer = VerticesResponse((vertex,), self.history.head), VerticesResponse((ours,), self.history.head)
        told = [Send(peer, news) for peer in members if peer != who]
        return [Persist(f"{KEPT}{body.round}", encode(vertex)), Emit(fact), *told, Send(who, answer)]

    def on_peer_connected(self, peer: PeerId, put_away: Set[PeerId]) -> list[Effect]:
        """A member that a recovery removed has connected: request the vertices it holds since then.

        If both have come equally far, neither would ask the other.
        """
        if peer not in put_away or self.known:
            return []
        return [Send(peer, VerticesRequest(self._epoch_began()))]

    def _epoch_began(self) -> int:
        """Round in which the local epoch began, or the oldest one in memory."""
        bodies, epoch = self.history.bodies, self.history.head_body.epoch
        oldest = min(bodies) + 1
        return min((r for r, body in bodies.items() if body.epoch == epoch and r >= oldest), default=oldest)

    def answer_other_branch(self, vertex: Vertex, who: PeerId) -> list[Effect] | None:
        """Messages to a peer on a different vertex in another epoch; None if there is no such difference.

        Each peer is asked once: its response shows where its branch begins, or it is not accepted.
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
