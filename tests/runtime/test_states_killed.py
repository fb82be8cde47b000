"""States under SIGKILL at random points: what was staged or committed is there, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.base.ids import Digest
from atoll.crypto.digest import blob_id, manifest_of
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage import state_files
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore

SIZE = 5_000_000  # bytes of a state: files from 1 MiB on are written over
PIECES = 40

WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_states_killed import opened, stage
for line in sys.stdin:
    place = Path(line.strip())
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("over", flush=True)
        continue
    _, retention, states = opened(place)
    for number in range(10_000):
        name = stage(states, number)
        os.write(1, b"staged %s\\n" % name.hex().encode())
        if number % 3:
            states.commit(name)
            os.write(1, b"committed %s\\n" % name.hex().encode())
            retention._replaced.clear()  # a minute has passed
            retention.tidy(set(), number)
"""


def opened(folder: Path) -> tuple[PeerStore, BlobRetention, FileStateStore]:
    store = PeerStore(folder)
    retention = BlobRetention(store, KeepSection(newest=0, every_rounds=1000, bytes_max=0))
    return store, retention, FileStateStore(store, retention)


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


def stage(states: FileStateStore, number: int) -> Digest:
    """Written in pieces, the last ones first."""
    data, draft = content(number), states.draft(SIZE)
    for at in reversed(range(0, SIZE, SIZE // PIECES)):
        draft.write(at, data[at : at + SIZE // PIECES])
    name, _ = draft.finish()
    return name


def killed_at(writer: subprocess.Popen[str], folder: Path, seed: int) -> list[Digest]:
    """States that the writer must still have, once it died in the middle of a later one."""
    assert writer.stdin is not None and writer.stdout is not None
    writer.stdin.write(f"{folder}\n")
    writer.stdin.flush()
    pid, last = int(writer.stdout.readline()), random.Random(seed).randrange(30)
    told: list[tuple[str, Digest]] = []
    for line in writer.stdout:
        if line == "over\n":
            break
        word, name = line.split()
        told.append((word, Digest(bytes.fromhex(name))))
        if len(told) == last + 1:
            os.kill(pid, signal.SIGKILL)
    heads = [name for word, name in told if word == "committed"]
    return [*heads[-1:], told[-1][1]]


def play(folder: Path, seeds: range) -> None:
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        try:
            for seed in seeds:
                place = folder / f"p{seed}"
                owed = killed_at(writer, place, seed)
                store, _, states = opened(place)
                for name in owed:
                    number = int.from_bytes(states.view(name)[:4], "big")
                    assert states.view(name) == content(number), f"seed {seed}"
                left = [path.name for path in (place / "blobs").iterdir() if path.suffix not in ("", ".manifest")]
                assert left in ([], ["spare.new"]), f"seed {seed}: {left}"
                assert all(states.is_recoverable(Digest(bytes.fromhex(p.name))) for p in store_files(place))
                store.close()
                shutil.rmtree(place)
        finally:
            writer.kill()


def store_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "blobs").iterdir() if path.suffix == ""]


def test_what_was_staged_or_committed_survives(tmp_path: Path):
    play(tmp_path, range(8))


@pytest.mark.long
def test_what_was_staged_or_committed_survives_three_hundred_times(tmp_path: Path):
    play(tmp_path, range(1000, 1300))


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
