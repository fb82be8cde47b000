"""Unsigned varints of multiformats (multiformats/unsigned-varint).

Invariants:
- One encoding per number, at most nine bytes (63 bits), read from any bytes-like object without copying.
- An incomplete number gives None; a longer one is refused.
"""

from __future__ import annotations

from atoll.base.errors import PeerFault

Bytes = bytes | bytearray | memoryview

VARINT_BYTES_MAX = 9  # unsigned-varint, "Practical maximum of 9 bytes": 63 bits, so that no reader needs bignums


def encode(value: int) -> bytes:
    """Encode in the shortest form, seven bits per byte, low bits first."""
    assert 0 <= value < 1 << 63
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: Bytes, at: int = 0, who: str = "") -> tuple[int, int] | None:
    """Decode to (value, offset after it); None if the number is incomplete. Raises PeerFault if it is malformed."""
    value = 0
    for size, byte in enumerate(data[at : at + VARINT_BYTES_MAX], start=1):
        value |= (byte & 0x7F) << 7 * (size - 1)
        if byte < 0x80:
            if byte == 0 and size > 1:  # "MUST be minimally encoded": two spellings of a length hide in signatures
                raise PeerFault(who, "varint is not minimally encoded", bytes(data[at : at + size]))
            return value, at + size
    if len(data) - at >= VARINT_BYTES_MAX:
        cut = bytes(data[at : at + VARINT_BYTES_MAX])
        raise PeerFault(who, f"varint is longer than {VARINT_BYTES_MAX} bytes", cut)
    return None
