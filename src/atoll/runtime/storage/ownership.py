"""Ownership, modes and lock of a peer's folder: files 0600 in folders 0700, one process, whatever the umask.

Invariants:
- A folder of another user, or one that every user can write to, is refused before anything is written into it.
- No file is created, written or read as a secret through a symbolic link.
- A folder of this user that others could only read is closed silently if it is empty or holds a run.
Not responsible for: the folders above it, and files that a user names elsewhere (they keep the umask).
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from atoll.base.errors import UsageError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
OTHERS = stat.S_IRWXG | stat.S_IRWXO
CHOOSE = "choose another folder with --dir"


def private_folder(folder: Path, choose: str = CHOOSE) -> None:
    """Make this folder, or take it if it is this user's, with mode 0700. UsageError if it is not safe to use.

    `choose` names the way to use another one.
    """
    safe_folder(folder, choose)
    found = stat.S_IMODE(folder.stat().st_mode)
    if not found & OTHERS:
        return
    if any(folder.iterdir()) and not any((place / "kept.sqlite").exists() for place in (folder, folder.parent)):
        raise UsageError(
            "E-DIR-11",
            f"{folder} holds other things, and other users can look into it (mode {found:#o})",
            cause="a peer's folder is closed to other users, who may need what lies there",
            fix=f"name a folder of its own: --dir {_quoted(folder / 'atoll-run')}; or, if other users need nothing "
            f"there: chmod 700 {_quoted(folder)}",
        )
    folder.chmod(PRIVATE_FOLDER)


def safe_folder(folder: Path, choose: str = CHOOSE) -> None:
    """Make this folder, or take it if no other user can change what lies in it; else UsageError."""
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True)
    except FileExistsError:
        if folder.is_symlink() and not folder.exists():
            raise FileNotFoundError(errno.ENOENT, "it is a link that leads nowhere", str(folder)) from None
        if not folder.is_dir():
            raise
    else:
        _check_new(folder, choose)
    found = folder.stat()
    if {_owner(folder), found.st_uid} != {os.geteuid()}:  # owner of a link and of its target
        raise _of_another_user(folder, folder, choose)
    if found.st_mode & stat.S_IWOTH:
        raise UsageError(
            "E-DIR-09",
            f"{folder} can be changed by every user of this computer (mode {stat.S_IMODE(found.st_mode):#o})",
            cause="keys and training state would lie in it, and another user may have put files there",
            fix=f"{choose}; or look at what lies in it, then chmod 700 {_quoted(folder)}",
        )
    if found.st_mode & stat.S_IWGRP:  # as a umask of 002 makes folders
        for path in folder.iterdir():
            if _owner(path) != os.geteuid():
                raise _of_another_user(path, folder, choose)


def _check_new(folder: Path, choose: str) -> None:
    """UsageError if a folder that this process just made has another owner, or is open to others."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & OTHERS:
        with suppress(OSError):
            folder.rmdir()
        raise UsageError(
            "E-DIR-12",
            f"{folder} cannot be closed to other users: a new folder there has mode "
            f"{stat.S_IMODE(found.st_mode):#o} and uid {found.st_uid}",
            cause="this file system keeps no owners or modes",
            fix=f"{choose}, on a local disk",
        )


def open_private(path: str | Path, flags: int) -> int:
    """A file descriptor of a file with mode 0600 that no link led to. Also an `opener` for `open`."""
    handle = os.open(path, flags | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) & OTHERS:  # made by an earlier version, or overwritten
            os.fchmod(handle, PRIVATE_FILE)
    except OSError:
        os.close(handle)
        raise
    return handle


def make_private(path: Path) -> None:
    """An existing or an empty new file with mode 0600. Never opened if it exists, since that ends locks on it."""
    try:
        os.close(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        path.chmod(PRIVATE_FILE)


def read_secret(path: Path) -> bytes | None:
    """None if there is no such file. UsageError if another user owns it, or if every user can change it.

    Like its folder, it is closed silently if only its group could change it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a planted pipe would wait for ever
    except FileNotFoundError:
        return None
    except OSError as why:
        raise _no_secret(path, f"it cannot be opened without following a link ({why.strerror})") from why
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise _no_secret(path, "it is no file")
        if found.st_uid != os.geteuid():
            raise _no_secret(path, f"it belongs to another user (uid {found.st_uid})")
        if found.st_mode & stat.S_IWOTH:
            raise _no_secret(path, f"every user can change it (mode {stat.S_IMODE(found.st_mode):#o})")
        if found.st_mode & OTHERS:
            os.fchmod(handle, PRIVATE_FILE)
        return file.read()


def lock_folder(folder: Path, in_use: UsageError | None = None) -> int:
    """Lock the folder: two processes with one identity would produce evidence against each other. UsageError.

    `in_use`: the error for a folder that is not a peer's.
    """
    handle = open_private(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        os.lockf(handle, os.F_TLOCK, 0)
    except OSError:
        os.close(handle)
        raise (in_use or _in_use(folder)) from None
    return handle


def check_unlocked(folder: Path) -> None:
    """UsageError if another process holds this folder. Must not be called for a folder of this process."""
    if is_in_use(folder):
        raise _in_use(folder)


def is_in_use(folder: Path) -> bool:
    """True while another process holds this folder. Must not be called for a folder of this process."""
    try:
        handle = os.open(folder / "lock", os.O_RDWR)
    except OSError:  # none, or one of another user or disk that only reads
        return False
    try:
        os.lockf(handle, os.F_TEST, 0)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _owner(path: Path) -> int:
    return path.lstat().st_uid


def _in_use(folder: Path) -> UsageError:
    return UsageError(
        "E-DIR-01",
        f"another Atoll process is using {folder}",
        cause="the peer is already running in this folder",
        fix=f"atoll status --dir {folder}, or choose another folder with --dir",
    )


def _of_another_user(path: Path, folder: Path, choose: str) -> UsageError:
    return UsageError(
        "E-DIR-08",
        f"{path} belongs to another user (uid {_owner(path)}), this process runs as uid {os.geteuid()}",
        cause="another user made it and could read or replace the keys in it; or it is mounted from elsewhere",
        fix=f"{choose}, in a container one inside the mount, such as "
        f"{_quoted(folder / 'run')}; or, if it is yours: sudo chown -R {os.geteuid()} {_quoted(folder)}",
    )


def _no_secret(path: Path, why: str) -> UsageError:
    return UsageError(
        "E-DIR-10",
        f"{path} is not read as a secret: {why}",
        cause="a key must be a file of this user that others cannot change",
        fix=f"put your own copy of {path.name} there with mode 0600, or choose another folder with --dir",
    )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
