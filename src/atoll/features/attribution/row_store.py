"""Kept rows on disk: each a blob of its own, so that one is read without the others.

Promises: a row that was put is durable, and stays until somebody says what to keep and it is not among that.
Never knows whose row it is, nor of which round: the peer does (`features/attribution/row_archive.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.peer.tasks import ArchivedRow
from atoll.runtime.storage.store import PeerStore

FRESH_S = 60.0  # a row that was just put waits so long to be named by `hold`


class RowStore:
    """All of it on the thread that tidies."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store
        self._held: Sequence[Digest] = ()  # the most important first
        self._fresh: dict[Digest, float] = {}  # put, and not held yet -> when

    def put(self, rows: Iterable[ArchivedRow]) -> tuple[Digest, ...]:
        names = tuple(self._store.put_blob(row.payload.data) for row in rows)
        self._fresh |= dict.fromkeys(names, time.monotonic())
        return names

    def hold(self, blobs: Sequence[Digest]) -> tuple[Digest, ...]:
        """These, as far as there is room. Says which are not here."""
        self._held = blobs
        for name in blobs:
            self._fresh.pop(name, None)
        return tuple(name for name in blobs if not self._store.has_blob(name))

    def read(self, blob: Digest, digest: Digest) -> Payload | None:
        data = self._store.read_blob(blob)
        return None if data is None else Payload(digest, len(data), data)

    def kept(self, bytes_max: int) -> set[Digest]:
        """What stays, in so many bytes."""
        now = time.monotonic()
        self._fresh = {name: since for name, since in self._fresh.items() if now - since < FRESH_S}
        return {*self._fresh, *self._store.within(self._held, bytes_max)}
