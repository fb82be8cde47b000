"""Peers of attached loops, forked from their loop: processes of their own, without another import of torch."""

from __future__ import annotations

import asyncio
import builtins
import os
import select
import signal
import subprocess
import traceback
from functools import partial
from types import SimpleNamespace

import torch

from atoll.runtime.embed import peer_channel
from atoll.runtime.embed.peer_process import serve

_print = print


class ForkedPeer:
    """As much of `subprocess.Popen` as `PeerChannel` uses, for the command of a peer process."""

    def __init__(self, command: list[str], **_: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _be_peer(int(command[-2]), int(command[-1]))
        self._end = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("peer", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_peer(fd: int, memory: int) -> None:
    """What the peer's command does. The loop's end of the socket must not stay open here."""
    try:
        os.setpgid(0, 0)
        low, high = sorted((fd, memory))
        for begin, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(begin, end)
        asyncio.run(serve(fd, memory))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _print_and_die(left: list[int], *words: object, **how: object) -> None:
    _print(*words, **how | {"flush": True})
    left[0] -= "loss" in str(words[0]).split(":")[0]
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)


def prepare(env: dict[str, str], prints: int) -> None:
    """Make this process a member's: its environment, its forked peer, and perhaps its death amid a round."""
    os.environ |= env
    torch.set_num_threads(1)
    if prints:
        builtins.print = partial(_print_and_die, [prints])
    peer_channel.subprocess = SimpleNamespace(
        Popen=ForkedPeer, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
