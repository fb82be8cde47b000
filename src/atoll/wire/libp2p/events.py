"""What a libp2p connection tells its user. Values only; who makes them is said beside each."""

from __future__ import annotations

import msgspec

from atoll.base.machine import Lane
from atoll.crypto.noise import NoiseConnection


class ConnectionReady(msgspec.Struct, frozen=True, gc=False):
    """The remote has proven who it is (`established.peer`), and what the connection is for is agreed.

    CONTROL: streams may be opened. BULK: from here on the bytes are the caller's, who writes what
    `take_outgoing` still holds, then goes on with `rest` (bytes that arrived already) and with
    `established.bulk_send` and `bulk_receive`, keys that this connection has not used.
    """

    lane: Lane
    established: NoiseConnection
    rest: bytes = b""


class StreamStarted(msgspec.Struct, frozen=True, gc=False):
    """The remote began a stream; its protocol is not agreed yet. Between yamux and streams only."""

    stream: int


class StreamOpened(msgspec.Struct, frozen=True, gc=False):
    """A protocol is agreed: from now on `send` works and data flows."""

    stream: int
    protocol: str
    by_remote: bool


class StreamData(msgspec.Struct, frozen=True, gc=False):
    """Bytes in order. Say `consumed(stream, len(data))` when they are dealt with: only then may more come."""

    stream: int
    data: bytes


class StreamClosed(msgspec.Struct, frozen=True, gc=False):
    """The remote will send nothing more on this stream; our own direction stays open until `close`."""

    stream: int


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """The stream is gone in both directions; drop what of it is still unread."""

    stream: int
    why: str


class PingAnswered(msgspec.Struct, frozen=True, gc=False):
    """The answer to `ping(value)`."""

    value: int


class GoneAway(msgspec.Struct, frozen=True, gc=False):
    """The remote opens and accepts no more streams; those that exist may still end in good order."""

    reason: int


StreamEvent = StreamOpened | StreamData | StreamClosed | StreamReset | PingAnswered | GoneAway
ConnectionEvent = ConnectionReady | StreamEvent
MuxerEvent = StreamStarted | StreamData | StreamClosed | StreamReset | PingAnswered | GoneAway
