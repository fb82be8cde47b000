"""Memory for arriving payloads, and for wires made here, used again once nobody looks at it any more.

Fresh pages cost 0.08 CPU-s/GB to be zeroed by the kernel, an eighth of what a received byte costs in all. The parts
of an update have nearly the same sizes every round: shares follow measured uplinks, so blocks are given some room
to spare. What nobody ever wrote to has no pages, and costs nothing: so large pages end where the first use ends.
Promises: a view is given to one reader only, until its last slice is gone; any thread may ask.
Never keeps more than `kept_bytes_max` beyond what is being read, nor anything for two sweeps without use.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import numpy as np

from atoll.base.limits import BULK_FRAME_MAX, MIB

SMALL_BYTES = MIB  # below this the allocator's own free lists do as well
STEP = 4  # between the sizes of blocks
LARGE_PAGE = 2 * MIB  # numpy asks for them wherever memory is long: a part of 8.3 MB then lay on ten or more


class _PooledBlock(NamedTuple):
    memory: np.ndarray
    used_bytes: int  # of it, from the beginning: the rest has no pages


class BufferPool:
    """Called with a size, answers with uninitialised memory of that size."""

    def __init__(self, kept_bytes_max: int = 4 * BULK_FRAME_MAX) -> None:
        self.kept_bytes_max = kept_bytes_max  # whoever keeps rows longer may want more
        self._free: list[_PooledBlock] = []  # oldest first
        self._kept_bytes = 0  # in them
        self._unused = 0  # so many of the oldest have not been used since the last sweep
        self._returned: deque[_PooledBlock] = (
            deque()
        )  # by whatever thread dropped the last view, even while it asks
        self._asking = Lock()

    def __call__(self, size_bytes: int) -> memoryview:
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8).data
        with self._asking:
            block = self._block(size_bytes)
        view = block.memory[:size_bytes]  # an object of its own: memoryviews keep it alive, it keeps nobody else's
        weakref.finalize(view, self._returned.append, block).atexit = False
        return view.data

    def sweep(self) -> None:
        """Let go of what was not used since the last sweep."""
        with self._asking:
            self._collect()
            self._kept_bytes -= sum(block.used_bytes for block in self._free[: self._unused])
            del self._free[: self._unused]
            self._unused = len(self._free)

    def _block(self, size_bytes: int) -> _PooledBlock:
        self._collect()
        capacity_bytes = SMALL_BYTES
        while capacity_bytes < size_bytes:
            capacity_bytes *= STEP
        index = self._best_fit(capacity_bytes, size_bytes)
        if index is None:
            return _PooledBlock(_fresh(capacity_bytes, size_bytes), size_bytes)
        self._unused -= index < self._unused
        memory, used_bytes = self._free.pop(index)
        self._kept_bytes -= used_bytes
        return _PooledBlock(memory, max(used_bytes, size_bytes))

    def _best_fit(self, capacity_bytes: int, size_bytes: int) -> int | None:
        """Of equally good ones the newest: it may still be in a core's cache."""
        best, best_off = None, capacity_bytes
        for index in range(len(self._free) - 1, -1, -1):
            block = self._free[index]
            off = abs(block.used_bytes - size_bytes)
            if len(block.memory) == capacity_bytes and (best is None or off < best_off):
                best, best_off = index, off
                if off == 0:
                    break
        return best

    def _collect(self) -> None:
        while self._returned:
            self._free.append(block := self._returned.popleft())
            self._kept_bytes += block.used_bytes
        while self._kept_bytes > self.kept_bytes_max:
            self._kept_bytes -= self._free.pop(0).used_bytes
            self._unused = max(0, self._unused - 1)


def mapped(size_bytes: int) -> mmap.mmap:
    """New memory by itself: it has pages only where it was written to, and they go back to the system with it."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size_bytes)
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child copies it


def for_once(size_bytes: int) -> memoryview:
    """New memory for something that is read in whole, and kept. On small pages: where large ones lie idle for some
    seconds a virtual machine may give them back to its host, and the first touch then costs ten times as much."""
    return memoryview(mapped(size_bytes)) if size_bytes >= SMALL_BYTES else memoryview(bytearray(size_bytes))


def _fresh(capacity_bytes: int, size_bytes: int) -> np.ndarray:
    """New memory, on large pages as far as they will be filled (the last one: nearly), where the system has them.

    A part of 4.17 MB on one large page and 508 small ones cost 2.5 ms of processor time to touch first.
    """
    memory = mapped(capacity_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and (filled := (size_bytes + LARGE_PAGE // 16) // LARGE_PAGE * LARGE_PAGE):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, 0, filled)
    return np.frombuffer(memory, np.uint8)
