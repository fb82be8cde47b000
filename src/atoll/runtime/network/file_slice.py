"""File slice on its way to the network, read only when it is encrypted, so that it occupies no memory here.

A waiting chunk costs a few numbers instead of 1 MiB, and its bytes pass through a core's cache once. The maker of a
slice (`PeerStore`) has checked that the bytes are right and in the system's page cache.

Invariants:
- All slices of one file share one handle, open until the last slice is gone, even if the file was unlinked.
- A slice never returns fewer bytes: it raises OSError.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress


class SharedOpenFile:
    """An open file, closed with its last reference."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        with suppress(AttributeError):  # the file could not be opened
            os.close(self.number)


class FileSlice:
    """Bytes `begin` to `end` of this file."""

    def __init__(self, file: SharedOpenFile, begin: int, end: int) -> None:
        self._file, self._begin, self._end = file, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> FileSlice:
        begin, end, _ = part.indices(len(self))
        return FileSlice(self._file, self._begin + begin, self._begin + end)

    def __bytes__(self) -> bytes:
        return bytes(self.read_into(memoryview(bytearray(len(self)))))

    def read_into(self, place: memoryview) -> memoryview:
        """Read the whole slice to the start of `place`; returns that part. Raises OSError."""
        place = place[: len(self)]
        if os.preadv(self._file.number, [place], self._begin) < len(place):
            raise OSError(errno.EIO, "a file became shorter while it was sent")
        return place

    def touch(self, flags: int) -> None:
        """Read the first and last byte with these flags. Raises OSError if the flags forbid that read."""
        for at in (self._begin, self._end - 1):
            os.preadv(self._file.number, [bytearray(1)], at, flags)
