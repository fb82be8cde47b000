"""Secure channel over a connection: a handshake, then frames (control lane) or sealed records (bulk lane).

`SessionFactory` makes sessions: pure machines on bytes, so that links contain no cryptography.

Invariants:
- A session returns no frame before the remote's identity is known.
- Only tests run unencrypted, by `PlainSessionFactory(insecure=True)`.
Not responsible for: sockets.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.base.machine import Lane
from atoll.wire.libp2p.framing import LengthPrefixedFrames, frame

FRAME_MAX = CONTROL_FRAME_MAX + 1  # bytes; a message and the byte with its kind
PLAIN_HELLO = b"atoll/plain/1"


class ServedNonMember(NamedTuple):
    """The remote is an authenticated foreign peer. It may use served protocols and is no link."""

    peer: PeerId


class ChannelOpened(NamedTuple):
    """The handshake is over; `peer` is authenticated."""

    peer: PeerId
    lane: Lane


class RecordSealer(Protocol):
    """Encrypts the records of one direction, in order."""

    def seal_into(self, plain: memoryview, out: memoryview, header: bytes) -> int:
        """Encrypt into `out`, TAG_BYTES longer than `plain`. `header` is sent in clear and authenticated."""
        ...


class RecordOpener(Protocol):
    def open_into(self, box: memoryview, out: memoryview, header: bytes) -> int:
        """Decrypt. Raises PeerFault unless header and box are those that were sealed next."""
        ...


class SecureSession(Protocol):
    """Session of one connection. The caller writes `outgoing` to the connection after every call."""

    def start(self, remote_address: str) -> None:
        """The connection is up. The dialer sends first."""
        ...

    def receive(self, data: memoryview) -> list[ChannelOpened | ServedNonMember | bytes]:
        """Decode bytes to `ServedNonMember` or `ChannelOpened`, then control frames.

        A PeerFault ends the session.
        """
        ...

    def send(self, message: bytes) -> None:
        """Send a frame. Control lane only, after `ChannelOpened`."""
        ...

    def outgoing(self) -> bytes:
        """The next piece to write; empty once nothing is left."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """Bytes of frames that `outgoing` holds back while the remote has no room for them."""
        ...

    @property
    def session_id(self) -> bytes:
        """Unique name of this handshake, equal at both ends; empty: the session cannot continue later."""
        ...

    def keep_tickets(self) -> None:
        """This connection is the link from now on: keep the tickets by which another one may replace it."""
        ...

    def boxes(self) -> tuple[RecordSealer, RecordOpener, bytes]:
        """Sealer, opener, and the bytes behind the handshake. Bulk lane only, once, after `ChannelOpened`."""
        ...


class SessionFactory(Protocol):
    """Makes sessions that prove the local peer's identity."""

    def dialing(self, lane: Lane, expected: PeerId | None) -> SecureSession: ...

    def accepting(self) -> SecureSession: ...

    def forget(self, peer: PeerId) -> None:
        """The session with this peer has ended: its tickets are void."""
        ...

    def listening(self, addresses: list[str]) -> None:
        """Set the addresses that foreign peers may learn."""
        ...


# ---- without secrecy, for tests ----------------------------------------------------------------------------


class PlainSessionFactory:
    """Unauthenticated peer ids in clear, for tests of the layers above and below the cryptography."""

    def __init__(self, me: PeerId, *, insecure: bool = False) -> None:
        if not insecure:
            raise ValueError("PlainSessionFactory neither encrypts nor authenticates; pass insecure=True in a test")
        self._me = me

    def dialing(self, lane: Lane, expected: PeerId | None) -> SecureSession:
        return _PlainSession(self._me, lane)

    def listening(self, addresses: list[str]) -> None:
        pass

    def accepting(self) -> SecureSession:
        return _PlainSession(self._me, None)

    def forget(self, peer: PeerId) -> None:
        pass


class _PlainSession:
    """hello = magic, lane, length of the id, id; the dialer's first. Then plain frames or records."""

    waiting_bytes = 0  # there is no window
    session_id = b""

    def __init__(self, me: PeerId, lane: Lane | None) -> None:
        self._me, self._lane = me.encode(), lane
        self._opened = False
        self._part = bytearray()  # incomplete hello
        self._out = bytearray()
        self._frames = LengthPrefixedFrames(limit=FRAME_MAX)

    def start(self, remote_address: str) -> None:
        if self._lane is not None:
            self._send_hello(self._lane)

    def receive(self, data: memoryview) -> list[ChannelOpened | ServedNonMember | bytes]:
        if self._opened:
            return list(self._frames.receive(data))
        self._part += data
        magic = len(PLAIN_HELLO)
        if not PLAIN_HELLO.startswith(self._part[:magic]):
            raise PeerFault("", "no hello", bytes(self._part[:magic]))
        if len(self._part) < magic + 2 or len(self._part) < (end := magic + 2 + self._part[magic + 1]):
            return []
        if self._part[magic] not in set(Lane):
            raise PeerFault("", "no such lane")
        lane = Lane(self._part[magic])
        peer = PeerId(self._part[magic + 2 : end].decode(errors="replace"))
        rest = bytes(self._part[end:])
        self._opened = True
        if self._lane is None:
            self._lane = lane
            self._send_hello(lane)
        self._part = bytearray(rest)
        frames = self._frames.receive(rest) if lane is Lane.CONTROL else []
        return [ChannelOpened(peer, lane), *frames]

    def _send_hello(self, lane: Lane) -> None:
        self._out += PLAIN_HELLO + bytes((lane, len(self._me))) + self._me

    def send(self, message: bytes) -> None:
        self._out += frame(message, limit=FRAME_MAX)

    def outgoing(self) -> bytes:
        out, self._out = bytes(self._out), bytearray()
        return out

    def keep_tickets(self) -> None:
        pass

    def boxes(self) -> tuple[RecordSealer, RecordOpener, bytes]:
        return _PlainBox(), _PlainBox(), bytes(self._part)


class _PlainBox:
    def seal_into(self, plain: memoryview, out: memoryview, header: bytes) -> int:
        out[: len(plain)] = plain
        return len(out)

    def open_into(self, box: memoryview, out: memoryview, header: bytes) -> int:
        out[:] = box[: len(out)]
        return len(out)
