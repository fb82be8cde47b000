"""libp2p's Noise frames: a two-byte length, then a handshake message or a sealed box.

Never holds more than one frame and what came with it: a longer length than can be is a PeerFault before its bytes
arrive.
"""

from __future__ import annotations

from typing import Final

from atoll.base.errors import PeerFault
from atoll.crypto.seal import TAG_BYTES

FRAME_MAX: Final = 65535  # bytes after the length, in handshake and transport alike
FRAME_PLAIN_MAX: Final = FRAME_MAX - TAG_BYTES


def framed(message: bytes) -> bytes:
    """A handshake message, or a box, behind its two-byte length."""
    assert len(message) <= FRAME_MAX
    return len(message).to_bytes(2, "big") + message


class FrameDecoder:
    """Bytes as they arrive -> frames behind two-byte lengths. Whoever feeds it takes all whole frames at once."""

    def __init__(self, who: str = "") -> None:
        self._buffer, self._who = bytearray(), who

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    def next_frame(self, bytes_max: int = FRAME_MAX) -> bytes | None:
        """The next whole frame, or None until more was fed. PeerFault as soon as a longer one is announced."""
        if len(self._buffer) < 2:
            return None
        frame_bytes = int.from_bytes(self._buffer[:2], "big")
        if frame_bytes > bytes_max:
            raise PeerFault(self._who, f"announced a frame of {frame_bytes} bytes, {bytes_max} can be")
        if len(self._buffer) < 2 + frame_bytes:
            return None
        frame = bytes(self._buffer[2 : 2 + frame_bytes])
        del self._buffer[: 2 + frame_bytes]
        return frame

    def rest(self) -> bytes:
        """What was fed and is not part of a frame taken yet, for whoever reads on in another framing."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest
