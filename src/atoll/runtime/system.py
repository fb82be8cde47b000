"""Operating system: the one module that asks for what Linux has and other systems may lack.

Every function has a fallback, or returns that the system cannot tell. Windows is refused as a whole: a peer and its
trainer share memory by inherited descriptors, and files are private by modes, which Windows lacks.
Not responsible for: what is on every POSIX system (signals, Unix sockets, file modes).
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.base.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows, which `check_system` refuses
    fcntl: Any = None

READ_CACHED = getattr(os, "RWF_NOWAIT", 0)  # read from memory only, fail if the disk is needed; 0: cannot be asked
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of `ru_maxrss`
SENT_FIRST_TO_DIE = "500"  # of -1000 to 1000, added to the share of memory that a process has


def check_system() -> None:
    """Raise UsageError where Atoll cannot run at all."""
    if sys.platform == "win32":
        raise UsageError(
            "E-SYS-01",
            "Atoll does not run on Windows itself",
            cause="its processes share memory and keep files private in ways that Windows lacks",
            fix="install it inside WSL 2 (wsl --install), which is a Linux, or use another computer",
        )


# ---- processes and memory ----


def usable_cores() -> int:
    """Cores that this process may use; elsewhere than on Linux all of the computer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_first() -> None:
    """Let the system end this process before others if memory runs out. Elsewhere it chooses by size."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(SENT_FIRST_TO_DIE)


def container_bytes() -> int | None:
    """Memory that the container of this process may use; None without a limit."""
    for path in map(Path, MEMORY_LIMITS):
        with suppress(OSError, ValueError):
            return int(path.read_text())
    return None


def anonymous_file() -> int:
    """Descriptor of a new unnamed file of size 0, in memory if possible. The caller closes it."""
    if hasattr(os, "memfd_create"):  # not /dev/shm, which containers keep at 64 MB
        return os.memfd_create("atoll", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def use_large_pages(memory: mmap.mmap, size_bytes: int) -> None:
    """Ask for large pages in the first bytes; without them memory works as usual."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, 0, size_bytes)


# ---- files ----


def reserve_blocks(handle: int, size_bytes: int) -> None:
    """Reserve disk blocks, so that a lack of room shows now. Without effect on macOS. Raises OSError."""
    if size_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size_bytes)


def has_other_handles(handle: int) -> bool:
    """True if the file of this handle is open elsewhere, under any name, or if the system cannot tell.

    Close the handle afterwards: it may hold a lease.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return True
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # granted only if no other handle is open
    except OSError:
        return True
    return False


# ---- TCP ----


def limit_silence(sock: socket.socket, seconds: float) -> None:
    """End the connection after this time with unacknowledged bytes. Elsewhere the system's own limit holds."""
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def choose_congestion(sock: socket.socket, name: str) -> None:
    """Choose the congestion control, before connect. Some kernels lack it or forbid the choice."""
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def congestion_of(sock: socket.socket) -> str:
    """The congestion control in use; empty if the system cannot tell."""
    with suppress(OSError, AttributeError):
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    return ""


def round_trip_us(sock: socket.socket) -> int:
    """The kernel's smoothed round trip, 0 if it cannot tell. `struct tcp_info`: 8 bytes, then words, the 16th."""
    return _tcp_info(sock, "=I", 68)


def acknowledged_bytes(sock: socket.socket) -> int:
    """`tcpi_bytes_acked`; 0 if the system cannot tell."""
    return _tcp_info(sock, "=Q", 120)


def kernel_unsent_bytes(sock: socket.socket) -> int:
    """`tcpi_notsent_bytes`; 0 if the system cannot tell."""
    return _tcp_info(sock, "=I", 144)


def _tcp_info(sock: socket.socket, form: str, offset: int) -> int:
    size = offset + struct.calcsize(form)
    with suppress(OSError, AttributeError, struct.error):
        return struct.unpack_from(form, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size), offset)[0]
    return 0
