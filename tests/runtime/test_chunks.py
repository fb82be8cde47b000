"""Chunks between a real disk and a loop: nothing is written that is not asked for by a manifest, nothing waits."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import Payload
from atoll.crypto.digest import BlobManifest, blob_id, digest, manifest_of
from atoll.protocol.transfer.tasks import PartialManifest, ReadChunk, ReadManifest, StoreChunk
from atoll.runtime.storage import partial_blobs
from atoll.runtime.storage import store as stores
from atoll.runtime.storage.chunk_disk_queue import ARRIVING_MAX, ChunkDiskQueue
from atoll.runtime.storage.partial_blobs import PartialBlobStore
from atoll.runtime.storage.store import NotInMemory, PeerStore, run_store_task
from atoll.wire.messages.history import ChunkResponse

SIZE = 2 * BLOB_CHUNK + 5000
DATA = os.urandom(SIZE)
MANIFEST = manifest_of(DATA)
BLOB = blob_id(MANIFEST)


needs_page_cache = pytest.mark.skipif(not stores.READ_CACHED, reason="no way to ask only what is in memory")


def story(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def piece(index: int, data: bytes = DATA) -> memoryview:
    return memoryview(data)[index * BLOB_CHUNK : (index + 1) * BLOB_CHUNK]


async def taken(chunks: ChunkDiskQueue, *arriving: tuple[int, memoryview], blob: Digest = BLOB) -> list[Payload]:
    """These chunks come in one turn of the loop; what the machine is told about them."""
    told = [asyncio.get_running_loop().create_future() for _ in arriving]
    for (index, data), future in zip(arriving, told, strict=True):
        chunks.receive_chunk(ChunkResponse(blob, index), data, future.set_result)
    return list(await asyncio.gather(*told))


async def done(chunks: ChunkDiskQueue, work: Any) -> Any:
    answer = asyncio.get_running_loop().create_future()
    chunks.run(work, answer.set_result)
    assert not answer.done(), "answered inside the call that asked"
    return await answer


@contextmanager
def disk(folder: Path) -> Iterator[tuple[PeerStore, ChunkDiskQueue]]:
    store = PeerStore(folder)
    chunks = ChunkDiskQueue(store)
    yield store, chunks
    chunks.close()
    store.close()


def on_disk(store: PeerStore) -> bytes:
    return store.blob_path(BLOB).with_suffix(".part").read_bytes()


@story
async def test_a_chunk_is_on_disk_before_the_machine_hears_of_it(tmp_path: Path):
    """All three come, the machine asks for them to be stored, and the file is whole under its name."""
    with disk(tmp_path) as (store, chunks):
        store.open_blob(BLOB, MANIFEST)
        payloads = await taken(chunks, *((i, piece(i)) for i in range(3)))
        assert on_disk(store) == DATA
        assert [p.digest for p in payloads] == list(MANIFEST.chunks)
        for index, payload in enumerate(payloads):
            assert await done(chunks, StoreChunk(BLOB, index, payload)) is None
        store.finish_blob(BLOB)
        assert store.read_blob(BLOB) == DATA


@story
async def test_what_no_manifest_names_is_never_written(tmp_path: Path):
    """Another byte, the right bytes in the wrong place, a place beyond the end, a blob that nobody wants."""
    with disk(tmp_path) as (store, chunks):
        store.open_blob(BLOB, MANIFEST)
        wrong = bytearray(piece(0))
        wrong[77] ^= 1
        lies = ((0, memoryview(bytes(wrong))), (1, piece(0)), (3, piece(0)), (2**63, piece(0)))
        payloads = await taken(chunks, *lies)
        assert [p.digest for p in payloads] == [digest(data) for _, data in lies], "the machine names the liar"
        await taken(chunks, (0, piece(0)), blob=digest(b"of another blob"))
        assert on_disk(store) == bytes(SIZE) and len(list((tmp_path / "blobs").iterdir())) == 1


@story
async def test_a_chunk_that_went_into_a_file_that_is_gone_is_written_again(tmp_path: Path):
    """The fetch is given up after the chunk came, and begun anew before the machine asks for it to be stored."""
    with disk(tmp_path) as (store, chunks):
        store.open_blob(BLOB, MANIFEST)
        (payload,) = await taken(chunks, (1, piece(1)))
        store.unfinished.drop(BLOB)
        assert store.open_blob(BLOB, MANIFEST) == frozenset()
        assert await done(chunks, StoreChunk(BLOB, 1, payload)) is None
        assert store.open_blob(BLOB, MANIFEST) == {1}


@story
async def test_a_disk_that_refuses_is_told_to_whoever_asks_for_the_chunk_to_be_stored(tmp_path: Path):
    with disk(tmp_path) as (store, chunks):
        store.open_blob(BLOB, MANIFEST)
        store.blob_path(BLOB).with_suffix(".part").unlink()
        (payload,) = await taken(chunks, (0, piece(0)))
        assert isinstance(await done(chunks, StoreChunk(BLOB, 0, payload)), FileNotFoundError)


@story
async def test_a_flood_of_chunks_waits_in_the_network_and_not_in_memory(tmp_path: Path):
    """Ten times as many as may wait, in one turn of the loop: the rest is judged at once, before more is read."""
    with disk(tmp_path) as (_, chunks):
        told: list[Payload] = []
        for _ in range(10 * ARRIVING_MAX):
            chunks.receive_chunk(ChunkResponse(BLOB, 0), memoryview(b"flood"), told.append)
        assert len(told) >= 9 * ARRIVING_MAX - 16
        while len(told) < 10 * ARRIVING_MAX:
            await asyncio.sleep(0)


@story
async def test_what_the_thread_does_not_keep_up_with_is_on_disk_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It waits for the disk with one chunk, others wait for it: what comes next is written at once, since a process
    that is killed loses what lies in its memory. Not where the disk is behind: then the loop would wait, too."""
    held, let_go = Event(), Event()
    monkeypatch.setattr(PartialBlobStore, "catch_up", lambda store, name: (held.set(), let_go.wait()))
    with disk(tmp_path) as (store, chunks):
        store.open_blob(BLOB, MANIFEST)
        told: list[Payload] = []
        chunks.receive_chunk(ChunkResponse(BLOB, 0), piece(0), told.append)
        held.wait()
        for _ in range(ARRIVING_MAX):
            chunks.receive_chunk(ChunkResponse(BLOB, 0), piece(0), told.append)
        chunks.receive_chunk(ChunkResponse(BLOB, 1), piece(1), told.append)
        assert len(told) == 1 and on_disk(store)[BLOB_CHUNK : 2 * BLOB_CHUNK] == piece(1)
        monkeypatch.setattr(PartialBlobStore, "is_behind", lambda store, name: True)
        chunks.receive_chunk(ChunkResponse(BLOB, 2), piece(2), told.append)
        assert len(told) == 2 and told[1].digest == MANIFEST.chunks[2]
        assert on_disk(store)[2 * BLOB_CHUNK :] == bytes(5000)
        let_go.set()
        assert await done(chunks, StoreChunk(BLOB, 2, told[1])) is None
        while len(told) < 3 + ARRIVING_MAX:
            await asyncio.sleep(0)
        assert on_disk(store) == DATA


