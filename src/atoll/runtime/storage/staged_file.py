"""Two files of bytes, of which one holds and one will: what is written ahead costs nothing to make true.

Promises: a file is there whole or not at all, though not synced, so a power cut may lose it or leave pages of an
older one in it: whoever reads it must be able to tell. Files that nobody needs are written over, not made anew.
Never says what is in them.
"""

from __future__ import annotations

import os
from pathlib import Path

from atoll.crypto.digest import Buffer
from atoll.runtime.storage.atomic_files import write_over
from atoll.runtime.storage.ownership import open_private


class StagedFile:
    def __init__(self, folder: Path, name: str) -> None:
        self._held, self._ahead, self._spare = (folder / f"{name}.{end}" for end in ("bin", "next", "tmp"))

    def write(self, *pieces: Buffer, ahead: bool = False) -> None:
        """`ahead`: it lies beside what holds now, until `come_true`."""
        if ahead and self._ahead.exists():
            self._ahead.rename(self._spare)
        handle = open_private(self._spare, os.O_WRONLY | os.O_CREAT)
        try:
            write_over(handle, *pieces)
        finally:
            os.close(handle)
        self._spare.rename(self._ahead if ahead else self._held)

    def come_true(self) -> None:
        """What was written ahead takes the place of what held until now."""
        if not self._ahead.exists():
            return  # a life before had come so far
        if self._held.exists():
            self._held.rename(self._spare)
        self._ahead.rename(self._held)

    def read(self, ahead: bool = False) -> bytes | None:
        path = self._ahead if ahead else self._held
        return path.read_bytes() if path.exists() else None
