"""Blobs that are being fetched, on disk: files filled chunk by chunk, which get their names once they are whole.

    blobs/<hex>.part    room for all of it; what is there already is found again after a restart, by hashing it

Promises: a file that a sync failed for is thrown away and fetched again, never believed; `give_name` returns only
once all bytes are on disk. Nothing is read out of a file that its opening does not know to be there.
Never waits for a sync while chunks arrive, unless whoever writes asks for it (`catch_up`).
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
PARTS_KEPT_S = 86400.0  # of a blob that is not whole, since it was last written to: a cut download goes on
PARTS_BUSY_S = 600.0  # where the disk is full only what was written to since then is spared
SYNCED_EVERY_BYTES = 64 * 2**20  # of a blob that is being fetched: what its end or a power cut finds unsynced

_sync_data = getattr(os, "fdatasync", os.fsync)

Memory = Callable[[int], memoryview]


class PartialBlobStore:
    """The unfinished blobs of one `PeerStore`, in the folder of its blobs."""

    def __init__(self, blobs: Path, durable: bool) -> None:
        self._blobs, self._folder, self._durable = blobs, os.fspath(blobs), durable
        self._openings: dict[Digest, PartialBlob] = {}
        self._syncs = ThreadPoolExecutor(1, "sync")

    def close(self) -> None:
        self._syncs.shutdown()

    # ---- begin ---------------------------------------------------------------------------------------------

    def make_room(self, name: Digest, manifest: BlobManifest, drop_spare: Callable[[], int]) -> set[int]:
        """For all of it; the chunks that an earlier attempt left here, each one verified. A full disk is asked for
        what quiet downloads hold, and for what `drop_spare` does; it says how many files that were."""
        path, before = self._part(name), self._openings.get(name)
        if before is not None and before.syncing is not None:
            wait([before.syncing])  # what that loses shall not be believed
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
        """Its room is made, and these chunks are in it."""
        self._openings.pop(name, None)
        self._openings[name] = opening = PartialBlob(manifest)
        for index in have:
            opening.wrote(index)
        if len(self._openings) > OPENINGS_HELD:
            self._openings.pop(next(iter(self._openings)))  # given up long ago

    # ---- what is here --------------------------------------------------------------------------------------

    def partly(self, name: Digest) -> PartialManifest | None:
        """What is here of a blob that is being fetched, if anything is."""
        opening = self._openings.get(name)
        return (
            PartialManifest(opening.manifest, bytes(opening.here))
            if opening is not None and any(opening.here)
            else None
        )

    def opening(self, name: Digest) -> PartialBlob | None:
        """The room that was made last for this blob, while it is being fetched."""
        return self._openings.get(name)

    def read(self, name: Digest, index: int, memory: Memory, flags: int) -> Payload | None:
        """A chunk that was written while the blob is being fetched, hashed anew every time: its file changes."""
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
            return None  # finished, or dropped, meanwhile
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
        """Write this chunk, whose digest is `proof`, if a blob that is being fetched is made of it. Says into which
        room it went; None: nothing was written, whoever asks for it to be stored may be told why."""
        opening = self._openings.get(name)
        if opening is None or not opening.fits(index, proof, len(data)):
            return None
        try:
            self.store(name, index, data)
        except OSError:
            return None
        return opening

    def is_behind(self, name: Digest) -> bool:
        """The disk still syncs what it was given before of this blob, and was given as much again."""
        opening = self._openings.get(name)
        return opening is not None and opening.is_syncing and opening.unsynced_bytes >= SYNCED_EVERY_BYTES

    def catch_up(self, name: Digest) -> None:
        """Waits for a disk that is behind."""
        opening = self._openings.get(name)
        if opening is not None and opening.syncing is not None and self.is_behind(name):
            wait([opening.syncing])

    def store(self, name: Digest, index: int, data: Buffer) -> None:
        """Write one verified chunk. Synced now and then, without waiting: a disk that syncs 64 MiB for 0.1 s would
        keep as much of a fast network's bytes from their file, in memory that a kill takes."""
        opening = self._openings.get(name)  # first: what is written into an earlier file is not in a later one
        try:
            handle = open_private(self._place(name), os.O_WRONLY)
        except FileNotFoundError:
            if self._path(name).exists():
                return  # somebody else who fetched it was done first
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
        """Every chunk was verified: its opening, which is none any more. OSError if the disk lost some of it."""
        opening = self._openings.get(name)
        if opening is not None and not (opening.is_whole or self._path(name).exists()):
            # a sync failed, and it was begun anew
            raise OSError(errno.EIO, "the disk lost what was written", os.fspath(self._part(name)))
        self._openings.pop(name, None)
        return opening

    def give_name(self, name: Digest, opening: PartialBlob | None) -> bool:
        """The synced file gets its final name; False if somebody else's has it already, and this one goes."""
        part, path = self._part(name), self._path(name)
        if opening is not None and opening.syncing is not None:
            wait([opening.syncing])  # if it fails there is no such file any more
        if path.exists():
            part.unlink(missing_ok=True)
            return False
        with part.open("r+b") as file:
            self._sync_part(name, file.fileno(), os.fsync)
        part.rename(path)
        return True

    def drop(self, name: Digest) -> None:
        """Forget what is here of a blob that is not fetched any more."""
        self._openings.pop(name, None)
        self._part(name).unlink(missing_ok=True)

    def drop_quiet(self, quiet_s: float) -> int:
        """Forget unfinished blobs that nothing was written to for so long. How many those were."""
        dropped = 0
        for path in self._blobs.glob("*.part"):
            with suppress(FileNotFoundError):  # finished meanwhile
                if path.stat().st_mtime < time.time() - quiet_s:
                    path.unlink()
                    dropped += 1
        return dropped

    def _sync_part(self, name: Digest, handle: int, sync: Callable[[int], None]) -> None:
        """A sync that failed is not tried again: the kernel tells of lost pages once and then calls them clean, so
        the next one would succeed, and memory would show what the disk never got (fsyncgate, 2018)."""
        try:
            sync(handle)
        except OSError as why:
            log.warning("the disk lost what was fetched of %s, it is to be fetched again: %s", name.hex(), why)
            with suppress(FileNotFoundError):  # given up meanwhile, and perhaps begun anew in another file
                if os.path.samestat(os.fstat(handle), self._part(name).stat()):
                    self.drop(name)
            raise

    def _sync_behind(self, name: Digest, handle: int, sync: Callable[[int], None]) -> None:
        """Beside those who write. If it fails the file goes, and whoever writes next is told so."""
        try:
            self._sync_part(name, handle, sync)
        finally:
            os.close(handle)

    def _path(self, name: Digest) -> Path:
        """Once it is whole."""
        return self._blobs / name.hex()

    def _part(self, name: Digest) -> Path:
        return self._blobs / f"{name.hex()}.part"

    def _place(self, name: Digest) -> str:
        """The same, without the price of a `Path`, for what happens once per chunk."""
        return f"{self._folder}/{name.hex()}.part"


def _empty(manifest: BlobManifest) -> set[int]:
    """The chunks of zeros, of which a file that was just made consists: moments at the beginning of a run."""
    zeros = {size: digest(bytes(size)) for size in {manifest.chunk_bytes(i) for i in range(len(manifest.chunks))}}
    return {i for i, chunk in enumerate(manifest.chunks) if chunk == zeros[manifest.chunk_bytes(i)]}
