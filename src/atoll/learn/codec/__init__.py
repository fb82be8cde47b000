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
from atoll.learn.codec.blocks import SPAN


@dataclass(frozen=True)
class Codec:
    name: str
    wire_bytes: Callable[[int], int]  # n values -> exact length of their wire
    encode: Callable[[Tensor], bytes]  # (n,) fp32 -> wire; ValueError if a value is not finite
    check: Callable[[Buffer, int], None]  # PeerFault unless the wire is one that encode could have made for n
    decode_span: Callable[[Buffer, int, int, Tensor], None]
    """(checked wire, n, lo, out): write values lo … lo + len(out); lo is a multiple of BLOCK, and so is
    len(out) unless the span ends at n."""

    def decode(self, wire: Buffer, n: int) -> Tensor:
        """Wire -> (n,) fp32, bit-identical everywhere. PeerFault if the wire is not one for n values."""
        self.check(wire, n)
        out_N = torch.empty(n)
        for lo in range(0, n, SPAN):
            self.decode_span(wire, n, lo, out_N[lo : lo + SPAN])
        return out_N


CODECS = {
    "fp32": Codec("fp32", fp32.wire_bytes, fp32.encode, fp32.check, fp32.decode_span),
    "int8": Codec("int8", int8.wire_bytes, int8.encode, int8.check, int8.decode_span),
    "2bit": Codec("2bit", two_bit.wire_bytes, two_bit.encode, two_bit.check, two_bit.decode_span),
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
