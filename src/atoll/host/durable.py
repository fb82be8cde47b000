"""Files that a power cut leaves whole or not at all, and disks that say in time that they are full."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from atoll.base.errors import RunFailedError
from atoll.keys.digest import Buffer

log = logging.getLogger(__name__)


def refused(what: str, why: object, where: Path, cause: str = "the disk is full or read-only") -> RunFailedError:
    """What a person is told of a disk that does not take what it must."""
    fix = f"free some space in {where}, then start again"
    return RunFailedError("E-DISK-01", f"cannot {what}: {why}", cause=cause, fix=fix)


def write_durably(path: Path, data: Buffer, mode: int = 0o644) -> None:
    """Under its final name only once every byte is on disk: write aside, sync, rename, sync the folder."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.rename(path)
    except OSError as why:
        with suppress(OSError):
            temporary.unlink()
        raise refused(f"write {path.name}", why.strerror, path.parent) from why
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
            what = f"make room for {size_bytes / 1e9:.2f} GB"
            raise refused(what, why.strerror, path.parent, "the disk is full") from why
        os.ftruncate(handle, size_bytes)
        log.warning(
            "this file system sets no room aside (%s): that it is too small for the %.2f GB of %s shows only "
            "when it is full",
            why.strerror,
            size_bytes / 1e9,
            path.name,
        )
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
