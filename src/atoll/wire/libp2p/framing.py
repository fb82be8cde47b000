"""Messages on a stream: a length, then that many bytes. `/atoll/...` uses 4 bytes big endian, libp2p a varint.

Promises: a length above the bound is refused before one byte of the body is kept; however the stream was cut,
the same messages come out; at most one incomplete message is held.
Never allocates what a length merely announces: the buffer grows with the bytes that really arrived.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import PeerFault
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.wire.libp2p import varint
from atoll.wire.libp2p.varint import Bytes

ReadLength = Callable[[bytearray, str], tuple[int, int] | None]  # (length, where the body begins), None: cut


def u32_length(buffer: bytearray, who: str) -> tuple[int, int] | None:
    return (int.from_bytes(buffer[:4], "big"), 4) if len(buffer) >= 4 else None


def varint_length(buffer: bytearray, who: str) -> tuple[int, int] | None:
    return varint.decode(buffer, 0, who)


def frame(message: Bytes, *, limit: int = CONTROL_FRAME_MAX) -> bytes:
    """One `/atoll/...` message as it stands on the wire."""
    assert len(message) <= limit, f"{len(message)} bytes do not fit a frame of {limit}"
    return b"".join((len(message).to_bytes(4, "big"), message))


def varint_frame(message: Bytes) -> bytes:
    """One libp2p message as it stands on the wire."""
    return b"".join((varint.encode(len(message)), message))


class LengthPrefixedFrames:
    """Cuts a stream of bytes into messages."""

    def __init__(
        self, who: str = "", *, limit: int = CONTROL_FRAME_MAX, read_length: ReadLength = u32_length
    ) -> None:
        self._who, self._limit, self._read_length = who, limit, read_length
        self._buffer = bytearray()
        self._missing = 0  # buffer length at which the next message may be complete

    def receive(self, data: Bytes) -> list[bytes]:
        """The messages that these bytes complete."""
        self._buffer += data
        messages: list[bytes] = []
        while len(self._buffer) >= self._missing and (head := self._read_length(self._buffer, self._who)):
            length, begin = head
            if length > self._limit:
                raise PeerFault(self._who, f"a message of {length} bytes is longer than {self._limit}")
            self._missing = begin + length
            if len(self._buffer) < self._missing:
                break
            messages.append(bytes(memoryview(self._buffer)[begin : begin + length]))
            del self._buffer[: begin + length]
            self._missing = 0
        return messages
