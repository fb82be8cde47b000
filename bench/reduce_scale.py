"""One all-reduce of 10 to 5000 virtual peers: its time, what each peer sends beside what the plan counts, deaths.

    nice python bench/reduce_scale.py [--seed 1] [--sizes 10 100 1000 5000] [--dying 1000] [--kept FILE] [--quick]
                                      [--json]

The machines are those of the real world; links, disks and arithmetic are virtual (`reduction_world.py`): one way
25 to 50 ms drawn per pair, 1 Gbit/s up and down per peer, 0.5 ms per message at either end, 1 GB/s to combine,
4 ms for a disk. Updates have 1 MB. Everybody has committed before; what committing costs is not in here. Virtual
figures depend on the seed alone, CPU seconds on the computer.

Every row is told when it is there (with `--json` on stderr). All of it takes many CPU minutes; with `--kept FILE` a
run that was broken off goes on where it was.

The last table is of a group's large call: 100 MB in three turns of every owner, members 0.2 to 0.5 ms apart. One
or two die at any moment of it; what an owner had to do passes to one member, or to one per turn (`spread`).
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, TextIO

import msgspec
from form import asking, report, versions
from reduction_world import GIGABIT, Outcome, Reduction, ReductionKnobs
from traffic_counts import traffic_counts

from atoll.base.ids import PeerId
from atoll.policy.topology_cost import AgreedLinks, predict
from atoll.protocol.allreduce.topology import (
    ReduceTopology,
    butterfly,
    hierarchical,
    limit_fan,
    ring,
    star,
    tree,
)
from atoll.simulation.signatures import peer_name

SEED = b"reduce_scale"
TOPOLOGIES: dict[str, Callable[[tuple[PeerId, ...]], ReduceTopology]] = {
    "hierarchical": lambda peers: hierarchical(limit_fan(peers, SEED), SEED),
    "butterfly": lambda peers: butterfly(peers, SEED),
    "tree": lambda peers: tree(peers, SEED, pieces=16),
    "star": lambda peers: star(peers, SEED, pieces=16),
    "ring": lambda peers: ring(peers, SEED),
}
LARGEST = {"ring": 10, "star": 1000}  # beyond, one is always silent, or it takes a minute and more
PREDICTED_MAX = 100  # the planner wants the latency of every pair
SIZES = (10, 100, 1000, 5000)
DEATH_RATE = 0.05
TURNS, CALL_BYTES = 3, 100_000_000  # of a group's large call
NEAR = replace(GIGABIT, latency_min_s=0.0002, latency_max_s=0.0005)
TAKEOVERS = ((4, 1), (8, 1), (8, 2))  # members, and how many of them die
TAKEOVER_SEEDS, QUICK_TAKEOVER_SEEDS = 100, 20


def row(name: str, count: int, seed: int) -> dict[str, Any]:
    """Nobody dies."""
    peers = tuple(peer_name(i) for i in range(count))
    topology = TOPOLOGIES[name](peers)
    planned, knobs, cpu = traffic_counts(topology, peers), ReductionKnobs(), time.process_time()
    game = Reduction(seed, peers, topology, knobs)
    outcome = game.run()
    cpu = time.process_time() - cpu
    megabytes = knobs.update_bytes / 1e6
    return {
        "peers": count,
        "topology": name,
        "parts": planned.parts,
        "hops": outcome.hops,
        "hops_planned": planned.hops,
        "messages_max": max(outcome.messages.values()),
        "messages_max_planned": planned.messages_max,
        "messages_mean": sum(outcome.messages.values()) / count,
        "messages_mean_planned": planned.messages_mean,
        "sent_mb_max": max(outcome.sent_bytes.values()) / 1e6,
        "sent_mb_max_planned": planned.sent_max * megabytes,
        "sent_mb_mean": sum(outcome.sent_bytes.values()) / count / 1e6,
        "sent_mb_mean_planned": planned.sent_mean * megabytes,
        "virtual_s": outcome.seconds,
        "predicted_s": predicted_s(game, topology) if count <= PREDICTED_MAX else None,
        "all_counted_once": all(
            list(part.holders.values()) == [count] and not part.left_out and not part.twice
            for part in outcome.parts
        ),
        "digest": outcome.digest,
        "cpu_s": cpu,
    }


def predicted_s(game: Reduction, topology: ReduceTopology) -> float:
    """What the planner says about the same links; it takes combining and disks for free."""
    peers, network = game.peers, game.knobs.network
    latency_s = [[0.0 if a == b else game.network.one_way_s(a, b) for b in peers] for a in peers]
    up, down = [network.uplink_bytes_s] * len(peers), [network.downlink_bytes_s] * len(peers)
    return predict(topology, game.knobs.update_bytes, AgreedLinks(peers, latency_s, up, down)).seconds


def deaths(name: str, count: int, seed: int, spread_s: float) -> dict[str, Any]:
    """Some die in the first quarter of a second, while rows and answers fly."""
    peers = tuple(peer_name(i) for i in range(count))
    knobs = ReductionKnobs(death_rate=DEATH_RATE, deaths_until_s=0.25, detect_spread_s=spread_s)
    cpu = time.process_time()
    outcome = Reduction(seed, peers, TOPOLOGIES[name](peers), knobs).run()
    owned = [part for part in outcome.parts if part.owners_alive]
    return {
        "peers": count,
        "topology": name,
        "seed": seed,
        "died": count - outcome.alive,
        "detect_s": knobs.detect_s,
        "detect_spread_s": spread_s,
        "parts": len(outcome.parts),
        "parts_owned": len(owned),
        "parts_with_two_results": sum(len(part.holders) > 1 for part in outcome.parts),
        "results_missing": sum(part.without for part in owned),  # (living peer, part with a living owner)
        "living_left_out": sum(part.left_out for part in outcome.parts),
        "counted_twice": sum(part.twice for part in outcome.parts),
        "virtual_s": outcome.seconds,
        "messages_max": max(outcome.messages.values()),
        "sent_mb_max": max(outcome.sent_bytes.values()) / 1e6,
        "control_messages_mean": outcome.control / count,
        "digest": outcome.digest,
        "cpu_s": time.process_time() - cpu,
    }


def takeovers(count: int, dying: int, spread: bool, seeds: int) -> dict[str, Any]:
    """How much longer a large call takes where some die in the middle of it."""
    peers = tuple(peer_name(i) for i in range(count))
    knobs = ReductionKnobs(NEAR, CALL_BYTES, detect_s=0.02, detect_spread_s=0.05)

    def outcome(seed: int, knobs: ReductionKnobs) -> Outcome:
        shape = butterfly(peers, seed.to_bytes(4, "big"), pieces=TURNS, spread=spread)
        return Reduction(seed, peers, shape, knobs).run()

    whole_s = outcome(0, knobs).seconds
    deadly = replace(knobs, death_rate=dying / count, deaths_until_s=whole_s)
    ended = [outcome(seed, deadly) for seed in range(seeds)]
    recovery_s = sorted(each.seconds - whole_s for each in ended)
    return {
        "peers": count,
        "dying": dying,
        "spread": spread,
        "undisturbed_s": whole_s,
        "recovery_s_median": statistics.median(recovery_s),
        "recovery_s_max": recovery_s[-1],
        "sent_mb_mean": statistics.mean(sum(each.sent_bytes.values()) for each in ended) / 1e6,
    }


class Told:
    """Tells every row when it is there; those in `kept` are an earlier run's, and are not played again."""

    def __init__(self, kept: Path | None, to: TextIO) -> None:
        self.kept, self.to = kept, to
        lines = kept.read_bytes().splitlines() if kept is not None and kept.exists() else []
        self.known: dict[str, dict[str, Any]] = dict(msgspec.json.decode(line) for line in lines)

    def of(self, play: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        name = f"{play.__name__} {' '.join(map(str, arguments))}"
        if name not in self.known:
            self.known[name] = play(*arguments)
            if self.kept is not None:
                with self.kept.open("ab") as file:
                    file.write(msgspec.json.encode((name, self.known[name])) + b"\n")
        return self.known[name]

    def say(self, line: str) -> None:
        print(line, file=self.to, flush=True)


def played_rows(told: Told, sizes: Sequence[int], seed: int) -> list[dict[str, Any]]:
    told.say("nobody dies (planned figures in brackets):")
    told.say(
        "  peers topology     parts    hops   messages max       mean    sent MB max       mean  virtual s  CPU s"
    )
    rows = []
    for n, name in product(sizes, TOPOLOGIES):
        if n > LARGEST.get(name, n):
            continue
        r = told.of(row, name, n, seed)
        said = "" if r["predicted_s"] is None else f" ({r['predicted_s']:.3f})"
        told.say(
            f"  {r['peers']:>5} {r['topology']:<12} {r['parts']:>5} {r['hops']:>3} ({r['hops_planned']}) "
            f"{r['messages_max']:>7} ({r['messages_max_planned']}) {r['messages_mean']:>7.2f} "
            f"({r['messages_mean_planned']:.2f}) {r['sent_mb_max']:>8.2f} ({r['sent_mb_max_planned']:.2f}) "
            f"{r['sent_mb_mean']:>6.3f} ({r['sent_mb_mean_planned']:.3f}) {r['virtual_s']:>7.3f}{said} "
            f"{r['cpu_s']:>6.1f}{'' if r['all_counted_once'] else '  NOT EVERYBODY COUNTED ONCE'}"
        )
        rows.append(r)
    return rows


def played_deaths(told: Told, peers: int, seed: int) -> list[dict[str, Any]]:
    told.say("5 % die within 0.25 s; noticed 1 s later, by all at once or within another 0.5 s:")
    told.say(
        "  peers topology     spread s seed owned parts  two results  missing  left out  twice  virtual s  CPU s"
    )
    games = []
    for name, spread_s, k in product(("hierarchical", "butterfly", "tree"), (0.0, 0.5), range(seed, seed + 3)):
        d = told.of(deaths, name, peers, k, spread_s)
        told.say(
            f"  {d['peers']:>5} {d['topology']:<12} {d['detect_spread_s']:>8} {d['seed']:>4} "
            f"{d['parts_owned']:>5} of {d['parts']:<2} {d['parts_with_two_results']:>12} {d['results_missing']:>8} "
            f"{d['living_left_out']:>9} {d['counted_twice']:>6} {d['virtual_s']:>10.2f} {d['cpu_s']:>6.1f}"
        )
        games.append(d)
    return games


def played_takeovers(told: Told, seeds: int) -> list[dict[str, Any]]:
    told.say(f"100 MB in {TURNS} turns, {seeds} seeds: seconds beyond an undisturbed call")
    told.say("  peers dying spread  undisturbed s  median s  max s  sent MB")
    found = []
    for (n, dying), spread in product(TAKEOVERS, (False, True)):
        p = told.of(takeovers, n, dying, spread, seeds)
        told.say(
            f"  {p['peers']:>5} {p['dying']:>5} {p['spread']!s:>6} {p['undisturbed_s']:>14.3f} "
            f"{p['recovery_s_median']:>9.3f} {p['recovery_s_max']:>6.3f} {p['sent_mb_mean']:>8.0f}"
        )
        found.append(p)
    return found


def main() -> None:
    parser = asking(__doc__, "at most 100 peers, deaths among 200")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--sizes", type=int, nargs="+", help=f"peers where nobody dies; {SIZES}, with --quick (10, 100)"
    )
    parser.add_argument("--dying", type=int, help="peers of the reduces in which some die; 1000, with --quick 200")
    parser.add_argument(
        "--kept", type=Path, help="a file of rows of this same code: what is in it is not played again"
    )
    options = parser.parse_args()
    sizes = options.sizes or [n for n in SIZES if n <= 100 or not options.quick]
    told = Told(options.kept, sys.stderr if options.json else sys.stdout)
    told.say(f"seed {options.seed}, {ReductionKnobs()}")
    figures = {
        "rows": played_rows(told, sizes, options.seed),
        "deaths": played_deaths(told, options.dying or (200 if options.quick else 1000), options.seed),
        "takeovers": played_takeovers(told, QUICK_TAKEOVER_SEEDS if options.quick else TAKEOVER_SEEDS),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / (2**20 if sys.platform == "darwin" else 2**10),
    }
    told.say(f"{figures['peak_mib']:.0f} MiB")
    if options.json:
        settings = {"seed": options.seed, "knobs": asdict(ReductionKnobs())}
        print(report("reduce_scale", settings, figures, versions("msgspec")))


if __name__ == "__main__":
    main()
