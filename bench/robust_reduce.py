"""What distrust costs a reduce: order statistics instead of a mean, and owners that watch each other.

`combine`: one part owner's CPU seconds for one part, from encoded rows to encoded answer, on real tensors; each
statistic turn by turn with the mean in one process, medians; rules by distance compare, weigh, combine. `compare`:
the products alone, by BLAS in whatever order it likes, in one order through numpy, and through kernels. `rounds`:
whole rounds of the real peers in the simulator (virtual network of 100 Mbit/s, 10 to 80 ms, update of 4 MB), honest
or with villains; bytes are payloads sent by all, seconds are virtual, both against the same swarm with trust =
"community". What the simulator does not charge is arithmetic, which is what `combine` is for.

    python bench/robust_reduce.py [--quick] [--json]
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch
from form import asking, report, versions
from msgspec.structs import replace

from atoll.keys.digest import Buffer
from atoll.learn.aggregate.gram import add_products
from atoll.learn.codec import CODECS, Codec, native
from atoll.learn.codec.blocks import spans_of
from atoll.learn.combine import combine, combine_weighed
from atoll.learn.products import CHUNK, add_inner_products, filled
from atoll.learn.statistic import STATISTICS, Statistic
from atoll.learn.weighing import compare, weigh
from atoll.node.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.policy.trust import DISTANCES, liars_among, rows_needed
from atoll.sim.island import IslandKnobs
from atoll.sim.owners import CROOKS
from atoll.sim.swarm import Swarm, SwarmKnobs
from atoll.sim.villains import villain

SIZES = (4, 7, 16)
VALUES, QUICK_VALUES = 4_000_000, 1_000_000
UPDATE_BYTES = 4_000_000
CASES: dict[str, dict[int, str]] = {  # which founders are villains, in a swarm of seven
    "honest": {},
    "one miscounter": {2: "miscounter"},
    "two miscounters": {2: "miscounter", 5: "miscounter"},
    "one mute": {2: "mute"},
}


def combine_figures(members: int, values: int, repeats: int) -> list[dict]:
    """CPU seconds per statistic, and against the mean."""
    codec, generator = CODECS["int8"], torch.Generator().manual_seed(members)
    rows = [(1, codec.encode(torch.randn(values, generator=generator))) for _ in range(members)]
    liars = liars_among(members, 0.33)
    names = [*STATISTICS, *(name for name in DISTANCES if members >= rows_needed(name, liars))]
    spent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats + 1):
        for name in names:
            began = time.process_time()
            if name in DISTANCES:
                by_distance(rows, values, codec, name, liars)
            else:
                combine(rows, values, codec, codec, Statistic(name, liars))
            spent[name].append(time.process_time() - began)
    cpu_s = {name: median(seconds[1:]) for name, seconds in spent.items()}  # the first one warms up
    return [
        {
            "members": members,
            "liars": liars,
            "statistic": name,
            "cpu_s_per_million": round(cpu_s[name] / values * 1e6, 4),
            "time_ratio": round(cpu_s[name] / cpu_s["mean"], 2),
        }
        for name in names
    ]


def by_distance(rows: list[tuple[int, Buffer]], values: int, codec: Codec, name: str, liars: int) -> None:
    """An owner's whole work for its part, as if it were the only one."""
    peers = [f"{k:02}" for k in range(len(rows))]
    weights = weigh(name, liars, peers, [(peers, compare(rows, values, codec).products)])
    combine_weighed(rows, weights, values, codec, codec)


