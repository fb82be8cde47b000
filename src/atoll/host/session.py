"""What makes a TCP connection trustworthy: a handshake, then frames (control lane) or sealed records (bulk lane).

`Security` is the door; behind it stand pure machines on bytes, so that links know nothing of cryptography.
Promises: no frame comes out before the remote's identity is known.
Never does I/O; never used unencrypted unless a test says so in as many words (`PlainSecurity(insecure=True)`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.base.machine import Lane
from atoll.wire.libp2p.framing import Frames, frame

FRAME_MAX = CONTROL_FRAME_MAX + 64  # bytes; a message and the word that says what it is
PLAIN_HELLO = b"atoll/plain/1"


class Opened(NamedTuple):
    """The handshake is over: this is who is at the other end, and what the connection is for."""

    peer: PeerId
    lane: Lane


class Sealer(Protocol):
    """Encrypts the records of one direction, in order."""

    overhead_bytes: int

    def seal_into(self, head: bytes, data: memoryview, out: memoryview) -> None:
        """Fill `out`, `overhead_bytes` longer than `data`. `head` travels in clear and is authenticated."""
        ...


class Opener(Protocol):
    overhead_bytes: int

    def open_into(self, head: bytes, sealed: memoryview, out: memoryview) -> None:
        """The reverse; raises PeerFault when head or record are not what was sealed, in order."""
        ...


class Session(Protocol):
    """One connection. Bytes in by `receive`, bytes out by `outgoing`, which is asked after every call."""

    def start(self) -> None:
        """The connection stands; the dialer begins."""
        ...

    def receive(self, data: memoryview) -> list[Opened | bytes]:
        """What came of these bytes: once `Opened`, then control frames. A PeerFault ends the session."""
        ...

    def send(self, frame: bytes) -> None:
        """Control lane only, after `Opened`."""
        ...

    def outgoing(self) -> bytes: ...

    @property
    def ready(self) -> bool:
        """The remote has room for another frame."""
        ...

    def boxes(self) -> tuple[Sealer, Opener, bytes]:
        """Bulk lane only, once, after `Opened`: both directions, and the bytes that came behind the handshake."""
        ...


class Security(Protocol):
    """Who I am, and how I prove it on each connection."""

    def dialing(self, lane: Lane, expected: PeerId | None) -> Session: ...

    def accepting(self) -> Session: ...


# ---- without secrecy, for tests ----------------------------------------------------------------------------


class PlainSecurity:
    """Peer ids in clear, believed as they come. For tests of what is above and below the cryptography."""

    def __init__(self, me: PeerId, *, insecure: bool = False) -> None:
        if not insecure:
            raise ValueError("PlainSecurity neither hides nor proves anything; pass insecure=True in a test")
        self._me = me

    def dialing(self, lane: Lane, expected: PeerId | None) -> Session:
        return _PlainSession(self._me, lane)

    def accepting(self) -> Session:
        return _PlainSession(self._me, None)


class _PlainSession:
    """hello = magic, lane, length of the id, id; the dialer's first. Then frames, or records as they are."""

    ready = True

    def __init__(self, me: PeerId, lane: Lane | None) -> None:
        self._me, self._lane = me.encode(), lane
        self._opened = False
        self._part = bytearray()  # of the hello
        self._out = bytearray()
        self._frames = Frames(limit=FRAME_MAX)

    def start(self) -> None:
        if self._lane is not None:
            self._hello(self._lane)

    def receive(self, data: memoryview) -> list[Opened | bytes]:
        if self._opened:
            return list(self._frames.receive(data))
        self._part += data
        magic = len(PLAIN_HELLO)
        if not PLAIN_HELLO.startswith(self._part[:magic]):
            raise PeerFault("", "no hello", bytes(self._part[:magic]))
        if len(self._part) < magic + 2 or len(self._part) < (end := magic + 2 + self._part[magic + 1]):
            return []
        lane = Lane(self._part[magic])
        peer = PeerId(self._part[magic + 2 : end].decode())
        rest = bytes(self._part[end:])
        self._opened = True
        if self._lane is None:
            self._lane = lane
            self._hello(lane)
        self._part = bytearray(rest)
        frames = self._frames.receive(rest) if lane is Lane.CONTROL else []
        return [Opened(peer, lane), *frames]

    def _hello(self, lane: Lane) -> None:
        self._out += PLAIN_HELLO + bytes((lane, len(self._me))) + self._me

    def send(self, message: bytes) -> None:
        self._out += frame(message, limit=FRAME_MAX)

    def outgoing(self) -> bytes:
        out, self._out = bytes(self._out), bytearray()
        return out

    def boxes(self) -> tuple[Sealer, Opener, bytes]:
        return _PlainBox(), _PlainBox(), bytes(self._part)


class _PlainBox:
    overhead_bytes = 0

    def seal_into(self, head: bytes, data: memoryview, out: memoryview) -> None:
        out[:] = data

    def open_into(self, head: bytes, sealed: memoryview, out: memoryview) -> None:
        out[:] = sealed
