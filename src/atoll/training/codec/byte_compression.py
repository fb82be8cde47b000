"""zstd, lz4, snappy: a general-purpose compressor after a codec, used only if it saves time.

`int8+zstd:3` names the compressor. `int8+auto` leaves the choice to the sender. The sender uses the rate of its
link (`SharedKnowledge.link_bytes_s`; 20 Mbit/s if unknown) and takes the fastest choice: compress, send,
decompress, or send uncompressed. The wire names the compressor, so a receiver needs to know neither link nor
choice. A sample is compressed first; incompressible data costs the time of a sample and one byte.
The declared size of an untrusted wire is compared with the inner codec's length before memory is allocated, and the
wire is decompressed into exactly that memory. Compressors differ between versions in their output, never in the
decoded bytes. Such a wire decodes to the same bits everywhere, but must not be a result by which two owners are
compared.
Wire: a byte 0 and the inner wire; or a byte 1 (zstd), 2 (lz4) or 3 (snappy), its length (4 bytes), and the
compressed inner wire.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cramjam
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.core import Codec

PLAIN = 0
LENGTH_BYTES = 4
SAMPLE_BYTES = 1 << 16  # enough to estimate the ratio; takes a compressor 1 ms
HOME_LINK_BYTES_S = 2.5e6  # assumed rate of an unmeasured link: 20 Mbit/s, a home's upload
AUTO = "auto"


class ByteCompressor(NamedTuple):
    """A compressor. Its speeds only guide the sender's choice; peers need not agree on them."""

    code: int  # first byte of the wire
    # of the inner wire, on one core of an AMD EPYC: the slowest of four kinds of compressible wires
    encode_gb_s: float
    decode_gb_s: float  # (int8 with few, half and all of the values, int4 with heavy tails)
    compress: Callable[[Buffer], cramjam.Buffer]


def _lz4_into(data: Buffer, room: bytearray) -> int:
    return cramjam.lz4.decompress_block_into(data, room, output_len=len(room))


METHODS = {
    "zstd:3": ByteCompressor(1, 0.16, 0.87, partial(cramjam.zstd.compress, level=3)),
    "zstd:5": ByteCompressor(1, 0.06, 0.55, partial(cramjam.zstd.compress, level=5)),
    "zstd:9": ByteCompressor(1, 0.03, 0.88, partial(cramjam.zstd.compress, level=9)),
    "lz4": ByteCompressor(2, 0.40, 2.4, partial(cramjam.lz4.compress_block, store_size=False)),
    "snappy": ByteCompressor(3, 0.35, 0.9, cramjam.snappy.compress_raw),
}
# first byte -> (packed, room) -> bytes written; raises if the room is too small
INTO: dict[int, Callable[[Buffer, bytearray], int]] = {
    1: cramjam.zstd.decompress_into,
    2: _lz4_into,
    3: cramjam.snappy.decompress_raw_into,
}


def seconds_per_gb(ratio: float, encode_gb_s: float, decode_gb_s: float, link_bytes_s: float) -> float:
    """Seconds to compress a GB to `ratio` GB, send that, and decompress it, one after another."""
    return 1 / encode_gb_s + ratio * 1e9 / link_bytes_s + 1 / decode_gb_s


def saves_time(ratio: float, encode_gb_s: float, decode_gb_s: float, link_bytes_s: float) -> bool:
    """Whether compressing to `ratio` of the bytes, sending and decompressing is faster than sending all bytes."""
    return seconds_per_gb(ratio, encode_gb_s, decode_gb_s, link_bytes_s) < 1e9 / link_bytes_s


def compressed_codec(name: str, inner: Codec, link_bytes_s: float | None) -> Codec:
    """The codec `inner` followed by compressor `name`: one of METHODS, or AUTO for the fastest choice."""
    methods = tuple(METHODS.values()) if name == AUTO else (METHODS[name],)
    link_bytes_s = HOME_LINK_BYTES_S if link_bytes_s is None else link_bytes_s
    if not link_bytes_s > 0:
        raise ValueError(f"link_bytes_s is {link_bytes_s}; give the measured rate in bytes per second, or None")
    return Codec(
        f"{inner.name}+{name}",
        lambda n: 1 + inner.wire_bytes(n) if n else 0,
        partial(_encode, methods, inner, link_bytes_s),
        partial(_open_wire, frozenset(method.code for method in methods), inner),
        inner.decode_span,
        False,
        False,
        add_span=inner.add_span,
    )


def _encode(methods: tuple[ByteCompressor, ...], inner: Codec, link_bytes_s: float, x: Tensor) -> Buffer:
    plain = inner.encode(x)
    if len(x) == 0:
        return b""
    start = max(0, len(plain) - SAMPLE_BYTES) // 2  # the middle: scales stand at the beginning
    sample = plain[start : start + SAMPLE_BYTES]
    ratios = [(LENGTH_BYTES + len(method.compress(sample))) / len(sample) for method in methods]
    tried = zip(methods, ratios, strict=True)
    best, ratio = min(
        tried, key=lambda one: seconds_per_gb(one[1], one[0].encode_gb_s, one[0].decode_gb_s, link_bytes_s)
    )
    if saves_time(ratio, best.encode_gb_s, best.decode_gb_s, link_bytes_s):
        packed = bytes(best.compress(plain))
        ratio = (LENGTH_BYTES + len(packed)) / len(plain)
        if saves_time(ratio, best.encode_gb_s, best.decode_gb_s, link_bytes_s):
            return bytes([best.code]) + len(plain).to_bytes(LENGTH_BYTES, "little") + packed
    return bytes([PLAIN]) + plain


def _open_wire(codes: frozenset[int], inner: Codec, wire: Buffer, n: int) -> Any:
    if n == 0:
        return inner.open_wire(wire, 0)
    view, most = memoryview(wire), inner.wire_bytes(n)
    if not 1 < len(view) <= 1 + most or view[0] not in (PLAIN, *codes):
        raise PeerFault("", f"{len(view)} bytes are not a wire of {n} values, compressed or not")
    if view[0] == PLAIN:
        return inner.open_wire(view[1:], n)
    declared = int.from_bytes(view[1 : 1 + LENGTH_BYTES], "little")
    if declared > most or (inner.fixed and declared != most) or declared + 1 <= len(view):
        raise PeerFault("", f"compressed bytes declare {declared} bytes, more than the agreed {most}")
    return inner.open_wire(_decompressed(view[0], view[1 + LENGTH_BYTES :], declared), n)


def _decompressed(code: int, data: memoryview, declared: int) -> bytearray:
    room = bytearray(declared)
    try:
        written = INTO[code](data, room)
    except cramjam.DecompressionError as fault:
        raise PeerFault("", f"compressed bytes do not decompress: {fault}") from None
    if written != declared:
        raise PeerFault("", f"compressed bytes hold {written} bytes but declare {declared}")
    return room
