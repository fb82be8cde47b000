"""What processes cost, read from outside of them: bytes on loopback, CPU seconds, peak memory.

Linux only (/proc). A process counts with all its children, because some systems work in daemons of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CPU_CLOCK = 2  # Linux makes the number of the clock of another process of its id and this: clock_getcpuclockid(3)
TICK_S, STOP_S = 0.1, 1.0  # a thread that only sleeps is never kept waiting for a second by a busy box


class Watch:
    """Counts how often this process stood still (a suspended computer, a stopped job). Times across it are void."""

    def __init__(self) -> None:
        self.stops = 0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            self.stops += now - last > STOP_S
            last = now


def loopback_bytes() -> int:
    """Received over `lo` since it came up, headers included. /proc/net/dev is always of our own namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    raise RuntimeError("no loopback interface in /proc/net/dev")


def family(pid: int) -> Iterator[psutil.Process]:
    process = psutil.Process(pid)
    yield process
    yield from process.children(recursive=True)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its living children so far, to the nanosecond."""
    used = 0.0
    for process in family(pid):
        with suppress(OSError):
            used += time.clock_gettime(~process.pid << 3 | CPU_CLOCK)
    return used


def forget_peak(pid: int) -> None:
    """Peak memory starts anew from what is in use now (proc(5), clear_refs, value 5)."""
    for process in family(pid):
        with suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def memory_bytes(pid: int, peak: bool) -> int:
    """Resident memory of a family without libraries: now, or at its peak; shared pages count once.

    Linux keeps a peak of each process's whole resident set only; what is shared in it, and what belongs to files,
    is taken off as it is now.
    """
    total_kb = 0
    for process in family(pid):
        with suppress(OSError, KeyError):
            status = fields(f"/proc/{process.pid}/status")
            rolled = fields(f"/proc/{process.pid}/smaps_rollup")
            total_kb += status["VmHWM" if peak else "VmRSS"] - rolled["Rss"] + rolled["Pss"] - rolled["Pss_File"]
    return total_kb * 1024


def fields(path: str) -> dict[str, int]:
    """The lines `Name:  number kB` of a file under /proc."""
    found = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0])
    return found
