"""What every reduce topology takes on shaped links, beside what the planner predicts and what it would choose.

Two networks in the laboratory (`lab.py`): "equal", 4 peers, 50 ms round trips ±10, 100 Mbit/s each way; "apart",
two clusters of 4, 5 ms round trips inside, 120 ms and 20 Mbit/s shared by all between them, 100 Mbit/s per peer.
Two ways to run: by "links", one process per peer moves rows and answers of the right size over real encrypted
links exactly as the topology says, and combines nothing (what the planner predicts:
`policy/topology_cost.predict`);
by "reduce", the library `atoll.reduce` averages real tensors, agrees on the result and answers for it. Rows of one
network are interleaved: every repetition runs each of them some times in a row, from a barrier to the last answer
at the slowest peer. By "links" all rows share connections, which remember the rate that the topology before left
them (three senders to one peer: a third of its downlink), so only the last run of a row counts, when they have
found the rate of its own; what the first one took is what a change of topology costs, and stands beside it.

    predicted_s, measured_s   by the planner; median, with min_s and max_s beside it
    unsettled_s               of the first run after another topology's, by links
    chosen                    whether the planner would take it
    late_share                of all packets, those that the router was too busy to send in time

    sudo python bench/topology.py [--quick] [--json] [--megabytes 5] [--network equal,apart] [--by links,reduce]
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from form import asking, congestion, report, versions
from lab import LATE_S, Counted, Lab, Network, address_of

from atoll.base.ids import PeerId
from atoll.base.limits import PIECES_MAX
from atoll.base.machine import Lane, LinkDown, LinkUp
from atoll.crypto.identity import Identity
from atoll.policy.topology_cost import AgreedLinks, ReduceCost, choose, clusters_by_latency, predict
from atoll.protocol.allreduce.topology import (
    ReduceTopology,
    butterfly,
    candidate_topologies,
    hierarchical,
    limit_fan,
    ring,
    star,
    tree,
)
from atoll.runtime.network.connection_manager import ConnectionManager
from atoll.runtime.network.libp2p import Libp2pSecurity
from atoll.runtime.network.link_settings import LinkCallbacks

MEGABYTES, QUICK_MEGABYTES = 5.0, 0.5  # of one encoded update
REPEATS, QUICK_REPEATS = 3, 1  # after one to warm up
QUICK_RATIO = 3.0  # a quick run leaves out what is predicted to take so many times as long as the best
MBIT = 1e6 / 8  # bytes
SEED = b"bench/topology"
PORT = 7071
PATIENCE_S = 120.0  # for any one step
INT8_BYTES = 1.0078  # per value, bench/codec.py
KIND = struct.Struct("!IB")  # part; 1: an answer on its way down, 0: a row on its way up
NETWORKS = {
    "equal": Network.flat(4, rtt_s=0.05, rate_bytes_s=100 * MBIT, jitter_s=0.005),
    "apart": Network.clustered((4, 4), 0.005, 0.12, trunk_bytes_s=20 * MBIT, rate_bytes_s=100 * MBIT),
}
SETTLING = 4  # runs in a row by links until connections have found their rate again
MEETINGS = 8  # calls before the measured ones: in a few seconds members learn their links, and agree on them


def label(topology: ReduceTopology) -> str:
    """Name and parts: the same topology may be cut finer."""
    return f"{topology.name} x{len(topology.parts)}"


def agreed(network: Network, peers: Sequence[PeerId]) -> AgreedLinks:
    """What the peers of this network would agree about it."""
    trunks = (
        {(a, b): network.trunk_bytes_s for a in range(2) for b in range(2) if a != b} if network.clusters else {}
    )
    return AgreedLinks(
        tuple(peers),
        network.latency_s,
        network.up_bytes_s,
        network.down_bytes_s,
        regions=tuple(network.cluster_of(host) for host in range(network.hosts)) if network.clusters else (),
        wan_bytes_s=trunks,
    )


def worth_trying(network: Network, peers: Sequence[PeerId], update_bytes: int) -> tuple[ReduceTopology, ...]:
    """The planner's candidates, simplest first; the same at every peer."""
    clusters = clusters_by_latency(agreed(network, peers))
    return candidate_topologies(peers, SEED, clusters=clusters, update_bytes=update_bytes)


