"""Advice for loops on one computer whose torch threads together outnumber its cores.

Threads that wait for each other at every operation slow a small model down up to ten times on two cores.
Invariants:
- The number of threads is the user's: it is never changed here.
- A loop is advised at most once, and only if fewer threads would help.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.runtime.control.socket import count_local_peers
from atoll.runtime.system import usable_cores


class SharedCoresAdvice:
    """The advice of one loop. `threads`: torch's in the loop's process; 0: its model is on a GPU."""

    def __init__(
        self, threads: int, cores: int | None = None, count_peers: Callable[[], int] = count_local_peers
    ) -> None:
        self._threads, self._count_peers = threads, count_peers
        self._cores = usable_cores() if cores is None else cores

    def text_once(self) -> str:
        """The advice if this loop takes more than its share of the cores; else, and from then on, empty."""
        if self._threads <= 1 or (peers := self._count_peers()) <= 1:
            return ""
        share = max(1, self._cores // peers)
        if self._threads <= share:
            return ""
        threads, self._threads = self._threads, 0
        return (
            f"{peers} peers share the {self._cores} cores of this computer, and this loop computes with {threads} "
            f"threads: start each loop with OMP_NUM_THREADS={share}, else their threads slow each other down"
        )
