"""Peer store: named values, blobs by digest, private state, keys and the event log in one folder.

    peer.key  session.key     secrets
    kept.sqlite               genesis, vertices, signatures, tickets; committed with fsync before `keep` returns
    blobs/<hex>               states, data, exhibits; .part during the download (partial_blobs.py), or .damaged
    blobs/*.new               blobs being written; spare.new is the file of a removed blob, to be written over
    blobs/<hex>.manifest      chunk digests; proved by the name, made again if lost
    private.bin               error feedback and inner state, keyed by vertex; losing it costs progress, not safety
    private.next              staged successor, valid once the current round counts the update in it
    facts.jsonl               event log for people and plots, and facts.old.jsonl before it (event_log.py)
    door  lock  atoll.log  *.safetensors   control socket, owner, messages; data and model for the user

Invariants:
- All files are private to this user: 0600 in 0700 (ownership.py).
- What `keep` or `finish_blob` returned for survives a power cut. A half-written file never has a final name.
- A blob is used only if its bytes hash to its name. Chunks that left memory are hashed again
  (`ChunkVerificationCache`).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import Payload
from atoll.crypto.digest import BlobManifest, Buffer, blob_id, digest, manifest_of_spans
from atoll.peer.tasks import ReadVertices
from atoll.protocol.history.era_signatures import SEALED_HELD, ReadEraSignatures
from atoll.protocol.transfer.tasks import BlobStoragePrepared, CloseBlob, DropBlob, PrepareBlobStorage, ReadManifest
from atoll.runtime.network.buffer_pool import for_once
from atoll.runtime.network.file_slice import FileSlice, SharedOpenFile
from atoll.runtime.storage.atomic_files import aside, open_elsewhere, read_at, refused, sync_folder, write_durably
from atoll.runtime.storage.ownership import lock_folder, make_private, open_private, private_folder, read_secret
from atoll.runtime.storage.partial_blobs import PARTS_KEPT_S, Memory, PartialBlobStore
from atoll.runtime.storage.staged_file import StagedFile
from atoll.runtime.storage.verified_chunks import ChunkVerificationCache, FileStamp
from atoll.runtime.system import READ_CACHED

VERTICES_GIVEN = 256  # newest vertices loaded by a starting peer; older ones stay on disk
MANIFESTS_HELD = 64
_MANIFEST = msgspec.msgpack.Decoder(BlobManifest)
SPARE_FROM_BYTES = 2**20  # size from which the file of a removed blob is reused


def fresh(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


def damaged(what: str, folder: Path) -> UsageError:
    """The error of a folder from which a peer must not resume."""
    return UsageError(
        "E-DIR-07",
        f"{what} in {folder} is damaged or gone",
        cause="this disk changed what was written; a peer that resumed from it would refuse what others agree on",
        fix=f"atoll verify {folder} names all that is damaged. To go on, ask a member for a ticket (atoll invite), "
        "copy peer.key, and nothing else, into a new folder (mkdir -m 700), and join there: the others know that "
        "identity",
    )


class NotInMemory(Exception):
    """The read would wait for the disk."""


class PeerStore:
    """One peer's folder. A second process that opens it gets UsageError."""

    def __init__(self, folder: Path, durable: bool = True) -> None:
        """`durable=False`: nothing is synced, and a crash loses the folder; for peers that never resume."""
        self.folder, self._durable = folder, durable
        try:
            private_folder(folder)
            private_folder(folder / "blobs")
            make_private(folder / "kept.sqlite")  # its log and index get the same mode
            self._lock = lock_folder(self.folder)
        except OSError as why:
            raise refused("open this folder", why.strerror, folder) from why
        self._blobs = os.fspath(folder / "blobs")
        self._spare = folder / "blobs" / "spare.new"  # file of a removed blob, overwritten by the next one
        for left in [*(folder / "blobs").glob("*.new"), *(folder / "blobs").glob("*.tmp")]:
            left.unlink(missing_ok=True)  # left by a process that ended while it wrote
        try:
            self._database = self._open_database()
        except sqlite3.OperationalError as why:
            os.close(self._lock)
            raise refused("open kept.sqlite", why, folder) from why
        except sqlite3.DatabaseError as why:
            os.close(self._lock)
            raise damaged(f"kept.sqlite ({why})", folder) from why
        self._manifests: OrderedDict[Digest, BlobManifest] = OrderedDict()
        self._proofs: dict[Digest, ChunkVerificationCache] = {}  # only for blobs with a manifest in memory
        self._served: dict[Digest, float] = {}  # blob → time at which one of its chunks went to a member
        self.unfinished = PartialBlobStore(folder / "blobs", durable)
        self.private = StagedFile(folder, "private")  # private_state.py

    def _open_database(self) -> sqlite3.Connection:
        path = self.folder / "kept.sqlite"
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        # WAL with FULL syncs at every commit
        database.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'OFF'}")
        database.execute("CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, value BLOB NOT NULL)")
        return database

    def close(self) -> None:
        """Close the folder. Does nothing a second time."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        self.unfinished.close()
        self._database.close()
        os.close(lock)

    # ---- named values --------------------------------------------------------------------------------------

    def keep(self, values: Iterable[tuple[str, bytes | None]]) -> None:
        """Write these values, or delete those that are None, in one durable step. Raises RunFailedError."""
        try:
            self._database.execute("BEGIN")
            for name, value in values:
                if value is None:
                    self._database.execute("DELETE FROM kept WHERE name = ?", (name,))
                else:
                    self._database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (name, value))
            self._database.execute("COMMIT")
        except sqlite3.OperationalError as why:
            if self._database.in_transaction:
                with suppress(sqlite3.OperationalError):
                    self._database.execute("ROLLBACK")
            raise refused("write kept.sqlite", why, self.folder) from why

    def startup_values(self) -> dict[str, bytes]:
        """Values for a starting peer: all but older vertices and older sealed eras. Raises UsageError."""
        try:
            return self._kept()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as why:
            raise damaged(f"kept.sqlite ({why})", self.folder) from why

    def _kept(self) -> dict[str, bytes]:
        rows = self._database.execute(
            "SELECT name, value FROM kept WHERE name NOT LIKE 'vertex/%' AND name NOT LIKE 'sealed/%'"
        ).fetchall()
        for kind, given in (("vertex/", VERTICES_GIVEN), ("sealed/", SEALED_HELD)):
            rows += self._database.execute(
                "SELECT name, value FROM kept WHERE name LIKE ? "
                "ORDER BY CAST(substr(name, 8) AS INTEGER) DESC LIMIT ?",
                (f"{kind}%", given),
            ).fetchall()
        return dict(rows)

    def value(self, name: str) -> bytes | None:
        row = self._database.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return bytes(row[0]) if row is not None else None

    def vertices_from(self, first: int, bytes_max: int) -> tuple[bytes, ...]:
        """Consecutive vertices from round `first` within `bytes_max`; at least one if it is here."""
        chosen: list[bytes] = []
        size = 0
        while True:
            vertex = self.value(f"vertex/{first + len(chosen)}")
            size += len(vertex or b"")
            if vertex is None or (chosen and size > bytes_max):
                return tuple(chosen)
            chosen.append(vertex)

    def vertices(self) -> list[bytes]:
        """Every vertex after genesis, oldest first, encoded."""
        rows = self._database.execute(
            "SELECT value FROM kept WHERE name LIKE 'vertex/%' ORDER BY CAST(substr(name, 8) AS INTEGER)"
        )
        return [value for (value,) in rows]

    # ---- blobs ---------------------------------------------------------------------------------------------

    def put_blob(self, *pieces: Buffer) -> Digest:
        """Store the concatenated pieces durably; returns the blob's name."""
        manifest = manifest_of_spans(pieces)
        name = blob_id(manifest)
        path = self._path(name)
        written = not path.exists()
        if written and self._durable:
            self.take_spare(aside(path).name)
            write_durably(path, pieces)
        elif written:
            with open(path, "wb", opener=open_private) as file:
                file.writelines(pieces)
        self._remember(name, manifest, self._stamp(name) if written else None)
        self._write_manifest(name, manifest)
        return name

    def take_spare(self, name: str) -> Path:
        """Path of a file to be written, which is that of a removed blob where no process has it open."""
        path = self.folder / "blobs" / name
        with suppress(FileNotFoundError):  # another thread takes or replaces the spare at any time
            if self._spare.exists() and open_elsewhere(self._spare.rename(path)):
                path.unlink()
        return path

    def sync(self, handle: int) -> None:
        """Make an open file durable, if this folder is."""
        if self._durable:
            os.fsync(handle)

    def new_blob(self) -> NewBlob:
        """A blob that is written piece by piece and named at the end."""
        return NewBlob(self, self.folder / "blobs" / "being-written.new", self._durable)

    def has_blob(self, name: Digest) -> bool:
        return self._path(name).exists()

    def blob_bytes(self) -> int:
        """Disk space of finished blobs."""
        size = 0
        for path in (self.folder / "blobs").iterdir():
            with suppress(FileNotFoundError):  # removed meanwhile
                size += path.stat().st_size if path.suffix == "" else 0
        return size

    def blobs_within(self, names: Sequence[Digest], bytes_max: int) -> set[Digest]:
        """The longest prefix of these blobs that takes at most `bytes_max`."""
        kept, size = set[Digest](), 0
        for name in names:
            path = self._path(name)
            size += path.stat().st_size if path.exists() else 0
            if size > bytes_max:
                break
            kept.add(name)
        return kept

    def read_blob(self, name: Digest) -> memoryview | None:
        """The verified bytes; None if the blob is not here. A damaged file is set aside."""
        try:
            handle = os.open(self._place(name), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(handle)  # before reading, so that a change meanwhile is detected
            data = for_once(found.st_size)
            manifest = self._read_all(name, handle, FileStamp.of(found), data)
        finally:
            os.close(handle)
        if blob_id(manifest) != name:
            self.set_aside(name)
            return None
        self._remember(name, manifest, FileStamp.of(found))
        return data.toreadonly()

    def _read_all(self, name: Digest, handle: int, stamp: FileStamp, data: memoryview) -> BlobManifest:
        """Read the file; returns its manifest. Chunks hashed in this process and still in memory are believed."""
        proof, held = self._proofs.get(name), self._manifests.get(name)
        known = held if proof is not None and proof.stamp == stamp else None
        chunks: list[Digest] = []
        for index, begin in enumerate(range(0, len(data), BLOB_CHUNK)):
            place = data[begin : begin + BLOB_CHUNK]
            if known and proof and proof.chunks[index]:
                if _stayed_in_memory(handle, place, begin):
                    chunks.append(known.chunks[index])
                    continue
                proof.went(index)
            read_at(handle, place, begin)
            chunks.append(digest(place))
        return BlobManifest(len(data), tuple(chunks))

    def set_aside(self, name: Digest) -> None:
        """Rename a damaged blob, so that it counts as missing."""
        self._proofs.pop(name, None)
        self._path(name).rename(self._path(name).with_suffix(".damaged"))

    def blob_path(self, name: Digest) -> Path:
        return self._path(name)

    def manifest(self, name: Digest) -> BlobManifest | None:
        """Manifest of a finished blob. It is stored beside the blob, since making it means reading all bytes."""
        if not self.has_blob(name):
            return None
        held = self._manifests.get(name) or self._read_manifest(name)
        if held is None:
            try:
                with open(self._place(name), "rb") as file:
                    held = manifest_of_spans(iter(partial(file.read, BLOB_CHUNK), b""))
                if blob_id(held) != name:
                    self.set_aside(name)
                    return None
            except FileNotFoundError:  # removed meanwhile
                return None
            self._write_manifest(name, held)
        self._remember(name, held)
        return held

    def read_chunk(self, name: Digest, index: int, memory: Memory = fresh) -> Payload | None:
        """None if the chunk is not here or is damaged; a damaged file is set aside."""
        manifest = self.manifest(name)
        if manifest is None:
            return self.unfinished.read(name, index, memory, 0)
        return self._read_chunk(name, manifest, index, memory, 0)

    def note_served(self, name: Digest) -> None:
        """A chunk of this blob goes to a member. Called on the event loop."""
        self._served[name] = time.monotonic()

    def served_since(self, earliest: float) -> list[Digest]:
        """Blobs of which chunks went to members since this monotonic time, the last one first."""
        served = self._served = {name: at for name, at in list(self._served.items()) if at >= earliest}
        return sorted(served, key=served.__getitem__, reverse=True)

    def verify_blob(self, name: Digest) -> bool:
        """Whether every byte is here; a damaged file is set aside. Hashed chunks still in memory are not read."""
        manifest, room = self.manifest(name), fresh(BLOB_CHUNK)
        if manifest is None:
            return False
        for index in range(len(manifest.chunks)):
            with suppress(OSError):  # it left memory
                if READ_CACHED and self._proved_chunk(name, manifest, index):
                    continue
            if not self._read_chunk(name, manifest, index, lambda size: room[:size], 0):
                return False
        return True

    def read_chunk_at_hand(self, name: Digest, index: int, memory: Memory) -> Payload | None:
        """`read_chunk` without waiting for the disk. Raises NotInMemory if it would wait.

        A chunk that stayed in memory since it was hashed is returned as a `FileSlice`, not read yet.
        """
        manifest = self._manifests.get(name)
        if manifest is None or not READ_CACHED:
            raise NotInMemory
        try:
            proved = self._proved_chunk(name, manifest, index)
            return proved or self._read_chunk(name, manifest, index, memory, READ_CACHED)
        except OSError as why:
            if why.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT):
                raise
            if proof := self._proofs.get(name):
                proof.went(index)
            raise NotInMemory from None

    def _proved_chunk(self, name: Digest, manifest: BlobManifest, index: int) -> Payload | None:
        proof = self._proofs.get(name)
        if proof is None or not 0 <= index < len(proof.chunks) or not proof.chunks[index]:
            return None
        if self._stamp(name) != proof.stamp:
            return None  # the file was changed
        proof.file = proof.file or SharedOpenFile(self._place(name))
        begin = index * BLOB_CHUNK
        stretch = FileSlice(proof.file, begin, begin + manifest.chunk_bytes(index))
        stretch.touch(READ_CACHED)
        return Payload(manifest.chunks[index], len(stretch), stretch)

    def _read_chunk(
        self, name: Digest, manifest: BlobManifest, index: int, memory: Memory, flags: int
    ) -> Payload | None:
        if not 0 <= index < len(manifest.chunks):
            return None
        data = memory(manifest.chunk_bytes(index))
        try:
            handle = os.open(self._place(name), os.O_RDONLY)
        except FileNotFoundError:  # removed, or not whole yet
            return self.unfinished.read(name, index, memory, flags)
        try:
            count = os.preadv(handle, [data], index * BLOB_CHUNK, flags)
            stamp = FileStamp.of(os.fstat(handle))  # after reading, so that an earlier change is detected
        finally:
            os.close(handle)
        if flags and count < len(data):
            raise BlockingIOError(errno.EAGAIN, "not all of it is in memory")
        if digest(data[:count]) != manifest.chunks[index]:
            with suppress(FileNotFoundError):
                self.set_aside(name)  # a damaged chunk must not make this peer look dishonest
            return None
        proof = self._proofs.get(name)
        if proof is None or proof.stamp != stamp:
            proof = self._proofs[name] = ChunkVerificationCache(stamp, bytearray(len(manifest.chunks)))
        proof.chunks[index] = 1
        return Payload(manifest.chunks[index], count, data)

    def open_blob(self, name: Digest, manifest: BlobManifest) -> frozenset[int]:
        """Reserve room for a download; returns the verified chunks that are already here.

        They are from an earlier attempt or from other blobs that share chunks, such as an earlier state.
        """
        if self.has_blob(name):
            return frozenset(range(len(manifest.chunks)))
        have = self.unfinished.make_room(name, manifest, self._drop_spare)
        have |= self._copy_from_others(name, manifest, have)
        self._remember(name, manifest)
        self.unfinished.begin(name, manifest, have)
        return frozenset(have)

    def _copy_from_others(self, name: Digest, manifest: BlobManifest, have: set[int]) -> set[int]:
        """Copy chunks that finished blobs share with this one; returns their indices."""
        lacking: dict[tuple[Digest, int], list[int]] = {}  # indices by digest and length
        for index, wanted in enumerate(manifest.chunks):
            if index not in have:
                lacking.setdefault((wanted, manifest.chunk_bytes(index)), []).append(index)
        copied: set[int] = set()
        for path in (self.folder / "blobs").glob("[0-9a-f]" * 2 * DIGEST_BYTES + ".manifest"):
            other = Digest(bytes.fromhex(path.stem))
            held = self._manifests.get(other) or self._read_manifest(other)
            if held is None:
                continue
            for at, shared in enumerate(held.chunks):
                wanted = shared, held.chunk_bytes(at)
                try:
                    chunk = self.read_chunk(other, at) if wanted in lacking else None
                except OSError:  # a bad sector: the chunk is fetched
                    continue
                if chunk is None:
                    continue
                for index in lacking.pop(wanted):
                    self.unfinished.store(name, index, chunk.data)
                    copied.add(index)
        return copied

    def finish_blob(self, name: Digest) -> None:
        """Give a completely verified download its final name, durably. Raises OSError."""
        opening = self.unfinished.take(name)
        if opening is not None:
            self._write_manifest(name, opening.manifest)
        if not self.unfinished.give_name(name, opening):
            return
        if opening is not None:
            self._remember(name, opening.manifest, self._stamp(name))
        sync_folder(self.folder / "blobs")

    def take_in(self, path: Path, name: Digest, manifest: BlobManifest) -> None:
        """Rename a whole, synced file to a blob."""
        self._write_manifest(name, manifest)
        path.rename(self._path(name))
        self._remember(name, manifest, self._stamp(name))
        if self._durable:
            sync_folder(path.parent)

    def drop_blobs(self, keep: set[Digest]) -> None:
        """Remove finished blobs outside `keep`, and old files of interrupted downloads."""
        self.unfinished.drop_quiet(PARTS_KEPT_S)
        for path in (self.folder / "blobs").iterdir():
            if path.suffix == "" and (name := Digest(bytes.fromhex(path.name))) not in keep:
                path.with_suffix(".manifest").unlink(missing_ok=True)
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if found.st_size >= SPARE_FROM_BYTES and found.st_nlink == 1:  # not hard-linked by a backup
                        path.rename(self._spare)
                    else:
                        path.unlink()
                self._proofs.pop(name, None)  # its open file closes once no slice is being sent

    def _drop_spare(self) -> int:
        spared = self._spare.exists()
        self._spare.unlink(missing_ok=True)
        return int(spared)

    # ---- secrets -------------------------------------------------------------------------------------------

    def secret(self, name: str) -> bytes | None:
        return read_secret(self.folder / name)

    def write_secret(self, name: str, data: bytes) -> None:
        write_durably(self.folder / name, (data,), afresh=True)

    # ---- helpers -----------------------------------------------------------------------------------------

    def _path(self, name: Digest) -> Path:
        return self.folder / "blobs" / name.hex()

    def _place(self, name: Digest) -> str:
        """`_path` as text: a `Path` per chunk is too slow."""
        return f"{self._blobs}/{name.hex()}"

    def _read_manifest(self, name: Digest) -> BlobManifest | None:
        try:
            manifest = _MANIFEST.decode(self._path(name).with_suffix(".manifest").read_bytes())
            manifest.check()
        except (OSError, msgspec.DecodeError, ValueError):
            return None
        return manifest if blob_id(manifest) == name else None

    def _write_manifest(self, name: Digest, manifest: BlobManifest) -> None:
        path = self._path(name).with_suffix(".manifest")
        # a lost or truncated manifest is made again on demand
        with suppress(OSError), open(path, "wb", opener=open_private) as file:
            file.write(msgspec.msgpack.encode(manifest))

    def _remember(self, name: Digest, manifest: BlobManifest, proved: FileStamp | None = None) -> None:
        """`proved` is the stamp of a file, all chunks of which were just hashed."""
        self._manifests[name] = manifest
        if proved is not None:
            self._proofs[name] = ChunkVerificationCache(proved, bytearray(b"\1") * len(manifest.chunks))
        if len(self._manifests) > MANIFESTS_HELD:
            forgotten, _ = self._manifests.popitem(last=False)
            self._proofs.pop(forgotten, None)

    def _stamp(self, name: Digest) -> FileStamp | None:
        with suppress(FileNotFoundError):  # removed meanwhile
            return FileStamp.of(os.stat(self._place(name)))
        return None


