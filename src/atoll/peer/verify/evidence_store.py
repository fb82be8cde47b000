"""Exhibits of whom this peer refuted, or saw expelled or sent away: kept after the audit is over, so that anybody
may fetch one and judge again what the verdict rests on.

Where steps were to be taken again the state that the round began with stays beside it: nothing can be judged
without. Promises: at most EXHIBITS_KEPT, the newest first, also after a restart; they are fetched by name like any
blob. Never judges. How many bytes there is room for is the disk's business.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.base.errors import UNREADABLE
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Persist, RunTask
from atoll.peer.tasks import PinBlobs

EXHIBITS_KEPT = 16  # blobs: one may be enough, but a liar is often refuted in several rounds, or in many blocks
ROW = "exhibits"  # under which name it is remembered


class StoredEvidence(msgspec.Struct, frozen=True, array_like=True):
    """What was judged, and what it takes to judge it again."""

    round: int
    peer: PeerId
    exhibit: Digest
    state: Digest | None = None  # that the round began with


_KEPT = msgspec.msgpack.Decoder(tuple[StoredEvidence, ...])


class EvidenceStore:
    def __init__(self) -> None:
        self.kept: tuple[StoredEvidence, ...] = ()  # the newest first

    def start(self, data: bytes) -> list[Effect]:
        """What a life before wrote down."""
        try:
            self.kept = _KEPT.decode(data) if data else ()
        except UNREADABLE:
            return []  # of another version: those blobs are gone with the next round
        return self._hold() if self.kept else []

    def keep(self, new: Iterable[StoredEvidence]) -> list[Effect]:
        """These stay from now on, of one round those that came first."""
        newest = sorted(dict.fromkeys((*self.kept, *new)), key=lambda one: -one.round)
        if (kept := tuple(newest[:EXHIBITS_KEPT])) == self.kept:
            return []
        self.kept = kept
        return [Persist(ROW, msgspec.msgpack.encode(self.kept)), *self._hold()]

    def _hold(self) -> list[Effect]:
        names = dict.fromkeys(name for one in self.kept for name in (one.exhibit, one.state) if name is not None)
        return [RunTask("audit/keep", PinBlobs(tuple(names), "verdicts"))]
