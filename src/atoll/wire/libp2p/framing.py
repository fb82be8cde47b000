"""Length-prefixed framing of messages on a stream: 4 bytes big endian for `/atoll/...`, a varint for libp2p.

Driving contract: pass received bytes to `receive` in order, in any pieces. Drop the machine after PeerFault.

Invariants:
- A length above the limit is refused before any byte of the body is stored.
- The messages do not depend on how the stream was cut; at most one incomplete message is held.
- Nothing is allocated for an announced length: the buffer grows with the received bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import PeerFault
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.wire.libp2p import varint
from atoll.wire.libp2p.varint import Bytes

ReadLength = Callable[[bytearray, str], tuple[int, int] | None]  # (length, offset of the body); None: incomplete


def u32_length(buffer: bytearray, who: str) -> tuple[int, int] | None:
    return (int.from_bytes(buffer[:4], "big"), 4) if len(buffer) >= 4 else None


def varint_length(buffer: bytearray, who: str) -> tuple[int, int] | None:
    return varint.decode(buffer, 0, who)


def frame(message: Bytes, *, limit: int = CONTROL_FRAME_MAX) -> bytes:
    """Encode one `/atoll/...` message with its length."""
    assert len(message) <= limit, f"{len(message)} bytes do not fit a frame of {limit}"
    return b"".join((len(message).to_bytes(4, "big"), message))


def varint_frame(message: Bytes) -> bytes:
    """Encode one libp2p message with its varint length."""
    return b"".join((varint.encode(len(message)), message))


class LengthPrefixedFrames:
    """Splitter of a byte stream into messages."""

    def __init__(
        self, who: str = "", *, limit: int = CONTROL_FRAME_MAX, read_length: ReadLength = u32_length
    ) -> None:
        self._who, self._limit, self._read_length = who, limit, read_length
        self._buffer = bytearray()
        self._missing = 0  # buffer length at which the next message may be complete

    def receive(self, data: Bytes) -> list[bytes]:
        """Return the messages that these bytes complete. Raises PeerFault for a length above the limit."""
        self._buffer += data
        messages: list[bytes] = []
        while len(self._buffer) >= self._missing and (head := self._read_length(self._buffer, self._who)):
            length, begin = head
            if length > self._limit:
                raise PeerFault(self._who, f"message of {length} bytes is longer than {self._limit}")
            self._missing = begin + length
            if len(self._buffer) < self._missing:
                break
            messages.append(bytes(memoryview(self._buffer)[begin : begin + length]))
            del self._buffer[: begin + length]
            self._missing = 0
        return messages
