"""One peer of one system in a process of its own: does what its standard input says, a line of JSON at a time.

    python -m systems.peer TASK          (in the folder bench/; TASK is JSON)

    invite                  -> where
    enter where             -> me
    fill round              -> filled        fresh numbers
    average at              -> ended, done   starts at this time of the monotonic clock, which all processes share
    settle                  -> settled       averages again and again until everybody is in: who just joined, too
    check round             -> errors
    paint slot trial        -> painted       a pattern that tells of whom a mean is made
    recognise trial         -> seen, digest

Whatever goes wrong is answered as `error` and ends the process, and so does the end of its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any, TextIO

import torch

from systems import System, Task, data, made, patterns

SETTLE_S = 60.0


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
        return {"me": self.system.me}

    def fill(self, round: int) -> dict[str, Any]:
        data.fill(self.system.x, round, self.task.rank)
        self._wait()
        return {"filled": round}

    def average(self, at: float) -> dict[str, Any]:
        time.sleep(max(0.0, at - time.monotonic()))
        done = self.system.average()
        self._wait()
        ended = time.monotonic()
        if (done.count < self.task.peers or done.partly) and not self.task.losses:
            raise RuntimeError(f"only {done.count} of {self.task.peers} were averaged: {done}")
        return {"ended": ended, "done": asdict(done)}

    def _wait(self) -> None:
        """For a GPU that is still at it."""
        if self.system.x.is_cuda:
            torch.cuda.synchronize()

    def settle(self) -> dict[str, Any]:
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            if self.system.average().count == self.task.peers:
                return {"settled": self.task.rank}
        raise TimeoutError(f"after {SETTLE_S:.0f} s of all-reduces somebody is still missing")

    def check(self, round: int) -> dict[str, Any]:
        return {"errors": asdict(data.errors(self.system.x, round, self.task.rank, self.task.peers))}

    def paint(self, slot: int, trial: int) -> dict[str, Any]:
        patterns.paint(self.system.x, slot, trial, self.task.peers)
        return {"painted": slot}

    def recognise(self, trial: int) -> dict[str, Any]:
        seen = patterns.recognise(self.system.x, self.task.peers, trial, self.task.codec)
        return {"seen": asdict(seen), "digest": data.digest(self.system.x)}


def own_answers() -> TextIO:
    """Standard output for the answers alone: what libraries and their children print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = own_answers()

    def answer(word: dict[str, Any]) -> None:
        print(json.dumps(word), file=answers, flush=True)

    try:
        desk = Desk(Task(**json.loads(sys.argv[1])))
        answer({"ready": os.getpid()})
        for line in sys.stdin:
            word = json.loads(line)
            answer(getattr(desk, word.pop("do"))(**word))
        desk.system.leave()
    except Exception as trouble:
        answer({"error": f"{type(trouble).__name__}: {trouble}"})
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # some systems leave threads behind that would wait for ever


if __name__ == "__main__":
    main()
