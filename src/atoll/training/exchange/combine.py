"""Combining one part: the weighted mean (or order statistic) of the members' rows, encoded once as the part's
result.

`combine` is the part owner's work: decode, average or sort (`statistic`) or weigh by distances
(`distance_weights`), encode the result once. `combine_remembering` adds error feedback of the owner: the result's
encoding error goes into the next one. `gather` needs no owner: every member decodes all rows.
Invariants:
- The order of rows is the caller's. Every operation is elementwise, rounds once and runs on the CPU, so equal rows
  give equal bits on all peers.
- Beside the rows and the result an owner holds a few spans, however large the part is, unless the result's codec
  needs the whole part (`Codec.spanwise`).
- No row raises an error: a row that does not decode is returned by index, and the others count without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec, pack_spans
from atoll.training.codec.blocks import Room, lend_spans, new_wire, spans_of
from atoll.training.exchange.statistic import MEAN, RowCombinationRule, order_statistics

WEIGHT_MAX = 2**48  # samples or tokens of one peer in one round; a higher weight is a lie


class CombinedPart(NamedTuple):
    wire: Buffer | None  # the encoded result; None if no row had any weight, or too few had for the statistic
    # indices of the rows in the result (a row of weight 0 adds nothing, but counts as included)
    counted: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]  # (index, fault) of the rows left out
    why: str = ""  # reason for a missing result


class WeightedRowMean(NamedTuple):
    mean_N: Tensor | None  # weighted mean, fp32; None if no row had any weight
    counted: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]


class OpenRows(NamedTuple):
    """The rows that decode."""

    opened: list[tuple[int, Any]]  # (weight, opened wire)
    codecs: list[Codec]  # codec of each row
    counted: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]

    @property
    def total(self) -> int:
        return sum(weight for weight, _ in self.opened)


def combine(
    rows: Sequence[tuple[int, Buffer]],
    n: int,
    codec: Codec | Sequence[Codec],
    reply: Codec,
    statistic: RowCombinationRule = MEAN,
    room: Room = new_wire,
) -> CombinedPart:
    """Statistic of n values over (weight, wire) rows, encoded with `reply` into `room`.

    `codec` is one for all rows or one for each (mean only: partial sums travel in the codec of results).
    Rows that do not decode do not reduce the number of tolerated liars, so leaving them out gives the same result.
    If distances weigh the rows, all rows decoded when they were compared. A row that no longer decodes then
    invalidates the result.
    """
    kept = opened_rows(rows, n, codec)
    if statistic.weights and kept.faults:
        why = f"{len(kept.faults)} of the compared rows no longer decode"
        return CombinedPart(None, kept.counted, kept.faults, why)
    if statistic.weights and not isinstance(statistic.weights, bytes):
        why, spans = "", _sums(kept, statistic.weights, n)
    elif statistic.sorts:
        assert isinstance(codec, Codec)
        mixtures = statistic.mixtures(len(kept.opened))  # mixtures name rows by their position
        sorted_in = [opened for weight, opened in kept.opened if weight or mixtures is not None]
        why = statistic.shortage(len(sorted_in if mixtures is None else mixtures))
        spans = order_statistics(sorted_in, n, codec, statistic)
    else:
        why, spans = "" if kept.total else "no row has any weight", _means(kept, n)
    return CombinedPart(None if why else reply.encode_spans(n, spans, room), kept.counted, kept.faults, why)


def combine_remembering(
    rows: Sequence[tuple[int, Buffer]], n: int, codec: Codec, reply: Codec, memory_N: Tensor | None, beta: float
) -> tuple[CombinedPart, Tensor | None]:
    """Like `combine`, with error feedback of the owner: e = beta * memory + mean; wire = C(e); memory' = e -
    C^-1(wire).

    DoubleSqueeze (Tang et al. 2019, 1905.05957, algorithm 1). Only the owner has the memory (n,), so no other peer
    can recompute its result, and the memory is lost when another owner takes over. Use it only where owners are
    trusted. If no row has any weight, there is no result, and the memory is returned as it was. `memory_N` is not
    changed.
    """
    kept = opened_rows(rows, n, codec)
    if kept.total == 0:
        return CombinedPart(None, kept.counted, kept.faults), memory_N
    left_N = torch.empty(n, dtype=torch.float32)
    wire = pack_spans(reply, _means(kept, n), memory_N, beta, left_N)
    return CombinedPart(wire, kept.counted, kept.faults), left_N


def gather(rows: Sequence[tuple[int, Buffer]], n: int, codec: Codec) -> WeightedRowMean:
    """The weighted mean itself, for members that all hold every row: no encoded result, so no second loss.

    Equal rows in equal order give equal bits; members agree elsewhere on which rows those are. A member downloads
    every other member's wire instead of one result.
    """
    kept = opened_rows(rows, n, codec)
    mean_N = None
    if kept.total:
        mean_N = torch.empty(n, dtype=torch.float32)
        for (lo, hi), mean_S in zip(spans_of(n), _means(kept, n), strict=True):
            mean_N[lo:hi] = mean_S
    return WeightedRowMean(mean_N, kept.counted, kept.faults)


def opened_rows(rows: Sequence[tuple[int, Buffer]], n: int, codec: Codec | Sequence[Codec]) -> OpenRows:
    counted, faults, kept, codecs = [], [], [], []
    each = [codec] * len(rows) if isinstance(codec, Codec) else codec
    for index, ((weight, wire), one) in enumerate(zip(rows, each, strict=True)):
        try:
            if not 0 <= weight <= WEIGHT_MAX:
                raise PeerFault("", f"weight {weight} is outside 0…{WEIGHT_MAX}")
            kept.append((weight, one.open_wire(wire, n)))
            codecs.append(one)
            counted.append(index)
        except PeerFault as fault:
            faults.append((index, fault.what))
    return OpenRows(kept, codecs, tuple(counted), tuple(faults))


def _means(rows: OpenRows, n: int) -> Iterator[Tensor]:
    """Sum over rows, in order, of value * (weight / total), span by span. Valid until the next."""
    total = rows.total
    # Python rounds the quotient of two ints correctly; if no row has any weight, no span is taken
    return _sums(rows, [weight / (total or 1) for weight, _ in rows.opened], n)


def _sums(rows: OpenRows, shares: Sequence[float], n: int) -> Iterator[Tensor]:
    """Sum over rows, in order, of value * share, span by span. Each span is valid until the next one."""
    shared = [(s, o, c) for s, (_, o), c in zip(shares, rows.opened, rows.codecs, strict=True) if s]
    with lend_spans(2) as (sum_S, value_S):
        for lo, hi in spans_of(n):
            mean_S, into_S = sum_S[: hi - lo].zero_(), value_S[: hi - lo]
            for share, opened, codec in shared:
                codec.add(opened, lo, share, mean_S, into_S)
            yield mean_S
