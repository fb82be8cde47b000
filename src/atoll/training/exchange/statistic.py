"""Coordinate-wise statistics of a part's rows: mean, median, trimmed mean and mean around the median.

    mean          weighted by samples; tolerates no Byzantine row
    median        the middle value, of an even number the mean of the two middle ones
    trimmed_mean  the mean without the f lowest and the f highest
    meamed        the mean of the n - f values nearest the median

Distance-based rules (`distance_weights`) come with weights of the rows. The value is then a weighted sum. After
`nnm + ` it is one of the last three statistics, of mixtures of rows instead of rows.

The last three sort values (robust/columns). **Every row then counts once, whatever number of samples it claims**: a
weight is the sender's own claim, and a sender that sets its weight controls a weighted order statistic. A row of
weight 0 (a joiner's) is left out of the sort, as it adds nothing to a mean.
Invariants:
- A sorting statistic needs 2f + 1 rows that count; with fewer, `shortage` returns the reason.
- Beside the rows it holds one decoded span (1 MiB) of each.
- Equal rows in equal order (that of their authors' ids) give equal bits on any machine. In another order the last
  bits of sums may differ, also of a trimmed mean, which sums ranks in sorted order.
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
class RowCombinationRule:
    name: str = "mean"
    liars: int = 0  # f: Byzantine rows tolerated
    weights: RowWeights = ()  # weights of the rows, in their order, if computed from distances

    def __post_init__(self) -> None:
        if self.name not in STATISTICS and not self.weights:
            raise ValueError(f"unknown statistic {self.name!r}; known are {', '.join(STATISTICS)}")
        if self.liars < 0:
            raise ValueError(f"{self.name} cannot tolerate {self.liars} liars")

    @property
    def sorts(self) -> bool:
        return self.by_value in OF_COLUMNS

    @property
    def by_value(self) -> str:
        """The statistic applied to rows or mixtures."""
        return AFTER_MIXING.get(self.name, self.name)

    def mixtures(self, rows: int) -> columns.Chosen | None:
        """Rows of each mixture, out of `rows` rows; None if the rows themselves are sorted."""
        if not isinstance(self.weights, bytes):
            return None
        return tuple(mixture for mixture in mixtures_in(self.weights, rows) if mixture)

    def shortage(self, rows: int) -> str:
        """Why `rows` counted rows are too few; empty if they suffice."""
        least = 2 * self.liars + 1
        if not self.sorts or rows >= least:
            return ""
        return f"{self.name} needs {least} rows to withstand {self.liars} liars, not {rows}"


MEAN = RowCombinationRule()


def order_statistics(
    opened: Sequence[Any], n: int, codec: Codec, statistic: RowCombinationRule
) -> Iterator[Tensor]:
    """The statistic of n values over opened wires, span by span. A span is valid until the next one is taken."""
    work, rows_RS = OF_COLUMNS[statistic.by_value], torch.empty(len(opened), min(n, SPAN), dtype=torch.float32)
    mix = statistic.mixtures(len(opened))
    for lo, hi in spans_of(n):
        rows = [codec.read_span(wire, lo, room_S[: hi - lo]) for wire, room_S in zip(opened, rows_RS, strict=True)]
        # a minimum of 0 and -0 may be either, and the sign is another byte: -0 + 0 is 0
        yield work(rows, statistic.liars, mix).add_(0.0)
