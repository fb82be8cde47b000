"""Names of things: who, what, when. Plain types, so that they hash fast and print readably."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)  # base58 libp2p peer id in the real world, a short name in the virtual one
Digest = NewType("Digest", bytes)  # 32 bytes of BLAKE3
Seconds = float  # a duration, or a point on some clock; which clock is said where it is used

DIGEST_BYTES = 32
ZERO_DIGEST = Digest(bytes(DIGEST_BYTES))


def short(name: PeerId | Digest | str | bytes) -> str:
    """Eight characters that people can compare; never used to decide anything."""
    return name.hex()[:8] if isinstance(name, bytes) else name[-8:]