# ---- one peer, in a process of its own -----------------------------------------------------------------------


class Passing:
    """Moves one update along one topology, as the reduce protocol would; what arrives is counted and dropped."""

    def __init__(
        self,
        me: PeerId,
        peers: Sequence[PeerId],
        topology: ReduceTopology,
        update_bytes: int,
        links: ConnectionManager,
    ):
        self.me, self.links, self.done = me, links, asyncio.Event()
        total = sum(part.share for part in topology.parts)
        self.data = memoryview(os.urandom(update_bytes))
        self.sizes = [update_bytes * part.share // total for part in topology.parts]
        self.parents = [part.parent(me) for part in topology.parts]
        self.children = [tuple(p for p in peers if part.parent(p) == me) for part in topology.parts]
        self.missing = [len(children) for children in self.children]
        self.unanswered = len(topology.parts)
        piece: Counter[PeerId] = Counter()
        self.order: list[tuple[int, int, int]] = []  # pieces one after another, each first to whoever stands next
        for part, of in enumerate(topology.parts):
            owner = of.owners[0]
            behind = (peers.index(self.parents[part] or owner) - peers.index(me)) % len(peers)
            self.order.append((piece[owner], behind, part))
            piece[owner] += 1
        self.order.sort()

    def __repr__(self) -> str:
        return f"rows missing per part {self.missing}, {self.unanswered} parts unanswered"

    def go(self) -> None:
        for _, _, part in self.order:
            if not self.missing[part]:
                self._up(part)

    def hear(self, message: bytes) -> None:
        part, answer = KIND.unpack(message)
        if answer:
            self._down(part)
        else:
            self.missing[part] -= 1
            if not self.missing[part]:
                self._up(part)

    def _up(self, part: int) -> None:
        if (parent := self.parents[part]) is None:
            self._down(part)
        else:
            self._send(parent, part, 0)

    def _down(self, part: int) -> None:
        for child in self.children[part]:
            self._send(child, part, 1)
        self.unanswered -= 1
        if not self.unanswered:
            self.done.set()

    def _send(self, to: PeerId, part: int, answer: int) -> None:
        assert self.links.send(to, KIND.pack(part, answer), Lane.BULK, self.data[: self.sizes[part]])


class Worker:
    """Does what its standard input says; answers every line with one line."""

    def __init__(self, host: int, network: Network) -> None:
        self.host, self.network = host, network
        identity = Identity.generate()
        self.me = identity.peer
        self.links = ConnectionManager(
            self.me, Libp2pSecurity(identity, SEED), LinkCallbacks(self._on_link, self._on_message)
        )
        self.peers: tuple[PeerId, ...] = ()
        self.up: set[PeerId] = set()
        self.news = asyncio.Event()
        self.passing: Passing | None = None
        self.groups: dict[str, Any] = {}

    async def run(self, address: str) -> None:
        await self.links.listen([f"/ip4/{address}/tcp/{PORT}"])
        loop = asyncio.get_running_loop()
        self.say(peer=self.me)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            await getattr(self, order.pop("do"))(**order)
        await self.links.close()

    def say(self, **what: Any) -> None:
        print(json.dumps(what), flush=True)

    async def meet(self, peers: list[PeerId], addresses: list[str]) -> None:
        self.peers = tuple(peers)
        for peer, address in zip(peers, addresses, strict=True):
            self.links.contact(peer, (f"/ip4/{address}/tcp/{PORT}",))
        async with asyncio.timeout(PATIENCE_S):
            while len(self.up) < len(peers) - 1:
                self.news.clear()
                await self.news.wait()
        self.say()

    async def prepare(self, index: int, update_bytes: int) -> None:
        topology = worth_trying(self.network, self.peers, update_bytes)[index]
        self.passing = Passing(self.me, self.peers, topology, update_bytes, self.links)
        self.say()

    async def go(self) -> None:
        assert self.passing is not None and len(self.up) == len(self.peers) - 1, "a link broke"
        began = time.monotonic()
        self.passing.go()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.passing.done.wait()
        except TimeoutError:
            raise RuntimeError(f"host {self.host} waits for ever; {self.passing}; {self.links.stats()}") from None
        self.say(began=began, ended=time.monotonic())

    async def found(self, topology: str, address: str) -> None:
        import atoll.reduce

        self.groups[topology] = await asyncio.to_thread(
            atoll.reduce.found,
            peers=len(self.peers),
            codec="int8",
            topology=topology,
            timeout_s=PATIENCE_S,
            options=atoll.reduce.ReduceOptions(listen=(f"/ip4/{address}/tcp/0",)),
        )
        self.say(ticket=self.groups[topology].ticket)

    async def join(self, topology: str, ticket: str, address: str) -> None:
        import atoll.reduce

        listen = (f"/ip4/{address}/tcp/0",)
        self.groups[topology] = await asyncio.to_thread(atoll.reduce.join, ticket, listen=listen)
        self.say()

    async def reduce(self, topology: str, values: int) -> None:
        import torch

        torch.set_num_threads(1)
        tensor = torch.randn(values)
        began = time.monotonic()
        done = await asyncio.to_thread(self.groups[topology].all_reduce, [tensor], timeout_s=PATIENCE_S)
        self.say(
            began=began,
            ended=time.monotonic(),
            contributors=len(done.contributors),
            topology=self.groups[topology].topology[0],
        )

    async def close(self) -> None:
        for group in self.groups.values():
            await asyncio.to_thread(group.close)
        self.say()

    def _on_link(self, event: LinkUp | LinkDown) -> None:
        (self.up.add if isinstance(event, LinkUp) else self.up.discard)(event.peer)
        self.news.set()

    def _on_message(self, sender: PeerId, message: bytes, payload: memoryview | None, _: bytes | None) -> None:
        assert self.passing is not None and payload is not None
        self.passing.hear(message)


# ---- all of them ---------------------------------------------------------------------------------------------


class Crew:
    """One worker per host of a lab."""

    def __init__(self, lab: Lab, network: str) -> None:
        self.lab = lab
        self.addresses = [lab.address(host) for host in range(lab.network.hosts)]
        argv = [sys.executable, __file__, "--worker", network]
        self.processes = [
            lab.run(host, [*argv, str(host)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for host in range(lab.network.hosts)
        ]
        self.peers = tuple(PeerId(self.heard(host)["peer"]) for host in range(lab.network.hosts))
        self.all(do="meet", peers=self.peers, addresses=self.addresses)

    def tell(self, host: int, **order: Any) -> None:
        stdin = self.processes[host].stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()

    def heard(self, host: int) -> dict[str, Any]:
        stdout = self.processes[host].stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            raise RuntimeError(f"host {host} ended; what it said stands above")
        return json.loads(line)

    def all(self, **order: Any) -> list[dict[str, Any]]:
        for host in range(len(self.processes)):
            self.tell(host, **order)
        return [self.heard(host) for host in range(len(self.processes))]

    def open_group(self, topology: str) -> None:
        self.tell(0, do="found", topology=topology, address=self.addresses[0])
        ticket = self.heard(0)["ticket"]
        others = range(1, len(self.processes))
        for host in others:
            self.tell(host, do="join", topology=topology, ticket=ticket, address=self.addresses[host])
        for host in others:
            self.heard(host)


@dataclass
class Row:
    """One topology on one network, run in one way."""

    network: str
    by: str
    index: int  # among the candidates
    topology: ReduceTopology
    predicted: ReduceCost
    chosen: bool
    setting: str = ""  # of a group
    used: str = ""  # by a group that chooses itself
    seconds: list[float] = field(default_factory=list)
    unsettled_s: list[float] = field(default_factory=list)  # of the first run after another topology's
    trunk_bytes: list[int] = field(default_factory=list)
    late_packets: int = 0
    packets: int = 0

    def figures(self) -> dict[str, Any]:
        return {
            "network": self.network,
            "by": self.by,
            "topology": f"auto: {self.used}" if self.setting == "auto" else label(self.topology),
            "predicted_s": round(self.predicted.seconds, 3),
            "measured_s": round(statistics.median(self.seconds), 3),
            "min_s": round(min(self.seconds), 3),
            "max_s": round(max(self.seconds), 3),
            "unsettled_s": round(statistics.median(self.unsettled_s), 3) if self.unsettled_s else None,
            "predicted_trunk_mb": round(self.predicted.wan_bytes / 1e6, 2),
            "measured_trunk_mb": round(statistics.median(self.trunk_bytes) / 1e6, 2),
            "chosen": self.chosen,
            "late_share": round(self.late_packets / max(1, self.packets), 4),
        }

    def run(self, crew: Crew, update_bytes: int) -> list[dict[str, Any]]:
        if self.by == "reduce":
            done = crew.all(do="reduce", topology=self.setting, values=int(update_bytes / INT8_BYTES))
            self.used = done[0]["topology"]
            return done
        crew.all(do="prepare", index=self.index, update_bytes=update_bytes)
        return crew.all(do="go")

    def measure(self, crew: Crew, update_bytes: int) -> None:
        if self.by == "links":
            self.unsettled_s.append(took_s(self.run(crew, update_bytes)))
            for _ in range(SETTLING - 2):
                self.run(crew, update_bytes)
        before = crew.lab.counted()
        times = self.run(crew, update_bytes)
        after = crew.lab.counted()
        assert all(t.get("contributors") in (None, len(crew.peers)) for t in times), "somebody did not count"
        self.seconds.append(took_s(times))
        self.trunk_bytes.append(after.trunk_bytes - before.trunk_bytes)
        self.late_packets += after.late_packets - before.late_packets
        self.packets += after.packets - before.packets


def took_s(times: Sequence[dict[str, Any]]) -> float:
    """From the barrier to the last answer at the slowest peer."""
    return max(t["ended"] for t in times) - min(t["began"] for t in times)


def rows_of(
    name: str, peers: Sequence[PeerId], update_bytes: int, ways: Sequence[str], ratio_max: float
) -> tuple[list[Row], str]:
    """What is going to be measured, and the planner's reason for its choice."""
    network = NETWORKS[name]
    links = agreed(network, peers)
    tried = worth_trying(network, peers, update_bytes)
    choice = choose(tried, update_bytes, links)
    rows = [
        Row(name, "links", k, topology, predict(topology, update_bytes, links), topology is choice.topology)
        for k, topology in enumerate(tried)
        if "links" in ways
    ]
    if "reduce" in ways:
        from atoll.runtime.allreduce.parts import cuts, part_values
        from atoll.training.codec import codec_named

        near = limit_fan(clusters_by_latency(links), SEED)
        makes: dict[str, Callable[[], ReduceTopology]] = {
            "butterfly": lambda: butterfly(peers, SEED, pieces=PIECES_MAX),
            "ring": lambda: ring(peers, SEED, pieces=PIECES_MAX),
            "tree": lambda: tree(peers, SEED, pieces=PIECES_MAX),
            "star": lambda: star(peers, SEED, pieces=PIECES_MAX),
        }
        if any(isinstance(item, tuple) for item in near):
            makes["hierarchical"] = lambda: hierarchical(near, SEED, pieces=PIECES_MAX)
        found: list[Row] = []
        for setting, make in makes.items():
            whole = make()
            values, shares = int(update_bytes / INT8_BYTES), [part.share for part in whole.parts]
            slices = cuts(values, shares, PIECES_MAX, part_values(codec_named("int8")))
            used = tuple(part for part, (lo, hi) in zip(whole.parts, slices, strict=True) if hi > lo)
            topology = ReduceTopology(
                whole.name, used
            )  # a group leaves out the parts that so few values do not fill
            found.append(Row(name, "reduce", -1, topology, predict(topology, update_bytes, links), False, setting))
        best = choose([row.topology for row in found], update_bytes, links)
        found.append(Row(name, "reduce", -1, best.topology, best.prediction, True, "auto"))
        rows += found
    longest_s = ratio_max * min(row.predicted.seconds for row in rows)
    return [row for row in rows if row.predicted.seconds <= longest_s], choice.reason


def measure(
    name: str, update_bytes: int, repeats: int, ways: Sequence[str], ratio_max: float
) -> tuple[list[Row], str, Counted]:
    with Lab(NETWORKS[name]) as lab:
        crew = Crew(lab, name)
        rows, reason = rows_of(name, crew.peers, update_bytes, ways, ratio_max)
        for row in rows:
            if row.by == "reduce":
                crew.open_group(row.setting)
        for row in rows:
            if row.by == "reduce" or row is rows[0]:  # by links only the first finds connections that are new
                for _ in range(MEETINGS if row.setting in ("auto", "hierarchical") else 1):
                    row.run(crew, update_bytes)
        for _ in range(repeats):
            for row in rows:
                row.measure(crew, update_bytes)
        crew.all(do="close")
        return rows, reason, lab.counted()


async def work(network: str, host: int) -> None:
    await Worker(host, NETWORKS[network]).run(address_of(host))


def main() -> None:
    parser = asking(__doc__, f"{QUICK_MEGABYTES} MB, {QUICK_REPEATS} repeat, two clusters alone")
    parser.add_argument("--megabytes", type=float, help="of one encoded update")
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--network", default="", help="default equal,apart; quick apart")
    parser.add_argument("--by", default="links,reduce")
    parser.add_argument("--worker", nargs=2, metavar=("NETWORK", "HOST"), help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        asyncio.run(work(arguments.worker[0], int(arguments.worker[1])))
        return
    megabytes = arguments.megabytes or (QUICK_MEGABYTES if arguments.quick else MEGABYTES)
    repeats = arguments.repeat or (QUICK_REPEATS if arguments.quick else REPEATS)
    ratio_max = QUICK_RATIO if arguments.quick else float("inf")
    figures: list[dict[str, Any]] = []
    reasons: dict[str, str] = {}
    networks = arguments.network or ("apart" if arguments.quick else "equal,apart")
    for name in networks.split(","):
        try:
            ways, size = arguments.by.split(","), int(megabytes * 1e6)
            rows, reasons[name], counted = measure(name, size, repeats, ways, ratio_max)
        except PermissionError as why:
            raise SystemExit(str(why)) from None
        figures += [row.figures() for row in rows]
        if not arguments.json:
            table(name, figures, reasons[name], megabytes, repeats, counted)
    if arguments.json:
        settings = {
            "megabytes": megabytes,
            "repeats": repeats,
            "cores": os.cpu_count(),
            "net.ipv4.tcp_congestion_control": congestion(),
            "networks": {n: NETWORKS[n] for n in reasons},
        }
        print(report("topology", settings, figures, versions(), reasons=reasons))


def table(
    name: str, figures: list[dict[str, Any]], reason: str, megabytes: float, repeats: int, counted: Counted
) -> None:
    print(f"\n{name}: updates of {megabytes:g} MB, median of {repeats}; the planner: {reason}")
    print(
        f"{'by':8}{'topology':22}{'predicted s':>12}{'measured s':>12}{'at first':>10}"
        f"{'trunk MB':>10}{'measured':>10}   chosen"
    )
    for f in figures:
        if f["network"] == name:
            print(
                f"{f['by']:8}{f['topology']:22}{f['predicted_s']:12.2f}{f['measured_s']:12.2f}"
                f"{'' if f['unsettled_s'] is None else format(f['unsettled_s'], '.2f'):>10}"
                f"{f['predicted_trunk_mb']:10.1f}{f['measured_trunk_mb']:10.1f}   {'<--' if f['chosen'] else ''}"
            )
    late = counted.late_packets / max(1, counted.packets)
    print(f"{counted.dropped} packets dropped by full queues; {late:.2%} came {LATE_S * 1e3:g} ms late or more,")
    print(f"the worst {counted.late_s * 1e3:.0f} ms: what the router was too busy for is not the topology's fault")


if __name__ == "__main__":
    main()
