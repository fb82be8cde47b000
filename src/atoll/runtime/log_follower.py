"""New entries of an event log that another process writes, across its rotation."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from atoll.base.errors import UNREADABLE

_ENTRY = msgspec.json.Decoder(dict[str, Any])


class LogFollower:
    """Reads what was added since the last call, from byte `begin` of the file on. The file may not be there yet."""

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path, self._begin = path, begin
        self._file: BinaryIO | None = None
        self._rest = b""  # of a line that is not whole yet

    def read(self) -> list[dict[str, Any]]:
        entries = list[dict[str, Any]]()
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return entries
                self._file.seek(self._begin)
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            for line in lines:
                with suppress(*UNREADABLE):  # torn by a full disk
                    entries.append(_ENTRY.decode(line))
            if not self._was_rotated():
                return entries
            self.close()
            self._file, self._begin, self._rest = None, 0, b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _was_rotated(self) -> bool:
        """True once another file has the log's name; what was read of this one is then all of it."""
        assert self._file is not None
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:  # between two files
            return False
