"""Peers forked from an interpreter that has imported torch and Atoll already: most of what a short life spends.

Each is a process with its own pipes, signals and end, and begins where `python -m atoll` begins; its trainers are
fresh interpreters as ever. What forked peers share is the seed of Python's hashes: stories about the start itself,
the demo's peers, and the founder of one whole journey are fresh ones. Imports nothing of Atoll: every peer imports
this file anew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import reduction
from typing import TextIO
from unittest.mock import patch

HUMBLE = {"OMP_NUM_THREADS": "1"}
IMPORTED = ["atoll.cli.up", "atoll.cli.join", "atoll.runtime.bootstrap", "atoll.training.models"]


class WarmPeer:
    """`atoll` with these words, and as much of `subprocess.Popen` as tests use; stderr is a pipe or this file."""

    def __init__(self, words: Sequence[str], stderr: TextIO | None = None) -> None:
        their_in, our_in = os.pipe()
        our_out, their_out = os.pipe()
        our_err, their_err = os.pipe() if stderr is None else (None, os.dup(stderr.fileno()))
        self.stdin, self.stdout = os.fdopen(our_in, "w"), os.fdopen(our_out)
        self.stderr = None if our_err is None else os.fdopen(our_err)
        given = [_Given(end) for end in (their_in, their_out, their_err)]
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload(IMPORTED)
        self._process = forking.Process(target=_live, args=(list(words), given))
        try:
            with patch.dict(os.environ, HUMBLE):  # the first one starts the interpreter that all are forked from
                self._process.start()
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
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Given:
    """A descriptor on its way to a peer, where it has another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self):
        return _arrived, (reduction.DupFd(self.number),)


def _arrived(sent) -> _Given:
    return _Given(sent.detach())


def _live(words: list[str], given: list[_Given]) -> None:
    for place, end in enumerate(given):
        os.dup2(end.number, place)
        os.close(end.number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(place, mode, closefd=False) for place, mode in enumerate("rww"))
    sys.argv = ["atoll", *words]
    from atoll.__main__ import main

    main()
