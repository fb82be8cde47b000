"""The way back: what members sent for one part becomes one mean (or order statistic) that all of them hold.

`combine` is the part owner's work: decode, average or sort (training/exchange/statistic), or weigh as distances
have it
(training/exchange/distance_weights), encode the answer once. `combine_remembering` lets the owner keep what
its answers left out, and make it good in the next ones. `gather` needs no owner: everybody decodes everybody. The
order of rows is the caller's and is kept; every operation is elementwise, rounds once and runs on the CPU, so any
two that are given the same rows get the same bits. Beside the rows and the answer an owner holds a few spans,
however large the part is, unless the answer's codec has to see all of it (`Codec.spanwise`).
Never raises for a row: one that does not decode is named by index, and the others count without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec, pack_spans
from atoll.training.codec.blocks import Room, lent_spans, new_wire, spans_of
from atoll.training.exchange.statistic import MEAN, RowStatistic, order_statistics

WEIGHT_MAX = 2**48  # samples or tokens of one peer in one round; above it a weight is a lie


class CombinedPart(NamedTuple):
    wire: Buffer | None  # the answer, encoded; None if no row had any weight, or too few for the statistic
    counted: tuple[int, ...]  # indices of the rows that are in it (a row of weight 0 adds nothing, but is in it)
    faults: tuple[tuple[int, str], ...]  # (index, what was wrong) of the rows left out
    why: str = ""  # there is no answer, in words


class GatheredMean(NamedTuple):
    mean_N: Tensor | None  # the weighted mean as fp32; None if no row had any weight
    counted: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]


class OpenRows(NamedTuple):
    """The rows that decode."""

    opened: list[tuple[int, Any]]  # (weight, opened wire)
    codecs: list[Codec]  # of each
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
    statistic: RowStatistic = MEAN,
    room: Room = new_wire,
) -> CombinedPart:
    """Statistic of n values over (weight, wire) rows, encoded with `reply`, if it can into `room`; `codec` is one
    for all rows or one for each (the mean only: sums made on the way travel as answers do).

    Rows that do not decode are not reckoned against the liars: the others alone shall give the same answer. Where
    distances weigh rows, all of them were opened when they were compared: one that does not decode now spoils it.
    """
    kept = opened_rows(rows, n, codec)
    if statistic.weights and kept.faults:
        why = f"{len(kept.faults)} of its rows do not decode any more"
        return CombinedPart(None, kept.counted, kept.faults, why)
    if statistic.weights and not isinstance(statistic.weights, bytes):
        why, spans = "", _sums(kept, statistic.weights, n)
    elif statistic.sorts:
        assert isinstance(codec, Codec)
        mixtures = statistic.mixtures(len(kept.opened))  # they name rows by their places
        sorted_in = [opened for weight, opened in kept.opened if weight or mixtures is not None]
        why = statistic.shortage(len(sorted_in if mixtures is None else mixtures))
        spans = order_statistics(sorted_in, n, codec, statistic)
    else:
        why, spans = "" if kept.total else "no row has any weight", _means(kept, n)
    return CombinedPart(None if why else reply.encode_spans(n, spans, room), kept.counted, kept.faults, why)


def combine_remembering(
    rows: Sequence[tuple[int, Buffer]], n: int, codec: Codec, reply: Codec, memory_N: Tensor | None, beta: float
) -> tuple[CombinedPart, Tensor | None]:
    """The same under error feedback of the owner: e = beta * memory + mean; wire = C(e); memory' = e - C^-1(wire).

    DoubleSqueeze (Tang et al. 2019, 1905.05957, algorithm 1). The memory (n,) is the owner's alone, so nobody can
    recompute its answer, and what it holds is lost when another owner takes over: only where owners are trusted.
    Without any weight there is no answer, and the memory stays what it was. `memory_N` is left alone.
    """
    kept = opened_rows(rows, n, codec)
    if kept.total == 0:
        return CombinedPart(None, kept.counted, kept.faults), memory_N
    left_N = torch.empty(n, dtype=torch.float32)
    wire = pack_spans(reply, _means(kept, n), memory_N, beta, left_N)
    return CombinedPart(wire, kept.counted, kept.faults), left_N


def gather(rows: Sequence[tuple[int, Buffer]], n: int, codec: Codec) -> GatheredMean:
    """The weighted mean itself, where every member has every row: no answer, so no second loss.

    Members get the same bits from the same rows in the same order; which rows those are is for them to agree on.
    Costs a member everybody's wire instead of one answer.
    """
    kept = opened_rows(rows, n, codec)
    mean_N = None
    if kept.total:
        mean_N = torch.empty(n, dtype=torch.float32)
        for (lo, hi), mean_S in zip(spans_of(n), _means(kept, n), strict=True):
            mean_N[lo:hi] = mean_S
    return GatheredMean(mean_N, kept.counted, kept.faults)


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
    """Sum over rows, in order, of value * (weight / total); span by span, each good until the next is asked for."""
    total = rows.total
    # the quotient of two ints is correctly rounded in Python; without any weight nobody asks for a span
    return _sums(rows, [weight / (total or 1) for weight, _ in rows.opened], n)


def _sums(rows: OpenRows, shares: Sequence[float], n: int) -> Iterator[Tensor]:
    """Sum over rows, in order, of value * share; span by span, each good until the next."""
    shared = [(s, o, c) for s, (_, o), c in zip(shares, rows.opened, rows.codecs, strict=True) if s]
    with lent_spans(2) as (sum_S, value_S):
        for lo, hi in spans_of(n):
            mean_S, into_S = sum_S[: hi - lo].zero_(), value_S[: hi - lo]
            for share, opened, codec in shared:
                codec.add(opened, lo, share, mean_S, into_S)
            yield mean_S
