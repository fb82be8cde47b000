"""Vertex sync between peers with histories of different length: requests, hints and responses.

Invariants:
- A peer gets a request or hint at most once per second, however much it sends.
- Vertices older than memory are read from disk for a few peers at once. Damaged ones are requested from members.
Not responsible for: verifying a vertex; the history does.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import CONTROL_FRAME_MAX, PEERS_MAX
from atoll.base.machine import Effect, RunTask, Send
from atoll.peer.sync.history_repair import HistoryRepair
from atoll.peer.tasks import ReadVertices
from atoll.protocol.history.chain import VertexChain, decode_undamaged, find_missing_vertex
from atoll.protocol.history.era_signatures import EraSignatureTracker
from atoll.protocol.transfer.serve import SERVED_AT_ONCE
from atoll.wire.messages.history import VerticesRequest, VerticesResponse
from atoll.wire.messages.vertex import Vertex

HINT_AGAIN_S = 1.0  # seconds between vertices sent unrequested to a peer that works on an old round
VERTICES_BYTES_MAX = CONTROL_FRAME_MAX // 2


class VertexSync:
    """`history` is None until genesis is known."""

    def __init__(self) -> None:
        self.history: VertexChain | None = None
        self.eras: EraSignatureTracker | None = None  # None if the run has no eras
        self.hinted: dict[PeerId, Seconds] = {}
        self.ends: dict[PeerId, int] = {}  # last known head of each peer
        self.reading: dict[str, PeerId] = {}  # disk reads of old vertices and the requesting peer
        self.mending: HistoryRepair | None = None  # repair of an old vertex; no peer waits for it

    def woke(self) -> None:
        """After a sleep of this computer, forget recent hints."""
        self.hinted.clear()

    def ends_with(self, sender: PeerId, head: int) -> None:
        """Note a peer's head."""
        if sender not in self.ends and len(self.ends) >= PEERS_MAX:
            self.ends.clear()
        self.ends[sender] = head

    def ask(self, sender: PeerId, head: int, now: Seconds) -> list[Effect]:
        """Note a peer's head; if it is ahead, request the rest."""
        self.ends_with(sender, head)
        mine = self.history.head if self.history is not None else -2
        if head <= mine or self.hinted_lately(sender, now):
            return []
        if self.eras is not None and self.eras.blocking_era(mine + 1) is not None:
            # without these signatures the vertices would be rejected
            return self.eras.request_blocking(sender, mine + 1, now)
        return [Send(sender, VerticesRequest(mine + 1))]

    def hint(self, peer: PeerId, round: int, now: Seconds) -> list[Effect]:
        """Send vertices to a peer that works on a closed round."""
        if self.history is None or self.hinted_lately(peer, now):
            return []
        vertices = self.history.vertices_from(round, VERTICES_BYTES_MAX)
        return [Send(peer, VerticesResponse(vertices, self.history.head))] if vertices else []

    def serve(self, sender: PeerId, first: int) -> list[Effect]:
        """Send vertices from round `first` on, as requested."""
        if self.history is None:
            return []
        vertices = self.history.vertices_from(max(first, -1), VERTICES_BYTES_MAX)
        if vertices:
            return [Send(sender, VerticesResponse(vertices, self.history.head))]
        job = f"history/{first}/{sender}"  # older than memory
        if 0 <= first <= self.history.head and len(self.reading) < SERVED_AT_ONCE and job not in self.reading:
            self.reading[job] = sender
            return [RunTask(job, ReadVertices(first, VERTICES_BYTES_MAX))]
        return []

    def read(self, job: str, kept: Sequence[bytes], members: Sequence[PeerId]) -> list[Effect]:
        """Send old vertices read from disk, none after a failed read; request damaged ones from members."""
        asker, vertices = self.reading.pop(job, None), tuple(decode_undamaged(kept))
        if asker is None or self.history is None:
            return []
        effects: list[Effect] = [Send(asker, VerticesResponse(vertices, self.history.head))] if vertices else []
        if len(vertices) < len(kept):
            effects += self._mend(self.history, int(job.split("/")[1]), kept, members)
        return effects

    def _mend(
        self, history: VertexChain, first: int, kept: Sequence[bytes], members: Sequence[PeerId]
    ) -> list[Effect]:
        """Request the newest damaged vertex among these, if the next one is intact and names it."""
        rows = {f"vertex/{first + place}": data for place, data in enumerate(kept)}
        hole = find_missing_vertex(rows, history.notary.run)
        if hole is None or hole.id is None:
            return []
        if self.mending is None or self.mending.hole != hole:
            self.mending = HistoryRepair(history, rows, hole)
        return self.mending.ask(members)

    def mended(self, sender: PeerId, vertices: Sequence[Vertex]) -> list[Effect]:
        """Take vertices that may repair the local disk."""
        return self.mending.take(sender, vertices) if self.mending is not None else []

    def hinted_lately(self, peer: PeerId, now: Seconds) -> bool:
        """True if the peer was hinted within `HINT_AGAIN_S`; otherwise note it as hinted now."""
        if now - self.hinted.get(peer, -1e9) < HINT_AGAIN_S:
            return True
        if len(self.hinted) >= PEERS_MAX:
            self.hinted.clear()
        self.hinted[peer] = now
        return False
