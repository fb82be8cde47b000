"""changed: only the changed tensors of a vector, those with a norm above a threshold; the others decode to zero.

The default threshold is 1e-6 (`changed:1e-5` sets another). `SharedKnowledge.sizes` holds the number of values of
each tensor; without it a tensor is a range of 4096 values. Parts cut tensors. For n values of a tensor of N
(`SharedKnowledge.wholes`) the threshold is threshold * sqrt(n / N), so all parts together omit no more than the
threshold, though only the author sees a whole tensor. If the largest magnitude m does not decide, the norm is
computed on integers, so two owners never disagree at the border: k = |x| * (4095 / m) rounded; norm = sqrt(sum of
k^2) / 4095 * m.
Wire: a bit per tensor, then the wire of the changed ones, concatenated. Its length varies.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import check_input, largest_of, refuse
from atoll.training.codec.core import Codec

THRESHOLD = 1e-6  # default norm of a tensor's change
PAGE = 4096  # values of a tensor if sizes are unknown
GRID = 4095  # squares of 12-bit numbers: 2^39 of them add up exactly in 64 bits


class OpenedTensors(NamedTuple):
    edges: list[int]  # start of each tensor, and the end of the last one
    source: list[int]  # start of its values in value_M; -1 if it did not change
    value_M: Tensor


def changed(
    threshold: float, values: Codec, sizes: tuple[int, ...] | None, wholes: tuple[int, ...] | None = None
) -> Codec:
    return Codec(
        f"changed{'' if threshold == THRESHOLD else f':{threshold!r}'}+{values.name}",
        lambda n: -(-(len(_edges(sizes, n)) - 1) // 8) + values.wire_bytes(n),
        partial(_encode, threshold, values, sizes, wholes),
        partial(_open_wire, values, sizes),
        _decode_span,
        False,
        values.same_everywhere,
    )


def _edges(sizes: tuple[int, ...] | None, n: int) -> list[int]:
    if sizes is None:
        return [*range(0, n, PAGE), n]
    edges = [0, *accumulate(sizes)]
    if edges[-1] != n or min(sizes, default=1) < 1:
        raise ValueError(f"tensors with {edges[-1]} values in total, or empty ones, in a vector of {n}")
    return edges


def _is_changed(x: Tensor, threshold: float) -> bool:
    largest = largest_of(x)
    if largest > threshold or largest == 0:
        return largest > 0  # one value alone is enough
    grid = (x.to(torch.float64).abs() * (GRID / largest)).round_().to(torch.int64)
    return math.sqrt(int((grid * grid).sum())) / GRID * largest > threshold


def _encode(
    threshold: float, values: Codec, sizes: tuple[int, ...] | None, wholes: tuple[int, ...] | None, x: Tensor
) -> Buffer:
    x = check_input(x)
    refuse(largest_of(x))
    edges = _edges(sizes, x.numel())
    tensors = [x[lo:hi] for lo, hi in pairwise(edges)]
    shares = zip(tensors, wholes or map(len, tensors), strict=True)
    flags = np.array([_is_changed(x_N, threshold * math.sqrt(len(x_N) / whole)) for x_N, whole in shares], np.bool_)
    kept = [tensor for tensor, flag in zip(tensors, flags, strict=True) if flag]
    wire = values.encode(torch.cat([x.new_empty(0), *kept]))
    return np.packbits(flags, bitorder="little").tobytes() + wire


def _open_wire(values: Codec, sizes: tuple[int, ...] | None, wire: Buffer, n: int) -> OpenedTensors:
    edges = _edges(sizes, n)
    tensors = len(edges) - 1
    cut = -(-tensors // 8)
    if len(wire) < cut:
        raise PeerFault("", f"{len(wire)} bytes are too few for the flags of {tensors} tensors")
    flags = np.unpackbits(np.frombuffer(wire, np.uint8, cut), bitorder="little")
    if flags[tensors:].any():
        raise PeerFault("", "unused bits of the last byte are not zero")
    source, kept = [], 0
    for (lo, hi), flag in zip(pairwise(edges), flags.tolist(), strict=False):
        source.append(kept if flag else -1)
        kept += (hi - lo) * flag
    return OpenedTensors(edges, source, values.decode(memoryview(wire)[cut:], kept))


def _decode_span(opened: OpenedTensors, lo: int, out_S: Tensor) -> None:
    out_S.zero_()
    hi = lo + len(out_S)
    first, last = np.searchsorted(opened.edges, (lo, hi), side="right")
    for tensor in range(first - 1, min(last, len(opened.source))):
        if opened.source[tensor] >= 0:
            start, end = max(lo, opened.edges[tensor]), min(hi, opened.edges[tensor + 1])
            at = opened.source[tensor] + start - opened.edges[tensor]
            out_S[start - lo : end - lo] = opened.value_M[at : at + end - start]
