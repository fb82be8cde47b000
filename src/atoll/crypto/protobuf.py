"""Protobuf fields of libp2p messages: numbers (varints) and length-delimited bytes, others skipped.

Invariants:
- A message has at most `FIELDS_MAX` fields, and each number has one encoding, the shortest.
- Nothing is allocated for an announced length, and nothing is read beyond the message.
Not responsible for: the meaning of fields, repeated fields. Groups are refused.
"""

from __future__ import annotations

FIELDS_MAX = 1024  # an identify message of a full js-libp2p or kubo node has about 60
NUMBER_BYTES_MAX = 10  # a number of 64 bits, seven bits per byte


def protobuf_field(number: int, data: bytes) -> bytes:
    """Encode one length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def protobuf_fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Field numbers and values in the order of the message. Raises ValueError if the message is malformed."""
    fields: list[tuple[int, int | bytes]] = []
    at = count = 0
    while at < len(data):
        count += 1
        if count > FIELDS_MAX:
            raise ValueError(f"protobuf message has more than {FIELDS_MAX} fields")
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("protobuf field has no number")
        match kind:  # protobuf.dev/programming-guides/encoding, "Message Structure"
            case 0:
                value, at = _read_varint(data, at)
                fields.append((number, value))
            case 1:
                at += 8
            case 2:
                size, at = _read_varint(data, at)
                fields.append((number, data[at : at + size]))
                at += size
            case 5:
                at += 4
            case _:
                raise ValueError(f"protobuf field has the unsupported kind {kind}")
        if at > len(data):
            raise ValueError("protobuf field ends behind the message")
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
    for size, byte in enumerate(data[at : at + NUMBER_BYTES_MAX], start=1):
        value |= (byte & 0x7F) << 7 * (size - 1)
        if byte < 0x80:
            if byte == 0 and size > 1:
                raise ValueError("protobuf number is not minimally encoded")
            return value, at + size
    raise ValueError(f"protobuf number ends behind the message or has more than {NUMBER_BYTES_MAX} bytes")
