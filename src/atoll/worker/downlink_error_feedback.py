"""Downlink error feedback: what an owner's encoded results left out, added to its next results for the same values.

    combine  encodes the mean plus the stored error; the error of this result is staged by the result's digest
    settle   the staged error is committed if a vertex holds that result, and dropped otherwise

Invariants:
- A result that no vertex holds changes nothing, so a failed attempt leaves no trace.
- Values that other members owned meanwhile keep their stored error.
- In memory only: after a restart, or with another owner, the error starts at zero. This costs one result's error.
Only for runs that trust their owners: no member can check such a result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec
from atoll.training.exchange.combine import CombinedPart, combine_remembering
from atoll.training.recipe.state import untouched_zeros


class DownlinkErrorFeedback:
    def __init__(self) -> None:
        self._owed_F: Tensor | None = None  # over the whole vector: part bounds move with the members
        self._waiting: dict[Digest, tuple[int, Tensor]] = {}  # digest of a result -> begin of its part, its error

    def combine(
        self, rows: Sequence[tuple[int, Buffer]], lo: int, n: int, up: Codec, down: Codec
    ) -> tuple[CombinedPart, Tensor | None]:
        """The result for n values from `lo` on, and its error (n,), to be staged by `waits`.

        DoubleSqueeze (`training.exchange.combine.combine_remembering`, arXiv:1905.05957), without decay.
        """
        owed_N = None if self._owed_F is None else self._owed_F[lo : lo + n]
        return combine_remembering(rows, n, up, down, owed_N, 1.0)

    def stage(self, answer: Digest, lo: int, left_N: Tensor) -> None:
        """Stage the error (n,) of this result until a vertex takes it."""
        self._waiting[answer] = lo, left_N

    def commit(self, led: Collection[Digest], floats: int) -> None:
        """Commit the errors of these own results, which a final vertex holds. `floats`: values of the model."""
        for answer in led:
            if (left := self._waiting.get(answer)) is not None:
                if self._owed_F is None:
                    self._owed_F = untouched_zeros(floats)  # an owner writes its own parts only
                lo, left_N = left
                self._owed_F[lo : lo + len(left_N)] = left_N
        self._waiting.clear()

    def reset(self) -> None:
        """Drop all errors: they belong to another history, since this peer begins from another state."""
        self._owed_F = None
        self._waiting.clear()
