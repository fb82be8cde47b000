"""Run the conformance suite for as long as you like, or find the seeds of the mutants.

python tests/protocol/conformance/run.py --minutes 10 [--engine epochs ...] [--seed 100000]
python tests/protocol/conformance/run.py --mutants [--seeds 2000] [--only raft]

In one world of four clocks run apart and are set (`drift_of`); in another one liars speak for others, too.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from clocks import DRIFT  # noqa: E402  (its folder is on the path only now)
from mutants import MUTANTS  # noqa: E402
from test_snow import Swarm  # noqa: E402
from world import story  # noqa: E402

from atoll.protocol.agreement.one_phase import OnePhaseAgreement  # noqa: E402

SIZES = (  # voters, liars, rule
    *((n, (n - 1) // 3, "two-thirds") for n in (4, 7, 16, 31)),
    (4, 0, "two-thirds"),
    (2, 0, "majority"),
    (3, 0, "majority"),
    (5, 0, "majority"),
)


def drift_of(seed: int) -> float:
    return DRIFT if seed % 4 == 1 else 0.0


def agreement(seed: int) -> None:
    """Small swarms mostly: they are searched a hundred times faster, and every rule can be broken in them."""
    weights = (40, 12, 2, 0.5, 8, 8, 20, 10)
    (size,) = random.Random(seed).choices(SIZES, weights)
    moves = 60 if size[0] < 10 else 30
    story(seed, *size, moves=moves, drift=drift_of(seed), forgers=seed % 4 == 3)


def raft(seed: int) -> None:
    """Raft behind the door: crashes, torn writes, partitions, loss, in the same worlds as the agreement."""
    voters = random.Random(seed).choices((1, 2, 3, 4, 5, 7, 16), (1, 8, 30, 20, 30, 10, 1))[0]
    moves, drift = 60 if voters < 10 else 30, drift_of(seed)
    story(seed, voters, 0, "majority", moves=moves, machine=OnePhaseAgreement, drift=drift)


def epochs(seed: int) -> None:
    """Four heights, each of another committee."""
    weights = (40, 4, 10)
    (size,) = random.Random(seed).choices([SIZES[0], SIZES[1], SIZES[4]], weights)
    story(seed, *size, heights=4)


def raft_epochs(seed: int) -> None:
    story(seed, (3, 4, 5, 7)[seed % 4], 0, "majority", machine=OnePhaseAgreement, heights=4)


def snow(seed: int) -> None:
    """Loss, restarts, a partition that heals: all settle on one choice."""
    draw = random.Random(seed)
    swarm = Swarm(
        20, draw, draw.choice([0.0, 0.2, 0.8, 1.0]), loss=draw.choice([0.0, 0.1, 0.2]), drift=drift_of(seed)
    )
    side = {p for p in swarm.names if draw.random() < 0.25}
    swarm.cut = lambda a, b: (a in side) != (b in side)
    for _ in range(8):
        name = draw.choice(swarm.names)
        if swarm.drift:
            swarm.clocks[name].set(draw, swarm.now)
        swarm.start(name)
        swarm.run(draw.choice([0.5, 5.0]))
    swarm.cut, swarm.loss = lambda a, b: False, 0.0
    for name in swarm.names:  # a partition that ends restarts the polls
        swarm.start(name)
    assert len(swarm.until_settled(1000.0)) == 1, f"seed {seed}: {Counter(swarm.settled.values())}"
    assert len(swarm.settled) == len(swarm.honest), f"seed {seed}: not all settled"


ENGINES = {
    "agreement": agreement,
    "epochs": epochs,
    "raft": raft,
    "raft_epochs": raft_epochs,
    "snow": snow,
}


def hunt(seeds: int, only: str) -> None:
    """The first seed that catches each mutant; list it in mutants.py."""
    for mutant in (m for m in MUTANTS if m.lacks.startswith(only)):
        built = mutant.build()
        for seed in range(seeds):
            try:
                story(seed, **built, **mutant.knobs())
            except AssertionError as why:
                print(f"{mutant.lacks:52} {seed:>5}  {str(why).partition(': ')[2]}", flush=True)
                break
            except KeyError:
                continue  # it fell over a stranger's word; another seed shows what it would have believed
        else:
            print(f"{mutant.lacks:52}  none  of {seeds} seeds", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--engine", choices=sorted(ENGINES), action="append")
    parser.add_argument("--seed", type=int, default=100_000, help="the first one; each engine counts up from it")
    parser.add_argument("--mutants", action="store_true", help="search the seed that catches each mutant")
    parser.add_argument("--seeds", type=int, default=2000, help="how many to try per mutant")
    parser.add_argument("--only", default="", help="mutants whose name begins so")
    args = parser.parse_args()
    if args.mutants:
        hunt(args.seeds, args.only)
        return 0
    until, seed, failed = time.monotonic() + 60 * args.minutes, args.seed, 0
    engines = args.engine or sorted(ENGINES)
    while time.monotonic() < until:
        for engine in engines:
            try:
                ENGINES[engine](seed)
            except Exception as why:
                failed += 1
                print(f"{engine} --seed {seed}: {why!r}", flush=True)
        seed += 1
    print(f"{seed - args.seed} seeds of {', '.join(engines)}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