@needs_page_cache
@story
async def test_chunks_in_memory_are_read_without_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also the last, shorter one; what is not here or beyond the end is said to be so."""
    with disk(tmp_path) as (store, chunks):
        assert store.put_blob(DATA) == BLOB
        monkeypatch.setattr(store, "read_chunk", _went_to_the_thread)
        for index in range(3):
            read = await done(chunks, ReadChunk(BLOB, index))
            assert bytes(read.data) == piece(index) and read.digest == MANIFEST.chunks[index]
        assert await done(chunks, ReadChunk(BLOB, 3)) is None


@pytest.mark.parametrize("why", ["no manifest in memory", "not in the page cache"])
@story
async def test_what_must_come_from_disk_is_read_on_the_thread(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = PeerStore(tmp_path)
    store.put_blob(DATA)
    if why == "no manifest in memory":
        store.close()
        store = PeerStore(tmp_path)
    else:
        monkeypatch.setattr(store, "read_chunk_at_hand", _not_in_memory)
    chunks = ChunkDiskQueue(store)
    assert (await done(chunks, ReadChunk(BLOB, 2))).data == piece(2)
    assert await done(chunks, ReadChunk(digest(b"nobody's"), 0)) is None
    chunks.close()
    store.close()


def _not_in_memory(*_: object) -> None:
    raise NotInMemory


def _went_to_the_thread(*_: object) -> None:
    raise AssertionError("went to the thread")


@story
async def test_a_damaged_chunk_in_memory_is_not_served_either(tmp_path: Path):
    with disk(tmp_path) as (store, chunks):
        store.put_blob(DATA)
        with store.blob_path(BLOB).open("r+b") as file:
            file.seek(BLOB_CHUNK + 7)
            file.write(b"?")
        assert (await done(chunks, ReadChunk(BLOB, 0))).data == piece(0)
        assert await done(chunks, ReadChunk(BLOB, 1)) is None and not store.has_blob(BLOB)


@needs_page_cache
@story
async def test_what_was_written_here_and_stayed_in_memory_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor what was restored, or served once before: digests are counted. Nothing leaves memory here, however busy
    the computer is."""
    hashed: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(stores.os, "preadv", lambda handle, to, at, flags=0: preadv(handle, to, at))

    def counted(data: memoryview) -> Digest:
        hashed.append(len(data))
        return digest(data)

    async def served(store: PeerStore) -> int:
        chunks, before = ChunkDiskQueue(store), len(hashed)
        for index in range(3):
            assert bytes((await done(chunks, ReadChunk(BLOB, index))).data) == piece(index)
        chunks.close()
        return len(hashed) - before

    store = PeerStore(tmp_path)
    store.put_blob(DATA)
    monkeypatch.setattr(stores, "digest", counted)
    assert await served(store) == 0
    store.close()
    store = PeerStore(tmp_path)  # started again, it has looked at nothing yet
    assert [await served(store), await served(store)] == [3, 0]
    store.close()
    store = PeerStore(tmp_path)
    assert store.read_blob(BLOB) == DATA and await served(store) == 0
    store.close()


