"""The little of protobuf that libp2p messages need: varint and length-delimited fields.

Promises: unknown fields are skipped (fixed-width ones too), a message has at most `FIELDS_MAX` of them, and every
value is a view into the caller's bytes, so nothing is allocated because a length field says so.
Never reads groups, never recurses.
"""

from __future__ import annotations

from collections.abc import Iterator

from atoll.base.errors import PeerFault
from atoll.wire.libp2p import varint
from atoll.wire.libp2p.varint import Bytes

FIELDS_MAX = 1024  # an identify message of a full js-libp2p or kubo node has about 60
UINT64_BYTES_MAX = 10  # protobuf lets a 64-bit value (every negative number) take one byte more than multiformats

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # protobuf.dev/programming-guides/encoding, "Message Structure"


def write(number: int, value: int | Bytes) -> bytes:
    """One field: an int as varint, bytes as length-delimited."""
    if isinstance(value, int):
        return varint.encode(number << 3 | VARINT) + varint.encode(value)
    return b"".join((varint.encode(number << 3 | DELIMITED), varint.encode(len(value)), value))


def read(message: Bytes, who: str = "") -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) in the order of the wire; the caller decides what a repeated field means."""
    view = memoryview(message)
    at = count = 0
    while at < len(view):
        count += 1
        if count > FIELDS_MAX:
            raise PeerFault(who, f"a protobuf message has more than {FIELDS_MAX} fields")
        key, at = _varint(view, at, who)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(view, at, who)
            yield number, value
        elif kind == DELIMITED:
            size, at = _varint(view, at, who)
            yield number, _cut(view, at, size, who)
            at += size
        elif kind in (FIXED64, FIXED32):  # no message of ours has one: skipped like any unknown field
            size = 8 if kind == FIXED64 else 4
            _cut(view, at, size, who)
            at += size
        else:
            raise PeerFault(who, f"a protobuf field has wire type {kind}")


def take_bytes(value: int | memoryview, what: str, who: str = "") -> bytes:
    if isinstance(value, int):
        raise PeerFault(who, f"{what} is a number where bytes were promised")
    return bytes(value)


def take_text(value: int | memoryview, what: str, who: str = "") -> str:
    raw = take_bytes(value, what, who)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise PeerFault(who, f"{what} is not UTF-8", raw[:64]) from None


def _varint(view: memoryview, at: int, who: str) -> tuple[int, int]:
    found = varint.decode(view, at, who, bytes_max=UINT64_BYTES_MAX)
    if found is None:
        raise PeerFault(who, "a protobuf message ends inside a number")
    return found


def _cut(view: memoryview, at: int, size: int, who: str) -> memoryview:
    if size > len(view) - at:
        raise PeerFault(who, f"a protobuf field of {size} bytes is longer than its message")
    return view[at : at + size]
