"""A swarm of real peer processes on this computer, for stories and benches: start, watch facts, kill, freeze.

Each peer is `python -m atoll up|join --facts`, as a person would start it. Facts arrive as lines of JSON; `wait`
looks at all of them, in order, so nothing here sleeps to wait for something.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import psutil

if TYPE_CHECKING:
    from lab import Lab

PATIENCE_S = 120.0  # for any one thing to happen on a busy computer
TICKET_USES = 64  # the default where members trust each other
LAB_PORT = 7071  # the same in every life: others look for a restarted peer where it was

Fact = dict[str, Any]


class Peer:
    def __init__(self, index: int, process: subprocess.Popen[str], swarm: Swarm) -> None:
        self.index, self.process, self.swarm = index, process, swarm
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.swarm.news.put({"by": self.index, "heard": time.time()} | {"line": json.loads(line)})
        self.swarm.news.put({"by": self.index, "heard": time.time(), "line": {"fact": "Exit"}})

    def trainer(self) -> psutil.Process:
        def is_trainer(child: psutil.Process) -> bool:
            with suppress(psutil.NoSuchProcess):  # also raised for a zombie
                return "atoll.runtime.trainer" in " ".join(child.cmdline())
            return False

        return next(filter(is_trainer, psutil.Process(self.process.pid).children(recursive=True)))


class Swarm:
    """Peers by index; every fact heard so far in `facts`, oldest first."""

    def __init__(
        self,
        base: Path,
        settings: list[str],
        lab: Lab | None = None,
        begin: Callable[[list[str], TextIO], Any] | None = None,
    ) -> None:
        """In a lab every peer runs at the host of its index. `begin` starts peers otherwise than a person would."""
        self.base, self.settings, self.lab, self.begin = base, settings, lab, begin
        self.news: queue.Queue[Fact] = queue.Queue()
        self.facts: list[Fact] = []
        self.peers: dict[int, Peer] = {}
        self.ticket = ""

    def found(self) -> None:
        sets = [word for s in self.settings for word in ("--set", s)]
        # where members may lie, a founder's ticket admits one peer by default
        self._start(0, ["up", "--uses", str(TICKET_USES), *sets])
        self.ticket = self.wait(lambda f: f["fact"] == "Opened" and f["by"] == 0)["ticket"]

    def join(self, index: int, command: tuple[str, ...] | None = None) -> None:
        """`command` runs in the place of `python -m atoll`."""
        self._start(index, ["join", self.ticket], command)

    def resume(self, index: int) -> None:
        self._start(index, ["up"])

    def kill(self, index: int) -> float:
        os.kill(self.peers[index].process.pid, signal.SIGKILL)
        return time.time()

    def freeze(self, index: int) -> float:
        os.kill(self.peers[index].process.pid, signal.SIGSTOP)
        return time.time()

    def thaw(self, index: int) -> None:
        os.kill(self.peers[index].process.pid, signal.SIGCONT)

    def wait(self, wanted: Callable[[Fact], bool], since: int = 0, patience_s: float = PATIENCE_S) -> Fact:
        """The first wanted fact from position `since` in `facts` on. TimeoutError names the last ones."""
        for fact in self.facts[since:]:
            if wanted(fact):
                return fact
        deadline = time.monotonic() + patience_s
        while True:
            try:
                raw = self.news.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                last = [(f["by"], f["fact"], f.get("round")) for f in self.facts[-12:]]
                raise TimeoutError(f"not seen in {patience_s:.0f} s; last facts: {last}") from None
            fact = {"by": raw["by"], "heard": raw["heard"]} | raw["line"]
            self.facts.append(fact)
            if wanted(fact):
                return fact
            if fact["fact"] == "Exit" and not any(f["by"] == fact["by"] for f in self.facts[:-1]):
                words = (self.base / f"peer-{fact['by']}.stderr").read_text(errors="replace")
                raise RuntimeError(f"peer {fact['by']} ended before it said anything: {words}")

    def closed(self, trained: int, peer: int, since: int = 0, patience_s: float = PATIENCE_S) -> Fact:
        """This peer closing the training round with this number, or a later one."""

        def wanted(fact: Fact) -> bool:
            return fact["fact"] == "RoundClosed" and fact["by"] == peer and fact["trained"] >= trained

        return self.wait(wanted, since, patience_s)

    def end(self) -> None:
        for peer in self.peers.values():
            if peer.process.poll() is None:
                children = psutil.Process(peer.process.pid).children(recursive=True)
                peer.process.kill()
                for child in children:
                    child.kill() if child.is_running() else None
            self._bury(peer)

    def _bury(self, peer: Peer) -> None:
        peer.process.wait()
        peer.reader.join()
        for pipe in (peer.process.stdin, peer.process.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self, index: int, words: list[str], atoll: tuple[str, ...] | None = None) -> None:
        if index in self.peers:
            self._bury(self.peers[index])
        folder = self.base / f"peer-{index}"
        words = [*words, "--facts", "--threads", "1", "--name", folder.name, "--dir", str(folder)]
        start = subprocess.Popen
        if self.lab is not None:
            words += ["--listen", f"/ip4/{self.lab.address(index)}/tcp/{LAB_PORT}"]
            start = partial(self.lab.run, index)
        with (self.base / f"{folder.name}.stderr").open("a") as said:
            if self.begin is not None:
                process = self.begin(words, said)
            else:
                command = [*(atoll or (sys.executable, "-m", "atoll")), *words]
                process = start(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=said, text=True)
        self.peers[index] = Peer(index, process, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
