"""One of four real peers trains at a quarter of its speed: what rounds that do not wait for it are worth.

    python bench/straggler.py [--rounds N] [--recipe NAME]

Its trainer process is stopped (SIGSTOP) for three quarters of every 80 ms. Played twice: all are waited for
(`sync.quorum = 0`), and a quorum of two with a grace of four steps is enough. Counted are the steps that
commitments in vertices say, over the wall time between the first and the last of the rounds looked at.
Four trainers want four cores: on fewer, the others use what the slow one does not, and only ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from real_swarm import Swarm

PEERS, SLOW, WARM_ROUNDS = 4, 3, 3
ON_S, OFF_S = 0.02, 0.06
COMMON = [f"run.start_peers={PEERS}", "train.batch=8", "sync.overlap=4", "train.inner_steps=40"]


def throttled(pid: int, over: threading.Event) -> None:
    """Let this process run a quarter of the time."""
    with suppress(ProcessLookupError):
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(OFF_S)
            os.kill(pid, signal.SIGCONT)
            over.wait(ON_S)


def played(rounds: int, recipe: str, quorum: int) -> dict[str, float]:
    accepted = [f"sync.quorum={quorum}", "sync.grace=4"] if quorum else ["sync.quorum=0"]
    sets = [*COMMON, f"run.rounds={rounds + WARM_ROUNDS}", f"train.recipe={recipe}", *accepted]
    over = threading.Event()
    with tempfile.TemporaryDirectory() as base, Swarm(Path(base), sets) as swarm:
        swarm.found()
        for index in range(1, PEERS):
            swarm.join(index)
        swarm.closed(1, peer=0)
        brake = threading.Thread(target=throttled, args=(swarm.peers[SLOW].trainer().pid, over))
        brake.start()
        try:
            begin = swarm.closed(WARM_ROUNDS, peer=0)
            last = swarm.closed(rounds + WARM_ROUNDS, peer=0, patience_s=600.0)
        finally:
            over.set()
            brake.join()
        between = [
            f
            for f in swarm.facts
            if f["by"] == 0 and f["fact"] == "RoundClosed" and begin["trained"] < f["trained"] <= last["trained"]
        ]
        took_s = last["at"] - begin["at"]
        return {
            "quorum": quorum,
            "rounds": len(between),
            "round_s": took_s / len(between),
            "steps_per_s": sum(f["steps"] for f in between) / took_s,
            "rounds_without_somebody": sum(len(f["missing"]) > 0 for f in between),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--recipe", default="diloco")
    parser.add_argument("--json", action="store_true", help="one object per run")
    options = parser.parse_args()
    for quorum in (0, 2):
        found = played(options.rounds, options.recipe, quorum)
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            print("  ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
