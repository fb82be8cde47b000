"""zstd, lz4, snappy: a general-purpose compressor behind a codec, used only where it pays.

The wire says whether it was used, so a sender decides for itself: `pays` compares, for the link at hand, the
time to compress and send with the time to send as it is. A sample is tried first; what does not shrink
costs a sample's time and one byte.
A stranger's wire allocates nothing before its declared size was compared with the inner codec's length, and is
decompressed into exactly that room. Compressors differ between versions in what they write, never in what they
read: such a wire decodes to the same bits everywhere but must not be an answer that two owners are compared by.
Wire: a byte 0 and the inner wire; or a byte 1, its length (4 bytes), and the compressed inner wire.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cramjam
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.keys.digest import Buffer
from atoll.learn.codec.core import Codec

PLAIN, PACKED = 0, 1
LENGTH_BYTES = 4
SAMPLE_BYTES = 1 << 16  # long enough for a compressor to show what it can do, 1 ms of its time


class Method(NamedTuple):
    compress: Callable[[Buffer], Buffer]
    into: Callable[[Buffer, bytearray], int]  # (packed, room) -> bytes written; raises rather than write more


def _lz4_into(data: Buffer, room: bytearray) -> int:
    return cramjam.lz4.decompress_block_into(data, room, output_len=len(room))


METHODS = {
    **{
        f"zstd:{level}": Method(partial(cramjam.zstd.compress, level=level), cramjam.zstd.decompress_into)
        for level in (3, 5, 9)
    },
    "lz4": Method(partial(cramjam.lz4.compress_block, store_size=False), _lz4_into),
    "snappy": Method(cramjam.snappy.compress_raw, cramjam.snappy.decompress_raw_into),
}


def pays(bytes_in: int, bytes_out: int, cpu_bytes_s: float, link_bytes_s: float) -> bool:
    """Whether compressing at that rate and sending less is sooner done than sending all."""
    return bytes_in / cpu_bytes_s + bytes_out / link_bytes_s < bytes_in / link_bytes_s


def squeezed(method: str, inner: Codec, worth: Callable[[int, int], bool]) -> Codec:
    return Codec(
        f"{inner.name}+{method}",
        lambda n: 1 + inner.wire_bytes(n) if n else 0,
        partial(_encode, METHODS[method], inner, worth),
        partial(_open_wire, METHODS[method], inner),
        inner.decode_span,
        False,
        False,
    )


def _encode(method: Method, inner: Codec, worth: Callable[[int, int], bool], x: Tensor) -> bytes:
    plain = inner.encode(x)
    if len(x) == 0:
        return b""
    start = max(0, len(plain) - SAMPLE_BYTES) // 2  # the middle: scales stand at the beginning
    sample = plain[start : start + SAMPLE_BYTES]
    if worth(len(sample), LENGTH_BYTES + len(method.compress(sample))):
        packed = bytes(method.compress(plain))
        if worth(len(plain), LENGTH_BYTES + len(packed)) and LENGTH_BYTES + len(packed) < len(plain):
            return bytes([PACKED]) + len(plain).to_bytes(LENGTH_BYTES, "little") + packed
    return bytes([PLAIN]) + plain


def _open_wire(method: Method, inner: Codec, wire: Buffer, n: int) -> Any:
    if n == 0:
        return inner.open_wire(wire, 0)
    view, most = memoryview(wire), inner.wire_bytes(n)
    if not 1 < len(view) <= 1 + most or view[0] > PACKED:
        raise PeerFault("", f"{len(view)} bytes are no wire of {n} values, compressed or not")
    if view[0] == PLAIN:
        return inner.open_wire(view[1:], n)
    declared = int.from_bytes(view[1 : 1 + LENGTH_BYTES], "little")
    if declared > most or (inner.fixed and declared != most) or declared + 1 <= len(view):
        raise PeerFault("", f"compressed bytes promise {declared} where at most {most} were agreed")
    return inner.open_wire(_room_filled(method, view[1 + LENGTH_BYTES :], declared), n)


def _room_filled(method: Method, data: memoryview, declared: int) -> bytearray:
    room = bytearray(declared)
    try:
        written = method.into(data, room)
    except cramjam.DecompressionError as fault:
        raise PeerFault("", f"compressed bytes do not decompress: {fault}") from None
    if written != declared:
        raise PeerFault("", f"compressed bytes hold {written} where they promise {declared}")
    return room
