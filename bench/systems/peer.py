"""One peer of one system in a process of its own: does what its standard input says, a line of JSON at a time.

    python -m systems.peer TASK          (in the folder bench/; TASK is JSON)

    invite                  -> where         rank 0 only
    enter where             -> here
    fill round              -> filled        fresh numbers
    average at              -> ended         starts at this time of the monotonic clock, which all processes share
    check round             -> errors

Whatever goes wrong is answered as `error` and ends the process, and so does the end of its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import torch

from systems import System, Task, data, made


class Desk:
    """The words that a peer understands."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(1)
        self.task = task
        self.system: System = made(task)

    def invite(self) -> dict[str, Any]:
        return {"where": self.system.invite()}

    def enter(self, where: str) -> dict[str, Any]:
        self.system.enter(where)
        return {"here": self.task.rank}

    def fill(self, round: int) -> dict[str, Any]:
        data.fill(self.system.x, round, self.task.rank)
        return {"filled": round}

    def average(self, at: float) -> dict[str, Any]:
        time.sleep(max(0.0, at - time.monotonic()))
        self.system.average()
        return {"ended": time.monotonic()}

    def check(self, round: int) -> dict[str, Any]:
        return {"errors": asdict(data.errors(self.system.x, round, self.task.rank, self.task.peers))}


def listen(desk: Callable[[], Any], answers: TextIO) -> None:
    """Do each word of standard input at the desk and write what it returns."""

    def answer(word: dict[str, Any]) -> None:
        print(json.dumps(word), file=answers, flush=True)

    try:
        opened = desk()
        answer({"ready": os.getpid()})
        for line in sys.stdin:
            word = json.loads(line)
            answer(getattr(opened, word.pop("do"))(**word))
    except Exception as trouble:
        answer({"error": f"{type(trouble).__name__}: {trouble}"})
        raise


def own_answers() -> TextIO:
    """Standard output for the answers alone: what libraries and their children print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    answers = own_answers()
    desk: list[Desk] = []

    def opened() -> Desk:
        desk.append(Desk(task))
        return desk[0]

    listen(opened, answers)
    desk[0].system.leave()
    os._exit(0)  # some systems leave threads behind that would wait for ever


if __name__ == "__main__":
    main()
