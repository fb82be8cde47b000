"""Vertices that this disk changed or lost, asked of members: the newest ones before the peer goes on, an older one
when somebody else asked for it (`peer/sync/vertex_sync.py`).

Who votes, whose record is worth what and where the run may go back to follow from the newest vertices, so a peer
with a hole in those it is handed at start would refuse what the others agree on: until they are whole it neither
trains nor votes. It shows others what it does hold, since their disks may have lost something, too.
Promises: only a vertex is taken that the one after it names, and that a quorum signed. Never mends the newest one,
which nothing names: that this peer agreed to it is known from nowhere else (`runtime/bootstrap.py` says so and
ends).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Emit, Persist, Send
from atoll.base.round_robin import in_turn
from atoll.peer.events import HistoryLacks, HistoryMended
from atoll.protocol.history.chain import MissingVertex, VertexChain, newest_hole
from atoll.wire.codec import encode, vertex_id
from atoll.wire.messages.history import VerticesRequest
from atoll.wire.messages.vertex import Vertex


class HistoryRepair:
    """`hole` is None once `kept`, which a starting peer is handed or which was read for another, is whole."""

    def __init__(self, history: VertexChain, kept: dict[str, bytes], hole: MissingVertex) -> None:
        self.history, self.kept = history, dict(kept)
        self.hole: MissingVertex | None = hole
        self.turn = 0

    def begin(self) -> Emit:
        assert self.hole is not None
        return Emit(HistoryLacks(round=self.history.head, lacks=self.hole.round))

    def ask(self, members: Sequence[PeerId]) -> list[Effect]:
        """The vertex, and the one before it: that says who may sign it."""
        if self.hole is None:
            return []
        self.turn += 1
        wish = VerticesRequest(self.hole.round - 1)
        return [Send(peer, wish) for peer in in_turn(members, len(members), self.turn)]

    def take(self, sender: PeerId, vertices: Sequence[Vertex]) -> list[Effect]:
        """PeerFault if the one that is lacking comes with votes that no quorum gave."""
        effects: list[Effect] = []
        for parent, vertex in reversed(list(pairwise(vertices))):
            if self.hole is None or vertex_id(vertex.body) != self.hole.id:
                continue  # of another branch, or made up, or not lacking
            self.history.check_after(parent, vertex, sender)
            name = f"vertex/{self.hole.round}"
            self.kept[name] = encode(vertex)
            fact = HistoryMended(round=self.history.head, lacked=self.hole.round, by=sender)
            effects += [Persist(name, self.kept[name]), Emit(fact)]
            self.hole = newest_hole(self.kept, self.history.notary.run)
        return effects + self.ask([sender]) if effects else []
