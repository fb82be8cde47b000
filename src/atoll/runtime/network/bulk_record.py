"""Record format of the bulk lane.

A record is a clear, authenticated head and a sealed body:

    kind u8, 3 zero bytes, body bytes u32, payload bytes u32, slab index u32, frame number u64     (big endian)

Invariants: lengths in a head are checked before any memory is reserved for them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from atoll.base.errors import PeerFault
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, MIB
from atoll.crypto.seal import TAG_BYTES

HEAD = struct.Struct("!BxxxIIIQ")
MESSAGE, SLAB = 0, 1
NO_PAYLOAD = 2**32 - 1  # value of payload bytes for a frame without payload; an empty payload is 0
SLAB_BYTES = MIB // 2  # sealed and plain text fit a core's cache: 0.59 CPU-s/GB, at 128 kB 0.99
BODY_MAX = max(SLAB_BYTES, CONTROL_FRAME_MAX)  # bytes of one record
BOX_BYTES = HEAD.size + BODY_MAX + TAG_BYTES + HEAD.size  # a record, and the head of the next one behind it
BESIDE_SLAB_MAX = BODY_MAX - SLAB_BYTES - TAG_BYTES  # longest message that fits a buffer beside a slab
PEEK_BYTES = 4096  # read while no head is known: a whole small message, little of a slab to move


class RecordHeader(NamedTuple):
    """Head of a record, within the limits."""

    head: bytes
    kind: int
    body_bytes: int
    payload_bytes: int
    slab: int  # index; 0 for a message
    number: int

    @property
    def sealed_bytes(self) -> int:
        """Bytes behind the head."""
        return self.body_bytes + TAG_BYTES


def next_read_bytes(coming: RecordHeader | None) -> int:
    """Length of the next read: to the end of this record and of the next head, so that no large bytes are moved.

    A message and the first slab of its payload are one read, as they were one write.
    """
    if coming is None:
        return PEEK_BYTES
    wanted_bytes = coming.sealed_bytes + HEAD.size
    if coming.kind == MESSAGE and coming.payload_bytes != NO_PAYLOAD and coming.body_bytes <= BESIDE_SLAB_MAX:
        wanted_bytes += min(SLAB_BYTES, coming.payload_bytes) + TAG_BYTES + HEAD.size
    return wanted_bytes


def checked_header(head: bytes) -> RecordHeader:
    """The decoded head of a record. Raises PeerFault above the limits."""
    kind, body_bytes, payload_bytes, index, number = HEAD.unpack(head)
    if kind not in (MESSAGE, SLAB) or (kind == SLAB and payload_bytes == NO_PAYLOAD):
        raise PeerFault("", f"a bulk record of kind {kind}")
    if body_bytes > (SLAB_BYTES if kind == SLAB else CONTROL_FRAME_MAX):
        raise PeerFault("", f"a bulk record of {body_bytes} bytes")
    if payload_bytes != NO_PAYLOAD and payload_bytes > BULK_FRAME_MAX:
        raise PeerFault("", f"a payload of {payload_bytes} bytes")
    return RecordHeader(head, kind, body_bytes, payload_bytes, index, number)
