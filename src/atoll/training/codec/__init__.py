"""Codecs: encode an fp32 vector as bytes and decode it, with error feedback.

A codec turns one fp32 vector into a wire with a length, or maximum length, that is known beforehand. Error feedback
(`pack`) wraps any codec and is a plain value. Formats: specs/codecs.md.
Invariants:
- A wire decodes to the same bits on every machine.
- Untrusted input is checked before use (`PeerFault`), and never grows beyond the agreed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import SPAN, spans_of
from atoll.training.codec.chain import CODECS, check_codec_name, codec_named
from atoll.training.codec.core import Codec, SharedKnowledge

__all__ = ["CODECS", "Codec", "SharedKnowledge", "check_codec_name", "codec_named", "pack", "pack_spans"]


def pack(codec: Codec, delta_N: Tensor, memory_N: Tensor | None, beta: float) -> tuple[Buffer, Tensor]:
    """Encode under error feedback: e = beta * memory + delta; wire = C(e); memory' = e - C^-1(wire).

    Seide et al. 2014, section 3.1, is beta = 1; SparseLoCo (2508.15706, algorithm 1) 0.95. The memory is the
    sender's own: its bits need not agree with those of other peers.
    """
    left_N = torch.empty_like(delta_N)
    spans = (delta_N[lo:hi] for lo, hi in spans_of(len(delta_N)))
    return pack_spans(codec, spans, memory_N, beta, left_N), left_N


def pack_spans(
    codec: Codec, deltas: Iterable[Tensor], memory_N: Tensor | None, beta: float, left_N: Tensor
) -> Buffer:
    """`pack` for a delta that comes span by span, each valid until the next; memory' is written into `left_N`.

    It allocates no second vector of this length, unless the codec needs the whole vector (`Codec.spanwise`).
    """
    n = len(left_N)

    def owed() -> Iterator[Tensor]:
        for (lo, hi), delta_S in zip(spans_of(n), deltas, strict=True):
            e_S = left_N[lo:hi].copy_(delta_S)
            if memory_N is not None:
                e_S.add_(memory_N[lo:hi] if beta == 1.0 else memory_N[lo:hi] * beta)
            yield e_S

    wire = codec.encode_spans(n, owed())
    opened, room_S = codec.open_wire(wire, n), torch.empty(min(n, SPAN), dtype=torch.float32)
    for lo, hi in spans_of(n):
        left_N[lo:hi].sub_(codec.read_span(opened, lo, room_S[: hi - lo]))
    return wire
