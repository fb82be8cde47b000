"""What distrust costs an all-reduce: robust statistics instead of a mean, owners that are checked or watched.

`reduce`: the thing itself, `atoll.reduce` among processes over loopback: each group whose members may lie beside
one that is private and takes the mean, turn by turn; medians of the slowest member's time. Bytes are
those of `lo` (a network namespace of our own, if that is allowed), headers and openings included: after every call
there is a pause in which blocks are opened.
`openings`: payload bytes of rounds in the simulator whose answers are opened, against the same rounds without; real
numbers behind the virtual peers.
`combine`: one part owner's CPU seconds for one part, from encoded rows to encoded answer, on real tensors; each
statistic turn by turn with the mean in one process, medians, by torch alone and then with kernels (`engine`);
rules by distance compare, weigh, combine. `compare`: the products alone, by BLAS in whatever order it likes, in one
order through numpy, and through kernels. `rounds`: whole rounds of the real peers in the simulator (virtual network
of 100 Mbit/s, 10 to 80 ms, update of 4 MB), honest or with villains; bytes are payloads sent by all, seconds are
virtual, both against the same swarm that believes them. What the simulator does not charge is arithmetic, which is
what `combine` is for.

    python bench/robust_reduce.py [--quick] [--json] [--only reduce,openings,combine,compare,rounds]
                                  [--peers 8] [--megabytes 100] [--codec fp32] [--repeat 5]
                                  [--statistics mean+community,robust+community] [--beside SRC]

    time_ratio, bytes_ratio   against the plain group (or mean, or swarm) of the same run
    cpu_ratio                 the same of processor seconds, all members' during the call and the pause after it
    --beside SRC              `reduce` with groups of another version in turn with these: the folder its code is in
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from allreduce import enter_own_network
from form import asking, report, versions
from msgspec.structs import replace
from systems import probe
from systems.crew import Crew

from atoll.base.ids import PeerId
from atoll.crypto.digest import Buffer
from atoll.peer.settings import RunSettings
from atoll.policy.capability_terms import OPENED_SHARE, SumCheckTerms
from atoll.policy.fault_tolerance import CAPTURED, DISTANCES, liars_among, rows_needed
from atoll.policy.plan import RoundSettings
from atoll.simulation.adversaries.byzantine import villain
from atoll.simulation.adversaries.lying_owners import CROOKS
from atoll.simulation.sum_check import CUT, islands
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.tensors import TensorWorker
from atoll.simulation.worker import WorkerKnobs
from atoll.training.codec import CODECS, Codec
from atoll.training.codec.blocks import spans_of
from atoll.training.codec.compiled import native
from atoll.training.codec.deterministic_dot import CHUNK, add_inner_products, filled
from atoll.training.exchange.combine import combine
from atoll.training.exchange.distance_weights import compare_rows, weigh_rows
from atoll.training.exchange.statistic import STATISTICS, RowCombinationRule
from atoll.training.robust.gram import add_products
from atoll.verification.sum_check.tensors import LEAF_VALUES, LeafLayout

SIZES = (4, 7, 16)
SECTIONS = ("reduce", "openings", "combine", "compare", "rounds")
RULES = (  # statistic and trust of groups
    "mean+community",
    "median+community",
    "trimmed_mean+community",
    "robust+community",
    "nnm + trimmed_mean+community",
    "trimmed_mean+open",
)
QUICK_RULES = ("robust+community",)
LEAD_S = 0.02  # from saying when to start until then
OPENING_S = 1.0  # after a call: blocks are opened and fetched
OPENED_BLOCKS = 32  # of a part, in the simulator
VALUES, QUICK_VALUES = 4_000_000, 1_000_000
UPDATE_BYTES = 4_000_000
CASES: dict[str, dict[int, str]] = {  # which founders are villains, in a swarm of seven
    "honest": {},
    "one miscounter": {2: "miscounter"},
    "two miscounters": {2: "miscounter", 5: "miscounter"},
    "one mute": {2: "mute"},
}


class Group:
    """One group of processes, and what was measured of it."""

    def __init__(self, rules: str, peers: int, megabytes: float, codec: str, source: str = "") -> None:
        self.source, self.seconds, self.cpu_s, self.wire_bytes = source, list[float](), list[float](), list[int]()
        self.crew = Crew("atoll" + rules, peers, round(megabytes * 1e6 / 4), codec, "auto", source)

    def repeat(self, turn: int) -> None:
        """One call; turn 0 warms up."""
        self.crew.all("fill", round=turn)
        before, cpu_s, at = probe.loopback_bytes(), self.used_s(), time.monotonic() + LEAD_S
        ended = max(answer["ended"] for answer in self.crew.all("average", at=at))
        time.sleep(OPENING_S)
        if turn > 0:
            self.seconds.append(ended - at)
            self.cpu_s.append(self.used_s() - cpu_s)
            self.wire_bytes.append(probe.loopback_bytes() - before)

    def used_s(self) -> float:
        return sum(probe.cpu_s(process.pid) for process in self.crew.processes)


def reduce_figures(
    rules: str, peers: int, megabytes: float, codec: str, repeats: int, sources: list[str]
) -> list[dict]:
    """A group by `rules` of each version beside the plain one, a call of each in turn. More would not fit."""
    groups = list[Group]()
    try:
        for each, source in (("", ""), *((rules, source) for source in sources)):
            groups.append(Group(each, peers, megabytes, codec, source))
            groups[-1].crew.gather()
        for turn in range(repeats + 1):
            for group in groups:
                group.repeat(turn)
    finally:
        for group in groups:
            group.crew.end()
    return [of_group(groups[0], guarded, rules, peers, megabytes, codec) for guarded in groups[1:]]


def of_group(plain: Group, guarded: Group, rules: str, peers: int, megabytes: float, codec: str) -> dict:
    return {
        "rules": rules.lstrip("+"),
        "source": guarded.source,
        "peers": peers,
        "megabytes": megabytes,
        "codec": codec,
        "seconds_median": round(median(guarded.seconds), 3),
        "seconds_plain": round(median(plain.seconds), 3),
        "cpu_s": round(median(guarded.cpu_s), 3),
        "cpu_s_plain": round(median(plain.cpu_s), 3),
        "wire_mb": round(median(guarded.wire_bytes) / 1e6, 1),
        "time_ratio": round(median(guarded.seconds) / median(plain.seconds), 2),
        "cpu_ratio": round(median(guarded.cpu_s) / median(plain.cpu_s), 2),
        "bytes_ratio": round(median(guarded.wire_bytes) / median(plain.wire_bytes), 3),
    }


def opened_bytes(peers: int, rounds: int, values: int, opened: bool) -> float:
    """Payload bytes of a round."""
    cut = LeafLayout(CODECS["fp32"])
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds")
    run = RunSettings(open_to_all=True, round=plan, tolerance=0.33)
    if opened:
        run = replace(run, openings=SumCheckTerms(OPENED_SHARE, cut.leaf_bytes))

    def island(me: PeerId, knobs: WorkerKnobs, draw: random.Random) -> TensorWorker:
        return TensorWorker(me, knobs, draw, cut=cut if opened else None, values=values)

    swarm = VirtualSwarm(1, SwarmKnobs(peers, run=run), island=island)
    swarm.world.run(3600.0 * rounds, stop=lambda: min(swarm.heads()) >= rounds - 1)
    return swarm.world.network.bytes / rounds


def openings_figures(rounds: int) -> list[dict]:
    found = []
    for peers in (4, 7, 8):
        values = peers * OPENED_BLOCKS * LEAF_VALUES
        plain, opened = (opened_bytes(peers, rounds, values, opened) for opened in (False, True))
        found.append({"peers": peers, "update_bytes": 4 * values, "bytes_ratio": round(opened / plain, 3)})
    return found


def combine_figures(members: int, values: int, repeats: int) -> list[dict]:
    """CPU seconds per statistic, and against the mean, by torch alone and then with kernels where there are any."""
    native.kernels = None
    figures = combined(members, values, repeats)
    if native.load():
        figures += combined(members, values, repeats)
        native.kernels = None
    return figures


def combined(members: int, values: int, repeats: int) -> list[dict]:
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
                combine(rows, values, codec, codec, RowCombinationRule(name, liars))
            spent[name].append(time.process_time() - began)
    cpu_s = {name: median(seconds[1:]) for name, seconds in spent.items()}  # the first one warms up
    return [
        {
            "members": members,
            "liars": liars,
            "statistic": name,
            "engine": "torch" if native.kernels is None else "native",
            "cpu_s_per_million": round(cpu_s[name] / values * 1e6, 4),
            "time_ratio": round(cpu_s[name] / cpu_s["mean"], 2),
        }
        for name in names
    ]


def by_distance(rows: list[tuple[int, Buffer]], values: int, codec: Codec, name: str, liars: int) -> None:
    """An owner's whole work for its part, as if it were the only one."""
    peers = [f"{k:02}" for k in range(len(rows))]
    weights = weigh_rows(name, liars, peers, [(peers, compare_rows(rows, values, codec).products)])
    combine(rows, values, codec, codec, RowCombinationRule(name, liars, weights))


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
    if witnessed:
        run = replace(run, witnessed=True, openings=SumCheckTerms(OPENED_SHARE, CUT.leaf_bytes), captured=CAPTURED)
    knobs = SwarmKnobs(peers, island=WorkerKnobs(update_bytes=UPDATE_BYTES), run=run)
    twists = {place: villain(CROOKS[kind]) for place, kind in villains.items()}
    swarm = VirtualSwarm(1, knobs, twists, island=islands({}))
    swarm.world.run(3600.0 * rounds, stop=lambda: min(swarm.heads()) >= rounds - 1)
    machine = swarm.honest[0].machine
    assert machine is not None and machine.history is not None and machine.at >= rounds - 1
    voting = sum(m.votes for m in machine.history.head_body.members)
    return swarm.world.network.bytes / rounds, swarm.world.now / rounds, voting


