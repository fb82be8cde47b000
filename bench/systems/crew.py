"""Processes that are told what to do, a line of JSON at a time, and that end with the bench.

Promises: nobody is waited for without a limit; an answer that says `error`, or a process that ended, is a
`CrewError` with the last lines of what it printed; `end` leaves no process behind, daemons of a system included.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from systems import BENCH, OPTIONAL, OWN_PYTHON, Task

START_S, WORD_S = 120.0, 120.0  # the most that is waited; hivemind's peers need up to 40 s to come together
LEAVE_S = 5.0
TRACE_BYTES = 1500  # of what a process printed, in the error


class CrewError(RuntimeError):
    """A process did not do what it was told."""


class Silence(CrewError):
    """A process said nothing for longer than it may."""


class Process:
    """One process with a line in each direction. `source`: a folder from which it takes what it imports first."""

    def __init__(self, command: list[str], name: str, source: str = "") -> None:
        self.name = name
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self.scratch = tempfile.TemporaryDirectory(
            prefix="bench-", ignore_cleanup_errors=True
        )  # the killed leave files
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            text=True,
            cwd=BENCH,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "TMPDIR": self.scratch.name}
            | ({"PYTHONPATH": source} if source else {}),
            start_new_session=True,  # so that its whole family can be ended by one signal
        )
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, do: str, **words: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: its last answer tells why
            self.process.stdin.write(json.dumps({"do": do} | words) + "\n")
            self.process.stdin.flush()

    def hear(self, patience_s: float = WORD_S) -> dict[str, Any]:
        """The next answer. Patience is counted in seconds awake: being stopped together is nobody's silence."""
        for _ in range(max(1, math.ceil(patience_s))):
            with suppress(queue.Empty):
                answer = self.answers.get(timeout=1.0)
                break
        else:
            raise Silence(f"{self.name}: no answer in {patience_s:.0f} s")
        if "error" in answer:
            raise CrewError(f"{self.name}: {answer['error']}\n{self.trace()}".rstrip())
        return answer

    def trace(self) -> str:
        size = self.printed.seek(0, os.SEEK_END)
        self.printed.seek(max(0, size - TRACE_BYTES))
        return self.printed.read().decode(errors="replace")

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        self.tell(do, **words)
        return self.hear()

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill(self) -> None:
        """SIGKILL to the process and all its family, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def bury(self) -> None:
        self.kill()
        self.process.wait()
        self.reader.join()
        self.hang_up()
        self.printed.close()
        self.scratch.cleanup()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.answers.put(json.loads(line))
        self.answers.put({"error": "the process ended"})


def end(processes: list[Process]) -> None:
    """Everybody may say good-bye; who does not in time is killed."""
    for process in processes:
        process.hang_up()
    until = time.monotonic() + LEAVE_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        process.bury()


def start(task: Task, source: str = "") -> Process:
    python = str(OWN_PYTHON) if task.system in OPTIONAL else sys.executable
    command = [python, "-m", "systems.peer", json.dumps(asdict(task))]
    return Process(command, f"{task.system} {task.codec} peer {task.rank}", source)


class Crew:
    """All the peers of one group."""

    def __init__(
        self,
        system: str,
        peers: int,
        values: int,
        codec: str,
        topology: str,
        source: str = "",
        way_back: str = "",
        device: str = "cpu",
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes: list[Process] = []
        for rank in range(peers):
            folder = str(Path(self.folder.name))
            task = Task(system, rank, peers, values, codec, topology, folder, way_back=way_back, device=device)
            self.processes.append(start(task, source))

    def gather(self) -> None:
        """Wait until every process is up, and bring them together."""
        for process in self.processes:
            process.hear(START_S)
        where = self.processes[0].ask("invite")["where"]
        self.all("enter", where=where)

    def all(self, do: str, **words: Any) -> list[dict[str, Any]]:
        """Tell everybody, then hear everybody."""
        for process in self.processes:
            process.tell(do, **words)
        return [process.hear() for process in self.processes]

    def end(self) -> None:
        end(self.processes)
        self.folder.cleanup()
