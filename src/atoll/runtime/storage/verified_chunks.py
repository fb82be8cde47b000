"""Knowledge of this process about blob files, kept without reading them again.

`PartialBlob` holds which chunks of a download are present, `ChunkVerificationCache` which chunks of a finished blob
were hashed and stayed in memory since, `FileStamp` the identity of a file.

Invariants: no knowledge survives the process; a new process hashes again.
Not responsible for: disk access.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from threading import Lock
from typing import NamedTuple

from atoll.base.ids import Digest
from atoll.crypto.digest import BlobManifest
from atoll.runtime.network.file_slice import SharedOpenFile


class PartialBlob:
    """Chunks present of one download. Every `open_blob` makes a new one, which knows nothing of an earlier file."""

    def __init__(self, manifest: BlobManifest) -> None:
        self.manifest = manifest
        self.here = bytearray(-(-len(manifest.chunks) // 8))  # one bit per verified and written chunk
        self.unsynced_bytes = 0  # written since the last sync began
        self.syncing: Future[None] | None = None  # the last sync
        self._writing = Lock()

    def has(self, index: int) -> bool:
        return bool(self.here[index // 8] >> index % 8 & 1)

    @property
    def is_whole(self) -> bool:
        return int.from_bytes(self.here).bit_count() == len(self.manifest.chunks)

    def wrote(self, index: int, unsynced_bytes: int = 0) -> None:
        """Mark a chunk as written. Any thread may call this."""
        with self._writing:
            self.here[index // 8] |= 1 << index % 8
            self.unsynced_bytes += unsynced_bytes

    def sync_is_due(self, every_bytes: int) -> bool:
        """True once per `every_bytes` written, as soon as the previous sync has ended."""
        with self._writing:
            due = self.unsynced_bytes >= every_bytes and not self.is_syncing
            self.unsynced_bytes = 0 if due else self.unsynced_bytes
        return due

    @property
    def is_syncing(self) -> bool:
        return self.syncing is not None and not self.syncing.done()

    def fits(self, index: int, proof: Digest, size_bytes: int) -> bool:
        """True if the chunk matches in digest and length: a stranger's manifest may name longer bytes."""
        manifest = self.manifest
        if not 0 <= index < len(manifest.chunks):
            return False
        return manifest.chunks[index] == proof and manifest.chunk_bytes(index) == size_bytes


class FileStamp(NamedTuple):
    """Identity of a file's content. Writing to a file or replacing it changes the stamp."""

    inode: int
    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStamp:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class ChunkVerificationCache:
    """Chunks of a blob that were hashed in this process and have stayed in memory since.

    A failing disk does not change the stamp, but changed bytes have to be read from it. So a chunk that left memory
    loses its proof, and so do its neighbors, which the system reads along with it. The others stay proved: memory
    is reclaimed page by page. Only the first and last byte of a chunk are probed. Pages between them that were
    reclaimed and came back damaged are detected by the requester, which hashes the whole chunk.
    """

    def __init__(self, stamp: FileStamp, chunks: bytearray) -> None:
        self.stamp = stamp
        self.chunks = chunks  # 1 for a proved chunk
        self.file: SharedOpenFile | None = None  # open file, once a chunk was served

    def went(self, index: int) -> None:
        for near in range(max(0, index - 1), min(index + 2, len(self.chunks))):
            self.chunks[near] = 0
