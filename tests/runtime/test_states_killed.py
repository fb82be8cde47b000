"""States under SIGKILL and power cuts at random points: what was staged or committed is there, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torn_disk import cut_power, forget_syncs

from atoll.base.ids import Digest
from atoll.crypto.digest import blob_id, manifest_of
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage import state_files
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore
from atoll.worker.state_store import MissingStateError

SIZE = 2_000_000  # bytes of a state: files from 1 MiB on are written over
PIECES = 16
OPERATIONS = PIECES + 5  # about as many writes, syncs and renames make one state

WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_states_killed import opened, stage
from torn_disk import record_in
size = int(sys.argv[2])
for line in sys.stdin:
    place, kill_at, share = line.split()
    pid = os.fork()
    if pid:
        os.write(1, b"over %d\\n" % os.waitpid(pid, 0)[1])
        continue
    _, retention, states = opened(Path(place))
    record_in(Path(place + ".log"), int(kill_at), float(share))
    for number in range(10_000):
        name = stage(states, number, size)
        os.write(1, b"staged %d %s\\n" % (number, name.hex().encode()))
        if number % 3:
            states.commit(name)
            os.write(1, b"committed %d %s\\n" % (number, name.hex().encode()))
            retention._replaced.clear()  # a minute has passed
            retention.tidy(set(), number)
"""


@dataclass(frozen=True)
class OwedState:
    """A state that the writer must still have after its death."""

    number: int
    name: Digest


def opened(folder: Path) -> tuple[PeerStore, BlobRetention, FileStateStore]:
    store = PeerStore(folder)
    retention = BlobRetention(store, KeepSection(newest=0, every_rounds=1000, bytes_max=0))
    return store, retention, FileStateStore(store, retention)


def content(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def stage(states: FileStateStore, number: int, size: int = SIZE) -> Digest:
    """Written in pieces, the last ones first."""
    data, draft = memoryview(content(number, size)), states.draft(size)
    for at in reversed(range(0, size, size // PIECES)):
        draft.write(at, data[at : at + size // PIECES])
    name, _ = draft.finish()
    return name


class StateWriter:
    """A process that forks a fresh writer for every point, so that only the first one is slow to start."""

    def __init__(self, size: int = SIZE) -> None:
        command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def killed_at(self, place: Path, operation: int, share: float) -> list[OwedState]:
        """States that must be there once the writer died in this operation on its disk, the head first."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{place} {operation} {share}\n")
        self.process.stdin.flush()
        told: list[tuple[str, OwedState]] = []
        for line in self.process.stdout:
            if line.startswith("over"):
                assert os.WTERMSIG(int(line.split()[1])) == signal.SIGKILL, "the writer failed by itself"
                break
            word, number, name = line.split()
            told.append((word, OwedState(int(number), Digest(bytes.fromhex(name)))))
        heads = [owed for word, owed in told if word == "committed"]
        return list(dict.fromkeys([*heads[-1:], *(owed for _, owed in told[-1:])]))

    def close(self) -> None:
        with self.process:
            self.process.kill()


def drawn_point(writer: StateWriter, place: Path, seed: int, cuts: bool) -> list[OwedState]:
    """A folder as this seed's kill, or power cut, left it, and what must be in it."""
    draw = random.Random(seed)
    return point(writer, place, draw.randrange(1, 12 * OPERATIONS), draw, cuts)


def point(writer: StateWriter, place: Path, operation: int, draw: random.Random, cuts: bool) -> list[OwedState]:
    owed, log = writer.killed_at(place, operation, draw.random()), place.with_name(place.name + ".log")
    if cuts:
        cut_power(place / "blobs", log, draw)
    log.unlink(missing_ok=True)
    return owed


def holds(place: Path, owed: Sequence[OwedState], size: int, cuts: bool) -> None:
    """The owed states are whole; so are others with a name, unless the power was cut. No other file is left."""
    store, _, states = opened(place)
    try:
        for one in owed:
            assert states.view(one.name) == content(one.number, size)
        whole = [states.is_recoverable(Digest(bytes.fromhex(path.name))) for path in store_files(place)]
        assert cuts or all(whole)
        names = {
            path.name for path in (place / "blobs").iterdir() if path.suffix not in ("", ".manifest", ".damaged")
        }
        assert names <= {"spare.new", "state.new"}
    finally:
        store.close()


def play(folder: Path, seeds: range, cuts: bool) -> None:
    writer = StateWriter()
    try:
        for seed in seeds:
            place = folder / f"p{seed}"
            owed = drawn_point(writer, place, seed, cuts)
            try:
                holds(place, owed, SIZE, cuts)
            except (AssertionError, MissingStateError) as why:
                raise AssertionError(f"seed {seed}: {why}") from why
            shutil.rmtree(place)
    finally:
        writer.close()


def store_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "blobs").iterdir() if path.suffix == ""]


@pytest.mark.parametrize("cuts", [False, True], ids=["killed", "power cut"])
def test_what_was_staged_or_committed_survives(tmp_path: Path, cuts: bool):
    play(tmp_path, range(12), cuts)


def test_a_power_cut_in_any_operation_of_a_state_loses_no_other(tmp_path: Path):
    """Every write, sync and rename of the seventh state, which is written over the file of a removed one."""
    writer = StateWriter()
    try:
        for operation in range(6 * OPERATIONS, 7 * OPERATIONS + 1):
            owed = point(writer, tmp_path / "peer", operation, random.Random(operation), cuts=True)
            assert owed and owed[0].number >= 5
            holds(tmp_path / "peer", owed, SIZE, cuts=True)
            shutil.rmtree(tmp_path / "peer")
    finally:
        writer.close()


def test_mutant_a_store_that_does_not_sync_loses_what_it_staged(tmp_path: Path):
    """The same cuts, but no sync counts: a state that was acknowledged is torn, and that is noticed."""
    writer, lost = StateWriter(), 0
    try:
        for seed in range(6):
            place = tmp_path / f"p{seed}"
            owed = writer.killed_at(place, 4 * OPERATIONS + seed, 0.5)
            log = tmp_path / f"p{seed}.log"
            forget_syncs(log)
            cut_power(place / "blobs", log, random.Random(seed))
            try:
                holds(place, owed, SIZE, cuts=True)
            except (AssertionError, MissingStateError):
                lost += 1
    finally:
        writer.close()
    assert lost >= 4


@pytest.mark.long
@pytest.mark.parametrize("cuts", [False, True], ids=["killed", "power cut"])
def test_what_was_staged_or_committed_survives_three_hundred_times(tmp_path: Path, cuts: bool):
    play(tmp_path, range(1000, 1300), cuts)


def test_a_state_has_its_name_only_once_its_bytes_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also if it is written over the file of a removed one, whose pages would be there after a power cut."""
    store, retention, states = opened(tmp_path)
    for number in range(3):
        states.commit(stage(states, number))
        retention._replaced.clear()
        retention.tidy(set(), number)
    spare = tmp_path / "blobs" / "spare.new"
    inode, calls = spare.stat().st_ino, list[str]()
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        calls.append("sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).suffix)
        fsync(handle)

    def renamed(self: Path, target: Path) -> Path:
        calls.append(f"{self.name} -> {Path(target).suffix or 'name'}")
        return rename(self, target)

    monkeypatch.setattr(state_files.os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    name = stage(states, 3)
    assert calls == ["spare.new -> .new", "sync .new", "state.new -> name", "sync "]
    assert store.blob_path(name).stat().st_ino == inode and name == blob_id(manifest_of(content(3)))
    store.close()
