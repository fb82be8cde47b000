"""What this process knows about the files of blobs without looking at them again.

An `Opening` says which chunks of a blob on its way are here, a `VerifiedChunks` which chunks of a finished one
were hashed
and have stayed in memory since, a `FileStamp` whether a file is still the one that was looked at.
Promises: nothing here survives the process: whoever starts again hashes again.
Never touches a disk.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from threading import Lock
from typing import NamedTuple

from atoll.base.ids import Digest
from atoll.crypto.digest import BlobManifest
from atoll.runtime.network.file_slice import FileHandle


class PartialBlob:
    """Room for a blob that is being fetched. Every `open_blob` makes another one: what was written into the file of
    an earlier one is not in this."""

    def __init__(self, manifest: BlobManifest) -> None:
        self.manifest = manifest
        self.here = bytearray(-(-len(manifest.chunks) // 8))  # a bit for each chunk that was verified and written
        self.unsynced_bytes = 0  # written since the last sync began
        self.syncing: Future[None] | None = None  # the last one
        self._writing = Lock()

    def has(self, index: int) -> bool:
        return bool(self.here[index // 8] >> index % 8 & 1)

    @property
    def is_whole(self) -> bool:
        return int.from_bytes(self.here).bit_count() == len(self.manifest.chunks)

    def wrote(self, index: int, unsynced_bytes: int = 0) -> None:
        """By any thread."""
        with self._writing:
            self.here[index // 8] |= 1 << index % 8
            self.unsynced_bytes += unsynced_bytes

    def sync_is_due(self, every_bytes: int) -> bool:
        """True once for so many bytes, as soon as the sync before has ended."""
        with self._writing:
            due = self.unsynced_bytes >= every_bytes and not self.is_syncing
            self.unsynced_bytes = 0 if due else self.unsynced_bytes
        return due

    @property
    def is_syncing(self) -> bool:
        return self.syncing is not None and not self.syncing.done()

    def fits(self, index: int, proof: Digest, size_bytes: int) -> bool:
        """Also in length: a stranger's manifest may name bytes that are longer than their place."""
        manifest = self.manifest
        if not 0 <= index < len(manifest.chunks):
            return False
        return manifest.chunks[index] == proof and manifest.chunk_bytes(index) == size_bytes


class FileStamp(NamedTuple):
    """Another one after every write: whoever changes a file, or puts another one in its place, leaves a trace."""

    inode: int
    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStamp:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class VerifiedChunks:
    """Which chunks of a blob were hashed in this process since they were last known to be in memory.

    A disk that rots leaves no trace in the stamp, but what it changed has to come from it: a chunk that is not in
    memory any more ends its proof and that of its neighbours, of which the system reads some along with it. The
    others stay proved: memory goes page by page, and where a little of a blob went most of it is still there.
    Looked at are the first and last byte; pages between them that went and came back rotten are noticed by the
    asker, which hashes all.
    """

    def __init__(self, stamp: FileStamp, chunks: bytearray) -> None:
        self.stamp = stamp
        self.chunks = chunks  # 1: proved
        self.file: FileHandle | None = None  # once one of them was served

    def went(self, index: int) -> None:
        for near in range(max(0, index - 1), min(index + 2, len(self.chunks))):
            self.chunks[near] = 0
