"""How an update becomes bytes and bytes an update again.

A codec turns one fp32 vector into a wire whose length, or longest length, is known beforehand. What it decodes
to is the same bits on every machine; what a stranger sends is checked before it is believed (`PeerFault`), and
never grows beyond what was agreed on. Error feedback (`pack`) wraps any codec and is a plain value.
Formats: specs/codecs.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.keys.digest import Buffer
from atoll.learn.codec.chain import CODECS, chain, check_name, codec_named
from atoll.learn.codec.core import Codec, Known

__all__ = ["CODECS", "Codec", "Known", "chain", "check_name", "codec_named", "pack"]


def pack(codec: Codec, delta_N: Tensor, memory_N: Tensor | None, beta: float) -> tuple[Buffer, Tensor]:
    """Encode under error feedback: e = beta * memory + delta; wire = C(e); memory' = e - C^-1(wire).

    Seide et al. 2014, section 3.1, is beta = 1; SparseLoCo (2508.15706, algorithm 1) 0.95. The memory is the
    sender's own: its bits need not agree with anybody's. The wire may share memory with `delta_N` (`Codec.encode`).
    """
    e_N = delta_N if memory_N is None else memory_N * beta + delta_N
    wire = codec.encode(e_N)
    left_N = codec.decode(wire, e_N.numel())
    return wire, torch.sub(e_N, left_N, out=left_N)
