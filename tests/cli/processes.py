"""Commands as people run them, watched through what they print: peers in processes of their own, what only asks
or tells in this one, which has imported already what a process of its own would spend most of its life on."""

from __future__ import annotations

import asyncio
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from warm import HUMBLE, WarmPeer, trainer_program

from atoll.cli.main import main
from atoll.runtime.control.commands import COMMANDS
from atoll.runtime.control.socket import ControlServer
from atoll.runtime.trainer import client

PATIENCE_S = 90.0  # only a failing test waits so long
SMALL = [  # a run of seconds: 22 k parameters, few steps
    *("--set", "model.name=gpt-nano", "--set", "train.seq_len=32"),
    *("--set", "train.inner_steps=8", "--set", "train.batch=2"),
]
AS_TYPED = ("-m", "atoll")
TWO = (*SMALL, "--set", "run.start_peers=2")  # no member trains while the other one still starts


def atoll(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """One command, to its end, in this process."""
    typed, out, err = list(map(str, words)), io.StringIO(), io.StringIO()
    with (
        open(os.devnull) as nobody,
        patch.object(sys, "stdin", nobody),
        patch.object(client, "PROGRAM", trainer_program()),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main(typed)
    return subprocess.CompletedProcess(typed, ended.value.code or 0, out.getvalue(), err.getvalue())


def started(*words: str | Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """One command, to its end, in a process of its own."""
    command = [sys.executable, "-m", "atoll", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)


def lying(folder: Path, code: str) -> dict[str, str]:
    """The environment of a process that runs this before anything else: a member's that departs from the rules."""
    (lies := folder / "lies").mkdir()
    (lies / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(lies), os.environ.get("PYTHONPATH", "")])}


def answer_of(*words: str | Path) -> Any:
    """What a command says with --json; it must succeed."""
    done = atoll(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Peer:
    """A running `atoll up` or `atoll join` and the facts it has told.

    A warm process, which runs the code in `lies` first, or, with a `command` or an `env` of its own, a fresh one.
    """

    def __init__(
        self,
        *words: str | Path,
        command: tuple[str | Path, ...] = (),
        env: dict[str, str] | None = None,
        lies: str = "",
    ) -> None:
        typed = [*map(str, words), "--facts", "--threads", "1"]
        is_fresh = command or env
        self.process = _fresh(command or AS_TYPED, typed, env or {}) if is_fresh else WarmPeer(typed, lies=lies)
        self.facts: list[dict[str, Any]] = []
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._news.put(json.loads(line))
        self._news.put(None)

    def until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first fact, told already or to come, that fits."""
        for fact in self.facts:
            if condition(fact):
                return fact
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                fact = self._news.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                lately = "\n".join(map(str, self.facts[-30:]))
                raise AssertionError(f"not within {PATIENCE_S:.0f} s; told lately:\n{lately}") from None
            assert fact is not None, f"the process ended: {self.words()}"
            self.facts.append(fact)
            if condition(fact):
                return fact

    def until_fact(self, name: str, **fields: Any) -> dict[str, Any]:
        return self.until(lambda f: f["fact"] == name and all(f.get(k) == v for k, v in fields.items()))

    def until_expelled(self, peer: str) -> dict[str, Any]:
        """The vertex with which this one is out."""
        return self.until(
            lambda f: (
                f["fact"] == "MembershipChanged"
                and any(m["peer"] == peer and m["standing"] == "expelled" for m in f["members"])
            )
        )

    def trained_with(self, peers: int) -> dict[str, Any]:
        """The next round that counted this number of peers."""
        self.facts.clear()
        return self.until(lambda f: f["fact"] == "RoundClosed" and len(f["counted"]) == peers)

    def comes_to(self, other: Path) -> None:
        """It has the vertex that the peer in this folder has now."""
        round = answer_of("status", "--dir", other)["round"]
        self.until(lambda f: f["fact"] == "RoundClosed" and f["round"] >= round)

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def words(self) -> str:
        """What it said on stderr; only once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


def _fresh(command: tuple[str | Path, ...], typed: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command), *typed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | HUMBLE | env,
    )


@contextmanager
def peers(*running: Peer) -> Iterator[list[Peer]]:
    """Peers started inside end with the block, whatever happens."""
    started = list(running)
    try:
        yield started
    finally:
        for peer in started:
            peer.close()


@contextmanager
def beside_eve(
    folder: Path, code: str, words: Sequence[str], *others: str, in_trainer: bool = False
) -> Iterator[tuple[Peer, Peer]]:
    """Ada, who founds a run with these words, and eve, who departs from the rules by this code, itself or in its
    trainer.
    """
    with peers(Peer("up", "--dir", folder / "ada", "--name", "ada", *words)) as running:
        ada = running[0]
        join = ("join", ada.until_fact("Opened")["ticket"])
        running += [Peer(*join, "--dir", folder / name, "--name", name) for name in others]
        how = {"env": lying(folder, code)} if in_trainer else {"lies": code}
        eve = Peer(*join, "--dir", folder / "eve", "--name", "eve", **how)
        running.append(eve)
        yield ada, eve


@contextmanager
def answering(
    folder: Path, reply: Any, *, ends: bool = False, release: threading.Event | None = None
) -> Iterator[threading.Event]:
    """A control socket that gives this reply to every request, or raises it; orders wait until `release` is set.

    It closes with the event that it yields, or, if `ends`, with the first request.
    """
    begun, done = threading.Event(), threading.Event()

    async def answer(_: Any) -> Any:
        if ends:
            done.set()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def answer_later(_: Any) -> Any:
        if release is not None:
            await asyncio.to_thread(release.wait, PATIENCE_S)
        return await answer(_)

    async def serve() -> None:
        handlers = {command.name: answer if command.right is None else answer_later for command in COMMANDS}
        server = ControlServer(folder, handlers)
        await server.open()
        begun.set()
        await asyncio.to_thread(done.wait, 2 * PATIENCE_S)
        await server.close()
        if answers := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(answers)
        await asyncio.sleep(0)  # connections close in the loop's next turn

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert begun.wait(PATIENCE_S)
    try:
        yield done
    finally:
        done.set()
        thread.join()
