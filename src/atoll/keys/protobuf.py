"""The protobuf of libp2p's handshake payload: length-delimited fields, others skipped.

A number may be spelled longer than it need be, since what is read here is judged by the signature beside it;
`wire/libp2p/protobuf.py` reads messages that nobody signs, and refuses that. Never reads beyond its bytes.
"""

from __future__ import annotations


def protobuf_field(number: int, data: bytes) -> bytes:
    """One length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def protobuf_fields(data: bytes) -> list[tuple[int, bytes]]:
    """Every length-delimited field in order; others are skipped. ValueError where the bytes make no sense."""
    fields: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("a protobuf field without a number")
        match kind:
            case 0:
                _, at = _read_varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _read_varint(data, at)
                fields.append((number, data[at : at + size]))
                at += size
            case 5:
                at += 4
            case _:
                raise ValueError(f"a protobuf field of kind {kind}")
        if at > len(data):
            raise ValueError("a protobuf field that ends behind the message")
    return fields


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("a protobuf number that ends behind the message")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a protobuf number of more than 64 bits")
