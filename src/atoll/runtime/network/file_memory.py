"""Memory in unnamed files of a folder: the system writes its pages to disk where memory is short.

Invariants:
- Blocks of the disk are reserved before use, so a full disk is an error here and no crash at a later write.
- Nothing is left behind when the process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from atoll.base.errors import RunFailedError
from atoll.runtime.system import reserve_blocks


def file_memory(folder: Path) -> Callable[[int], mmap.mmap]:
    """Allocator of new mapped memory in unnamed files of this folder. Raises RunFailedError if the disk is full."""

    def allocate(size_bytes: int) -> mmap.mmap:
        handle = unnamed_file(folder, size_bytes)
        try:
            return mmap.mmap(handle, size_bytes)
        finally:
            os.close(handle)

    return allocate


def unnamed_file(folder: Path, size_bytes: int) -> int:
    """The descriptor of a new file without a name, with reserved blocks. Raises RunFailedError."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            handle = os.dup(file.fileno())
            try:
                _reserve(handle, size_bytes)
            except OSError:
                os.close(handle)
                raise
            return handle
    except OSError as why:
        raise RunFailedError(
            "E-DISK-01",
            f"cannot make room for {size_bytes / 1e9:.2f} GB in {folder}: {why.strerror}",
            cause='state_memory = "disk" keeps vectors of the model\'s size in files there',
            fix=f"free some space on the disk of {folder}, then start again",
        ) from why


def _reserve(handle: int, size_bytes: int) -> None:
    os.ftruncate(handle, size_bytes)
    try:
        reserve_blocks(handle, size_bytes)
    except OSError as why:
        if why.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
