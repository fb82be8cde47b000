"""Error feedback of one caller: the values that lossy codecs left out, sent with a later call.

    owed = atoll.reduce.ErrorFeedback()                       # one for each sequence of tensors, kept by its user
    group.all_reduce(gradients, error_feedback=owed)          # sends C(gradients + owed), and owes what C left out

Any member may use it alone; a new member begins with zeros. What a call leaves out is owed once its round is
agreed. If the mean lacks this member's values, they are owed as a whole. The residual stays unchanged if a slice
had no result, since its user keeps it, and if a call failed. If the others agreed on a call that failed here
(`E-RED-13`, `E-RED-15`), the residual before it is sent twice.
In a group with `remembered` owners the object also keeps the residual of *results* that this member gave for these
tensors (`worker/downlink_error_feedback.py`). An owner uses the feedback of its own call.
Costs four bytes per value, and four more per value of the slice in progress, on the GPU if codecs work there. With
remembering owners it costs four more per value. The residual is never scaled or dropped.
Source: Karimireddy et al. 2019, 1901.09847, algorithm 2 (EF-SGD), with the step size left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.base.errors import UsageError
from atoll.runtime.allreduce.flatten import moved
from atoll.worker.downlink_error_feedback import DownlinkErrorFeedback


class ErrorFeedback:
    """Residual of one group and one sequence of tensors: one object per bucket. Calls need not wait."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._owed_N: Tensor | None = None
        self.answers = DownlinkErrorFeedback()

    def owed(self, tensors: Sequence[Tensor], beside: Tensor) -> Tensor:
        """(N,) residual of these tensors, in order, on the device of the first call's vector. UsageError if the
        tensors are others.
        """
        sizes = tuple(tensor.numel() for tensor in tensors)
        if self._owed_N is None:
            nothing_N = torch.zeros(sum(sizes), dtype=torch.float32, device="cpu")
            self._sizes, self._owed_N = sizes, moved(nothing_N, beside)  # waits until the copy is complete
        same_sizes("error feedback", self._sizes, sizes)
        return self._owed_N


def same_sizes(what: str, before: Sequence[int], now: Sequence[int]) -> None:
    """UsageError if the sizes differ from those of the earlier call."""
    if before != now:
        raise UsageError(
            "E-RED-19",
            f"{what} of {_told(before)} in a call with {_told(now)}",
            cause="the residual of some tensors would be added to others",
            fix="use one object per sequence of tensors (atoll.reduce.ErrorFeedback, atoll.reduce.DeltaReference)",
        )


def _told(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} tensor{'s' * (len(sizes) > 1)} with {sum(sizes):,} values"
