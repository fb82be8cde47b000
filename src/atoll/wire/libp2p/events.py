"""Events of a libp2p connection. Values only."""

from __future__ import annotations

import msgspec

from atoll.base.machine import Lane
from atoll.crypto.noise import NoiseHandshakeResult


class ConnectionReady(msgspec.Struct, frozen=True, gc=False):
    """The remote has proven its identity (`established.peer`), and the lane is agreed.

    CONTROL: streams may be opened. BULK: the caller takes over the bytes. It writes what `take_outgoing` still
    holds, then continues with `rest` (bytes that arrived already) and the unused keys `established.bulk_send` and
    `bulk_receive`.
    """

    lane: Lane
    established: NoiseHandshakeResult
    rest: bytes = b""


class UnnegotiatedStreamOpened(msgspec.Struct, frozen=True, gc=False):
    """The remote opened a stream without an agreed protocol yet. Used between yamux and streams only."""

    stream: int


class StreamOpened(msgspec.Struct, frozen=True, gc=False):
    """A protocol is agreed: the stream can send and receive data."""

    stream: int
    protocol: str
    by_remote: bool


class StreamData(msgspec.Struct, frozen=True, gc=False):
    """Bytes in order. After processing, call `consumed(stream, len(data))`, which lets the remote send more."""

    stream: int
    data: bytes


class StreamHalfClosed(msgspec.Struct, frozen=True, gc=False):
    """The remote sends nothing more on this stream; the local direction stays open until `close`."""

    stream: int


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """The stream is closed in both directions; drop its unread data."""

    stream: int
    why: str


class PingAnswered(msgspec.Struct, frozen=True, gc=False):
    """The answer to `ping(value)`."""

    value: int


class GoAwayReceived(msgspec.Struct, frozen=True, gc=False):
    """The remote opens and accepts no more streams; existing ones may still end in good order."""

    reason: int


StreamEvent = StreamOpened | StreamData | StreamHalfClosed | StreamReset | PingAnswered | GoAwayReceived
ConnectionEvent = ConnectionReady | StreamEvent
MuxerEvent = UnnegotiatedStreamOpened | StreamData | StreamHalfClosed | StreamReset | PingAnswered | GoAwayReceived
