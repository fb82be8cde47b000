"""Stream handlers: serve libp2p protocols by their id, to members and to foreign peers.

A handler is a pure function of what arrives on one stream. It may reply to bytes, not open a conversation.

Invariants:
- One remote holds at most `SERVED_STREAMS_MAX` served streams per connection, and `streams_max` of one protocol.
- A remote that does not read its replies loses the stream, not the connection.
Not responsible for: the control stream (libp2p.py), streams that this peer opens, replies that have to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from atoll.base.ids import PeerId
from atoll.wire.libp2p import ping

SERVED_STREAMS_MAX = 16  # served streams per connection; 64 guests hold 1024 streams at most


class IncomingStream(NamedTuple):
    """A stream that a remote opened."""

    peer: PeerId
    is_member: bool  # False: a foreign peer, known by its classical key only
    remote_address: str  # multiaddr; empty if unknown


class ServedStream(NamedTuple):
    """Service of one stream."""

    first: bytes  # sent at once
    receive: Callable[[bytes], bytes] | None  # reply to arriving bytes, maybe empty; None: close after `first`


@dataclass(frozen=True)
class StreamHandler:
    """Service of one protocol."""

    open: Callable[[IncomingStream], ServedStream]
    """May raise PeerFault, as may `ServedStream.receive`: it ends the connection."""
    streams_max: int  # streams of this protocol per connection; a further one is reset
    members_only: bool = False  # a foreign peer's stream is reset


class StreamHandlers:
    """Registry of handlers by protocol id. A protocol may be registered at any time."""

    def __init__(self) -> None:
        self._handlers: dict[str, StreamHandler] = {}
        self.register(ping.PROTOCOL, StreamHandler(_serve_ping, ping.STREAMS_MAX))

    def register(self, protocol: str, handler: StreamHandler) -> None:
        """Raises ValueError if the protocol has a handler already."""
        if protocol in self._handlers:
            raise ValueError(f"{protocol} has a handler already")
        self._handlers[protocol] = handler

    @property
    def protocols(self) -> tuple[str, ...]:
        return tuple(self._handlers)

    def __contains__(self, protocol: object) -> bool:
        return protocol in self._handlers

    def __getitem__(self, protocol: str) -> StreamHandler:
        return self._handlers[protocol]


class ServedStreams:
    """Served streams of one connection."""

    def __init__(self, handlers: StreamHandlers) -> None:
        self._handlers = handlers
        self._open: dict[int, tuple[str, Callable[[bytes], bytes]]] = {}

    def open(self, stream: int, protocol: str, request: IncomingStream) -> ServedStream | None:
        """None: the stream is not served and has to be reset."""
        handler = self._handlers[protocol]
        same = sum(other == protocol for other, _ in self._open.values())
        if same >= handler.streams_max or len(self._open) >= SERVED_STREAMS_MAX:
            return None
        if handler.members_only and not request.is_member:
            return None
        served = handler.open(request)
        if served.receive is not None:
            self._open[stream] = protocol, served.receive
        return served

    def receive(self, stream: int, data: bytes) -> bytes:
        """The reply; empty for a stream that is not served."""
        return self._open[stream][1](data) if stream in self._open else b""

    def discard(self, stream: int) -> None:
        self._open.pop(stream, None)


def _serve_ping(request: IncomingStream) -> ServedStream:
    return ServedStream(b"", ping.PingResponder().receive)
