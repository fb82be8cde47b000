"""States as files of a peer's folder: the `StateStore` of real workers. One blob holds one state.

A state in use is a map of its file. So the system holds its pages while there is room, and needs no memory for them
otherwise. The next state is written while it is computed, over the file of a removed one where there is one.

Invariants:
- A state that was staged is whole, durable and named by its digest.
- A viewed state was verified chunk by chunk; a damaged file is set aside and counts as missing.
Not responsible for: how long a state stays (blob_retention.py).
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from atoll.base.ids import Digest
from atoll.base.limits import MIB
from atoll.crypto.digest import Buffer, blob_id, manifest_of_spans
from atoll.runtime.storage.atomic_files import map_file, refused, write_at
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.ownership import open_private
from atoll.runtime.storage.store import PeerStore
from atoll.worker.state_store import MissingStateError

HASHED_BYTES = 16 * MIB  # bytes hashed at once
SYNCED_BYTES = 32 * MIB  # written bytes after which the disk begins with them, while more are computed


class FileStateDraft:
    def __init__(
        self, store: PeerStore, retention: BlobRetention, disk: ThreadPoolExecutor, size_bytes: int
    ) -> None:
        self._store, self._retention, self._disk = store, retention, disk
        self._syncing: Future[None] | None = None
        self._unsynced_bytes = 0
        self._path = store.take_spare("state.new")
        try:
            self._file = open(self._path, "r+b" if self._path.exists() else "w+b", opener=open_private)  # noqa: SIM115
            self._file.truncate(size_bytes)
        except OSError as why:
            raise refused("write the next state", why.strerror, self._path.parent) from why

    def write(self, at: int, data: Buffer) -> None:
        try:
            write_at(self._file.fileno(), data, at)
            self._unsynced_bytes += len(data)
            if self._unsynced_bytes >= SYNCED_BYTES and (self._syncing is None or self._syncing.done()):
                self._finish_sync()
                self._unsynced_bytes = 0
                self._syncing = self._disk.submit(self._store.sync, self._file.fileno())
        except OSError as why:
            raise refused("write the next state", why.strerror, self._path.parent) from why

    def finish(self) -> tuple[Digest, memoryview]:
        try:
            view = map_file(self._file.fileno()).toreadonly()
            manifest = manifest_of_spans(view[at : at + HASHED_BYTES] for at in range(0, len(view), HASHED_BYTES))
            self._finish_sync()
            self._store.sync(self._file.fileno())
            with self._retention.adding:
                self._store.take_in(self._path, name := blob_id(manifest), manifest)
                self._retention.add_state(name)
        except OSError as why:
            self.drop()
            raise refused("write the next state", why.strerror, self._path.parent) from why
        self._file.close()
        return name, view

    def drop(self) -> None:
        with suppress(OSError):
            self._finish_sync()
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _finish_sync(self) -> None:
        """Raises OSError of the disk, which it reports only once."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing.result()


class FileStateStore:
    def __init__(self, store: PeerStore, retention: BlobRetention) -> None:
        self._store, self._retention = store, retention
        self._disk = ThreadPoolExecutor(1, "sync")  # its thread begins with the first large state

    def draft(self, size_bytes: int) -> FileStateDraft:
        return FileStateDraft(self._store, self._retention, self._disk, size_bytes)

    def commit(self, name: Digest) -> None:
        with self._retention.adding:
            if not self._store.has_blob(name):
                raise MissingStateError
            self._retention.set_head(name)

    def view(self, name: Digest) -> memoryview:
        self._retention.pin_for_a_while(name)
        if not self._store.verify_blob(name):
            raise MissingStateError
        try:
            handle = os.open(self._store.blob_path(name), os.O_RDONLY)
        except FileNotFoundError:  # removed meanwhile
            raise MissingStateError from None
        try:
            return map_file(handle).toreadonly()
        finally:
            os.close(handle)

    def is_recoverable(self, name: Digest) -> bool:
        return self._store.verify_blob(name)
