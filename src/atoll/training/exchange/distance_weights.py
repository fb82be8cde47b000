"""Distance-based aggregation in rounds: owners compare the rows of their parts; the summed products weigh the rows.

`compare` is the part owner's work: the inner products of its rows, which the owner signs. Products add up over
parts, so `weigh` sees whole updates without holding any of their values. It returns one weight per row, or the rows
to mix before values are sorted; `statistic.RowCombinationRule` takes either.
Products are about the origin, because the reference point must be the same in all parts. A row as reference point
could be chosen by its sender. In fp64, distances have a relative error below 1e-8 (4 million values) even if rows
differ by a thousandth of their length.
Invariants:
- Sums inside a part have one order (`deterministic_dot`). The later steps are elementwise, in the order of parts,
  and round once (robust/weights), so every machine gets the same bits.
- Each row counts once, whatever number of samples it claims.
Not responsible for: detecting liars, checking the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from atoll.base.ids import PeerId
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec
from atoll.training.codec.blocks import spans_of
from atoll.training.codec.deterministic_dot import Products, add_inner_products, filled
from atoll.training.exchange.combine import opened_rows
from atoll.training.exchange.statistic import AFTER_MIXING
from atoll.training.robust import weights
from atoll.training.robust.gram import GramMatrix, Square, times, with_origin
from atoll.training.robust.weights import Solve
from atoll.wire.weights import RowWeights, packed_mixtures


def with_nearest_mixing(solve: Solve) -> Solve:
    """The rule applied to the mean of each row's nearest rows (nearest-neighbor mixing), as weights of the rows."""

    def solved(gram: GramMatrix, f: int) -> weights.Weights:
        mix = weights.nnm(gram, f)
        return times(solve(gram.mixed(mix), f)[None, :], with_origin(mix))[0]

    return solved


SOLVES: dict[str, Solve] = {  # keys as in policy/fault_tolerance; robust/rules states what each rule withstands
    "robust": weights.caf,
    "krum": weights.krum,
    "multi_krum": lambda gram, f: weights.krum(gram, f, gram.origin - f),
    "geometric_median": partial(weights.geometric_median, steps=weights.STEPS, floor=None, from_origin=False),
    "centered_clipping": partial(weights.centered_clipping, steps=3, radius=None),
    "mda": weights.mda,
    "clipped_caf": weights.clipped_caf,
}
MIXED_FIRST = ("krum", "multi_krum", "geometric_median", "centered_clipping")
SOLVES |= {f"nnm + {rule}": with_nearest_mixing(SOLVES[rule]) for rule in MIXED_FIRST}


class RowProducts(NamedTuple):
    products: bytes  # products of the decoded rows with weight: upper triangle row by row, little-endian fp64
    counted: tuple[int, ...]  # indices of the rows that decode
    faults: tuple[tuple[int, str], ...]  # (index, fault) of the other rows


def compare_rows(rows: Sequence[tuple[int, Buffer]], n: int, codec: Codec) -> RowProducts:
    """Inner products of (weight, wire) rows of n values, in their order; rows of weight 0 are only decoded."""
    kept = opened_rows(rows, n, codec)
    products_P = _products([opened for weight, opened in kept.opened if weight], n, codec)
    return RowProducts(packed(products_P), kept.counted, kept.faults)


def _products(opened: Sequence[Any], n: int, codec: Codec) -> Products:
    """Inner products of the opened rows. Beside the rows it holds one decoded span of each."""
    count = len(opened)
    total_P = np.zeros(count * (count + 1) // 2)
    rows_RS = torch.zeros(count, 0, dtype=torch.float32)
    for lo, hi in spans_of(n if count else 0):
        if rows_RS.shape[1] != filled(hi - lo):  # the first span, and the last one
            rows_RS = torch.zeros(count, filled(hi - lo), dtype=torch.float32)
        for wire, row_S in zip(opened, rows_RS, strict=True):
            room_S = row_S[: hi - lo]
            span_S = codec.read_span(wire, lo, room_S)
            if span_S is not room_S:  # the span was already in memory
                room_S.copy_(span_S)
        add_inner_products(total_P, rows_RS.numpy())
    return total_P


def packed(products_P: Products) -> bytes:
    return products_P.astype("<f8").tobytes()


def unpack_products(products: bytes, count: int) -> Square:
    """Both triangles, (count, count)."""
    square = np.zeros((count, count))
    square[np.triu_indices(count)] = np.frombuffer(products, dtype="<f8")
    return square + np.triu(square, 1).T


def weigh_rows(
    statistic: str, liars: int, rows: Sequence[str], parts: Sequence[tuple[Sequence[str], bytes]]
) -> RowWeights:
    """One weight per row of `rows` by the rule; `parts` are (names, products) of every part, in order of parts.

    `names` are the authors of the compared rows, in that order: `rows` and perhaps more. Weights are not negative
    and sum to 1 (centered clipping: at most 1). If values are sorted after mixing, the result is bytes that list
    the rows of each mixture.
    """
    count, (order, gram) = len(rows), _ordered_gram(rows, parts)
    if statistic in AFTER_MIXING:
        mix = weights.nnm(gram, liars)
        nearest_to = {order[i]: [order[j] for j in np.flatnonzero(mix[i])] for i in range(count)}
        return packed_mixtures([nearest_to[row] for row in range(count)])
    found = SOLVES[statistic](gram, liars)
    weight_of = {rows[i]: float(weight) for i, weight in zip(order, found[:count], strict=True)}
    return tuple(weight_of[row] for row in rows)


def find_outliers(rows: Sequence[PeerId], parts: Sequence[tuple[Sequence[str], bytes]]) -> tuple[PeerId, ...]:
    """The rows that are far from the others; arguments as of `weigh`."""
    order, gram = _ordered_gram(rows, parts)
    found = zip(order, weights.scores(gram), strict=True)
    return tuple(sorted(rows[i] for i, score in found if score > weights.OUTLIER_SCORE))


def _ordered_gram(
    rows: Sequence[str], parts: Sequence[tuple[Sequence[str], bytes]]
) -> tuple[list[int], GramMatrix]:
    """The places of the rows, shortest row first, and the inner products in this order."""
    count = len(rows)
    total = np.zeros((count, count))
    for names, products in parts:
        places = [names.index(row) for row in rows]
        total += unpack_products(products, len(names))[np.ix_(places, places)]
    order = sorted(range(count), key=lambda i: (total[i, i], rows[i]))
    about_origin = np.zeros((count + 1, count + 1))  # all products of the origin are 0
    about_origin[:count, :count] = total[np.ix_(order, order)]
    return order, GramMatrix(about_origin, None)
