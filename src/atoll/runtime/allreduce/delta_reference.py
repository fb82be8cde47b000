"""Reference mean that later calls send differences from.

    held = atoll.reduce.DeltaReference()                     # one for each sequence of tensors, kept by its user
    group.all_reduce(parameters, held=held)        # sends C(parameters - held); held becomes the new mean

A codec loses a share of its input, and between two calls parameters change far less than their size. Members commit
to the digest of their reference before any row is shown. If the digests differ (a member is new, missed a call, or
a part had no result), nothing is combined. All members learn this from the same vertex and repeat the call with
whole values, so a difference is only added to its own reference.
The next difference contains what a codec left out, so `ErrorFeedback` is refused. Costs four bytes per value.
Digests are fast hashes: only for members that trust each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from atoll.runtime.allreduce.error_feedback import same_sizes


class DeltaReference:
    """Reference of one group and one sequence of tensors. Calls may follow each other without waiting."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._mean_N = torch.empty(0, dtype=torch.float32, device="cpu")
        self._names: dict[int, str] = {}  # offset of a slice → digest of its reference; empty: no mean yet

    def of(self, tensors: Sequence[Tensor]) -> None:
        """Bind the reference to these tensors. UsageError if it belongs to others."""
        sizes = tuple(tensor.numel() for tensor in tensors)
        if not self._sizes:
            self._sizes = sizes
        same_sizes("what is held", self._sizes, sizes)

    def slice(self, at: int, size: int) -> tuple[str, Tensor | None]:
        """Digest and values of the reference in this slice; the values are valid until the next `take`."""
        name = self._names.get(at, "")
        return name, self._mean_N[at : at + size] if name else None

    def take(self, at: int, mean_N: Tensor) -> None:
        """Store the agreed mean of a slice."""
        if not len(self._mean_N):
            self._mean_N = torch.empty(sum(self._sizes), dtype=torch.float32, device="cpu")
        self._mean_N[at : at + len(mean_N)] = mean_N
        self._names[at] = xxhash.xxh3_128_hexdigest(mean_N.numpy().data)
