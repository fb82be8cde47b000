"""History repair: replaces vertices that this disk changed or lost, before the peer continues.

Votes, reputation and rollback targets follow from the newest vertices. A peer with a hole in those loaded at start
would reject what the others agree on, so it neither trains nor votes until they are whole. It still serves what it
has, since other disks may have lost something, too. An older hole is repaired when another peer requests that
vertex (`peer/sync/vertex_sync.py`).

Invariants:
- A vertex is accepted only if the next one names it and a quorum signed it.
- The newest vertex, which no other names, is never repaired (`runtime/bootstrap.py` reports it and exits).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Emit, Persist, Send
from atoll.base.round_robin import round_robin
from atoll.peer.events import HistoryVertexRecovered, StoredVertexLost
from atoll.protocol.history.chain import MissingVertex, VertexChain, find_missing_vertex
from atoll.wire.codec import encode, vertex_id
from atoll.wire.messages.history import VerticesRequest
from atoll.wire.messages.vertex import Vertex


class HistoryRepair:
    """`hole` is None once `kept`, loaded at start or for another peer, is whole."""

    def __init__(self, history: VertexChain, kept: dict[str, bytes], hole: MissingVertex) -> None:
        self.history, self.kept = history, dict(kept)
        self.hole: MissingVertex | None = hole
        self.turn = 0

    def begin(self) -> Emit:
        assert self.hole is not None
        return Emit(StoredVertexLost(round=self.history.head, lacks=self.hole.round))

    def ask(self, members: Sequence[PeerId]) -> list[Effect]:
        """Request the missing vertex and the one before it, which names its voters."""
        if self.hole is None:
            return []
        self.turn += 1
        wish = VerticesRequest(self.hole.round - 1)
        return [Send(peer, wish) for peer in round_robin(members, len(members), self.turn)]

    def take(self, sender: PeerId, vertices: Sequence[Vertex]) -> list[Effect]:
        """Accept the missing vertex; PeerFault if it comes without votes of a quorum."""
        effects: list[Effect] = []
        for parent, vertex in reversed(list(pairwise(vertices))):
            if self.hole is None or vertex_id(vertex.body) != self.hole.id:
                continue  # of another branch, made up, or not missing
            self.history.check_after(parent, vertex, sender)
            name = f"vertex/{self.hole.round}"
            self.kept[name] = encode(vertex)
            fact = HistoryVertexRecovered(round=self.history.head, lacked=self.hole.round, by=sender)
            effects += [Persist(name, self.kept[name]), Emit(fact)]
            self.hole = find_missing_vertex(self.kept, self.history.notary.run)
        return effects + self.ask([sender]) if effects else []
