"""The part owner's work: decode what members sent for one part, average it, encode the answer once.

The order of rows is the caller's and is kept; every operation is elementwise, rounds once and runs on the
CPU, so any two owners given the same rows answer with the same bytes.
Never raises for a row: one that does not decode is named by index, and the others count without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.keys.digest import Buffer
from atoll.learn.codec import Codec
from atoll.learn.codec.blocks import SPAN, Opened, spans_of

WEIGHT_MAX = 2**48  # samples or tokens of one peer in one round; above it a weight is a lie


class Combined(NamedTuple):
    wire: bytes | None  # the weighted mean, encoded; None if no row had any weight
    counted: tuple[int, ...]  # indices of the rows that are in it (a row of weight 0 adds nothing, but is in it)
    faults: tuple[tuple[int, str], ...]  # (index, what was wrong) of the rows left out


def combine(rows: Sequence[tuple[int, Buffer]], n: int, codec: Codec, reply: Codec) -> Combined:
    """Weighted mean of n values over (weight, wire) rows, encoded with `reply`."""
    counted, faults, kept = [], [], []
    for index, (weight, wire) in enumerate(rows):
        try:
            if not 0 <= weight <= WEIGHT_MAX:
                raise PeerFault("", f"weight {weight} is outside 0…{WEIGHT_MAX}")
            kept.append((weight, codec.open_wire(wire, n)))
            counted.append(index)
        except PeerFault as fault:
            faults.append((index, fault.what))
    if sum(weight for weight, _ in kept) == 0:
        return Combined(None, tuple(counted), tuple(faults))
    return Combined(reply.encode(_mean(kept, n, codec)), tuple(counted), tuple(faults))


def _mean(rows: list[tuple[int, Opened]], n: int, codec: Codec) -> Tensor:
    """(n,): sum over rows, in order, of value * (weight / total), span by span so that it stays in the cache."""
    total = sum(weight for weight, _ in rows)
    mean_N, value_S = torch.zeros(n), torch.empty(min(n, SPAN))
    for lo, hi in spans_of(n):
        sum_S, into_S = mean_N[lo:hi], value_S[: hi - lo]
        for weight, opened in rows:
            if weight:
                codec.decode_span(opened, lo, into_S)
                into_S.mul_(weight / total)  # the quotient of two ints is correctly rounded in Python
                sum_S.add_(into_S)
    return mean_N