@needs_page_cache
@story
async def test_once_a_chunk_had_to_come_from_disk_its_neighbours_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk rots in silence: the file looks as it did. Chunk 1 went and came back with chunk 2. What lies
    further off is not hashed again: once the first page that went cost all the rest of a state its hash."""
    preadv, gone = os.preadv, [2 * BLOB_CHUNK]
    hashed: list[int] = []

    def counted(data: memoryview) -> Digest:
        hashed.append(len(data))
        return digest(data)

    def forgetful(handle: int, buffers: Any, at: int, flags: int = 0) -> int:
        if flags and at in gone:
            gone.remove(at)
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return preadv(handle, buffers, at)

    store = PeerStore(tmp_path)
    store.put_blob(DATA)
    path = store.blob_path(BLOB)
    looked = path.stat()
    with path.open("r+b") as file:
        file.seek(BLOB_CHUNK + 7)
        file.write(b"?")
    os.utime(path, ns=(looked.st_atime_ns, looked.st_mtime_ns))
    monkeypatch.setattr(stores.os, "preadv", forgetful)
    monkeypatch.setattr(stores, "digest", counted)
    chunks = ChunkDiskQueue(store)
    assert (await done(chunks, ReadChunk(BLOB, 2))).data == piece(2) and hashed == [len(piece(2))]
    assert bytes((await done(chunks, ReadChunk(BLOB, 0))).data) == piece(0) and len(hashed) == 1
    assert await done(chunks, ReadChunk(BLOB, 1)) is None and not store.has_blob(BLOB)
    chunks.close()
    store.close()


@needs_page_cache
def test_what_was_just_fetched_is_read_without_being_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All was, when it came. What went out of memory is, and found rotten, though its file looks as it did."""
    hashed: list[int] = []
    gone: list[int] = []
    preadv = os.preadv

    def forgetful(handle: int, buffers: Any, at: int, flags: int = 0) -> int:
        if flags and at in gone:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return preadv(handle, buffers, at)

    def counted(data: memoryview) -> Digest:
        hashed.append(len(data))
        return digest(data)

    store = PeerStore(tmp_path)
    store.open_blob(BLOB, MANIFEST)
    for index in range(3):
        store.unfinished.land(BLOB, index, MANIFEST.chunks[index], piece(index))
    store.finish_blob(BLOB)
    monkeypatch.setattr(stores.os, "preadv", forgetful)
    monkeypatch.setattr(stores, "digest", counted)
    assert store.read_blob(BLOB) == DATA and hashed == []
    gone.append(BLOB_CHUNK)
    assert store.read_blob(BLOB) == DATA and hashed == [BLOB_CHUNK, len(piece(2))]  # its neighbour came along
    path = store.blob_path(BLOB)
    looked = path.stat()
    with path.open("r+b") as file:
        file.seek(BLOB_CHUNK + 7)
        file.write(b"?")
    os.utime(path, ns=(looked.st_atime_ns, looked.st_mtime_ns))
    assert store.read_blob(BLOB) is None and not store.has_blob(BLOB)
    store.close()


