"""Buffer pool for arriving payloads and for wires made here; memory is reused once its last view is gone.

Fresh pages cost the kernel 0.08 CPU-s/GB for zeroing, an eighth of the whole cost of a received byte. Parts of an
update have similar sizes in every round, as shares follow measured uplinks. So blocks have some spare room. Memory
that was never written to has no pages and costs nothing, so large pages end where the first use ends.

Invariants:
- A view has one reader, until its last slice is gone. Any thread may call.
- At most `kept_bytes_max` is kept beyond what is in use, and nothing for two sweeps without use.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import numpy as np

from atoll.base.limits import BULK_FRAME_MAX, MIB
from atoll.runtime.system import use_large_pages

SMALL_BYTES = MIB  # below this, the allocator's free lists are as good
STEP = 4  # factor between block sizes
LARGE_PAGE = 2 * MIB  # numpy requests them for any long memory: a part of 8.3 MB then used ten or more


class _PooledBlock(NamedTuple):
    memory: np.ndarray
    used_bytes: int  # used from the start; the rest has no pages


class BufferPool:
    """Allocator of uninitialized memory: `pool(size_bytes)`."""

    def __init__(
        self, kept_bytes_max: int = 4 * BULK_FRAME_MAX, allocate: Callable[[int], mmap.mmap] | None = None
    ) -> None:
        """`allocate` makes the memory of blocks, of at most their size; None: anonymous memory."""
        self.kept_bytes_max = kept_bytes_max  # more if rows are kept longer
        self._allocate = allocate
        self._free: list[_PooledBlock] = []  # oldest first
        self._kept_bytes = 0  # in free blocks
        self._unused = 0  # number of oldest free blocks not used since the last sweep
        self._returned: deque[_PooledBlock] = (
            deque()
        )  # filled by the thread that drops the last view, even during a call
        self._asking = Lock()

    def __call__(self, size_bytes: int) -> memoryview:
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8).data
        with self._asking:
            block = self._block(size_bytes)
        view = block.memory[:size_bytes]  # a new array: memoryviews keep only it alive
        weakref.finalize(view, self._returned.append, block).atexit = False
        return view.data

    def sweep(self) -> None:
        """Free what was not used since the last sweep."""
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
            if self._allocate is not None:  # without spare room, which would be reserved on disk
                return _PooledBlock(np.frombuffer(self._allocate(size_bytes), np.uint8), size_bytes)
            return _PooledBlock(_fresh(capacity_bytes, size_bytes), size_bytes)
        self._unused -= index < self._unused
        memory, used_bytes = self._free.pop(index)
        self._kept_bytes -= used_bytes
        return _PooledBlock(memory, max(used_bytes, size_bytes))

    def _best_fit(self, capacity_bytes: int, size_bytes: int) -> int | None:
        """Index of the best free block. Ties go to the newest, which may still be in a core's cache."""
        best, best_off = None, capacity_bytes
        for index in range(len(self._free) - 1, -1, -1):
            block = self._free[index]
            off = abs(block.used_bytes - size_bytes)
            wanted_bytes = capacity_bytes if self._allocate is None else size_bytes
            if len(block.memory) == wanted_bytes and (best is None or off < best_off):
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
    """New mapped memory. It has pages only where it was written to, and frees them when it goes."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size_bytes)
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child copies it


def for_once(size_bytes: int) -> memoryview:
    """New unpooled memory for data that is read whole and kept, on small pages.

    A virtual machine may return large pages to its host after seconds without use. The next touch then costs ten
    times as much.
    """
    return memoryview(mapped(size_bytes)) if size_bytes >= SMALL_BYTES else memoryview(bytearray(size_bytes))


def _fresh(capacity_bytes: int, size_bytes: int) -> np.ndarray:
    """New memory, on large pages where they are filled (the last one nearly) and the system has them.

    A part of 4.17 MB on one large page and 508 small ones cost 2.5 ms of CPU time at the first touch.
    """
    memory = mapped(capacity_bytes)
    if filled := (size_bytes + LARGE_PAGE // 16) // LARGE_PAGE * LARGE_PAGE:
        use_large_pages(memory, filled)
    return np.frombuffer(memory, np.uint8)
