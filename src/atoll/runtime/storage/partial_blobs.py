"""Partial blobs: files of downloads, filled chunk by chunk and renamed once they are whole.

    blobs/<hex>.part    reserved for the whole blob; after a restart, hashing finds the chunks that are present

Invariants:
- A file is deleted after a failed sync and fetched again.
- `give_name` returns only once all bytes are on disk.
- No byte is read that the current download does not know to be present.
- Writers wait for a sync only by `catch_up`.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import Payload
from atoll.crypto.digest import BlobManifest, Buffer, digest
from atoll.protocol.transfer.tasks import PartialManifest
from atoll.runtime.storage.atomic_files import make_room, write_at
from atoll.runtime.storage.ownership import open_private
from atoll.runtime.storage.verified_chunks import PartialBlob

log = logging.getLogger(__name__)

OPENINGS_HELD = 64
PARTS_KEPT_S = 86400.0  # age of an abandoned file; an interrupted download goes on within it
PARTS_BUSY_S = 600.0  # on a full disk, only files written since then stay
SYNCED_EVERY_BYTES = 64 * 2**20  # unsynced bytes of one download, at its end or at a power cut

_sync_data = getattr(os, "fdatasync", os.fsync)

Memory = Callable[[int], memoryview]


class PartialBlobStore:
    """Downloads of one `PeerStore`, in its blob folder."""

    def __init__(self, blobs: Path, durable: bool) -> None:
        self._blobs, self._folder, self._durable = blobs, os.fspath(blobs), durable
        self._openings: dict[Digest, PartialBlob] = {}
        self._syncs = ThreadPoolExecutor(1, "sync")

    def close(self) -> None:
        self._syncs.shutdown()

    # ---- begin ---------------------------------------------------------------------------------------------

    def make_room(self, name: Digest, manifest: BlobManifest, drop_spare: Callable[[], int]) -> set[int]:
        """Reserve the whole file; returns the verified chunks that an earlier attempt left.

        On a full disk, quiet downloads are dropped and `drop_spare` is called; it returns the count of freed files.
        """
        path, before = self._part(name), self._openings.get(name)
        if before is not None and before.syncing is not None:
            wait([before.syncing])  # chunks that this sync loses must not count
        if not path.exists() or path.stat().st_size != manifest.size_bytes:
            try:
                make_room(path, manifest.size_bytes)
            except RunFailedError:
                if not self.drop_quiet(PARTS_BUSY_S) + drop_spare():
                    raise
                make_room(path, manifest.size_bytes)
            return _empty(manifest)
        with open(path, "rb", opener=open_private) as file:
            found = (digest(file.read(manifest.chunk_bytes(index))) for index in range(len(manifest.chunks)))
            return {index for index, (is_, be) in enumerate(zip(found, manifest.chunks, strict=True)) if is_ == be}

    def begin(self, name: Digest, manifest: BlobManifest, have: Iterable[int]) -> None:
        """Start a download with reserved room and these chunks."""
        self._openings.pop(name, None)
        self._openings[name] = opening = PartialBlob(manifest)
        for index in have:
            opening.wrote(index)
        if len(self._openings) > OPENINGS_HELD:
            self._openings.pop(next(iter(self._openings)))  # the oldest was abandoned

    # ---- what is here --------------------------------------------------------------------------------------

    def partly(self, name: Digest) -> PartialManifest | None:
        """Manifest of a download and its present chunks; None if it has none."""
        opening = self._openings.get(name)
        return (
            PartialManifest(opening.manifest, bytes(opening.here))
            if opening is not None and any(opening.here)
            else None
        )

    def opening(self, name: Digest) -> PartialBlob | None:
        """The current download of this blob."""
        return self._openings.get(name)

    def read(self, name: Digest, index: int, memory: Memory, flags: int) -> Payload | None:
        """A chunk of a download, hashed at every read, since the file changes."""
        opening = self._openings.get(name)
        if opening is None:
            return None
        manifest = opening.manifest
        if not 0 <= index < len(manifest.chunks) or not opening.has(index):
            return None
        data = memory(manifest.chunk_bytes(index))
        try:
            handle = os.open(self._place(name), os.O_RDONLY)
        except FileNotFoundError:
            return None  # finished or dropped meanwhile
        try:
            count = os.preadv(handle, [data], index * BLOB_CHUNK, flags)
        finally:
            os.close(handle)
        if flags and count < len(data):
            raise BlockingIOError(errno.EAGAIN, "not all of it is in memory")
        proof = manifest.chunks[index]
        return Payload(proof, count, data) if digest(data[:count]) == proof else None

    # ---- filling it ----------------------------------------------------------------------------------------

    def land(self, name: Digest, index: int, proof: Digest, data: Buffer) -> PartialBlob | None:
        """Write the chunk with digest `proof` if a download contains it; returns that download.

        None: nothing was written; a later `store` reports why.
        """
        opening = self._openings.get(name)
        if opening is None or not opening.fits(index, proof, len(data)):
            return None
        try:
            self.store(name, index, data)
        except OSError:
            return None
        return opening

    def is_behind(self, name: Digest) -> bool:
        """True if one sync is running and enough for the next one is written."""
        opening = self._openings.get(name)
        return opening is not None and opening.is_syncing and opening.unsynced_bytes >= SYNCED_EVERY_BYTES

    def catch_up(self, name: Digest) -> None:
        """Wait for a disk that is behind."""
        opening = self._openings.get(name)
        if opening is not None and opening.syncing is not None and self.is_behind(name):
            wait([opening.syncing])

    def store(self, name: Digest, index: int, data: Buffer) -> None:
        """Write one verified chunk. Raises OSError. A sync starts every `SYNCED_EVERY_BYTES`, without waiting.

        Waiting 0.1 s for a sync of 64 MiB would hold a fast network's bytes in memory, where a kill loses them.
        """
        opening = self._openings.get(
            name
        )  # before the file is opened: a chunk in an earlier file is not in a later one
        try:
            handle = open_private(self._place(name), os.O_WRONLY)
        except FileNotFoundError:
            if self._path(name).exists():
                return  # another download of it finished first
            raise
        try:
            write_at(handle, data, index * BLOB_CHUNK)
            if opening is not None:
                opening.wrote(index, len(data))
                if self._durable and opening.sync_is_due(SYNCED_EVERY_BYTES):
                    opening.syncing = self._syncs.submit(self._sync_behind, name, os.dup(handle), _sync_data)
        finally:
            os.close(handle)

    # ---- its end -------------------------------------------------------------------------------------------

    def take(self, name: Digest) -> PartialBlob | None:
        """End a download of verified chunks. Raises OSError if the disk lost some of them."""
        opening = self._openings.get(name)
        if opening is not None and not (opening.is_whole or self._path(name).exists()):
            # a sync failed, and the download started again
            raise OSError(errno.EIO, "the disk lost what was written", os.fspath(self._part(name)))
        self._openings.pop(name, None)
        return opening

    def give_name(self, name: Digest, opening: PartialBlob | None) -> bool:
        """Sync the file and rename it. False: the blob exists already, and this file is removed."""
        part, path = self._part(name), self._path(name)
        if opening is not None and opening.syncing is not None:
            wait([opening.syncing])  # if it fails, the file is gone
        if path.exists():
            part.unlink(missing_ok=True)
            return False
        with part.open("r+b") as file:
            self._sync_part(name, file.fileno(), os.fsync)
        part.rename(path)
        return True

    def drop(self, name: Digest) -> None:
        """Remove the file of a download that was given up."""
        self._openings.pop(name, None)
        self._part(name).unlink(missing_ok=True)

    def drop_quiet(self, quiet_s: float) -> int:
        """Remove files not written to for `quiet_s`; returns their number."""
        dropped = 0
        for path in self._blobs.glob("*.part"):
            with suppress(FileNotFoundError):  # finished meanwhile
                if path.stat().st_mtime < time.time() - quiet_s:
                    path.unlink()
                    dropped += 1
        return dropped

    def _sync_part(self, name: Digest, handle: int, sync: Callable[[int], None]) -> None:
        """Sync once. A failed sync is not retried.

        The kernel reports lost pages once and then marks them clean. The next sync would succeed, and memory would
        show bytes that the disk never got (fsyncgate, 2018).
        """
        try:
            sync(handle)
        except OSError as why:
            log.warning("the disk lost fetched bytes of %s; the blob is fetched again: %s", name.hex(), why)
            with suppress(FileNotFoundError):  # given up meanwhile, and perhaps started again in another file
                if os.path.samestat(os.fstat(handle), self._part(name).stat()):
                    self.drop(name)
            raise

    def _sync_behind(self, name: Digest, handle: int, sync: Callable[[int], None]) -> None:
        """Sync while writers go on. If it fails, the file is removed and the next write raises."""
        try:
            self._sync_part(name, handle, sync)
        finally:
            os.close(handle)

    def _path(self, name: Digest) -> Path:
        """Path of the whole blob."""
        return self._blobs / name.hex()

    def _part(self, name: Digest) -> Path:
        return self._blobs / f"{name.hex()}.part"

    def _place(self, name: Digest) -> str:
        """`_part` as text: a `Path` per chunk is too slow."""
        return f"{self._folder}/{name.hex()}.part"


def _empty(manifest: BlobManifest) -> set[int]:
    """Chunks of zeros, which a new file already has: moments at the start of a run consist of them."""
    zeros = {size: digest(bytes(size)) for size in {manifest.chunk_bytes(i) for i in range(len(manifest.chunks))}}
    return {i for i, chunk in enumerate(manifest.chunks) if chunk == zeros[manifest.chunk_bytes(i)]}
