"""Codec interface, and the shared knowledge of sender and receiver.

A codec is a value: a few functions and three facts. Wrapping codecs (`top_k`, `dct`, `zstd` …) take a codec and
return a codec, so properties of a codec hold for chains too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, empty, float32, mul

from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import Room, check_input, new_wire, spans_of

EncodeSpans = Callable[[int, Iterable[Tensor], Room], Buffer]
Show = Callable[[Buffer], object]


@dataclass(frozen=True)
class Codec:
    name: str
    wire_bytes: Callable[[int], int]  # n values -> length of their wire; the longest one if not `fixed`
    encode: Callable[[Tensor], Buffer]
    """(n,) fp32, on a CPU or a GPU -> wire; ValueError if a value is not finite. The wire may be the vector's own
    memory (`fp32`): a later change of the vector changes the wire.
    """
    open_wire: Callable[[Buffer, int], Any]  # PeerFault unless encode could have made the wire for n
    decode_span: Callable[[Any, int, Tensor], None]
    """(opened, lo, out): write values lo … lo + len(out). lo is a multiple of SPAN."""
    fixed: bool = True  # every wire for n has the same length
    same_everywhere: bool = True
    """Whether all machines encode to the same bytes. False if the output depends on a library's version: such
    results cannot be compared.
    """
    spanwise: EncodeSpans | None = None  # see encode_spans; None if a codec needs the whole vector first

    view_values: Callable[[Any, int, int], Tensor] | None = None
    """(opened, lo, hi): values lo … hi as a read-only view of memory; None if they must be decoded."""

    add_span: Callable[[Any, int, float, Tensor], bool] | None = None
    """Like `add`, with the same bits but without `room`. Returns False, and does nothing, while there is no kernel.
    """

    sections: tuple[tuple[int, int], ...] = ()
    """(values, bytes) of the units of each section of a wire, in order. A range of values that begins at a multiple
    of 4096 can then be cut out of all sections and is a wire of its own. If it cannot, this is empty, and no result
    can be opened (specs/openings.md).
    """

    hashing_codec: Callable[[Codec, Show], Codec] | None = None
    """See `showing`; None if wires are much smaller than vectors."""

    decode_whole: Callable[[Buffer, Tensor], None] | None = None
    """Replacement of `decode_into`, for codecs that check and copy values in one pass, or not on a CPU."""

    on_devices: bool = False  # `encode` and `decode_into` work on the vector's device: see `device.py`

    def with_hashing(self, show: Show) -> Codec:
        """The same codec with encoders that pass the whole wire to `show`, piece by piece, in order, for hashing.

        The pieces are then still in a core's cache. If wires are as large as vectors, hashing later costs six times
        as much (8.4 ms per 100 MB instead of 1.5).
        """
        if self.hashing_codec is not None:
            return self.hashing_codec(self, show)

        def shown(wire: Buffer) -> Buffer:
            show(wire)
            return wire

        return replace(
            self,
            encode=lambda x: shown(self.encode(x)),
            spanwise=lambda n, spans, room: shown(self.encode_spans(n, spans, room)),
        )

    def encode_spans(self, n: int, spans: Iterable[Tensor], room: Room = new_wire) -> Buffer:
        """The wire of n values that come span by span, in order, each valid until the next.

        The bytes are those of `encode`. Codecs that need one span at a time never hold the vector, and write the
        wire into `room`: fresh pages of an fp32 wire cost more than filling them.
        """
        if self.spanwise is not None:
            return self.spanwise(n, spans, room)
        x = empty(n, dtype=float32)
        for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
            x[lo:hi] = x_S
        return self.encode(x)

    def read_span(self, opened: Any, lo: int, room_S: Tensor) -> Tensor:
        """Values lo … lo + len(room), read-only: in `room`, or as a view of memory."""
        if self.view_values is not None:
            return self.view_values(opened, lo, lo + len(room_S))
        self.decode_span(opened, lo, room_S)
        return room_S

    def add(self, opened: Any, lo: int, share: float, sum_S: Tensor, room_S: Tensor) -> None:
        """sum += value * share from value lo on: products are rounded to fp32, then sums. `room` is overwritten.

        The sum began at zero, so it holds no minus zero: adding zeros does not change it.
        """
        if self.add_span is None or not self.add_span(opened, lo, share, sum_S):
            mul(self.read_span(opened, lo, room_S), share, out=room_S)
            sum_S.add_(room_S)

    def decode(self, wire: Buffer, n: int) -> Tensor:
        """Wire -> (n,) fp32, bit-identical everywhere. PeerFault if the wire is not one for n values."""
        out_N = empty(n, dtype=float32)
        self.decode_into(wire, out_N)
        return out_N

    def decode_into(self, wire: Buffer, out_N: Tensor) -> None:
        """Decode into `out_N`: one contiguous fp32 vector, on a CPU or a GPU. PeerFault may leave it partly
        overwritten.
        """
        if out_N.is_cuda and not self.on_devices:
            out_N.copy_(self.decode(wire, len(out_N)))
            return
        if self.decode_whole is not None:
            self.decode_whole(wire, out_N)
            return
        opened = self.open_wire(wire, len(out_N))
        if self.view_values is not None:
            out_N.copy_(self.view_values(opened, 0, len(out_N)))
            return
        for lo, hi in spans_of(len(out_N)):
            self.decode_span(opened, lo, out_N[lo:hi])


def whole(spanwise: EncodeSpans) -> Callable[[Tensor], Buffer]:
    """`encode` of a codec that works span by span."""

    def encode(x: Tensor) -> Buffer:
        x = check_input(x)
        return spanwise(len(x), (x[lo:hi] for lo, hi in spans_of(len(x))), new_wire)

    return encode


@dataclass(frozen=True)
class SharedKnowledge:
    """Values that both sides of a wire hold, and the sender's link rate. Most codecs need none of it.

    `training/recipe/update.py` fills it in from values that all members of a round agreed on.
    """

    seed: bytes | None = None  # `randk`: the same for all members, another in every round and part
    reference_N: Tensor | None = None  # `delta`: the vector the receiver holds; `lowrank`: start of its search
    sizes: tuple[int, ...] | None = None  # `changed`: values per tensor of this vector
    # `changed`: full size of each tensor, also outside this vector; None: no tensor is cut
    wholes: tuple[int, ...] | None = None
    shapes: tuple[tuple[int, int], ...] | None = None  # `lowrank`: (rows, columns) of every piece of this vector
    link_bytes_s: float | None = None
    """Compressors at the sender: rate of its link, bytes per second. None: unknown, assumed to be a home's. See
    `byte_compression.saves_time`.
    """


NOTHING = SharedKnowledge()
