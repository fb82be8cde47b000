"""Evidence store: exhibits that outlive their audit, so that any peer can fetch one and judge it again.

The local peer keeps the exhibits of members that it refuted or that a vertex removed. An exhibit of replayed steps
needs the state that the round began with, which is kept beside it. Both are blobs and are fetched by name.

Invariants:
- At most EXHIBITS_KEPT exhibits, newest first, also after a restart.
Not responsible for: judging; the room on disk (`runtime/storage/blob_retention.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.base.errors import UNREADABLE
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Persist, RunTask
from atoll.peer.tasks import PinBlobs

EXHIBITS_KEPT = 16  # blobs: one may be enough, but a liar is often refuted in several rounds, or in many blocks
ROW = "exhibits"  # name of the row on disk


class StoredEvidence(msgspec.Struct, frozen=True, array_like=True):
    """A judged exhibit, with what a second judgment needs."""

    round: int
    peer: PeerId
    exhibit: Digest
    state: Digest | None = None  # the state that the round began with


_KEPT = msgspec.msgpack.Decoder(tuple[StoredEvidence, ...])


class ConvictionEvidenceStore:
    def __init__(self) -> None:
        self.kept: tuple[StoredEvidence, ...] = ()  # newest first

    def start(self, data: bytes) -> list[Effect]:
        """Restore the row of the process before."""
        try:
            self.kept = _KEPT.decode(data) if data else ()
        except UNREADABLE:
            return []  # another version wrote the row; its blobs go with the next round
        return self._hold() if self.kept else []

    def keep(self, new: Iterable[StoredEvidence]) -> list[Effect]:
        """Keep these from now on; of one round the first ones win."""
        newest = sorted(dict.fromkeys((*self.kept, *new)), key=lambda one: -one.round)
        if (kept := tuple(newest[:EXHIBITS_KEPT])) == self.kept:
            return []
        self.kept = kept
        return [Persist(ROW, msgspec.msgpack.encode(self.kept)), *self._hold()]

    def _hold(self) -> list[Effect]:
        names = dict.fromkeys(name for one in self.kept for name in (one.exhibit, one.state) if name is not None)
        return [RunTask("audit/keep", PinBlobs(tuple(names), "verdicts"))]
