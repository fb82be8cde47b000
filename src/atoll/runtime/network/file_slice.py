"""A stretch of a file on its way to the network: read where it is encrypted, so it lies in no memory of ours.

A chunk that waits for its turn costs a few numbers instead of a megabyte, and its bytes pass through a core's
cache once. Whoever makes one has seen to it that they are right, and in the system's page cache (`PeerStore`).
Promises: all stretches of one file share one handle, open until the last of them is gone, also if the file has lost
its name meanwhile. Raises OSError for bytes that are not there any more; never hands out fewer.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress


class FileHandle:
    """An open file. Closed when nobody refers to it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be opened
            os.close(self.number)


class FileSlice:
    """Bytes `begin` to `end` of this file."""

    def __init__(self, file: FileHandle, begin: int, end: int) -> None:
        self._file, self._begin, self._end = file, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> FileSlice:
        begin, end, _ = part.indices(len(self))
        return FileSlice(self._file, self._begin + begin, self._begin + end)

    def __bytes__(self) -> bytes:
        return bytes(self.read_into(memoryview(bytearray(len(self)))))

    def read_into(self, place: memoryview) -> memoryview:
        """All of it stands at the beginning of `place`; that part of it."""
        place = place[: len(self)]
        if os.preadv(self._file.number, [place], self._begin) < len(place):
            raise OSError(errno.EIO, "a file became shorter while it was sent")
        return place

    def touch(self, flags: int) -> None:
        """Read its first and its last byte with these flags: an OSError if they forbid what it would take."""
        for at in (self._begin, self._end - 1):
            os.preadv(self._file.number, [bytearray(1)], at, flags)
