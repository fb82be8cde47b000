"""A disk that loses what was not synced: a log of what writes replaced, and power cuts that bring some of it back.

In the process that writes, `record_in` puts the log around `write_at`, `os.fsync` and renames, and kills the
process at a given one of these operations. `cut_power` then restores, block by block at random, what was there
before writes that no sync covered, and undoes the newest renames that no sync of the folder covered.
"""

from __future__ import annotations

import os
import random
import signal
import stat
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from atoll.crypto.digest import Buffer
from atoll.runtime.storage import state_files

BLOCK = 4096


class DiskLog:
    def __init__(self, path: Path, kill_at: int, share: float) -> None:
        """The process dies in operation `kill_at`; of a write, this share of the bytes is done by then."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._kill_at, self._share = kill_at, share
        self._operations = self._records = 0
        self._lock = Lock()  # a thread syncs while another one writes

    def put(self, *record: Any) -> None:
        os.write(self._file, _framed(record))
        self._records += 1

    def count_operation(self) -> bool:
        """True if the process dies in this one."""
        self._operations += 1
        return self._operations == self._kill_at

    def write_at(self, handle: int, data: Buffer, at: int) -> None:
        view = memoryview(data).cast("B")
        with self._lock:
            self.put("write", os.fstat(handle).st_ino, at, os.pread(handle, len(view), at), len(view))
            if self.count_operation():
                os.pwrite(handle, view[: int(self._share * len(view))], at)
                _die()
            assert os.pwrite(handle, view, at) == len(view)

    def fsync(self, handle: int) -> None:
        with self._lock:
            done, found = self._records, os.fstat(handle)
            if self.count_operation():
                _die()
        _fsync(handle)
        with self._lock:
            if not stat.S_ISDIR(found.st_mode):
                self.put("sync", found.st_ino, done)
            else:
                self.put("folder", done)

    def rename(self, source: Path, target: Path) -> Path:
        with self._lock:
            self.put("rename", str(source), str(target))
            if self.count_operation():
                _die()
            return _rename(source, target)


_fsync, _rename = os.fsync, Path.rename


def record_in(path: Path, kill_at: int, share: float) -> None:
    """Log this process's operations, and die in operation `kill_at`."""
    log = DiskLog(path, kill_at, share)
    state_files.write_at = log.write_at
    os.fsync = log.fsync
    Path.rename = lambda source, target: log.rename(source, Path(target))  # a function, so that it is a method


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut_power(folder: Path, log: Path, draw: random.Random) -> None:
    """Leave in `folder` what this disk may hold after a power cut at the end of the log."""
    records = _records(log)
    share = draw.choice([0.0, 0.5, 0.9])  # of what may be lost, so much stays
    named = max((done for kind, *_, done in records if kind == "folder"), default=0)
    renames = [(index, *record[1:]) for index, record in enumerate(records) if record[0] == "rename"]
    pending = [names for index, *names in renames if index >= named]
    for source, target in reversed(pending[draw.randint(0, len(pending)) :]):
        if Path(target).exists() and not Path(source).exists():
            _rename(Path(target), Path(source))
    places = {path.stat().st_ino: path for path in folder.iterdir()}
    synced: dict[int, int] = {}
    for kind, *fields in records:
        if kind == "sync":
            synced[fields[0]] = max(fields[1], synced.get(fields[0], 0))
    for index, (kind, *fields) in reversed(list(enumerate(records))):
        if kind == "write" and index >= synced.get(fields[0], 0) and fields[0] in places:
            _, at, before, length = fields
            with places[fields[0]].open("r+b") as file:
                for begin in range(0, length, BLOCK):
                    if draw.random() >= share:
                        file.seek(at + begin)
                        file.write(before[begin : begin + BLOCK].ljust(min(BLOCK, length - begin), b"\0"))


def forget_syncs(log: Path) -> None:
    """As if the disk had ignored every sync."""
    kept = [record for record in _records(log) if record[0] not in ("sync", "folder")]
    log.write_bytes(b"".join(_framed(record) for record in kept))


def _framed(record: tuple[Any, ...]) -> bytes:
    data = msgspec.msgpack.encode(record)
    return len(data).to_bytes(4, "big") + data


def _records(log: Path) -> list[tuple[Any, ...]]:
    data, at, found = log.read_bytes(), 0, list[tuple[Any, ...]]()
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            break
        found.append(tuple(msgspec.msgpack.decode(data[at + 4 : end])))
        at = end
    return found
