"""Pieces of states on a real disk: cut, joined, damaged, tidied."""

from __future__ import annotations

import os
import resource
import time
from itertools import combinations
from pathlib import Path

import pytest
from blake3 import blake3

from atoll.base.errors import UsageError
from atoll.crypto.digest import blob_id, manifest_of
from atoll.features.archive import reed_solomon
from atoll.features.archive.worker import cut_state, rebuild_blob
from atoll.peer.config.sections import KeepSection
from atoll.peer.tasks import DecodeErasurePieces, EncodeErasurePieces
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore

pytest.importorskip("pyeclib")

K, N = 2, 4
MIB = 2**20


def noise(size: int) -> bytes:
    return blake3(b"state").digest(length=size)


def ignore(name: bytes) -> None:
    pass


def states_of(store: PeerStore) -> FileStateStore:
    return FileStateStore(store, BlobRetention(store))


def cut_all(store: PeerStore, data: bytes):
    """(the state's name, what its pieces are called), all of them on this disk."""
    state = store.put_blob(data)
    named = {
        cut_state(states_of(store), store, EncodeErasurePieces(state, K, N, index), ignore) for index in range(N)
    }
    assert len(named) == 1
    (names,) = named
    assert names is not None and all(store.has_blob(piece) for piece in names.pieces)
    return state, names


@pytest.mark.parametrize("size", [5, 5 * MIB + 7, 4 * MIB])
def test_what_is_cut_on_disk_is_made_again_from_any_pieces(tmp_path: Path, size: int):
    store, data = PeerStore(tmp_path), noise(size)
    state, names = cut_all(store, data)
    for left in combinations(range(N), K):
        of = tuple((i, names.pieces[i]) for i in left)
        store.drop_blobs(set(names.pieces))
        assert not store.has_blob(state)
        assert rebuild_blob(store, DecodeErasurePieces(state, size, K, N, of), ignore)
        assert store.read_blob(state) == data
        for lost in set(range(N)) - set(left):
            store.drop_blobs(set(names.pieces) - {names.pieces[lost]})
            assert not store.has_blob(names.pieces[lost])
            assert rebuild_blob(store, DecodeErasurePieces(names.pieces[lost], size, K, N, of, lost), ignore)
            assert store.manifest(names.pieces[lost]) is not None
    assert {path.name for path in (tmp_path / "blobs").glob("*.new")} <= {"spare.new"}


def test_a_state_that_the_disk_damaged_is_not_cut_but_set_aside(tmp_path: Path):
    store = PeerStore(tmp_path)
    state = store.put_blob(noise(3 * MIB))
    with store.blob_path(state).open("r+b") as file:
        file.seek(MIB)
        file.write(b"!")
    assert cut_state(states_of(store), store, EncodeErasurePieces(state, K, N, 0), ignore) is None
    assert not store.has_blob(state) and not list((tmp_path / "blobs").glob("*.new"))


def test_pieces_that_the_disk_damaged_make_no_state_and_are_set_aside(tmp_path: Path):
    store = PeerStore(tmp_path)
    state, names = cut_all(store, noise(3 * MIB))
    store.drop_blobs(set(names.pieces))
    store.blob_path(names.pieces[3]).write_bytes(b"short")
    of = ((1, names.pieces[1]), (3, names.pieces[3]))
    assert not rebuild_blob(store, DecodeErasurePieces(state, 3 * MIB, K, N, of), ignore)
    assert not store.has_blob(names.pieces[3]) and store.has_blob(names.pieces[1])
    assert not rebuild_blob(
        store, DecodeErasurePieces(state, 3 * MIB, K, N, of), ignore
    )  # one is not here at all now


def test_a_state_is_coded_in_the_memory_of_a_few_stripes(tmp_path: Path):
    """64 MiB, of which never more than some stripes of N + K MiB are in memory."""
    store, whole = PeerStore(tmp_path, durable=False), store_of(tmp_path, 64)
    cut_state(states_of(store), store, EncodeErasurePieces(whole, K, N, 3), ignore)  # tables and libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = cut_state(states_of(store), store, EncodeErasurePieces(whole, K, N, 2), ignore)
    assert names is not None
    cut_state(states_of(store), store, EncodeErasurePieces(whole, K, N, 3), ignore)
    store.drop_blobs({names.pieces[2], names.pieces[3]})
    assert rebuild_blob(
        store, DecodeErasurePieces(whole, 64 * MIB, K, N, ((2, names.pieces[2]), (3, names.pieces[3]))), ignore
    )
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 40, f"{grown_mib:.0f} MiB more"


