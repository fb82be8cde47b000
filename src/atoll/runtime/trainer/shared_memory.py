"""Shared memory without a name between a peer and its trainer: nothing is left behind when either process dies.

The parent makes an anonymous file, the child inherits its descriptor and sets the size; both map it. Pages are
taken when they are touched, and reserved before what lies behind x is written: a file on a full disk is then an
error and no crash. The kernel frees the file with its last user.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import weakref
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import Buffer
from atoll.runtime.system import reserve_blocks
from atoll.training.codec.blocks import Room, new_wire, tensor_over

log = logging.getLogger(__name__)


class SharedMailbox:
    """The memory behind a descriptor: F floats for x, then room for inner state or for a second model."""

    def __init__(self, fd: int, floats: int, room_bytes: int) -> None:
        self.floats, self.room_bytes = floats, room_bytes
        size_bytes = 4 * floats + room_bytes
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)
        self._map, self._handle, self._reserved_bytes = mmap.mmap(fd, size_bytes), os.dup(fd), 0
        weakref.finalize(self, os.close, self._handle)
        self.x_F: Tensor = torch.frombuffer(self._map, dtype=torch.float32, count=floats)

    def pin(self, where: torch.device) -> None:
        """Pin the pages of x if this is a GPU: copies to and from it then pass no buffer of the driver.

        If the driver refuses, copies are the usual ones.
        """
        if where.type != "cuda" or not self.floats:
            return
        at, runtime = self.x_F.data_ptr(), cast(Any, torch.cuda.cudart())
        with torch.cuda.device(where):
            runtime.cudaHostRegister(at, 4 * self.floats, 0)
            if self.x_F.is_pinned():
                weakref.finalize(self, runtime.cudaHostUnregister, at).atexit = False
                return
            log.warning("%d bytes of shared memory cannot be pinned: GPU copies take longer", 4 * self.floats)
            with suppress(RuntimeError):  # the driver reports the refusal again at the next kernel
                torch.zeros(1, dtype=torch.float32, device=where)

    def put(self, *pieces: Buffer) -> int:
        """Write pieces of bytes one after the other behind x; returns their total size in bytes.

        Raises RunFailedError if a disk has no room for them.
        """
        size_bytes, at = sum(map(len, pieces)), 4 * self.floats
        if size_bytes > self.room_bytes:
            raise ValueError(f"{size_bytes} bytes do not fit the {self.room_bytes} kept for the inner state")
        self._reserve(size_bytes)
        for piece in pieces:
            self._map[at : at + len(piece)] = piece
            at += len(piece)
        return size_bytes

    def show(self, of_F: Tensor | None) -> None:
        """Write a second model (F,) behind x; x itself may still be read.

        Raises RunFailedError if a disk has no room for it.
        """
        if of_F is not None:
            self._reserve(4 * self.floats)
            self._room_F().copy_(of_F)

    def shown(self) -> Tensor:
        """The second model (F,) that was written last."""
        return self._room_F().clone()

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes <= self._reserved_bytes:
            return
        try:
            reserve_blocks(self._handle, 4 * self.floats + size_bytes)
        except OSError as why:
            if why.errno not in (errno.ENOSPC, errno.EDQUOT):  # this file system reserves nothing
                return
            raise RunFailedError(
                "E-DISK-01",
                f"cannot make room for {size_bytes / 1e9:.2f} GB in the file that a loop shares with its peer: "
                f"{why.strerror}",
                cause='state_memory = "disk" keeps vectors of the model\'s size in files',
                fix="free some space on that disk, then start again",
            ) from why
        self._reserved_bytes = size_bytes

    def _room_F(self) -> Tensor:
        if self.room_bytes < 4 * self.floats:
            raise ValueError(f"a model of {self.floats} values does not fit {self.room_bytes} bytes")
        return torch.frombuffer(self._map, dtype=torch.float32, count=self.floats, offset=4 * self.floats)

    def take(self, size_bytes: int, room: Room = new_wire) -> Buffer:
        """A copy of the first `size_bytes` bytes behind x, in `room`."""
        assert size_bytes <= self.room_bytes
        if size_bytes == 0:
            return b""
        data = room(size_bytes)
        laid = torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes, offset=4 * self.floats)
        tensor_over(data, torch.uint8).copy_(laid)
        return data
