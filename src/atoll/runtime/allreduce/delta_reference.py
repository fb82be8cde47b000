"""What a caller's members hold of an earlier mean, so that calls send differences from it.

    held = atoll.reduce.DeltaReference()                     # one for each sequence of tensors, kept by its user
    group.all_reduce(parameters, held=held)        # sends C(parameters - held); held becomes the new mean

A codec loses a share of what it is given, and between two calls parameters change by far less than they are.
Members commit to the name of what they hold before any row is shown. Where these differ (somebody is new, missed a
call, or its part was answered by nobody) nothing is combined, all hear it from the same vertex, and the call goes
once more with whole values: so a difference is never added to anything but what it was taken from.
What a codec left out is in the next difference, so there is nothing for `ErrorFeedback` to do, and it is refused.
Costs four bytes for every value. Names are quick hashes: only for members that trust each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from atoll.runtime.allreduce.error_feedback import same_sizes


class DeltaReference:
    """For one group and one sequence of tensors. Calls may follow each other without waiting."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._mean_N = torch.empty(0, dtype=torch.float32, device="cpu")
        self._names: dict[int, str] = {}  # of what slices of it hold, by where they begin; none: nothing yet

    def of(self, tensors: Sequence[Tensor]) -> None:
        """Calls are about these tensors. UsageError if they were about others."""
        sizes = tuple(tensor.numel() for tensor in tensors)
        if not self._sizes:
            self._sizes = sizes
        same_sizes("what is held", self._sizes, sizes)

    def slice(self, at: int, size: int) -> tuple[str, Tensor | None]:
        """The name of what is held of these values, and themselves, to be read until the next `take`."""
        name = self._names.get(at, "")
        return name, self._mean_N[at : at + size] if name else None

    def take(self, at: int, mean_N: Tensor) -> None:
        """These values were agreed on."""
        if not len(self._mean_N):
            self._mean_N = torch.empty(sum(self._sizes), dtype=torch.float32, device="cpu")
        self._mean_N[at : at + len(mean_N)] = mean_N
        self._names[at] = xxhash.xxh3_128_hexdigest(mean_N.numpy().data)
