"""Control socket: a unix-domain socket beside each running peer, for commands of its owner only.

A request is one line of JSON, and so is the reply; then the connection ends. The system limits a socket path to 108
bytes, so the socket is in a short private folder, and the file `door` in the peer's folder holds its path.

Invariants:
- Only this user can connect: folder 0700, socket 0600, owner checked.
- A refused request gets the same error that the command line shows.
- A value that a peer of another version does not send is an error of its own, and never a KeyError.
- torch is never imported: `atoll status` must stay fast.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from atoll.base.errors import AtollError, NetworkError, RefusedError, RunFailedError, UsageError
from atoll.runtime.storage.atomic_files import refused
from atoll.runtime.storage.ownership import is_in_use, open_private

REQUEST_MAX = 64 * 1024  # bytes of one request
REPLY_MAX = 16 * 2**20  # bytes of one reply: a run of 4096 members fits
PATH_MAX = 100  # bytes of a socket's path; Linux allows 107, macOS 103
ASK_S = 120.0  # an evaluation on a slow computer takes this long
CONNECT_S = 1.0  # to a peer of this computer: a listener answers at once
LOOKED_AT_MAX = 256  # folders beside a wrong one that are searched for a running peer
DEAD_S = 60.0  # age from which a socket without a listener belongs to a killed peer

OTHER_VERSION = "the command and the peer that runs in this folder are of different versions"
RESTART = "stop the peer and start it again with this version of Atoll"

log = logging.getLogger(__name__)
RequestHandler = Callable[[dict[str, Any]], Awaitable[Any]]
ERRORS: dict[int, type[AtollError]] = {2: UsageError, 3: NetworkError, 4: RefusedError, 5: RunFailedError}


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    verb: str
    with_: dict[str, Any] = msgspec.field(default_factory=dict, name="with")


class ControlErrorReply(msgspec.Struct, frozen=True):
    code: str
    what: str
    cause: str = ""
    fix: str = ""
    exit_status: int = 1


class ControlReply(msgspec.Struct, frozen=True, omit_defaults=True):
    ok: Any = None
    error: ControlErrorReply | None = None


_REQUEST = msgspec.json.Decoder(ControlRequest)
_REPLY = msgspec.json.Decoder(ControlReply)


# ---- the peer's side ---------------------------------------------------------------------------------------


class ControlServer:
    """Control socket of one running peer. `handlers` maps each verb to its function."""

    def __init__(self, folder: Path, handlers: dict[str, RequestHandler]) -> None:
        self.folder, self.handlers = folder, handlers
        self.path = door_path(folder)
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Start to listen. `ask(folder, …)` reaches this peer from now on."""
        self.path.unlink(missing_ok=True)  # the lock of the folder shows that its owner is gone
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=REQUEST_MAX)
        self.path.chmod(0o600)
        try:
            with open(self.folder / "door", "w", opener=open_private) as file:
                file.write(f"{self.path}\n")
        except OSError as why:
            raise refused("write door", why.strerror, self.folder) from why

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for path in (self.path, self.folder / "door"):
            path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, ValueError):  # ValueError: a line longer than REQUEST_MAX
                reply = await self._answer(await reader.readline())
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> ControlReply:
        try:
            request = _REQUEST.decode(line)
            handler = self.handlers.get(request.verb)
            if handler is None:
                raise UsageError(
                    "E-DOOR-02",
                    f"this peer does not know {request.verb!r}",
                    cause="the command is newer than the peer that runs in this folder",
                    fix=RESTART,
                )
            return ControlReply(ok=await handler(request.with_))
        except AtollError as why:
            return ControlReply(error=ControlErrorReply(why.code, why.what, why.cause, why.fix, why.exit_status))
        except msgspec.DecodeError as why:
            what = f"invalid request: {why}"
            return ControlReply(error=ControlErrorReply("E-DOOR-03", what, OTHER_VERSION, RESTART, exit_status=2))
        except Exception as why:
            log.exception("%s failed", line[:80])
            what = f"an error of Atoll itself in the running peer: {type(why).__name__}: {why}"
            fix = f"report it with the last lines of {self.folder / 'atoll.log'}"
            return ControlReply(error=ControlErrorReply("E-DOOR-10", what, "a defect", fix, exit_status=5))


# ---- the command's side ------------------------------------------------------------------------------------


class PeerAnswer(dict[str, Any]):
    """Answer of a running peer. A key that a peer of another version does not send raises UsageError."""

    def __init__(self, found: dict[str, Any], folder: Path) -> None:
        super().__init__((key, _answer_of(value, folder)) for key, value in found.items())
        self.folder = folder

    def __missing__(self, key: str) -> Any:
        raise _other_version(self.folder, f"its answer lacks {key!r}")


def _answer_of(found: Any, folder: Path) -> Any:
    """This JSON value with every object as a PeerAnswer."""
    if isinstance(found, dict):
        return PeerAnswer(found, folder)
    return [_answer_of(one, folder) for one in found] if isinstance(found, list) else found


def _other_version(folder: Path, why: str) -> UsageError:
    return UsageError(
        "E-DOOR-09",
        f"the peer in {folder} answered as another version of Atoll: {why}",
        cause="Atoll was updated after that peer had started; what the command asked for may be done",
        fix=f"atoll stop --dir {folder}, then start the peer again: atoll up --dir {folder}, or its own program",
    )


