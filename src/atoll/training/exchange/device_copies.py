"""Copies between GPUs and the host: pinned memory, and a stream for copies on every GPU.

Invariants:
- At the end of `device_copies` every copy has arrived, so host code reads only whole values.
- A copy follows all work that the caller's stream had before; work that comes later does not delay it.
- Without a GPU these are plain copies.
Not responsible for: memory that another process shares (`runtime/trainer/shared_memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, cuda

from atoll.training.codec.compiled import device

_streams: dict[torch.device, Any] = {}  # one stream for copies per GPU, of all threads


def host_vector(size: int, copied: Iterable[Tensor]) -> Tensor:
    """(size,) fp32 on the host, for copies of these tensors: pinned if one of them lies on a GPU."""
    if size and any(tensor.is_cuda for tensor in copied):
        try:
            return device.pinned(size, torch.float32)
        except RuntimeError:  # more than this computer lets a process lock: copies then take longer
            pass
    return torch.empty(size, dtype=torch.float32, device="cpu")


@contextmanager
def device_copies(copied: Iterable[Tensor]) -> Iterator[None]:
    """Context for copies of these tensors, which `copy_across` makes; all have arrived at its exit."""
    devices = {tensor.device for tensor in copied if tensor.is_cuda}
    streams = [_stream_after_caller(where) for where in devices]
    with ExitStack() as current:
        for stream in streams:
            current.enter_context(cuda.stream(stream))
        try:
            yield
        finally:
            for stream in streams:
                stream.synchronize()


def copy_across(into: Tensor, source: Tensor) -> None:
    """Copy, on a GPU without waiting: only within `device_copies` of both tensors."""
    into.copy_(source, non_blocking=into.is_cuda or source.is_cuda)


def _stream_after_caller(where: torch.device) -> Any:
    if where not in _streams:
        _streams[where] = cuda.Stream(where)
    _streams[where].wait_stream(cuda.current_stream(where))
    return _streams[where]
