"""Error feedback of one caller: what lossy codecs left out of its tensors, until a later call brings it.

    owed = atoll.reduce.ErrorFeedback()                       # one for each sequence of tensors, kept by its user
    group.all_reduce(gradients, error_feedback=owed)          # sends C(gradients + owed), and owes what C left out

The others need not know: any member may do so alone, and a newcomer's begins with nothing. What a call leaves out
is owed once its round is agreed: where the mean is without this member's values they are owed as a whole. A slice
that nobody answered for, which its user keeps, and a call that failed leave what was owed as it was; so if the
others agreed on a call that failed here (`E-RED-13`, `E-RED-15`), what was owed before it is sent a second time.
Where the group has `remembered` owners it keeps what *answers* left out, too: of those that this member gave for
these tensors (`worker/downlink_error_feedback.py`). Whoever owns a part gives its answers under the
feedback of its own call.
Costs four bytes for every value, and four more for each of the slice under way, on the GPU where codecs work there;
where owners remember, four more for every value. Never scales, never forgets.
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
    """For one group and one sequence of tensors, so one for each bucket. Calls may follow without waiting."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._owed_N: Tensor | None = None
        self.answers = DownlinkErrorFeedback()

    def owed(self, tensors: Sequence[Tensor], beside: Tensor) -> Tensor:
        """(N,) what is owed for the values of these tensors, in order, where the first call that named this object
        had its vector. UsageError if they are others."""
        sizes = tuple(tensor.numel() for tensor in tensors)
        if self._owed_N is None:
            nothing_N = torch.zeros(sum(sizes), dtype=torch.float32, device="cpu")
            self._sizes, self._owed_N = sizes, moved(nothing_N, beside)  # which waits until it is there
        same_sizes("error feedback", self._sizes, sizes)
        return self._owed_N


def same_sizes(what: str, before: Sequence[int], now: Sequence[int]) -> None:
    """UsageError if what is kept from call to call was of other tensors."""
    if before != now:
        raise UsageError(
            "E-RED-19",
            f"{what} of {_told(before)} in a call with {_told(now)}",
            cause="what was kept of some tensors would be added to others",
            fix="give each sequence of tensors an object of its own (atoll.reduce.ErrorFeedback, Held)",
        )


def _told(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} tensor{'s' * (len(sizes) > 1)} with {sum(sizes):,} values"
