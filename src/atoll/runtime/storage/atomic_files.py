"""Atomic durable file writes, and early errors from full disks."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.units import bytes_text
from atoll.crypto.digest import Buffer
from atoll.runtime.storage.ownership import open_private
from atoll.runtime.system import has_other_handles, reserve_blocks

log = logging.getLogger(__name__)


def refused(what: str, why: object, where: Path, cause: str = "the disk is full or read-only") -> RunFailedError:
    """The error of a disk that refuses a required write. `where` is in a peer's folder, or the folder itself."""
    folder = where.parent if where.name == "blobs" else where
    with suppress(OSError):
        why = f"{why} ({bytes_text(shutil.disk_usage(folder).free)} are free)"
    fix = (
        f"free some space on the disk of {folder} (elsewhere: what lies in that folder is needed), then start again"
    )
    return RunFailedError("E-DISK-01", f"cannot {what}: {why}", cause=cause, fix=fix)


def unusable(folder: Path, why: OSError | ValueError, fix: str = "choose another folder with --dir") -> UsageError:
    """The error of a path that cannot be a peer's folder."""
    cause = "a file has that name, or the place is read-only or full"
    what = f"{folder!s:.200} cannot be a peer's folder: {getattr(why, 'strerror', why)}"
    return UsageError("E-DIR-05", what, cause=cause, fix=fix)


def gone(folder: Path) -> RunFailedError:
    """The error of a peer whose folder was deleted under it."""
    return RunFailedError(
        "E-DIR-13",
        f"the folder {folder} is gone: this peer's keys and states were in it",
        cause="it was deleted or moved while the peer ran",
        fix="move it back and start again; or, if it is deleted, ask a member for a new ticket (atoll invite) and "
        "join as a new peer",
    )


def write_durably(path: Path, pieces: Iterable[Buffer], exported: bool = False, afresh: bool = False) -> None:
    """Write to a temporary file, sync it, rename it, sync the folder. Raises RunFailedError.

    The mode is 0600, or follows the umask if `exported`. `afresh`: never overwrite an existing temporary file. This
    also holds for exported files, since other users may write to their folder.
    """
    temporary, afresh = aside(path), afresh or exported
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if afresh else 0)
    try:
        if afresh:
            temporary.unlink(missing_ok=True)
        handle = os.open(temporary, flags, 0o666) if exported else open_private(temporary, flags)
        try:
            write_over(handle, pieces)
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
    """Path of the temporary file, which is overwritten if it exists."""
    return path.with_name(path.name + ".tmp")


def write_over(handle: int, pieces: Iterable[Buffer]) -> None:
    """Replace the content of an open file by these pieces.

    For a file of the same length, the kernel reuses pages and blocks at a tenth of the cost of new ones (120 MB:
    0.02 instead of 0.2 CPU-s).
    """
    size_bytes = 0
    for piece in pieces:
        write_at(handle, piece, size_bytes)
        size_bytes += memoryview(piece).nbytes
    os.ftruncate(handle, size_bytes)


def open_elsewhere(path: Path) -> bool:
    """True if a process has this file open, under any name, or if the system cannot tell."""
    handle = os.open(path, os.O_RDWR)
    try:
        return has_other_handles(handle)
    finally:
        os.close(handle)


def map_file(handle: int) -> memoryview:
    """The bytes of an open file. The map lives as long as a view of it; what is written to it stays in memory."""
    if os.fstat(handle).st_size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_COPY))


def map_path(path: Path) -> memoryview:
    """`map_file` of the file with this path. Raises OSError."""
    with path.open("rb") as file:
        return map_file(file.fileno()).toreadonly()


def make_room(path: Path, size_bytes: int) -> None:
    """Create an empty file with reserved blocks. Raises RunFailedError on a full disk, so before the download."""
    handle = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        reserve_blocks(handle, size_bytes)
        os.ftruncate(handle, size_bytes)
    except OSError as why:
        if why.errno in (errno.ENOSPC, errno.EDQUOT):
            path.unlink(missing_ok=True)
            what = f"make room for {size_bytes / 1e9:.2f} GB"
            raise refused(what, why.strerror, path.parent, "the disk is full") from why
        os.ftruncate(handle, size_bytes)
        log.warning(
            "this file system cannot reserve space (%s): a lack of room for the %.2f GB of %s shows only once the "
            "disk is full",
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
    """Fill `place` from offset `at`. Raises OSError if the file ends before."""
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
