"""Vertices asked for and shown: what one peer says to another whose history is longer, or shorter, than its own.

Promises: one peer is asked or told once a second, however much it talks; vertices older than memory are read from
disk for a few at once; one of them that the disk changed is found by that, and members are asked for it. Never
believes a vertex: that is the history's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import CONTROL_FRAME_MAX, PEERS_MAX
from atoll.base.machine import Effect, RunTask, Send
from atoll.peer.sync.history_repair import HistoryRepair
from atoll.peer.tasks import ReadVertices
from atoll.protocol.history.chain import VertexChain, newest_hole, whole
from atoll.protocol.history.era_signatures import EraChain
from atoll.protocol.transfer.download import SERVED_AT_ONCE
from atoll.wire.messages.history import VerticesRequest, VerticesResponse
from atoll.wire.messages.vertex import Vertex

HINT_AGAIN_S = 1.0  # a peer that talks about an old round is told the news at most this often
VERTICES_BYTES_MAX = CONTROL_FRAME_MAX // 2


class VertexSync:
    """`history` is None until genesis is known."""

    def __init__(self) -> None:
        self.history: VertexChain | None = None
        self.eras: EraChain | None = None  # where the run has them
        self.hinted: dict[PeerId, Seconds] = {}
        self.ends: dict[PeerId, int] = {}  # with which round the histories of others end, as they said last
        self.reading: dict[str, PeerId] = {}  # old vertices on their way from disk, and who asked for them
        self.mending: HistoryRepair | None = None  # of one of these; nobody waits for it

    def woke(self) -> None:
        """This computer slept: whatever was said before is old."""
        self.hinted.clear()

    def ends_with(self, sender: PeerId, head: int) -> None:
        """So it says of its history."""
        if sender not in self.ends and len(self.ends) >= PEERS_MAX:
            self.ends.clear()
        self.ends[sender] = head

    def ask(self, sender: PeerId, head: int, now: Seconds) -> list[Effect]:
        """It says that its history ends with this round: if mine ends before, ask for the rest."""
        self.ends_with(sender, head)
        mine = self.history.head if self.history is not None else -2
        if head <= mine or self.hinted_lately(sender, now):
            return []
        if self.eras is not None and self.eras.demanded(mine + 1) is not None:
            return self.eras.demand(sender, mine + 1, now)  # I would not believe it
        return [Send(sender, VerticesRequest(mine + 1))]

    def hint(self, peer: PeerId, round: int, now: Seconds) -> list[Effect]:
        """This peer works on a round that is over: show it the vertex."""
        if self.history is None or self.hinted_lately(peer, now):
            return []
        vertices = self.history.since(round, VERTICES_BYTES_MAX)
        return [Send(peer, VerticesResponse(vertices, self.history.head))] if vertices else []

    def give(self, sender: PeerId, first: int) -> list[Effect]:
        """It wants vertices from this round on."""
        if self.history is None:
            return []
        vertices = self.history.since(max(first, -1), VERTICES_BYTES_MAX)
        if vertices:
            return [Send(sender, VerticesResponse(vertices, self.history.head))]
        job = f"history/{first}/{sender}"  # older than what I hold in memory
        if 0 <= first <= self.history.head and len(self.reading) < SERVED_AT_ONCE and job not in self.reading:
            self.reading[job] = sender
            return [RunTask(job, ReadVertices(first, VERTICES_BYTES_MAX))]
        return []

    def read(self, job: str, kept: Sequence[bytes], members: Sequence[PeerId]) -> list[Effect]:
        """The disk answered, with nothing where that failed. What it damaged is for others to show, also to me."""
        asker, vertices = self.reading.pop(job, None), tuple(whole(kept))
        if asker is None or self.history is None:
            return []
        effects: list[Effect] = [Send(asker, VerticesResponse(vertices, self.history.head))] if vertices else []
        if len(vertices) < len(kept):
            effects += self._mend(self.history, int(job.split("/")[1]), kept, members)
        return effects

    def _mend(
        self, history: VertexChain, first: int, kept: Sequence[bytes], members: Sequence[PeerId]
    ) -> list[Effect]:
        """The newest of what is wrong in there, if the one after it is whole: that names it."""
        rows = {f"vertex/{first + place}": data for place, data in enumerate(kept)}
        hole = newest_hole(rows, history.notary.run)
        if hole is None or hole.id is None:
            return []
        if self.mending is None or self.mending.hole != hole:
            self.mending = HistoryRepair(history, rows, hole)
        return self.mending.ask(members)

    def mended(self, sender: PeerId, vertices: Sequence[Vertex]) -> list[Effect]:
        """What somebody shows may be what my disk lacks."""
        return self.mending.take(sender, vertices) if self.mending is not None else []

    def hinted_lately(self, peer: PeerId, now: Seconds) -> bool:
        """If not, it is now."""
        if now - self.hinted.get(peer, -1e9) < HINT_AGAIN_S:
            return True
        if len(self.hinted) >= PEERS_MAX:
            self.hinted.clear()
        self.hinted[peer] = now
        return False
