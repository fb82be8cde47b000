"""A file with a staged successor, promoted by an atomic rename.

Invariants:
- A file is whole or absent, except after a power cut: nothing is synced, and pages of an older file may remain.
- Unneeded files are overwritten, not created anew, unless a map of them is in use.
Not responsible for: the content; the reader detects damage.
"""

from __future__ import annotations

import os
from pathlib import Path

from atoll.crypto.digest import Buffer
from atoll.runtime.storage.atomic_files import map_file, open_elsewhere, write_over
from atoll.runtime.storage.ownership import open_private


class StagedFile:
    def __init__(self, folder: Path, name: str) -> None:
        self._held, self._ahead, self._spare = (folder / f"{name}.{end}" for end in ("bin", "next", "tmp"))

    def write(self, *pieces: Buffer, ahead: bool = False) -> memoryview:
        """Returns a map of what was written. `ahead`: stage the file beside the current one until `promote`."""
        if ahead and self._ahead.exists():
            self._ahead.rename(self._spare)
        if self._spare.exists() and open_elsewhere(self._spare):
            self._spare.unlink()  # a map reads it
        handle = open_private(self._spare, os.O_RDWR | os.O_CREAT)
        try:
            write_over(handle, pieces)
            view = map_file(handle)
        finally:
            os.close(handle)
        self._spare.rename(self._ahead if ahead else self._held)
        return view

    def promote(self) -> None:
        """Promote the staged file."""
        if not self._ahead.exists():
            return  # promoted before a restart
        if self._held.exists():
            self._held.rename(self._spare)
        self._ahead.rename(self._held)

    def read(self, ahead: bool = False) -> memoryview | None:
        """A map of the file; None if there is none."""
        try:
            handle = os.open(self._ahead if ahead else self._held, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return map_file(handle)
        finally:
            os.close(handle)
