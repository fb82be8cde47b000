"""A run that grows from 2 to 6 peers and loses a third of them at random, beside an undisturbed run of 4.

    python bench/growth.py [--json] [--quick]

Real processes. Both runs have the same recipe and number of rounds; the figure is the gap between their mean
training losses over the last rounds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from form import asking, report, versions
from real_swarm import Swarm

LAST = 4  # rounds whose losses are averaged


def losses(swarm: Swarm) -> dict[int, float]:
    return {f["trained"]: f["loss"] for f in swarm.facts if f["fact"] == "RoundClosed" and f["trained"] > 0}


def steady(settings: list[str], rounds: int, base: Path) -> dict[int, float]:
    with Swarm(base, [*settings, "run.start_peers=4"]) as swarm:
        swarm.found()
        for index in (1, 2, 3):
            swarm.join(index)
        swarm.closed(rounds, peer=0)
        return losses(swarm)


def growing(settings: list[str], rounds: int, seed: int, base: Path) -> tuple[dict[int, float], list[int]]:
    with Swarm(base, [*settings, "run.start_peers=2"]) as swarm:
        swarm.found()
        swarm.join(1)
        swarm.closed(2, peer=0)
        for index in (2, 3, 4, 5):
            swarm.join(index)
        since = len(swarm.facts)
        whole = swarm.wait(lambda f: f["fact"] == "RoundClosed" and f["by"] == 0 and len(f["counted"]) == 6, since)
        for index in random.Random(seed).sample(range(1, 6), 2):
            swarm.kill(index)
        swarm.closed(max(rounds, whole["trained"] + LAST + 2), peer=0)
        counted = [len(f["counted"]) for f in swarm.facts if f["fact"] == "RoundClosed" and f["by"] == 0]
        return losses(swarm), [c for c in counted if c]


def main() -> None:
    parser = asking(__doc__, "shorter rounds", json="one object instead of lines")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed")
    options = parser.parse_args()
    rounds, steps = (16, 20) if options.quick else (24, 40)
    settings = [f"run.rounds={4 * rounds}", f"train.inner_steps={steps}", "sync.up=2bit"]
    with tempfile.TemporaryDirectory() as folder:
        grown, counted = growing(settings, rounds, options.seed, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        still = steady(settings, max(grown), Path(folder))
    shared = sorted(grown.keys() & still.keys())[-LAST:]
    ours = statistics.mean(grown[r] for r in shared)
    theirs = statistics.mean(still[r] for r in shared)
    figures = {
        "loss_grown": round(ours, 4),
        "loss_steady": round(theirs, 4),
        "gap_percent": round(100 * (ours / theirs - 1), 2),
        "rounds": shared[-1],
        "counted_per_round": counted,
    }
    if options.json:
        told = {"inner_steps": steps, "model": "gpt-tiny", "seed": options.seed}
        print(report("growth", told, figures, versions("torch")))
        return
    print(f"counted per round: {counted}")
    print(f"loss {ours:.4f} beside {theirs:.4f} undisturbed: {figures['gap_percent']:+.2f} %")


if __name__ == "__main__":
    main()
