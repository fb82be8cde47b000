"""Noise frames of libp2p: a two-byte length, then a handshake message or a sealed box.

Invariants: at most one incomplete frame is held; a length above the limit is a PeerFault before its bytes arrive.
"""

from __future__ import annotations

from typing import Final

from atoll.base.errors import PeerFault
from atoll.crypto.seal import TAG_BYTES

FRAME_MAX: Final = 65535  # bytes after the length, in handshake and transport alike
FRAME_PLAIN_MAX: Final = FRAME_MAX - TAG_BYTES


def framed(message: bytes) -> bytes:
    """Encode a handshake message or box with its two-byte length."""
    assert len(message) <= FRAME_MAX
    return len(message).to_bytes(2, "big") + message


class FrameDecoder:
    """Splitter of a byte stream into frames. The caller takes all whole frames after each `feed`."""

    def __init__(self, who: str = "") -> None:
        self._buffer, self._who = bytearray(), who

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    def next_frame(self, bytes_max: int = FRAME_MAX) -> bytes | None:
        """Return the next whole frame; None if it is incomplete. Raises PeerFault if a longer one is announced."""
        if len(self._buffer) < 2:
            return None
        frame_bytes = int.from_bytes(self._buffer[:2], "big")
        if frame_bytes > bytes_max:
            raise PeerFault(self._who, f"announces a frame of {frame_bytes} bytes, limit {bytes_max}")
        if len(self._buffer) < 2 + frame_bytes:
            return None
        frame = bytes(self._buffer[2 : 2 + frame_bytes])
        del self._buffer[: 2 + frame_bytes]
        return frame

    def rest(self) -> bytes:
        """Take the remaining bytes, for a reader with another framing."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest
