"""Yamux frame header, twelve bytes (libp2p/specs yamux/README.md, "Framing").

Invariants: an invalid header is refused here, so the muxer receives only valid ones.
Not responsible for: bodies, which only data frames have.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from atoll.base.errors import PeerFault
from atoll.wire.libp2p.varint import Bytes

HEADER_BYTES = 12
VERSION = 0
DATA, WINDOW_UPDATE, PING, GO_AWAY = 0, 1, 2, 3
SYN, ACK, FIN, RST = 1, 2, 4, 8  # other bits carry no meaning and are ignored, as in every implementation
NORMAL, PROTOCOL_ERROR = 0, 1  # reasons of a GO_AWAY frame
SESSION = 0  # the stream id of frames about the connection itself

_LAYOUT = struct.Struct(">BBHII")


class YamuxHeader(NamedTuple):
    """Decoded header of one frame."""

    kind: int
    flags: int
    stream: int
    length: int  # bytes of the body (data), window growth in bytes, opaque ping value, or GO_AWAY reason


def pack(kind: int, flags: int, stream: int, length: int) -> bytes:
    return _LAYOUT.pack(VERSION, kind, flags, stream, length)


def unpack(raw: Bytes, who: str) -> YamuxHeader:
    version, kind, flags, stream, length = _LAYOUT.unpack(raw)
    if version != VERSION or kind > GO_AWAY:
        raise PeerFault(who, f"yamux frame of version {version} and type {kind}", bytes(raw))
    if (stream == SESSION) != (kind >= PING):  # "Both Ping and Go Away messages should always use the 0 StreamID"
        raise PeerFault(who, f"yamux frame of type {kind} on stream {stream}", bytes(raw))
    return YamuxHeader(kind, flags, stream, length)
