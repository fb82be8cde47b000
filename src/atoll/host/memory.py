"""Memory for arriving payloads, and for wires made here, used again once nobody looks at it any more.

Fresh pages cost 0.08 CPU-s/GB to be zeroed by the kernel, an eighth of what a received byte costs in all; the
parts of an update have the same sizes every round.
Promises: a view is given to one reader only, until its last slice is gone; any thread may ask.
Never keeps more than `kept_bytes_max` beyond what is being read, nor anything for two sweeps without use.
"""

from __future__ import annotations

import weakref
from collections import deque
from threading import Lock

import numpy as np

from atoll.base.limits import BULK_FRAME_MAX, MIB

SMALL_BYTES = MIB  # below this the allocator's own free lists do as well
WASTE_MAX = 2  # a block serves payloads of at least half its size


class Reused:
    """Called with a size, answers with uninitialised memory of that size."""

    def __init__(self, kept_bytes_max: int = 4 * BULK_FRAME_MAX) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._free: list[np.ndarray] = []  # oldest first
        self._unused = 0  # so many of the oldest have not been used since the last sweep
        self._returned: deque[np.ndarray] = deque()  # by whatever thread dropped the last view, even while it asks
        self._asking = Lock()

    def __call__(self, size_bytes: int) -> memoryview:
        if size_bytes < SMALL_BYTES:
            return memoryview(np.empty(size_bytes, np.uint8))
        with self._asking:
            block = self._block(size_bytes)
        view = block[:size_bytes]  # an object of its own: memoryviews keep it alive, it keeps nobody else's
        weakref.finalize(view, self._returned.append, block).atexit = False
        return memoryview(view)

    def sweep(self) -> None:
        """Let go of what was not used since the last sweep."""
        with self._asking:
            self._collect()
            del self._free[: self._unused]
            self._unused = len(self._free)

    def _block(self, size_bytes: int) -> np.ndarray:
        self._collect()
        for index in range(len(self._free) - 1, -1, -1):
            if size_bytes <= self._free[index].size <= WASTE_MAX * size_bytes:
                self._unused -= index < self._unused
                return self._free.pop(index)
        return np.empty(size_bytes, np.uint8)

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        kept_bytes = sum(block.size for block in self._free)
        while kept_bytes > self._kept_bytes_max:
            kept_bytes -= self._free.pop(0).size
            self._unused = max(0, self._unused - 1)
