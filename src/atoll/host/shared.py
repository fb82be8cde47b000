"""Memory that two processes share without a name, so that nothing is left behind however either of them dies.

The parent makes an anonymous file, the child inherits its descriptor and decides the size; both map it.
Pages are only taken when they are touched. Never leaves a file: the kernel frees it with its last user.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

import torch
from torch import Tensor


def anonymous() -> int:
    """The descriptor of a new file of size 0 that has no name. The caller closes it."""
    if sys.platform == "win32":
        raise ValueError("trainers share memory by inherited descriptors, which Windows lacks; use WSL")
    if hasattr(os, "memfd_create"):  # memory, but not /dev/shm, which containers keep at 64 MB
        return os.memfd_create("atoll", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Mailbox:
    """The memory behind a descriptor: F floats for x, then room for inner bytes or a model to look at."""

    def __init__(self, fd: int, floats: int, room_bytes: int) -> None:
        self.floats, self.room_bytes = floats, room_bytes
        size_bytes = 4 * floats + room_bytes
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)
        self._map = mmap.mmap(fd, size_bytes)
        self.x_F: Tensor = torch.frombuffer(self._map, dtype=torch.float32, count=floats)

    def put(self, data: bytes) -> int:
        """Lay bytes into the room behind x; their number."""
        if len(data) > self.room_bytes:
            raise ValueError(f"{len(data)} bytes do not fit the {self.room_bytes} kept for the inner state")
        self._map[4 * self.floats : 4 * self.floats + len(data)] = data
        return len(data)

    def show(self, of_F: Tensor | None) -> None:
        """Lay a model into the room behind x, to be looked at; x itself may still be read."""
        if of_F is not None:
            self._room_F().copy_(of_F)

    def shown(self) -> Tensor:
        """(F,): what was laid there last."""
        return self._room_F().clone()

    def _room_F(self) -> Tensor:
        if self.room_bytes < 4 * self.floats:
            raise ValueError(f"a model of {self.floats} values does not fit {self.room_bytes} bytes")
        return torch.frombuffer(self._map, dtype=torch.float32, count=self.floats, offset=4 * self.floats)

    def take(self, size_bytes: int) -> bytes:
        assert size_bytes <= self.room_bytes
        return self._map[4 * self.floats : 4 * self.floats + size_bytes]
