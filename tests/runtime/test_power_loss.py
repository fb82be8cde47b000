"""The store under SIGKILL and power cuts at random points: nothing acknowledged is lost, nothing is unreadable.

A writer keeps vertices and says so after each one; it is killed in the middle of whatever it does. For a power cut
the sectors that were written since the last sync are kept or dropped one by one, at random. What was synced is
known: all of it when `keep` returned; while a commit runs, first the log is written and synced, and only then pages
of the database are changed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.crypto.digest import blob_id, manifest_of
from atoll.runtime.storage import store as stores
from atoll.runtime.storage.store import PeerStore

SECTOR = 512
SIZE = 300  # bytes of the smallest vertex
DATABASE, LOG = "kept.sqlite", "kept.sqlite-wal"

WRITER = """
import os, shutil, sys
from pathlib import Path
from atoll.runtime.storage.store import PeerStore
folder, synced, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
for line in sys.stdin:
    place = folder / line.strip()
    pid = os.fork()
    if pid:
        os.write(1, b"%d\\n" % pid)  # in one piece: the new writer uses the same pipe
        os.waitpid(pid, 0)
        os.write(1, b"over\\n")
        continue
    store = PeerStore(place)
    store._database.execute("PRAGMA wal_autocheckpoint=12")  # so that few vertices reach all of sqlite's steps
    mine = synced / place.name
    for number in range(10_000):
        value = number.to_bytes(4, "big") * (size // 4 * (1 + number % 3))
        store.keep([(f"vertex/{number}", value), ("head", b"%d" % number)])
        if mine.parent.exists():
            fresh = mine.with_suffix(f".{number}")
            fresh.mkdir(parents=True)
            for name in ("kept.sqlite", "kept.sqlite-wal"):
                shutil.copy(place / name, fresh / name)
        os.write(1, b"kept %d\\n" % number)
"""


class Writer:
    """A process that forks a fresh writer for every point, so that only the first one is slow to start."""

    def __init__(self, folder: Path, cuts: bool) -> None:
        self.folder, self.synced = folder, folder / "synced"
        if cuts:
            self.synced.mkdir()
        command = [sys.executable, "-c", WRITER, str(folder), str(self.synced), str(SIZE)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def killed_after(self, name: str, acknowledged: int) -> int:
        """The newest vertex that was acknowledged before the writer died in the middle of a later one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        pid, newest = int(self.process.stdout.readline()), -1
        for line in self.process.stdout:
            if line == "over\n":
                return newest
            newest = int(line.split()[1])
            if newest == acknowledged:
                os.kill(pid, signal.SIGKILL)
        raise AssertionError("the writer died by itself")

    def close(self) -> None:
        with self.process:
            self.process.kill()


def value_of(number: int) -> bytes:
    """What the writer keeps as this vertex."""
    return number.to_bytes(4, "big") * (SIZE // 4 * (1 + number % 3))


def holds(folder: Path, newest: int) -> None:
    """Everything up to the newest acknowledged vertex is there, whole; of what came after, all of it or nothing."""
    store = PeerStore(folder)
    kept = {row[0]: row[1] for row in store._database.execute("SELECT name, value FROM kept")}
    assert store._database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.close()
    head = int(kept.get("head", b"-1"))
    assert head >= newest, f"vertex {newest} was acknowledged, the head is {head}"
    for number in range(head + 1):
        assert kept[f"vertex/{number}"] == value_of(number)
    assert f"vertex/{head + 1}" not in kept


def cut_power(folder: Path, synced: Path, draw: random.Random) -> None:
    """Drop some of what was written since the last sync."""
    now = {name: (folder / name).read_bytes() for name in (DATABASE, LOG)}
    before = {name: (synced / name).read_bytes() for name in (DATABASE, LOG)}
    # pages change only after the log is synced; as long as none did, the log itself may be half there
    torn = DATABASE if now[DATABASE] != before[DATABASE] else LOG
    old, new = before[torn], now[torn]
    kept = bytearray()
    share = draw.choice([0.0, 0.5, 0.9])
    for at in range(0, len(new), SECTOR):
        old_sector, new_sector = old[at : at + SECTOR], new[at : at + SECTOR]
        lost = draw.random() >= share
        kept += (old_sector.ljust(len(new_sector), b"\0") if lost else new_sector)[: len(new_sector)]
    if draw.random() < 0.5:
        del kept[max(len(old), draw.randint(0, len(kept))) :]  # the file never grew so far
    (folder / torn).write_bytes(kept)
    (folder / "kept.sqlite-shm").unlink(missing_ok=True)  # memory of the computer that lost power


def killed_at(writer: Writer, seed: int) -> tuple[Path, int]:
    """A store as this seed's kill, or power cut, left it, and the newest vertex that was acknowledged before."""
    draw, name = random.Random(seed), f"p{seed}"
    newest = writer.killed_after(name, draw.randrange(40))
    synced = sorted(writer.synced.glob(f"{name}.*"), key=lambda p: int(p.suffix[1:]))
    if synced:
        whole = [p for p in synced if int(p.suffix[1:]) <= newest]
        cut_power(writer.folder / name, whole[-1], draw)
    for path in synced:
        shutil.rmtree(path)
    return writer.folder / name, newest


def play(folder: Path, seeds: range, cuts: bool) -> None:
    writer = Writer(folder, cuts)
    try:
        for seed in seeds:
            place, newest = killed_at(writer, seed)
            try:
                holds(place, newest)
            except (AssertionError, sqlite3.DatabaseError) as why:
                raise AssertionError(f"seed {seed}: {why}") from why
            shutil.rmtree(place)
    finally:
        writer.close()


@pytest.mark.parametrize("cuts", [False, True], ids=["killed", "power cut"])
def test_what_was_acknowledged_survives(tmp_path: Path, cuts: bool):
    play(tmp_path, range(10), cuts)


@pytest.mark.long
@pytest.mark.parametrize("cuts", [False, True], ids=["killed", "power cut"])
def test_what_was_acknowledged_survives_five_hundred_times(tmp_path: Path, cuts: bool):
    play(tmp_path, range(1000, 1500), cuts)


def test_mutant_a_store_that_does_not_sync_loses_what_it_acknowledged(tmp_path: Path):
    """The same cut, two syncs earlier: what `keep` returned for may be dropped then, and that is noticed."""
    writer = Writer(tmp_path, cuts=True)
    try:
        newest = writer.killed_after("p0", 7)
    finally:
        writer.close()
    for name in (DATABASE, LOG):
        shutil.copy(tmp_path / "synced" / "p0.5" / name, tmp_path / "p0" / name)
    (tmp_path / "p0" / "kept.sqlite-shm").unlink(missing_ok=True)
    with pytest.raises(AssertionError, match="was acknowledged"):
        holds(tmp_path / "p0", newest)


def test_a_blob_has_its_name_only_once_its_bytes_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The order of what the disk is asked: every byte, then the name, then the folder that holds the name."""
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        calls.append("sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).suffix)
        fsync(handle)

    def renamed(self: Path, target: Path) -> Path:
        calls.append("name")
        return rename(self, target)

    monkeypatch.setattr(stores.os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    store, data = PeerStore(tmp_path), os.urandom(3_000_000)
    store.put_blob(data)
    assert calls == ["sync .tmp", "name", "sync "]
    calls.clear()
    data = os.urandom(2_500_000)
    manifest = manifest_of(data)
    name = blob_id(manifest)
    assert store.open_blob(name, manifest) == frozenset()
    for index in range(3):
        store.unfinished.store(name, index, data[index * 2**20 : (index + 1) * 2**20])
    store.finish_blob(name)
    assert calls == ["sync .part", "name", "sync "] and store.read_blob(name) == data
    store.close()


def test_half_a_blob_on_disk_is_worth_the_chunks_that_survived(tmp_path: Path):
    """A power cut drops a chunk that was stored and not synced: it is fetched again, the others are not."""
    data = os.urandom(3 * 2**20)
    manifest = manifest_of(data)
    name = blob_id(manifest)
    store = PeerStore(tmp_path)
    store.open_blob(name, manifest)
    for index in (0, 2):
        store.unfinished.store(name, index, data[index * 2**20 : (index + 1) * 2**20])
    with (tmp_path / "blobs" / f"{name.hex()}.part").open("r+b") as file:
        file.seek(2 * 2**20 + 512)
        file.write(bytes(SECTOR))
    assert store.open_blob(name, manifest) == {0}
    store.close()


def test_a_disk_that_changed_a_chunk_makes_nobody_a_liar(tmp_path: Path):
    """The damaged blob is set aside instead of served: the asker would blame this peer for wrong bytes."""
    store, data = PeerStore(tmp_path), os.urandom(2 * 2**20)
    name = store.put_blob(data)
    with store.blob_path(name).open("r+b") as file:
        file.seek(2**20 + 7)
        file.write(b"?")
    assert store.read_chunk(name, 0) is not None
    assert store.read_chunk(name, 1) is None and not store.has_blob(name)
    assert store.manifest(name) is None
    store.close()
