"""How an update becomes bytes and bytes an update again.

A codec turns one fp32 vector into a wire of a length known beforehand. What it decodes to is the same bits on
every machine; what a stranger sends is checked before it is believed (`PeerFault`), and never makes anything
larger than the vector that was agreed on. Error feedback (`pack`) wraps any codec and is a plain value.
Formats: specs/codecs.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.keys.digest import Buffer
from atoll.learn.codec import fp32, int8, two_bit
from atoll.learn.codec.blocks import Opened, spans_of


@dataclass(frozen=True)
class Codec:
    name: str
    wire_bytes: Callable[[int], int]  # n values -> exact length of their wire
    encode: Callable[[Tensor], bytes]  # (n,) fp32 -> wire; ValueError if a value is not finite
    open_wire: Callable[[Buffer, int], Opened]  # PeerFault unless encode could have made the wire for n
    decode_span: Callable[[Opened, int, Tensor], None]
    """(opened, lo, out): write values lo … lo + len(out). lo is a multiple of SPAN."""

    def decode(self, wire: Buffer, n: int) -> Tensor:
        """Wire -> (n,) fp32, bit-identical everywhere. PeerFault if the wire is not one for n values."""
        opened, out_N = self.open_wire(wire, n), torch.empty(n)
        for lo, hi in spans_of(n):
            self.decode_span(opened, lo, out_N[lo:hi])
        return out_N


CODECS = {
    "fp32": Codec("fp32", fp32.wire_bytes, fp32.encode, fp32.open_wire, fp32.decode_span),
    "int8": Codec("int8", int8.wire_bytes, int8.encode, int8.open_wire, int8.decode_span),
    "2bit": Codec("2bit", two_bit.wire_bytes, two_bit.encode, two_bit.open_wire, two_bit.decode_span),
}


def codec_named(name: str) -> Codec:
    if name not in CODECS:
        raise ValueError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    return CODECS[name]


def pack(codec: Codec, delta_N: Tensor, memory_N: Tensor | None, beta: float) -> tuple[bytes, Tensor]:
    """Encode under error feedback: e = beta * memory + delta; wire = C(e); memory' = e - C^-1(wire).

    Seide et al. 2014, section 3.1, is beta = 1; SparseLoCo (2508.15706, algorithm 1) 0.95. The memory is the
    sender's own: its bits need not agree with anybody's.
    """
    e_N = delta_N if memory_N is None else memory_N * beta + delta_N
    wire = codec.encode(e_N)
    return wire, e_N - codec.decode(wire, e_N.numel())
