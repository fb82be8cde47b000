"""Files that a power cut leaves whole or not at all, and disks that say in time that they are full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from atoll.base.errors import RunFailedError
from atoll.keys.digest import Buffer


def write_durably(path: Path, data: Buffer, mode: int = 0o644) -> None:
    """Under its final name only once every byte is on disk: write aside, sync, rename, sync the folder."""
    temporary = path.with_name(path.name + ".tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    except OSError as why:
        os.close(handle)
        temporary.unlink(missing_ok=True)
        raise RunFailedError(
            "E-DISK-01",
            f"cannot write {path.name}: {why.strerror}",
            cause="the disk is full or read-only",
            fix=f"free some space in {path.parent}, then start again",
        ) from why
    os.close(handle)
    temporary.rename(path)
    sync_folder(path.parent)


def make_room(path: Path, size_bytes: int) -> None:
    """An empty file of this size, its blocks set aside: a disk that is too small says so before the download."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if size_bytes and hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(handle, 0, size_bytes)
        os.ftruncate(handle, size_bytes)
    except OSError as why:
        if why.errno in (errno.ENOSPC, errno.EDQUOT):
            path.unlink(missing_ok=True)
            raise RunFailedError(
                "E-DISK-01",
                f"cannot make room for {size_bytes / 1e9:.2f} GB: {why.strerror}",
                cause="the disk is full",
                fix=f"free some space in {path.parent}, then start again",
            ) from why
        os.ftruncate(handle, size_bytes)  # this kind of file system sets nothing aside
    finally:
        os.close(handle)


def write_at(handle: int, data: Buffer, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
