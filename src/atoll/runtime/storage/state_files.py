"""States as files of a peer's folder: the `StateStore` of real workers. One blob holds one state.

Invariants:
- A state that was staged is whole, durable and named by its digest.
- A span is verified chunk by chunk; a damaged file is set aside and counts as missing.
Not responsible for: how long a state stays (blob_retention.py).
"""

from __future__ import annotations

from atoll.base.ids import Digest
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.store import PeerStore
from atoll.worker.state_store import MissingStateError, Spans


class FileStateStore:
    def __init__(self, store: PeerStore, retention: BlobRetention) -> None:
        self._store, self._retention = store, retention

    def stage(self, spans: Spans) -> Digest:
        with self._retention.adding:
            name = self._store.put_spans(spans)
            self._retention.add_state(name)
        return name

    def commit(self, name: Digest) -> None:
        with self._retention.adding:
            if not self._store.has_blob(name):
                raise MissingStateError
            self._retention.add_state(name)
            self._retention.head = name

    def read(self, name: Digest, begin: int, end: int) -> memoryview:
        self._retention.pin_for_a_while(name)
        data = self._store.read_span(name, begin, end)
        if data is None:
            raise MissingStateError
        return data

    def size_bytes(self, name: Digest) -> int:
        manifest = self._store.manifest(name)
        if manifest is None:
            raise MissingStateError
        return manifest.size_bytes

    def is_recoverable(self, name: Digest) -> bool:
        return self._store.verify_blob(name)
