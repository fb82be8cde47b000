"""One value out of many: what the rows of a part become, value by value, where some of the rows may be lies.

    mean          weighted by samples; withstands nobody
    median        the middle value, of an even number the mean of the two middle ones
    trimmed_mean  the mean without the f lowest and the f highest
    meamed        the mean of the n - f values nearest the median

Rules by distance (training/exchange/distance_weights) come with what rows weigh: then the value is a sum of
shares, or, after `nnm + `,
one of the last three, of mixtures of rows in the place of rows.

The last three sort values (training/robust/columns). **Every row then counts once, whatever number of samples it
claims**: a weight is the sender's own word, and whoever sets its own weight sets a weighted order statistic. A row
of weight 0 (a newcomer's) is left out of the sort, as it adds nothing to a mean.
Needs 2f + 1 rows that count, and says so instead of answering with less. Works span by span: beside the rows it
holds one decoded span (1 MiB) of each. The same rows in the same order, that of their authors' ids, give the same
bits on any machine; in another order the last bits of a sum of several rows may differ, also of a trimmed mean,
whose ranks are summed as the sort leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atoll.training.codec import Codec
from atoll.training.codec.blocks import SPAN, spans_of
from atoll.training.robust import columns
from atoll.wire.weights import RowWeights, mixtures_in

Work: TypeAlias = Callable[[list[Tensor], int, columns.Chosen | None], Tensor]  # (rows of a span, f, mixtures)

OF_COLUMNS: dict[str, Work] = {
    "median": lambda rows, liars, mix: columns.median(rows, mix),
    "trimmed_mean": columns.trimmed_mean,
    "meamed": lambda rows, liars, mix: columns.mean_around_median(rows, len(mix or rows) - liars, mix),
}
STATISTICS = ("mean", *OF_COLUMNS)
AFTER_MIXING = {f"nnm + {name}": name for name in OF_COLUMNS}


@dataclass(frozen=True)
class RowStatistic:
    name: str = "mean"
    liars: int = 0  # f: rows that may say anything
    weights: RowWeights = ()  # of the rows, in their order, where distances made them

    def __post_init__(self) -> None:
        if self.name not in STATISTICS and not self.weights:
            raise ValueError(f"there is no statistic {self.name!r}; there are {', '.join(STATISTICS)}")
        if self.liars < 0:
            raise ValueError(f"{self.name} cannot reckon with {self.liars} liars")

    @property
    def sorts(self) -> bool:
        return self.by_value in OF_COLUMNS

    @property
    def by_value(self) -> str:
        """What becomes of rows or mixtures."""
        return AFTER_MIXING.get(self.name, self.name)

    def mixtures(self, rows: int) -> columns.Chosen | None:
        """Of so many rows, those that each mixture is the mean of; None where rows themselves are sorted."""
        if not isinstance(self.weights, bytes):
            return None
        return tuple(mixture for mixture in mixtures_in(self.weights, rows) if mixture)

    def shortage(self, rows: int) -> str:
        """Why so few rows that count give no answer; empty if they do."""
        least = 2 * self.liars + 1
        if not self.sorts or rows >= least:
            return ""
        return f"{self.name} needs {least} rows to withstand {self.liars} liars, {rows} are here"


MEAN = RowStatistic()


def order_statistics(opened: Sequence[Any], n: int, codec: Codec, statistic: RowStatistic) -> Iterator[Tensor]:
    """The statistic of n values over opened wires, span by span; each is good until the next is asked for."""
    work, rows_RS = OF_COLUMNS[statistic.by_value], torch.empty(len(opened), min(n, SPAN), dtype=torch.float32)
    mix = statistic.mixtures(len(opened))
    for lo, hi in spans_of(n):
        rows = [codec.read_span(wire, lo, room_S[: hi - lo]) for wire, room_S in zip(opened, rows_RS, strict=True)]
        # a minimum of 0 and -0 may be either, and its sign would be another byte: -0 + 0 is 0
        yield work(rows, statistic.liars, mix).add_(0.0)
