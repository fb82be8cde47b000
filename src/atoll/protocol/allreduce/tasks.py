"""The slow work that a reduce asks for. Carried out off the loop; the machine never looks into a payload."""

from __future__ import annotations

import msgspec

from atoll.base.ids import PeerId
from atoll.base.machine import Payload
from atoll.wire.weights import RowWeights


class TaskRow(msgspec.Struct, frozen=True):
    peer: PeerId  # who sent it
    weight: int
    payload: Payload
    names: tuple[PeerId, ...]  # whose updates are in it
    handed: bool = False  # combined on the way: encoded as an answer is


class CombineRows(msgspec.Struct, frozen=True):
    """Decode the rows, make one of them in the given order by the statistic, encode it once -> Combined."""

    round: int
    part: int
    shares: tuple[int, ...]  # relative sizes of all parts
    rows: tuple[TaskRow, ...]
    onward: bool = False  # the result is a row again, `handed` to the next
    statistic: str = "mean"  # weighted; all others sort values, and every row with weight counts once
    liars: int = 0  # rows that the statistic has to withstand
    weights: RowWeights = ()  # of the rows, where their distances made them

    @property
    def parts(self) -> int:
        return len(self.shares)


class RowsCombined(msgspec.Struct, frozen=True):
    payload: Payload | None  # None: there is no answer, for the reason in `why`
    counted: tuple[PeerId, ...]
    undecodable: tuple[PeerId, ...]
    why: str = ""


class CompareRows(msgspec.Struct, frozen=True):
    """Decode the rows and multiply those that weigh something with each other -> Products."""

    round: int
    part: int
    shares: tuple[int, ...]  # relative sizes of all parts
    rows: tuple[TaskRow, ...]


class RowsCompared(msgspec.Struct, frozen=True):
    products: bytes  # as in a `Compared`
    counted: tuple[PeerId, ...]
    undecodable: tuple[PeerId, ...]


class WeighRows(msgspec.Struct, frozen=True):
    """Add the products of all parts, in order, and ask the rule what these rows weigh -> Weights."""

    round: int
    statistic: str
    liars: int
    rows: tuple[PeerId, ...]
    parts: tuple[tuple[tuple[PeerId, ...], bytes], ...]  # (whose rows, their products) of each part


class ComputedWeights(msgspec.Struct, frozen=True):
    weights: RowWeights  # of the rows, in their order
