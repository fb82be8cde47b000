"""Tasks of an all-reduce: slow work, carried out off the event loop, and its results."""

from __future__ import annotations

import msgspec

from atoll.base.ids import PeerId
from atoll.base.machine import Payload
from atoll.wire.weights import RowWeights


class TaskRow(msgspec.Struct, frozen=True):
    """One row of a task."""

    peer: PeerId  # sender
    weight: int
    payload: Payload
    names: tuple[PeerId, ...]  # contributors
    handed: bool = False  # a sum of a relay, encoded as a result is


class CombineRows(msgspec.Struct, frozen=True):
    """Decode the rows, combine them in this order by the statistic, encode the result once -> RowsCombined."""

    round: int
    part: int
    shares: tuple[int, ...]  # relative sizes of all parts
    rows: tuple[TaskRow, ...]
    onward: bool = False  # the result is a sum that a relay hands on
    statistic: str = "mean"  # weighted mean; other statistics sort values, and count each row with weight once
    liars: int = 0  # false rows that the statistic has to withstand
    weights: RowWeights = ()  # weights by distance; empty without

    @property
    def parts(self) -> int:
        return len(self.shares)


class RowsCombined(msgspec.Struct, frozen=True):
    """Result of `CombineRows`."""

    payload: Payload | None  # None: no result, for the reason in `why`
    counted: tuple[PeerId, ...]  # senders
    undecodable: tuple[PeerId, ...]
    why: str = ""


class ComputeRowProducts(msgspec.Struct, frozen=True):
    """Decode the rows and compute inner products of all pairs that weigh something -> ProductsComputed."""

    round: int
    part: int
    shares: tuple[int, ...]  # relative sizes of all parts
    rows: tuple[TaskRow, ...]


class ProductsComputed(msgspec.Struct, frozen=True):
    """Result of `ComputeRowProducts`."""

    products: bytes  # as in a `RowInnerProducts`
    counted: tuple[PeerId, ...]
    undecodable: tuple[PeerId, ...]


class WeighRows(msgspec.Struct, frozen=True):
    """Add the inner products of all parts, in order, and apply the rule -> ComputedWeights."""

    round: int
    statistic: str
    liars: int
    rows: tuple[PeerId, ...]
    parts: tuple[tuple[tuple[PeerId, ...], bytes], ...]  # (authors, inner products) of each part


class ComputedWeights(msgspec.Struct, frozen=True):
    """Result of `WeighRows`."""

    weights: RowWeights  # in the order of the rows
    outliers: tuple[PeerId, ...] = ()  # authors of rows far from the others
