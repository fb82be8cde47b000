"""Archived rows on disk, each a blob of its own.

Invariants:
- A row that was put is durable and stays until `hold` names other rows.
Not responsible for: the author and the round of a row (`features/attribution/row_archive.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.peer.tasks import ArchivedRow
from atoll.worker.context import BlobStore

FRESH_S = 60.0  # seconds that a new row waits to be named by `hold`


class RowStore:
    """Every method runs on the thread that cleans the disk up."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._held: Sequence[Digest] = ()  # most important first
        self._fresh: dict[Digest, float] = {}  # rows put and not held yet -> time.monotonic()

    def put(self, rows: Iterable[ArchivedRow]) -> tuple[Digest, ...]:
        names = tuple(self._store.put_blob(row.payload.data) for row in rows)
        self._fresh |= dict.fromkeys(names, time.monotonic())
        return names

    def hold(self, blobs: Sequence[Digest]) -> tuple[Digest, ...]:
        """Keep these rows, as far as there is room. Returns those that are not on this disk."""
        self._held = blobs
        for name in blobs:
            self._fresh.pop(name, None)
        return tuple(name for name in blobs if not self._store.has_blob(name))

    def read(self, blob: Digest, digest: Digest) -> Payload | None:
        data = self._store.read_blob(blob)
        return None if data is None else Payload(digest, len(data), data)

    def kept(self, bytes_max: int) -> set[Digest]:
        """The rows that stay within this many bytes."""
        now = time.monotonic()
        self._fresh = {name: since for name, since in self._fresh.items() if now - since < FRESH_S}
        return {*self._fresh, *self._store.blobs_within(self._held, bytes_max)}