def store_of(folder: Path, mib: int):
    """A state that was never in memory as a whole."""
    store = PeerStore.__new__(PeerStore)
    blobs = str(folder / "blobs")
    store.__dict__.update(folder=folder, _blobs=blobs, _durable=False, _manifests={}, _proofs={})
    blob = store.new_blob()
    for i in range(mib):
        blob.write(blake3(i.to_bytes(4, "big")).digest(length=MIB))
    name = blob.finish()
    assert name is not None
    return name


def test_a_shelf_keeps_pieces_and_of_older_states_those_that_are_not_placed(tmp_path: Path):
    """Nothing of it has been put lately, so only what somebody needs stays; a missing piece is said."""
    store = PeerStore(tmp_path)
    retention = BlobRetention(store, KeepSection(newest=0))
    whole, placed, piece = (store.put_blob(bytes([i])) for i in range(3))
    lost = blob_id(manifest_of(b"lost"))
    assert retention.retain_pieces((piece, lost), (whole,)) == (lost,)
    retention.tidy(set(), 50)
    assert store.has_blob(whole) and store.has_blob(piece) and not store.has_blob(placed)
    small = BlobRetention(store, KeepSection(newest=0, bytes_max=1))
    small.retain_pieces((piece,), (whole,))
    small.tidy(set(), 50)
    assert store.has_blob(piece) and not store.has_blob(whole), "pieces were promised, whole states give way"


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reed_solomon, "ready", lambda: False)
    reed_solomon._driver.cache_clear()
    with pytest.raises(UsageError, match=r"E-PCS-01.*\n.*\n.*pip install pyeclib"):
        reed_solomon.cut_stripe(b"abc", 2, 3)


def test_what_takes_long_to_make_is_held_from_the_moment_it_is_there(tmp_path: Path):
    """A hold lasts a minute, and a large state takes longer: it begins when all of it is written, not before."""
    store = PeerStore(tmp_path)
    state, names = cut_all(store, noise(5 * MIB))
    store.drop_blobs(set(names.pieces))
    written: list[int] = []

    def hold(name: bytes) -> None:
        assert not store.has_blob(state)
        written.append((tmp_path / "blobs" / "being-written.new").stat().st_size)

    of = tuple((i, names.pieces[i]) for i in (0, 3))
    assert rebuild_blob(store, DecodeErasurePieces(state, 5 * MIB, K, N, of), hold)
    assert written and written[-1] >= 4 * MIB  # but for what the file holds back


def test_what_a_crash_left_half_fetched_does_not_stay_for_ever(tmp_path: Path):
    """A part of today may be gone on with; one that nobody wrote to for two days is nobody's any more."""
    store = PeerStore(tmp_path)
    manifest = manifest_of(noise(3 * MIB))
    fresh, old = blob_id(manifest), blob_id(manifest_of(b"old"))
    for name in (fresh, old):
        store.open_blob(name, manifest)
    part = tmp_path / "blobs" / f"{old.hex()}.part"
    os.utime(part, (time.time() - 2 * 86400,) * 2)
    store.drop_blobs(set())
    assert not part.exists() and (tmp_path / "blobs" / f"{fresh.hex()}.part").exists()


def test_what_a_full_disk_broke_off_is_not_left_on_it(tmp_path: Path):
    """What was written last is still in memory, and closing the file writes it once more, in vain."""
    blob = PeerStore(tmp_path).new_blob()
    blob._file.close()
    blob._file = open("/dev/full", "wb")  # noqa: SIM115  # `drop` closes it
    blob.write(b"some bytes")
    blob.drop()
    assert blob._file.closed and not list((tmp_path / "blobs").glob("*.new"))