def compare_figures(members: int, values: int, repeats: int) -> list[dict]:
    """CPU seconds for the products of decoded rows, turn by turn; `blas` is what could not be made again."""
    rows_RS = torch.randn((members, filled(values)), generator=torch.Generator().manual_seed(members))
    pairs = members * (members + 1) // 2
    kernels = native.kernels if native.load() else None
    ways = ("blas", "numpy", "kernels") if kernels is not None else ("blas", "numpy")
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way in ways:
            native.kernels = kernels if way == "kernels" else None
            began = time.process_time()
            if way == "blas":
                by_blas(rows_RS)
            else:
                total_P = np.zeros(pairs)
                for lo, hi in spans_of(values):
                    add_inner_products(total_P, rows_RS[:, lo : lo + filled(hi - lo)].contiguous().numpy())
            spent[way].append(time.process_time() - began)
    native.kernels = None  # as the other figures were always taken
    return [
        {
            "members": members,
            "way": way,
            "cpu_s_per_million": round(median(seconds[1:]) / values * 1e6, 4),
        }
        for way, seconds in spent.items()
    ]


def by_blas(rows_RS: torch.Tensor) -> None:
    sums_RR = torch.zeros((len(rows_RS),) * 2, dtype=torch.float64)
    for at in range(0, rows_RS.shape[1], CHUNK):
        add_products(sums_RR, rows_RS[:, at : at + CHUNK].to(torch.float64))


def rounds_figures(peers: int, rounds: int, villains: dict[int, str], witnessed: bool) -> tuple[float, float, int]:
    """(payload bytes, virtual seconds) per round, and members that vote at the end."""
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds")
    run = RunSettings(open_to_all=True, round=plan, tolerance=0.33)
    knobs = SwarmKnobs(peers, island=IslandKnobs(update_bytes=UPDATE_BYTES), run=replace(run, witnessed=witnessed))
    swarm = Swarm(1, knobs, {place: villain(CROOKS[kind]) for place, kind in villains.items()})
    swarm.world.run(3600.0 * rounds, stop=lambda: min(swarm.heads()) >= rounds - 1)
    machine = swarm.honest[0].machine
    assert machine is not None and machine.history is not None and machine.at >= rounds - 1
    voting = sum(m.votes for m in machine.history.head_body.members)
    return swarm.world.network.bytes / rounds, swarm.world.now / rounds, voting


def measure(values: int, repeats: int, rounds: int) -> dict[str, list[dict[str, object]]]:
    combined = [figure for members in SIZES for figure in combine_figures(members, values, repeats)]
    compared = [figure for members in SIZES for figure in compare_figures(members, values, repeats)]
    played = []
    for peers in (4, 7):
        plain = rounds_figures(peers, rounds, {}, witnessed=False)
        for case, villains in CASES.items():
            if villains and peers != 7:
                continue
            size, seconds, voting = rounds_figures(peers, rounds, villains, witnessed=True)
            played.append(
                {
                    "peers": peers,
                    "case": case,
                    "bytes_ratio": round(size / plain[0], 2),
                    "time_ratio": round(seconds / plain[1], 2),
                    "voting_at_the_end": voting,
                }
            )
    return {"combine": combined, "compare": compared, "rounds": played}


def main() -> None:
    options = asking(__doc__, "fewer values and rounds", json="one object instead of lines").parse_args()
    torch.set_num_threads(1)
    values, repeats, rounds = (QUICK_VALUES, 3, 6) if options.quick else (VALUES, 7, 20)
    figures = measure(values, repeats, rounds)
    if options.json:
        sizes = {"values": values, "rounds": rounds, "update_bytes": UPDATE_BYTES}
        print(
            report("robust_reduce", {"quick": options.quick, **sizes, "codec": "int8"}, figures, versions("torch"))
        )
        return
    for f in figures["combine"]:
        who = f"{f['members']:>3} members, {f['liars']} liars  {f['statistic']:<13}"
        print(f"{who} {f['cpu_s_per_million']:.4f} s per million values  x{f['time_ratio']}")
    for f in figures["compare"]:
        way = f"{f['members']:>3} members  products by {f['way']:<8}"
        print(f"{way} {f['cpu_s_per_million']:.4f} s per million values")
    for f in figures["rounds"]:
        costs = f"bytes x{f['bytes_ratio']}  time x{f['time_ratio']}"
        print(f"{f['peers']:>3} peers  {f['case']:<16} {costs}  {f['voting_at_the_end']} vote at the end")


if __name__ == "__main__":
    main()
