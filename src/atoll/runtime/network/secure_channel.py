"""What makes a TCP connection trustworthy: a handshake, then frames (control lane) or sealed records (bulk lane).

`SessionFactory` is the door; behind it stand pure machines on bytes, so that links know nothing of cryptography.
Promises: no frame comes out before the remote's identity is known.
Never does I/O; never used unencrypted unless a test says so in as many words
(`PlainSessionFactory(insecure=True)`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.base.machine import Lane
from atoll.wire.libp2p.framing import LengthPrefixedFrames, frame

FRAME_MAX = CONTROL_FRAME_MAX + 1  # bytes; a message and the word that says what it is
PLAIN_HELLO = b"atoll/plain/1"


class ForeignPeer(NamedTuple):
    """A foreign libp2p peer: we know who it is, it may ask what the session itself answers, it is no link."""

    peer: PeerId


class ChannelOpened(NamedTuple):
    """The handshake is over: this is who is at the other end, and what the connection is for."""

    peer: PeerId
    lane: Lane


class RecordSealer(Protocol):
    """Encrypts the records of one direction, in order: `keys.seal.SealingKey`, or nothing for tests."""

    def seal_into(self, plain: memoryview, out: memoryview, header: bytes) -> int:
        """Fill `out`, TAG_BYTES longer than `plain`. `header` travels in clear and is authenticated."""
        ...


class RecordOpener(Protocol):
    def open_into(self, box: memoryview, out: memoryview, header: bytes) -> int:
        """The reverse; raises PeerFault when header or box are not what was sealed, in order."""
        ...


class SecureSession(Protocol):
    """One connection. Bytes in by `receive`, bytes out by `outgoing`, which is asked after every call."""

    def start(self, seen_at: str) -> None:
        """The connection stands, and this is the remote's address as we see it; the dialer begins."""
        ...

    def receive(self, data: memoryview) -> list[ChannelOpened | ForeignPeer | bytes]:
        """Decode received bytes: `ForeignPeer` or `Opened`, then control frames. A PeerFault ends the session."""
        ...

    def send(self, message: bytes) -> None:
        """Control lane only, after `Opened`."""
        ...

    def outgoing(self) -> bytes:
        """A fair piece of what is to be written; ask again until nothing is left."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """Of frames sent and not yet handed out by `outgoing`, because the remote has no room for them."""
        ...

    def boxes(self) -> tuple[RecordSealer, RecordOpener, bytes]:
        """Bulk lane only, once, after `Opened`: both directions, and the bytes that came behind the handshake."""
        ...


class SessionFactory(Protocol):
    """Who I am, and how I prove it on each connection."""

    def dialing(self, lane: Lane, expected: PeerId | None) -> SecureSession: ...

    def accepting(self) -> SecureSession: ...

    def listening(self, addresses: list[str]) -> None:
        """Where we can be reached, for whoever asks."""
        ...


# ---- without secrecy, for tests ----------------------------------------------------------------------------


class PlainSessionFactory:
    """Peer ids in clear, believed as they come. For tests of what is above and below the cryptography."""

    def __init__(self, me: PeerId, *, insecure: bool = False) -> None:
        if not insecure:
            raise ValueError("PlainSecurity neither hides nor proves anything; pass insecure=True in a test")
        self._me = me

    def dialing(self, lane: Lane, expected: PeerId | None) -> SecureSession:
        return _PlainSession(self._me, lane)

    def listening(self, addresses: list[str]) -> None:
        pass

    def accepting(self) -> SecureSession:
        return _PlainSession(self._me, None)


class _PlainSession:
    """hello = magic, lane, length of the id, id; the dialer's first. Then frames, or records as they are."""

    waiting_bytes = 0  # there is no window to wait for

    def __init__(self, me: PeerId, lane: Lane | None) -> None:
        self._me, self._lane = me.encode(), lane
        self._opened = False
        self._part = bytearray()  # of the hello
        self._out = bytearray()
        self._frames = LengthPrefixedFrames(limit=FRAME_MAX)

    def start(self, seen_at: str) -> None:
        if self._lane is not None:
            self._hello(self._lane)

    def receive(self, data: memoryview) -> list[ChannelOpened | ForeignPeer | bytes]:
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
            self._hello(lane)
        self._part = bytearray(rest)
        frames = self._frames.receive(rest) if lane is Lane.CONTROL else []
        return [ChannelOpened(peer, lane), *frames]

    def _hello(self, lane: Lane) -> None:
        self._out += PLAIN_HELLO + bytes((lane, len(self._me))) + self._me

    def send(self, message: bytes) -> None:
        self._out += frame(message, limit=FRAME_MAX)

    def outgoing(self) -> bytes:
        out, self._out = bytes(self._out), bytearray()
        return out

    def boxes(self) -> tuple[RecordSealer, RecordOpener, bytes]:
        return _PlainBox(), _PlainBox(), bytes(self._part)


class _PlainBox:
    def seal_into(self, plain: memoryview, out: memoryview, header: bytes) -> int:
        out[: len(plain)] = plain
        return len(out)

    def open_into(self, box: memoryview, out: memoryview, header: bytes) -> int:
        out[:] = box[: len(out)]
        return len(out)