def send_request(folder: Path, verb: str, **with_: Any) -> Any:
    """Send a request to the peer in `folder`; returns its reply or raises the error in it."""
    return _reply(folder, msgspec.json.encode(ControlRequest(verb, with_)) + b"\n")


async def send_request_async(folder: Path, verb: str, **with_: Any) -> Any:
    """`ask` for a caller with an event loop."""
    return await asyncio.to_thread(lambda: send_request(folder, verb, **with_))


def _reply(folder: Path, request: bytes) -> Any:
    try:
        path = (folder / "door").read_text().strip()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(ASK_S)
            line.connect(path)
            line.sendall(request)
            answer = bytearray()
            while not answer.endswith(b"\n"):
                piece = line.recv(65536)
                if not piece or len(answer) > REPLY_MAX:
                    break
                answer += piece
    except PermissionError as why:
        raise UsageError(
            "E-DOOR-08",
            f"the peer in {folder} belongs to another user: {why.strerror}",
            cause="its folder or its process belongs to another user",
            fix="run the command as the user who started that peer",
        ) from None
    except TimeoutError:
        raise NetworkError(
            "E-DOOR-04",
            f"the peer in {folder} did not answer within {ASK_S:.0f} s",
            cause="its computer is overloaded, or the process was stopped",
            fix="try again; if it stays silent, end the process and run atoll up --dir " + str(folder),
        ) from None
    except (OSError, ValueError):  # no file, no folder, no listener, or no path in the file
        raise no_peer_here(folder) from None
    if not answer.endswith(b"\n"):
        raise no_peer_here(folder)
    try:
        reply = _REPLY.decode(bytes(answer))
    except msgspec.DecodeError as why:
        raise _other_version(folder, str(why)) from None
    if reply.error is not None:
        e = reply.error
        raise ERRORS.get(e.exit_status, RunFailedError)(e.code, e.what, cause=e.cause, fix=e.fix)
    return _answer_of(reply.ok, folder)


def is_running(folder: Path) -> bool:
    """True if a peer of this user listens in `folder`; a killed peer leaves its `door` behind."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(CONNECT_S)
            line.connect((folder / "door").read_text().strip())
    except (OSError, ValueError):
        return False
    return True


def no_peer_here(folder: Path) -> NetworkError:
    if is_in_use(folder):
        return NetworkError(
            "E-DOOR-01",
            f"the peer in {folder} does not answer",
            cause="it is starting or ending at this moment",
            fix="run the command again in some seconds",
        )
    if near := _running_beside(folder):
        return NetworkError(
            "E-DOOR-01",
            f"no peer is running in {folder}",
            cause="another folder is meant",
            fix=f"name the folder in which a peer is running: --dir {near}",
        )
    held = (folder / "kept.sqlite").exists()
    again = f"atoll up --dir {folder} (--stay if the run is over), or start your own program that trained there"
    return NetworkError(
        "E-DOOR-01",
        f"no peer is running in {folder}",
        cause="it was stopped, or its run is over" if held else "nothing was founded or joined in this folder yet",
        fix=again if held else "atoll up, or atoll join TICKET; or name its folder with --dir",
    )


def _running_beside(folder: Path) -> str:
    """The running peers beside a folder without a run, or in its parent, for people; empty if there are none."""
    if (folder / "kept.sqlite").exists():
        return ""
    places = [folder.parent]
    with suppress(OSError):
        places += sorted(islice(folder.parent.iterdir(), LOOKED_AT_MAX))
    return ", or ".join(str(place) for place in places if _is_own_peer(place))


def _is_own_peer(place: Path) -> bool:
    with suppress(OSError):  # of another user, who may forbid to look
        return (place / "door").stat().st_uid == os.getuid() and is_running(place)
    return False


def door_path(folder: Path) -> Path:
    """Path of the socket of this folder's peer."""
    name = blake3(str(folder.resolve()).encode()).hexdigest(length=8) + ".sock"
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108  # `_private` checks
        if base and len(os.fsencode(f"{base}/atoll-{os.getuid()}/{name}")) <= PATH_MAX and Path(base).is_dir():
            return _private(Path(base) / f"atoll-{os.getuid()}") / name
    raise RunFailedError("E-DOOR-05", "there is no short folder for a socket", fix="set TMPDIR to a short path")


def count_local_peers() -> int:
    """Number of this user's peers on this computer; their trainers share its cores.

    Sockets of killed peers are removed once they are too old to belong to a starting peer.
    """
    count = 0
    for path in door_path(Path()).parent.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, suppress(OSError):
            line.setblocking(False)  # a peer that accepts nothing must not hold up the caller's event loop
            try:
                line.connect(str(path))
                count += 1
            except ConnectionRefusedError:
                if time.time() - path.stat().st_mtime > DEAD_S:
                    path.unlink()
    return count


def _private(folder: Path) -> Path:
    """Make the folder, or check that it is this user's: in a shared /tmp another user may have made it first."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunFailedError(
            "E-DOOR-06",
            f"{folder} is not a private folder of yours",
            cause="another user made it, or its permissions were changed",
            fix=f"set TMPDIR to a folder of your own, or remove {folder}",
        )
    return folder
