"""Files that a power cut leaves whole or not at all, and disks that say in time that they are full."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

from atoll.base.errors import RunFailedError, UsageError
from atoll.crypto.digest import Buffer
from atoll.runtime.storage.ownership import open_private

log = logging.getLogger(__name__)


def refused(what: str, why: object, where: Path, cause: str = "the disk is full or read-only") -> RunFailedError:
    """What a person is told of a disk that does not take what it must."""
    fix = f"free some space in {where}, then start again"
    return RunFailedError("E-DISK-01", f"cannot {what}: {why}", cause=cause, fix=fix)


def unusable(folder: Path, why: OSError | ValueError, fix: str = "choose another folder with --dir") -> UsageError:
    """What a person is told of a folder that cannot be one."""
    cause = "a file has that name, or the place is read-only or full"
    what = f"{folder!s:.200} cannot be a peer's folder: {getattr(why, 'strerror', why)}"
    return UsageError("E-DIR-05", what, cause=cause, fix=fix)


def write_durably(path: Path, *pieces: Buffer, exported: bool = False, afresh: bool = False) -> None:
    """Under its final name only once every byte is on disk: write aside, sync, rename, sync the folder.

    Mode 0600, or what the umask leaves of a file that is `exported`. `afresh`: what lies aside is not written over,
    nor is it for a file that is exported, whose folder others may write to.
    """
    temporary, afresh = aside(path), afresh or exported
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if afresh else 0)
    try:
        if afresh:
            temporary.unlink(missing_ok=True)
        handle = os.open(temporary, flags, 0o666) if exported else open_private(temporary, flags)
        try:
            write_over(handle, *pieces)
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.rename(path)
    except OSError as why:
        with suppress(OSError):
            temporary.unlink()
        raise refused(f"write {path.name}", why.strerror, path.parent) from why
    sync_folder(path.parent)


def aside(path: Path) -> Path:
    """Where a file is written before it gets its name. What lies there is written over."""
    return path.with_name(path.name + ".tmp")


def write_over(handle: int, *pieces: Buffer) -> None:
    """The file holds these pieces, one after the other, and nothing else.

    Where there was a file as long, the kernel has its pages and blocks already: a tenth of what new ones cost
    (120 MB: 0.02 instead of 0.2 CPU-s).
    """
    size_bytes = 0
    for piece in pieces:
        write_at(handle, piece, size_bytes)
        size_bytes += memoryview(piece).nbytes
    os.ftruncate(handle, size_bytes)


def open_elsewhere(path: Path) -> bool:
    """Whether somebody has this file open, by whatever name; True, too, where the system cannot tell."""
    if not hasattr(fcntl, "F_SETLEASE"):  # Linux has it
        return True
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # given to the only one who has it open
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(handle)


def make_room(path: Path, size_bytes: int) -> None:
    """An empty file of this size, its blocks set aside: a disk that is too small says so before the download."""
    handle = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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


def read_at(handle: int, place: memoryview, at: int) -> None:
    """Fill this place with what stands there; an OSError if the file ends before."""
    while place:
        count = os.preadv(handle, [place], at)
        if not count:
            raise OSError(errno.EIO, "a file became shorter while it was read")
        place, at = place[count:], at + count


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
