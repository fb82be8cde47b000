"""How an update becomes bytes and bytes an update again.

A codec turns one fp32 vector into a wire whose length, or longest length, is known beforehand. What it decodes
to is the same bits on every machine; what a stranger sends is checked before it is believed (`PeerFault`), and
never grows beyond what was agreed on. Error feedback (`pack`) wraps any codec and is a plain value.
Formats: specs/codecs.md.
"""

from __future__ import annotations

from torch import Tensor

from atoll.learn.codec.chain import CODECS, chain, codec_named
from atoll.learn.codec.core import Codec, Known

__all__ = ["CODECS", "Codec", "Known", "chain", "codec_named", "pack"]


def pack(codec: Codec, delta_N: Tensor, memory_N: Tensor | None, beta: float) -> tuple[bytes, Tensor]:
    """Encode under error feedback: e = beta * memory + delta; wire = C(e); memory' = e - C^-1(wire).

    Seide et al. 2014, section 3.1, is beta = 1; SparseLoCo (2508.15706, algorithm 1) 0.95. The memory is the
    sender's own: its bits need not agree with anybody's.
    """
    e_N = delta_N if memory_N is None else memory_N * beta + delta_N
    wire = codec.encode(e_N)
    return wire, e_N - codec.decode(wire, e_N.numel())
