"""What an owner's answers left out, until it answers for the same values again: error feedback on the way back.

    answer   the mean and what earlier answers left out, encoded; what this one leaves out waits by its name
    settle   what waits counts if a vertex holds that very answer, and is forgotten otherwise

Promises: an answer that no vertex holds changes nothing, so a failed attempt is as if it had not been; values that
others owned meanwhile keep what is owed for them. In memory only: a restart, and whoever owns in my place, begins
from nothing, which costs the error of one answer. Only where owners are believed: nobody can check such an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec
from atoll.training.exchange.combine import CombinedPart, combine_remembering


class DownlinkErrorFeedback:
    def __init__(self) -> None:
        self._owed_F: Tensor | None = None  # over the whole vector: part borders move with the members
        self._waiting: dict[Digest, tuple[int, Tensor]] = {}  # answer -> where its part begins, what it left out

    def combine(
        self, rows: Sequence[tuple[int, Buffer]], lo: int, n: int, up: Codec, down: Codec
    ) -> tuple[CombinedPart, Tensor | None]:
        """The answer for n values from `lo` on, and what it leaves out, (n,): for `waits`, once it has a name.

        DoubleSqueeze (`learn.combine.combine_remembering`, 1905.05957) with a memory that does not fade.
        """
        owed_N = None if self._owed_F is None else self._owed_F[lo : lo + n]
        return combine_remembering(rows, n, up, down, owed_N, 1.0)

    def waits(self, answer: Digest, lo: int, left_N: Tensor) -> None:
        """What this answer of mine leaves out, (n,), if a vertex takes it."""
        self._waiting[answer] = lo, left_N

    def settle(self, led: Collection[Digest], floats: int) -> None:
        """A vertex is final that holds these answers of mine, of a model of so many values."""
        for answer in led:
            if (left := self._waiting.get(answer)) is not None:
                if self._owed_F is None:
                    self._owed_F = torch.zeros(floats, dtype=torch.float32)
                lo, left_N = left
                self._owed_F[lo : lo + len(left_N)] = left_N
        self._waiting.clear()

    def forget(self) -> None:
        """I begin from another state than the one that I led to: what was left out belongs to another past."""
        self._owed_F = None
        self._waiting.clear()