class NewBlob:
    """A blob without a name until it is whole. One at a time per folder; call `finish` or `drop`."""

    def __init__(self, store: PeerStore, path: Path, durable: bool) -> None:
        self._store, self._path, self._durable = store, path, durable
        self._file = open(path, "wb", opener=open_private)  # noqa: SIM115  # until `finish` or `drop`
        self._chunks: list[Digest] = []
        self._size = 0

    def write(self, data: Buffer) -> None:
        """Append whole chunks; only the last call may end within one."""
        assert self._size % BLOB_CHUNK == 0
        view = memoryview(data).cast("B")
        self._chunks += [digest(view[at : at + BLOB_CHUNK]) for at in range(0, len(view), BLOB_CHUNK)]
        self._size += self._file.write(view)

    def finish(self, goal: Digest | None = None) -> Digest | None:
        """Make the blob durable and return its name; None, and nothing is left, if `goal` is another name."""
        manifest = BlobManifest(self._size, tuple(self._chunks))
        name = blob_id(manifest)
        if goal not in (None, name):
            self.drop()
            return None
        self._file.flush()
        if self._durable:
            os.fsync(self._file.fileno())
        self._file.close()
        self._store.take_in(self._path, name, manifest)
        return name

    def drop(self) -> None:
        with suppress(OSError):  # a full disk refuses again
            self._file.close()
        self._path.unlink(missing_ok=True)


def run_store_task(store: PeerStore, work: Any) -> Any:
    """Do a task that needs only the store. Chunks take another way (chunk_disk_queue.py)."""
    match work:
        case ReadVertices():
            return store.vertices_from(work.first, work.bytes_max)
        case ReadEraSignatures():
            return store.value(f"sealed/{work.round}")
        case PrepareBlobStorage():
            return BlobStoragePrepared(store.open_blob(work.blob, work.manifest))
        case CloseBlob():
            return store.finish_blob(work.blob)
        case DropBlob():
            return store.unfinished.drop(work.blob)
        case ReadManifest():
            return store.manifest(work.blob) or (store.unfinished.partly(work.blob) if work.partly else None)
        case _:
            raise RunFailedError("E-RUN-05", f"no worker does {type(work).__name__}")


def _stayed_in_memory(handle: int, place: memoryview, at: int) -> bool:
    """True if all bytes were in memory and are now in `place`; bytes read from disk may be damaged."""
    try:
        return bool(READ_CACHED) and os.preadv(handle, [place], at, READ_CACHED) == len(place)
    except OSError:
        return False