@story
async def test_a_chunk_on_its_way_keeps_its_bytes_though_its_blob_goes(tmp_path: Path):
    """Files of blobs that go are lent to the next ones, to be written over: not while they are being sent."""
    with disk(tmp_path) as (store, chunks):
        store.put_blob(DATA)
        read = await done(chunks, ReadChunk(BLOB, 1))
        store.drop_blobs(keep=set())
        store.put_blob(os.urandom(SIZE))
        assert bytes(read.data) == piece(1)
        assert await done(chunks, ReadChunk(BLOB, 1)) is None


def test_a_disk_without_room_says_so_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(handle: int, at: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores.os, "posix_fallocate", full)
    store = PeerStore(tmp_path)
    with pytest.raises(RunFailedError, match="E-DISK-01 cannot make room"):
        store.open_blob(BLOB, MANIFEST)
    assert not list((tmp_path / "blobs").iterdir())
    store.close()


def test_a_file_system_that_sets_nothing_aside_is_no_obstacle_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def cannot(handle: int, at: int, size_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(stores.os, "posix_fallocate", cannot)
    store = PeerStore(tmp_path)
    assert store.open_blob(BLOB, MANIFEST) == frozenset() and on_disk(store) == bytes(SIZE)
    assert store.open_blob(blob_id(BlobManifest(0, ())), BlobManifest(0, ())) == frozenset()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "cannot reserve space (Operation not supported)" in told and BLOB.hex() in told
    store.close()


def test_a_long_download_is_synced_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that its end has little left to wait for, and a power cut little to lose."""
    synced: list[int] = []
    monkeypatch.setattr(partial_blobs, "_sync_data", synced.append)
    monkeypatch.setattr(partial_blobs, "SYNCED_EVERY_BYTES", 2 * BLOB_CHUNK)
    store = PeerStore(tmp_path)
    store.open_blob(BLOB, MANIFEST)
    for index in (0, 1, 2, 0):
        store.unfinished.store(BLOB, index, piece(index))
    store.close()
    assert len(synced) == 1


def test_a_disk_that_syncs_keeps_nobody_from_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Until it was given as much again; and the blob has no name before that sync, too, has ended."""
    synced = Event()
    monkeypatch.setattr(partial_blobs, "_sync_data", lambda handle: synced.wait())
    monkeypatch.setattr(partial_blobs, "SYNCED_EVERY_BYTES", BLOB_CHUNK)
    store = PeerStore(tmp_path)
    store.open_blob(BLOB, MANIFEST)
    store.unfinished.store(BLOB, 0, piece(0))
    store.unfinished.store(BLOB, 2, piece(2))
    assert not store.unfinished.is_behind(BLOB)
    store.unfinished.store(BLOB, 1, piece(1))
    assert store.unfinished.is_behind(BLOB) and on_disk(store) == DATA
    with ThreadPoolExecutor() as others:
        caught_up, finished = others.submit(store.unfinished.catch_up, BLOB), others.submit(store.finish_blob, BLOB)
        assert not (caught_up.done() or finished.done() or store.has_blob(BLOB))
        synced.set()
    assert caught_up.exception() is None and finished.exception() is None and store.read_blob(BLOB) == DATA
    store.close()


@story
async def test_bytes_too_long_for_any_chunk_are_neither_hashed_nor_kept(tmp_path: Path):
    """A stranger's frame may hold 64 MiB: 32 of those would be two gigabytes, and milliseconds of the loop each."""
    with disk(tmp_path) as (_, chunks):
        told: list[Payload] = []
        long = bytes(BLOB_CHUNK + 1)
        chunks.receive_chunk(ChunkResponse(BLOB, 0), memoryview(long), told.append)
        assert [len(payload.data) for payload in told] == [0]
        assert told[0].size_bytes == len(long) and told[0].digest != digest(long)


@pytest.mark.parametrize("data", [b"", b"short", bytes(BLOB_CHUNK)])
def test_a_manifest_that_names_bytes_of_another_length_gets_nothing_written(data: bytes, tmp_path: Path):
    """Whoever names a blob may name anything in it: 100 bytes here, and a digest of fewer or more."""
    lie = BlobManifest(100, (digest(data),))
    store = PeerStore(tmp_path)
    store.put_blob(data)  # also where this disk holds such a chunk
    assert store.open_blob(blob_id(lie), lie) == frozenset()
    assert store.unfinished.land(blob_id(lie), 0, digest(data), data) is None
    assert store.blob_path(blob_id(lie)).with_suffix(".part").read_bytes() == bytes(100)
    store.close()


@pytest.mark.parametrize("when", ["on its way", "at its end"])
def test_a_disk_that_could_not_sync_has_lost_what_it_was_given(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It says so once and calls its cached pages clean: asked again it would say that all is well."""

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = PeerStore(tmp_path)
    store.open_blob(BLOB, MANIFEST)
    if when == "on its way":
        monkeypatch.setattr(partial_blobs, "SYNCED_EVERY_BYTES", 2 * BLOB_CHUNK)
        monkeypatch.setattr(partial_blobs, "_sync_data", broken)
    for index in range(3):
        store.unfinished.land(BLOB, index, MANIFEST.chunks[index], piece(index))
    monkeypatch.undo()
    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(stores.os, "fsync", broken)
        store.finish_blob(BLOB)
    assert store.open_blob(BLOB, MANIFEST) == frozenset(), "fetched again, not believed"
    store.close()


def test_a_sync_that_fails_late_takes_its_own_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fetch is given up while the disk syncs, and begun anew; then the disk says that it lost the first file."""
    synced = Event()

    def breaks(handle: int) -> None:
        synced.wait()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(partial_blobs, "_sync_data", breaks)
    monkeypatch.setattr(partial_blobs, "SYNCED_EVERY_BYTES", BLOB_CHUNK)
    store = PeerStore(tmp_path)
    store.open_blob(BLOB, MANIFEST)
    store.unfinished.store(BLOB, 0, piece(0))
    given_up = store.unfinished.opening(BLOB)
    store.unfinished.drop(BLOB)
    store.open_blob(BLOB, MANIFEST)
    again = store.unfinished.opening(BLOB)
    synced.set()
    assert given_up and given_up.syncing and isinstance(given_up.syncing.exception(), OSError)
    assert store.unfinished.opening(BLOB) is again and on_disk(store) == bytes(SIZE)
    synced.clear()
    store.unfinished.store(BLOB, 0, piece(0))
    waited: list[Any] = []
    monkeypatch.setattr(
        partial_blobs, "wait", lambda futures: (synced.set(), waited.append(futures[0].exception()))
    )
    # without giving it up first: nothing of the file that is lost is believed
    assert store.open_blob(BLOB, MANIFEST) == frozenset() and waited
    assert on_disk(store) == bytes(SIZE)
    store.close()


def test_a_blob_that_was_begun_anew_is_not_finished_by_whoever_began_it_first(tmp_path: Path):
    """Two fetch it: all is written, the file goes as a disk loses it, the second begins anew, the first ends."""
    store = PeerStore(tmp_path)
    for _ in range(2):
        store.open_blob(BLOB, MANIFEST)
        with pytest.raises(OSError, match="the disk lost"):
            store.finish_blob(BLOB)
        for index in range(3):
            store.unfinished.store(BLOB, index, piece(index))
        store.unfinished.drop(BLOB)
    assert not store.has_blob(BLOB)
    store.close()


def test_a_chunk_that_is_written_while_its_file_goes_is_not_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = PeerStore(tmp_path)
    store.open_blob(BLOB, MANIFEST)

    def in_between(handle: int, data: memoryview, at: int) -> None:
        store.unfinished.drop(BLOB)
        store.open_blob(BLOB, MANIFEST)

    monkeypatch.setattr(partial_blobs, "write_at", in_between)
    store.unfinished.store(BLOB, 0, piece(0))
    assert store.unfinished.partly(BLOB) is None
    store.close()


@story
async def test_whatever_breaks_at_one_chunk_the_thread_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A system that has no more threads to give does not even raise an OSError."""

    def no_more(*work: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(partial_blobs, "SYNCED_EVERY_BYTES", 1)
    store = PeerStore(tmp_path)
    monkeypatch.setattr(store.unfinished._syncs, "submit", no_more)
    chunks = ChunkDiskQueue(store)
    store.open_blob(BLOB, MANIFEST)
    async with asyncio.timeout(20):
        for _ in range(ARRIVING_MAX + 1):
            (payload,) = await taken(chunks, (0, piece(0)))
    assert isinstance(await done(chunks, StoreChunk(BLOB, 0, payload)), RuntimeError), "told to who asks"
    chunks.close()
    store.close()


@story
async def test_a_chunk_of_a_blob_that_became_whole_meanwhile_is_stored_already(tmp_path: Path):
    """A state may be fetched for two reasons at once; whoever closes first takes the file of the other."""
    with disk(tmp_path) as (store, chunks):
        store.open_blob(BLOB, MANIFEST)
        for index in range(3):
            store.unfinished.store(BLOB, index, piece(index))
        store.finish_blob(BLOB)
        payload = Payload(MANIFEST.chunks[1], BLOB_CHUNK, piece(1))
        assert await done(chunks, StoreChunk(BLOB, 1, payload)) is None
        store.finish_blob(BLOB)
        assert store.read_blob(BLOB) == DATA


def test_a_full_disk_takes_back_what_given_up_downloads_were_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A joiner too slow for one state after the other never comes to tidy up; what is written to stays."""
    fallocate = os.posix_fallocate
    store = PeerStore(tmp_path)
    given_up, in_use = (BlobManifest(BLOB_CHUNK, (digest(name),)) for name in (b"given up", b"in use"))
    parts = [store.blob_path(blob_id(m)).with_suffix(".part") for m in (given_up, in_use)]
    for manifest in (given_up, in_use):
        store.open_blob(blob_id(manifest), manifest)
    os.utime(parts[0], (0, time.time() - partial_blobs.PARTS_BUSY_S - 1))

    def nearly_full(handle: int, at: int, size_bytes: int) -> None:
        if parts[0].exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(handle, at, size_bytes)

    monkeypatch.setattr(stores.os, "posix_fallocate", nearly_full)
    assert store.open_blob(BLOB, MANIFEST) == frozenset() and on_disk(store) == bytes(SIZE)
    assert [part.exists() for part in parts] == [False, True]
    store.close()


@story
async def test_what_is_here_of_a_blob_on_its_way_is_given_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was written or found on disk, and nothing else, though the file has its whole length. What the disk
    changed since is not given; after the last chunk it is a blob like any other."""
    monkeypatch.setattr(
        stores, "READ_CACHED", 0
    )  # a disk that has to be waited for, and below one that need not be
    with disk(tmp_path) as (store, chunks):
        assert run_store_task(store, ReadManifest(BLOB, partly=True)) is None
        store.open_blob(BLOB, MANIFEST)
        assert run_store_task(store, ReadManifest(BLOB, partly=True)) is None  # nothing is worth asking for
        await taken(chunks, (1, piece(1)))
        store.unfinished.store(BLOB, 2, piece(2))
        assert run_store_task(store, ReadManifest(BLOB)) is None  # for those who know nothing of parts
        assert run_store_task(store, ReadManifest(BLOB, partly=True)) == PartialManifest(MANIFEST, b"\x06")
        given = [await done(chunks, ReadChunk(BLOB, index)) for index in (0, 1, 2, 3)]
        assert [None if p is None else bytes(p.data) for p in given] == [None, piece(1), piece(2), None]
        monkeypatch.undo()
        assert bytes((await done(chunks, ReadChunk(BLOB, 1))).data) == piece(1)
        with store.blob_path(BLOB).with_suffix(".part").open("r+b") as file:
            file.seek(BLOB_CHUNK + 7)
            file.write(b"rot")
        assert await done(chunks, ReadChunk(BLOB, 1)) is None
        store.open_blob(BLOB, MANIFEST)  # after a restart: found, hashed, and the rotten one is not among them
        assert run_store_task(store, ReadManifest(BLOB, partly=True)) == PartialManifest(MANIFEST, b"\x04")
        await taken(chunks, (0, piece(0)), (1, piece(1)))
        store.finish_blob(BLOB)
        assert run_store_task(store, ReadManifest(BLOB, partly=True)) == MANIFEST
        assert bytes((await done(chunks, ReadChunk(BLOB, 0))).data) == piece(0)