def played_figures(rounds: int) -> list[dict]:
    played = []
    for peers in (4, 7, 8):
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
    return played


def main() -> None:
    asked = asking(__doc__, "smaller, at most 90 s on two idle cores", json="one object instead of lines")
    asked.add_argument("--only", default=",".join(SECTIONS), help="comma between several")
    asked.add_argument("--peers", type=int, default=8, help="of `reduce`; 5 with --quick")
    asked.add_argument("--megabytes", type=float, help="10^6 bytes of fp32; 100, with --quick 10")
    asked.add_argument("--codec", default="fp32", help="of `reduce`")
    asked.add_argument("--repeat", type=int, help="counted calls; 5, with --quick 3")
    asked.add_argument("--statistics", help="of `reduce`, each with its trust; six, with --quick one")
    asked.add_argument("--beside", default="", help="folder of another version's code, in turn with this one")
    options = asked.parse_args()
    torch.set_num_threads(1)
    network = enter_own_network(sys.argv)
    quick = options.quick
    values, repeats, rounds = (QUICK_VALUES, 3, 6) if quick else (VALUES, 7, 20)
    size, calls = options.megabytes or (10.0 if quick else 100.0), options.repeat or (3 if quick else 5)
    peers = min(options.peers, 5) if quick else options.peers
    sources = ["", options.beside] if options.beside else [""]
    statistics = options.statistics.split(",") if options.statistics else QUICK_RULES if quick else RULES
    work: dict[str, Callable[[], list[dict]]] = {
        "reduce": lambda: [
            figure
            for rules in statistics
            for figure in reduce_figures(f"+{rules}", peers, size, options.codec, calls, sources)
        ],
        "openings": lambda: openings_figures(3 if quick else 10),
        "combine": lambda: [f for members in SIZES for f in combine_figures(members, values, repeats)],
        "compare": lambda: [f for members in SIZES for f in compare_figures(members, values, repeats)],
        "rounds": lambda: played_figures(rounds),
    }
    figures = {name: work[name]() if name in options.only.split(",") else [] for name in SECTIONS}
    if options.json:
        sizes = {"values": values, "rounds": rounds, "update_bytes": UPDATE_BYTES, "network": network}
        print(report("robust_reduce", {"quick": quick, **sizes, "codec": "int8"}, figures, versions("torch")))
        return
    for f in figures["reduce"]:
        costs = f"{f['seconds_median']:.3f} s  x{f['time_ratio']}  {f['cpu_s']:.2f} CPU-s  x{f['cpu_ratio']}"
        costs = f"{costs}  {f['wire_mb']} MB  x{f['bytes_ratio']}  {f['source']}"
        print(f"{f['peers']:>3} peers  {f['megabytes']:g} MB {f['codec']}  {f['rules']:<24} {costs}".rstrip())
    for f in figures["openings"]:
        print(
            f"{f['peers']:>3} peers  update of {f['update_bytes'] / 1e6:.1f} MB, opened  bytes x{f['bytes_ratio']}"
        )
    for f in figures["combine"]:
        who = f"{f['members']:>3} members, {f['liars']} liars  {f['engine']:<6}  {f['statistic']:<22}"
        print(f"{who} {f['cpu_s_per_million']:.4f} s per million values  x{f['time_ratio']}")
    for f in figures["compare"]:
        way = f"{f['members']:>3} members  products by {f['way']:<8}"
        print(f"{way} {f['cpu_s_per_million']:.4f} s per million values")
    for f in figures["rounds"]:
        costs = f"bytes x{f['bytes_ratio']}  time x{f['time_ratio']}"
        print(f"{f['peers']:>3} peers  {f['case']:<16} {costs}  {f['voting_at_the_end']} vote at the end")


if __name__ == "__main__":
    main()
