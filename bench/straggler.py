"""One of four real peers is four times slower: what rounds are worth that wait for it, do not, or ask it for less.

    python bench/straggler.py [--quick] [--json] [--rounds N] [--recipe NAME] [--how wait,quorum,speed]

    wait     every member takes all steps of a round, and all are waited for
    quorum   a quorum of two and a grace of four steps are enough; whoever still trains hands over what it has
    speed    each member is asked for steps by its own speed (`train.steps_by_speed`), and all are waited for

Trainer processes are stopped (SIGSTOP) for most of every 160 ms, so that four of them fit on two cores: three may
run for 64 ms of it, one for 16. Counted are the steps that vertices count, over the wall time between the first and
the last of the rounds looked at. `of_ideal`: of the steps that all could have taken in that time without ever
waiting, each at the speed that it showed in those very rounds; `slower`: how many times longer a step of the slow
one took than the median one of the others. Both are shares of one run, and the box must have cores to spare.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from form import asking, report, versions
from real_swarm import Fact, Swarm

PEERS, SLOW, WARM_ROUNDS = 4, 3, 3
PERIOD_S, FAST_S, SLOWER = 0.16, 0.064, 4
STEPS, OVERLAP = 80, 4
COMMON = ["train.batch=8", f"sync.overlap={OVERLAP}", f"run.start_peers={PEERS}"]
WAYS = {
    "wait": ["sync.quorum=0"],
    "quorum": ["sync.quorum=2", "sync.grace=4"],
    "speed": ["sync.quorum=0", "train.steps_by_speed=true", f"train.inner_steps_min={OVERLAP + 1}"],
}


def throttled(pid: int, on_s: float, over: threading.Event) -> None:
    """Let this process run for so much of every period."""
    with suppress(ProcessLookupError):
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(PERIOD_S - on_s)
            os.kill(pid, signal.SIGCONT)
            over.wait(on_s)


def played(way: str, rounds: int, steps: int, recipe: str) -> dict[str, float]:
    rounds_all = WARM_ROUNDS + rounds
    sets = [*COMMON, *WAYS[way], f"train.inner_steps={steps}", f"run.rounds={rounds_all}", f"train.recipe={recipe}"]
    over = threading.Event()
    with tempfile.TemporaryDirectory() as base, Swarm(Path(base), sets) as swarm:
        swarm.found()
        for index in range(1, PEERS):
            swarm.join(index)
        swarm.closed(1, peer=0)
        brakes = [
            threading.Thread(
                target=throttled, args=(peer.trainer().pid, FAST_S / (SLOWER if index == SLOW else 1), over)
            )
            for index, peer in swarm.peers.items()
        ]
        for brake in brakes:
            brake.start()
        try:
            begin = swarm.closed(WARM_ROUNDS, peer=0)
            last = swarm.closed(rounds_all, peer=0, patience_s=600.0)
        finally:
            over.set()
            for brake in brakes:
                brake.join()
        return worth(swarm.facts, begin, last)


def worth(facts: list[Fact], begin: Fact, last: Fact) -> dict[str, float]:
    """Of the rounds after `begin` up to `last`."""
    took_s = last["at"] - begin["at"]
    closed = [f for f in facts if f["fact"] == "RoundClosed" and f["by"] == 0]
    closed = [f for f in closed if begin["trained"] < f["trained"] <= last["trained"]]
    mine = {
        index: [
            f
            for f in facts
            if f["fact"] == "LocalTrainingEnded" and f["by"] == index and begin["at"] < f["at"] <= last["at"]
        ]
        for index in range(PEERS)
    }
    step_s = {
        index: sum(f["steps"] * f["step_s"] for f in ended) / sum(f["steps"] for f in ended)
        for index, ended in mine.items()
    }
    others = statistics.median(step_s[index] for index in mine if index != SLOW)
    return {
        "rounds": len(closed),
        "round_s": took_s / len(closed),
        "steps_per_s": sum(f["steps"] for f in closed) / took_s,
        "of_ideal": sum(f["steps"] for f in closed) / sum(took_s / each for each in step_s.values()),
        "slower": step_s[SLOW] / others,
        "steps_of_the_slow": statistics.mean(f["steps"] for f in mine[SLOW]),
        "rounds_without_somebody": sum(len(f["missing"]) > 0 for f in closed),
    }


def main() -> None:
    parser = asking(__doc__, "three rounds of half as many steps, wait and speed alone")
    parser.add_argument("--rounds", type=int, default=0, help="measured ones; default 12, quick 3")
    parser.add_argument("--recipe", default="diloco")
    parser.add_argument("--how", default="", help="default wait,quorum,speed; quick wait,speed")
    asked = parser.parse_args()
    rounds, steps = asked.rounds or (3 if asked.quick else 12), STEPS // 2 if asked.quick else STEPS
    ways = (asked.how or ("wait,speed" if asked.quick else ",".join(WAYS))).split(",")
    figures: dict[str, dict[str, float]] = {}
    for way in ways:
        figures[way] = played(way, rounds, steps, asked.recipe)
        if not asked.json:
            print(f"{way:7s}", "  ".join(f"{key} {value:.4g}" for key, value in figures[way].items()), flush=True)
    if asked.json:
        told = {"peers": PEERS, "rounds": rounds, "inner_steps": steps, "overlap": OVERLAP, "recipe": asked.recipe}
        cores = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
        print(report("straggler", told | cores, figures, versions("torch")))


if __name__ == "__main__":
    main()
