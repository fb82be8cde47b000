"""What a codec is, and what sender and receiver may know beside its name.

A codec is a value: five functions and three facts. Wrapping codecs (`top_k`, `dct`, `zstd` …) take a codec and
give a codec, so everything that holds for one holds for a chain of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, empty

from atoll.keys.digest import Buffer
from atoll.learn.codec.blocks import spans_of


@dataclass(frozen=True)
class Codec:
    name: str
    wire_bytes: Callable[[int], int]  # n values -> length of their wire; the longest one if not `fixed`
    encode: Callable[[Tensor], bytes]  # (n,) fp32 -> wire; ValueError if a value is not finite
    open_wire: Callable[[Buffer, int], Any]  # PeerFault unless encode could have made the wire for n
    decode_span: Callable[[Any, int, Tensor], None]
    """(opened, lo, out): write values lo … lo + len(out). lo is a multiple of SPAN."""
    fixed: bool = True  # every wire for n has the same length
    same_everywhere: bool = True
    """All machines encode alike. False where a library's version decides: such an answer cannot be compared."""

    def decode(self, wire: Buffer, n: int) -> Tensor:
        """Wire -> (n,) fp32, bit-identical everywhere. PeerFault if the wire is not one for n values."""
        opened, out_N = self.open_wire(wire, n), empty(n)
        for lo, hi in spans_of(n):
            self.decode_span(opened, lo, out_N[lo:hi])
        return out_N


def smaller(bytes_in: int, bytes_out: int) -> bool:
    return bytes_out < bytes_in


@dataclass(frozen=True)
class Known:
    """What both sides of a wire hold already. Most codecs need none of it."""

    seed: bytes | None = None  # `randk`: the same for all members, another in every round (the last vertex's id)
    reference_N: Tensor | None = None  # `delta`: the vector the receiver holds
    sizes: tuple[int, ...] | None = None  # `changed`: values per tensor of this vector
    pays: Callable[[int, int], bool] = field(default=smaller)
    """Byte codecs at the sender: (bytes in, bytes out) -> worth sending packed? See `squeeze.pays`."""


NOTHING = Known()
