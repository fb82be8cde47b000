"""Peers forked from an interpreter that has imported torch and Atoll already: most of what a short life spends.

Each is a process with its own pipes, signals and end, and begins where `python -m atoll` begins; its trainers are
forked as well (`warm_trainer.py`). What forked peers share is the seed of Python's hashes: stories about the start
itself, the demo's peers, and the founder of one whole journey are fresh ones, with fresh trainers. Imports nothing
of Atoll: every peer imports this file anew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import connection, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import TextIO
from unittest.mock import patch

HUMBLE = {"OMP_NUM_THREADS": "1"}
IMPORTED = [
    *("atoll.cli.up", "atoll.cli.join", "atoll.runtime.bootstrap", "atoll.training.models"),
    "atoll.runtime.trainer.__main__",
]


def code_of_script(folder: Path, *words: str) -> str:
    """In the place of `lies`: go to this folder and, with words, run `python WORDS` instead of `atoll`."""
    code = f"import atexit, os, runpy, sys; os.chdir({str(folder)!r})\n"
    if not words:
        return code
    run = f"sys.argv = {list(words)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return f"{code}{run}\natexit._run_exitfuncs(); raise SystemExit\n"


class WarmPeer:
    """`atoll` with these words, and as much of `subprocess.Popen` as tests use; stderr is a pipe or this file."""

    def __init__(self, words: Sequence[str], stderr: TextIO | None = None, lies: str = "") -> None:
        their_in, our_in = os.pipe()
        our_out, their_out = os.pipe()
        our_err, their_err = os.pipe() if stderr is None else (None, os.dup(stderr.fileno()))
        self.stdin, self.stdout = os.fdopen(our_in, "w"), os.fdopen(our_out)
        self.stderr = None if our_err is None else os.fdopen(our_err)
        given = [_Given(end) for end in (their_in, their_out, their_err)]
        try:
            self._process = _forked(_live, list(words), given, trainer_program(), lies)
        finally:
            for end in given:
                os.close(end.number)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("atoll", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its end is not reported yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and close its pipes; readers of the pipes are done before."""
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def _forked(target: Callable[..., None], *given: object, daemon: bool = False) -> BaseProcess:
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(IMPORTED)
    process = forking.Process(target=target, args=given, daemon=daemon)
    # the first one starts the interpreter that all are forked from: without what its test told its own peers
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | HUMBLE
    with patch.dict(os.environ, plain, clear=True):
        process.start()
    return process


@cache
def trainer_program() -> tuple[str, ...]:
    """Arguments of Python in the place of `client.PROGRAM`: trainers are forked, as long as this process lives."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address := mkdtemp(prefix="trainers-", dir=os.environ["XDG_RUNTIME_DIR"]) + "/door")
        door.listen()
        _forked(_fork_trainers, _Given(door.fileno()), daemon=True)
    return "-IS", str(Path(__file__).with_name("warm_trainer.py")), "atoll.runtime.trainer", address


class _Given:
    """A descriptor on its way to a peer, where it has another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self):
        return _arrived, (reduction.DupFd(self.number),)


def _arrived(sent) -> _Given:
    return _Given(sent.detach())


def _live(words: list[str], given: list[_Given], program: tuple[str, ...], lies: str) -> None:
    from atoll.__main__ import main
    from atoll.runtime.trainer import client

    _begins([end.number for end in given], "atoll", *words)
    client.PROGRAM = program
    exec(lies, {})
    main()


def _begins(pipes: list[int], *words: str) -> None:
    """From here on this process has these pipes and was called with these words."""
    for place, end in enumerate(pipes):
        os.dup2(end, place)
        os.close(end)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(place, mode, closefd=False) for place, mode in enumerate("rww"))
    sys.argv = list(words)


def _fork_trainers(door: _Given) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with socket.socket(fileno=door.number) as listening:
        while parent.sentinel not in connection.wait([listening, parent.sentinel]):
            link, _ = listening.accept()
            if not os.fork():
                listening.close()
                _train(link)
            link.close()


def _train(link: socket.socket) -> None:
    """A trainer with the pipes that come by this link; it ends with the link, and the link with it."""
    from atoll.runtime.trainer.__main__ import _main

    *pipes, mailbox = socket.recv_fds(link, 1, 4)[1]
    _begins(pipes, "trainer", str(mailbox))
    threading.Thread(target=lambda: os._exit(len(link.recv(1))), daemon=True).start()
    _main()
    os._exit(0)
