"""What a peer need not fetch, because blobs on its own disk are made of the same chunks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from atoll.base.limits import BLOB_CHUNK
from atoll.crypto.digest import blob_id, manifest_of
from atoll.runtime.storage import store as stores
from atoll.runtime.storage.store import PeerStore

OLD = [os.urandom(BLOB_CHUNK) for _ in range(4)]


def test_a_laggard_asks_only_for_the_chunks_that_differ(tmp_path: Path):
    """Two of five changed, one moved, one occurs twice: only the new ones come from the network."""
    new = [OLD[0], os.urandom(BLOB_CHUNK), OLD[3], OLD[0], os.urandom(77)]
    store = PeerStore(tmp_path)
    earlier = store.put_blob(b"".join(OLD))
    manifest = manifest_of(b"".join(new))
    name = blob_id(manifest)
    assert store.open_blob(name, manifest) == {0, 2, 3}
    for index in (1, 4):
        store.unfinished.store(name, index, new[index])
    store.finish_blob(name)
    assert store.read_blob(name) == b"".join(new) and store.read_blob(earlier) == b"".join(OLD)
    store.close()


def test_what_the_disk_changed_is_not_taken_over(tmp_path: Path):
    """The earlier blob is damaged in the chunk that both share: it is set aside, and the chunk fetched."""
    store = PeerStore(tmp_path)
    earlier = store.put_blob(b"".join(OLD))
    with store.blob_path(earlier).open("r+b") as file:
        file.seek(BLOB_CHUNK + 5)
        file.write(b"?")
    manifest = manifest_of(b"".join([OLD[0], OLD[1], b"more"]))
    assert store.open_blob(blob_id(manifest), manifest) == {0}
    assert not store.has_blob(earlier)
    store.close()


def test_a_manifest_whose_blob_is_gone_or_that_is_no_manifest_is_no_obstacle(tmp_path: Path):
    store = PeerStore(tmp_path)
    store.blob_path(store.put_blob(b"".join(OLD))).unlink()
    (tmp_path / "blobs" / f"{bytes(32).hex()}.manifest").write_bytes(b"torn")
    manifest = manifest_of(OLD[0] + b"more")
    assert store.open_blob(blob_id(manifest), manifest) == frozenset()
    store.close()


def test_chunks_of_zeros_are_there_as_soon_as_there_is_room(tmp_path: Path):
    """Moments at the beginning of a run; also a last chunk that is shorter."""
    store, data = PeerStore(tmp_path), bytes(BLOB_CHUNK) + OLD[0] + bytes(500)
    manifest = manifest_of(data)
    name = blob_id(manifest)
    assert store.open_blob(name, manifest) == {0, 2}
    store.unfinished.store(name, 1, OLD[0])
    store.finish_blob(name)
    assert store.read_blob(name) == data
    store.close()


def test_a_disk_that_cannot_read_an_old_blob_does_not_stop_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A bad sector under what both share: that chunk comes from the network, as it would without the old blob."""

    def broken(handle: int, buffers: object, at: int, flags: int = 0) -> int:
        raise OSError(errno.EIO, "Input/output error")

    store = PeerStore(tmp_path)
    store.put_blob(b"".join(OLD))
    manifest = manifest_of(OLD[0] + b"more")
    monkeypatch.setattr(stores.os, "preadv", broken)
    assert store.open_blob(blob_id(manifest), manifest) == frozenset()
    store.close()
