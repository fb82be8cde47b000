"""A network laboratory on one computer: hosts with real TCP, and a router in user space that shapes what they say.

Each host is a network namespace with one TUN device; one router process moves every packet between them and
applies what the network is asked to be: the sender's uplink, the trunk that two clusters share, one-way latency
and its jitter, loss, and the receiver's downlink. Needs no netem, which many kernels lack; needs root.

Promises: rates and round trips are within 10 % of what was asked while the router has time (`--check` measures it,
`LocalUpdateOutcome.late_s` tells it for every other run); nothing outlives the lab. Namespaces have no names: the
kernel drops
them with their last process, processes die with whoever started them, and the router ends when its standard input
does. So there is nothing to sweep, not even after SIGKILL.
Never touches the host's own interfaces, routes or sysctls.

    sudo python bench/lab.py --check [--json]

    with Lab(Network.flat(hosts=4, rtt_s=0.05, rate_bytes_s=12.5e6)) as lab:
        lab.run(0, ["iperf3", "-s"])
        lab.run(1, ["iperf3", "-c", lab.address(0)]).wait()

What it is not: packets are larger than on the internet (`mtu`), which keeps Python fast enough, but makes slow
start quicker and the same loss rate kinder than there; loss comes in no bursts; hosts share the cores of one box.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import heapq
import json
import os
import random
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import ioctl
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from form import congestion

HOSTS_MAX = 250  # the last byte of an address
MTU_BYTES = 9000  # a jumbo frame: 1 400 packets/s at 100 Mbit/s
QUEUE_PACKETS_MIN = 16  # a queue of one bandwidth-delay product, but never shorter than a small home router's
QUEUE_FAST_S = 0.02  # nor shorter than this: on a path of microseconds the router's own turn is the delay
WANDER_S = 0.1  # jitter is a delay that wanders to another value once in so long, as queues on the way do
READ_MAX = 64  # packets taken from one host before the others get their turn
LATE_S = 0.002  # a packet that leaves the router later than this was not shaped as asked
SOCKET_BYTES = 32 * 2**20  # the usual 4 to 6 MB cap one connection at buffer / round trip
UNLIMITED = float("inf")
CLONE_NEWNET, PR_SET_TIMERSLACK = 0x40000000, 29
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NEAR = 0.1  # how far a measured figure may be from what was asked


# ---- what to imitate ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A network as plain values. Rates count whole IP packets, in bytes/s, and each direction has its own."""

    latency_s: tuple[tuple[float, ...], ...]  # [from][to], one way
    jitter_s: float = 0.0  # one way; latency wanders within ± this, in order
    up_bytes_s: tuple[float, ...] = ()  # per host; empty: unlimited
    down_bytes_s: tuple[float, ...] = ()
    clusters: tuple[tuple[int, ...], ...] = ()  # hosts by cluster; empty: no trunks
    trunk_bytes_s: float = UNLIMITED  # from one cluster to another, shared by all their hosts
    loss_rate: float = 0.0  # of packets, independently, on every way
    mtu: int = MTU_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        hosts = self.hosts
        if not 2 <= hosts <= HOSTS_MAX or any(len(row) != hosts for row in self.latency_s):
            raise ValueError(f"latency_s must be a square matrix of 2 to {HOSTS_MAX} hosts")
        if any(rates and len(rates) != hosts for rates in (self.up_bytes_s, self.down_bytes_s)):
            raise ValueError(f"give one rate for each of the {hosts} hosts, or none")
        if self.clusters and sorted(host for cluster in self.clusters for host in cluster) != list(range(hosts)):
            raise ValueError("every host belongs to exactly one cluster")
        ways_s = [self.latency_s[a][b] for a in range(hosts) for b in range(hosts) if a != b]
        if not 0 <= self.jitter_s <= min(ways_s):
            raise ValueError("jitter_s must not be more than the shortest latency")

    @property
    def hosts(self) -> int:
        return len(self.latency_s)

    def rtt_s(self, a: int, b: int) -> float:
        return self.latency_s[a][b] + self.latency_s[b][a]

    def cluster_of(self, host: int) -> int:
        return next((c for c, cluster in enumerate(self.clusters) if host in cluster), 0)

    @classmethod
    def flat(cls, hosts: int, rtt_s: float, rate_bytes_s: float = UNLIMITED, **more: Any) -> Network:
        """All equally far from each other, with the same uplink and downlink."""
        latency_s = tuple(tuple(0.0 if a == b else rtt_s / 2 for b in range(hosts)) for a in range(hosts))
        return cls(latency_s, up_bytes_s=(rate_bytes_s,) * hosts, down_bytes_s=(rate_bytes_s,) * hosts, **more)

    @classmethod
    def clustered(
        cls,
        sizes: tuple[int, ...],
        inside_rtt_s: float,
        across_rtt_s: float,
        trunk_bytes_s: float,
        rate_bytes_s: float = UNLIMITED,
        **more: Any,
    ) -> Network:
        """Clusters of near hosts, with one thin trunk between any two clusters."""
        of = [c for c, size in enumerate(sizes) for _ in range(size)]
        rtt_s = {True: inside_rtt_s, False: across_rtt_s}
        latency_s = tuple(
            tuple(0.0 if a == b else rtt_s[of[a] == of[b]] / 2 for b in range(len(of))) for a in range(len(of))
        )
        return cls(
            latency_s,
            up_bytes_s=(rate_bytes_s,) * len(of),
            down_bytes_s=(rate_bytes_s,) * len(of),
            clusters=tuple(tuple(h for h, c in enumerate(of) if c == cluster) for cluster in range(len(sizes))),
            trunk_bytes_s=trunk_bytes_s,
            **more,
        )


@dataclass(frozen=True)
class Counted:
    """What the router has seen so far."""

    up_bytes: list[int]  # per host, that entered its uplink; what was dropped there not counted
    down_bytes: list[int]  # per host, delivered
    trunk_bytes: int  # that crossed from any cluster to any other
    packets: int
    dropped: int  # a queue was full
    lost: int  # by `loss_rate`
    late_packets: int  # left the router more than LATE_S after their time: the computer was too busy
    late_s: float  # the worst of them


# ---- the router --------------------------------------------------------------------------------------------


class Pipe:
    """A link of one rate, with a queue in front of it: first in, first out; who finds it full is dropped."""

    def __init__(self, rate_bytes_s: float, rtt_s: float, mtu: int) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.queue_s = max(rtt_s, QUEUE_PACKETS_MIN * mtu / rate_bytes_s, QUEUE_FAST_S)
        self.passed_bytes = 0
        self._free_at = 0.0

    def through(self, size: int, now: float) -> float | None:
        """When the packet's last byte has left; None: no room."""
        start = max(now, self._free_at)
        if start - now > self.queue_s:
            return None
        self._free_at = start + size / self.rate_bytes_s
        self.passed_bytes += size
        return self._free_at


class Way:
    """From one host to another: its pipes, and a latency that wanders without letting packets overtake."""

    def __init__(
        self, up: Pipe, trunk: Pipe | None, down: Pipe, latency_s: float, jitter_s: float, draw: random.Random
    ) -> None:
        self.up, self.trunk, self.down = up, trunk, down
        self._latency_s, self._jitter_s, self._draw = latency_s, jitter_s, draw
        self._from_s = self._to_s = latency_s
        self._turn_at = 0.0
        self._last = 0.0

    def arrives(self, at: float) -> float:
        """When a packet that leaves at `at` is there."""
        if not self._jitter_s:
            return at + self._latency_s
        while at >= self._turn_at:
            self._from_s, self._to_s = self._to_s, self._latency_s + self._draw.uniform(-1, 1) * self._jitter_s
            self._turn_at = max(self._turn_at + WANDER_S, at)  # after a silence the walk begins anew
        share = 1 - (self._turn_at - at) / WANDER_S
        self._last = max(self._last, at + self._from_s + max(0.0, share) * (self._to_s - self._from_s))
        return self._last


def ways_of(network: Network) -> tuple[list[list[Way]], list[Pipe], list[Pipe], list[Pipe]]:
    """[from][to] ways; the uplinks, downlinks and trunks that they share."""
    hosts, mtu, draw = range(network.hosts), network.mtu, random.Random(network.seed)
    furthest_s = [max(network.rtt_s(a, b) for b in hosts) for a in hosts]
    rates = (UNLIMITED,) * network.hosts
    ups = [Pipe(r, furthest_s[h], mtu) for h, r in enumerate(network.up_bytes_s or rates)]
    downs = [Pipe(r, furthest_s[h], mtu) for h, r in enumerate(network.down_bytes_s or rates)]
    trunks: dict[tuple[int, int], Pipe] = {}
    ways: list[list[Way]] = []
    for a in hosts:
        ways.append([])
        for b in hosts:
            ends = network.cluster_of(a), network.cluster_of(b)
            if ends[0] != ends[1] and ends not in trunks:
                trunks[ends] = Pipe(network.trunk_bytes_s, network.rtt_s(a, b), mtu)
            latency_s = network.latency_s[a][b]
            ways[a].append(Way(ups[a], trunks.get(ends), downs[b], latency_s, network.jitter_s, draw))
    return ways, ups, downs, list(trunks.values())


class Router:
    """Moves packets between TUN devices. Every moment is an event; the time of an event, not the time at which
    Python gets to it, decides about the next, so being late does not add up."""

    def __init__(self, network: Network, tuns: list[int]) -> None:
        self._tuns, self._loss_rate, self._mtu = tuns, network.loss_rate, network.mtu
        self._ways, self._ups, self._downs, self._trunks = ways_of(network)
        self._draw = random.Random(network.seed + 1)
        self._events: list[tuple[float, int, Callable[..., None], bytes, Way, int]] = []
        self._ties = count()
        self._packets = self._dropped = self._lost = self._late_packets = 0
        self._late_s = 0.0
        self._cut: set[tuple[int, int]] = set()  # (from, to) whose packets are dropped

    def serve(self, control: int) -> None:
        """Until `control` ends; a line there cuts or mends a link, or is empty, and asks for the counts."""
        hosts = {tun: host for host, tun in enumerate(self._tuns)}
        watched = [control, *self._tuns]
        now = time.monotonic
        while True:
            wait_s = max(0.0, self._events[0][0] - now()) if self._events else 1.0
            for fd in select.select(watched, [], [], wait_s)[0]:  # epoll counts in milliseconds, select in micro
                if fd in hosts:
                    self._take(fd, hosts[fd])
                elif not (words := os.read(fd, 4096)):
                    return
                else:
                    for line in words.decode().splitlines():
                        self._heed(line)
                        print(json.dumps(dataclasses.asdict(self.counted())), flush=True)
            while self._events and self._events[0][0] <= now():
                at, _, happen, packet, way, to = heapq.heappop(self._events)
                happen(packet, way, to, at)

    def counted(self) -> Counted:
        return Counted(
            up_bytes=[pipe.passed_bytes for pipe in self._ups],
            down_bytes=[pipe.passed_bytes for pipe in self._downs],
            trunk_bytes=sum(pipe.passed_bytes for pipe in self._trunks),
            packets=self._packets,
            dropped=self._dropped,
            lost=self._lost,
            late_packets=self._late_packets,
            late_s=round(self._late_s, 6),
        )

    def _heed(self, line: str) -> None:
        match line.split():
            case ["cut", a, b]:
                self._cut |= {(int(a), int(b)), (int(b), int(a))}
            case ["mend", a, b]:
                self._cut -= {(int(a), int(b)), (int(b), int(a))}
            case _:
                return

    def _take(self, tun: int, sender: int) -> None:
        for _ in range(READ_MAX):
            try:
                packet = os.read(tun, self._mtu)
            except BlockingIOError:
                return
            to = packet[19] - 1  # the last byte of the IPv4 destination
            if packet[0] >> 4 != 4 or not 0 <= to < len(self._tuns):
                continue
            self._packets += 1
            if (sender, to) in self._cut:
                continue
            way = self._ways[sender][to]
            self._pass(way.up, self._at_trunk if way.trunk else self._launch, packet, way, to, time.monotonic())

    def _at_trunk(self, packet: bytes, way: Way, to: int, at: float) -> None:
        assert way.trunk is not None
        self._pass(way.trunk, self._launch, packet, way, to, at)

    def _launch(self, packet: bytes, way: Way, to: int, at: float) -> None:
        if self._loss_rate and self._draw.random() < self._loss_rate:
            self._lost += 1
        else:
            self._at(way.arrives(at), self._at_downlink, packet, way, to)

    def _at_downlink(self, packet: bytes, way: Way, to: int, at: float) -> None:
        self._pass(way.down, self._deliver, packet, way, to, at)

    def _deliver(self, packet: bytes, way: Way, to: int, at: float) -> None:
        late_s = time.monotonic() - at
        self._late_packets += late_s > LATE_S
        self._late_s = max(self._late_s, late_s)
        os.write(self._tuns[to], packet)

    def _pass(self, pipe: Pipe, then: Callable[..., None], packet: bytes, way: Way, to: int, at: float) -> None:
        left = pipe.through(len(packet), at)
        if left is None:
            self._dropped += 1
        else:
            self._at(left, then, packet, way, to)

    def _at(self, at: float, happen: Callable[..., None], packet: bytes, way: Way, to: int) -> None:
        heapq.heappush(self._events, (at, next(self._ties), happen, packet, way, to))


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


def new_host(host: int, mtu: int) -> tuple[int, int]:
    """Move this process into a new namespace with one TUN device; (namespace, TUN) as file descriptors."""
    if libc().unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "this process may not make network namespaces")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"lab0", IFF_TUN | IFF_NO_PI))
    for name, value in {
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv4/tcp_wmem": f"4096 16384 {SOCKET_BYTES}",
        "ipv4/tcp_rmem": f"4096 131072 {SOCKET_BYTES}",
        "ipv4/tcp_no_metrics_save": "1",  # one measurement must not teach the next
    }.items():
        where = Path("/proc/sys/net") / name
        if where.exists():
            where.write_text(value)
    commands = f"""
        link set lo up
        addr add {address_of(host)}/24 dev lab0
        link set lab0 mtu {mtu} txqueuelen 10000 up
    """
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    return os.open("/proc/self/ns/net", os.O_RDONLY), tun


def route() -> None:
    """The router process: a network on standard input, then what `Router.serve` understands."""
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: what follows is for `select`
        line += os.read(0, 1)
    network = msgspec.convert(json.loads(line), Network)
    hosts = [new_host(host, network.mtu) for host in range(network.hosts)]
    print(json.dumps([namespace for namespace, _ in hosts]), flush=True)
    with contextlib.suppress(PermissionError):  # hosts that compute must not slow the network down
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    libc().prctl(PR_SET_TIMERSLACK, 1)  # ns; the kernel's 50 us add up over the six waits of a round trip
    gc.disable()  # nothing here refers to itself
    Router(network, [tun for _, tun in hosts]).serve(0)


# ---- the lab -----------------------------------------------------------------------------------------------


class Lab:
    """A network that runs while the context is entered. Raises PermissionError where that is not allowed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Lab:
        if os.geteuid() != 0 or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            raise PermissionError(
                "the laboratory makes network namespaces and TUN devices: run it as root (sudo), "
                "in a container with --cap-add NET_ADMIN,SYS_ADMIN --device /dev/net/tun"
            )
        self._router = subprocess.Popen(
            [sys.executable, __file__, "--router"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the bench: the router ends with its standard input
        )
        self._namespaces: list[int] = json.loads(self._asked(json.dumps(dataclasses.asdict(self.network))))
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        assert self._router.stdin and self._router.stdout
        self._router.stdin.close()
        self._router.wait()
        self._router.stdout.close()

    def address(self, host: int) -> str:
        assert 0 <= host < self.network.hosts
        return address_of(host)

    def run(self, host: int, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program at this host; `options` are Popen's. It is killed when the lab or our thread ends."""
        namespace = f"/proc/{self._router.pid}/fd/{self._namespaces[host]}"
        enter = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={namespace}", "--"]
        process = subprocess.Popen([*enter, *argv], **options)
        self.processes.append(process)
        return process

    def cut(self, a: int, b: int) -> None:
        """From now on nothing passes between these two, as if a cable were pulled out."""
        self._asked(f"cut {a} {b}")

    def mend(self, a: int, b: int) -> None:
        self._asked(f"mend {a} {b}")

    def counted(self) -> Counted:
        return Counted(**json.loads(self._asked("")))

    def _asked(self, line: str) -> str:
        assert self._router.stdin and self._router.stdout
        self._router.stdin.write(line + "\n")
        self._router.stdin.flush()
        if not (answer := self._router.stdout.readline()):
            raise RuntimeError("the router ended; what it said stands above")
        return answer


# ---- does it do what was asked? ----------------------------------------------------------------------------

PORT = 7000
PINGS = 100
WARM_S, POUR_S = 2.0, 4.0  # a connection first has to find its rate
DATAGRAMS = 40_000


def sink() -> None:
    """Answer one byte with one byte; swallow everything else and tell once per POUR_S how much it was."""

    def swallow(sock: socket.socket) -> None:
        buffer = bytearray(2**20)
        while got := sock.recv_into(buffer):
            if got == 1:
                sock.sendall(b"!")
            else:
                swallowed[0] += got

    def accept() -> None:
        while True:
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=swallow, args=(sock,), daemon=True).start()

    swallowed = [0]
    server = socket.create_server(("0.0.0.0", PORT), backlog=64)  # noqa: S104  # inside network namespaces
    print("ready", flush=True)
    threading.Thread(target=accept, daemon=True).start()
    for _ in sys.stdin:
        print(swallowed[0], flush=True)


def ping(address: str) -> None:
    """Print PINGS round trips of one byte, in seconds."""
    sock = socket.create_connection((address, PORT))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        began_s = time.perf_counter()
        sock.sendall(b"?")
        assert sock.recv(1) == b"!"
        print(time.perf_counter() - began_s)


def pour(address: str) -> None:
    """Send as fast as TCP allows, until killed."""
    sock = socket.create_connection((address, PORT))
    data = bytes(2**18)
    while True:
        sock.sendall(data)


def scatter(address: str) -> None:
    """Send DATAGRAMS small datagrams, a few at a time."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for n in range(DATAGRAMS):
        sock.sendto(b"a datagram", (address, PORT))
        if n % 20 == 0:
            time.sleep(0.001)


WORKERS: dict[str, Callable[..., None]] = {"sink": sink, "ping": ping, "pour": pour, "scatter": scatter}


@dataclass(frozen=True)
class Checked:
    what: str
    unit: str
    asked: float
    measured: float

    @property
    def off(self) -> float:
        return self.measured / self.asked - 1


def worker(lab: Lab, host: int, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, __file__, "--worker", *words]
    return lab.run(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def sink_at(lab: Lab, host: int) -> subprocess.Popen[str]:
    process = worker(lab, host, "sink")
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def round_trips_s(lab: Lab, a: int, b: int) -> list[float]:
    """Round trips from a to b, where a sink runs; the first pays for the connection's warmth and is left out."""
    process = worker(lab, a, "ping", lab.address(b))
    assert process.stdout
    return [float(line) for line in process.stdout][1:]


def rate_bytes_s(lab: Lab, sinks: list[subprocess.Popen[str]], ways: list[tuple[int, int]]) -> float:
    """What arrives in all the sinks together while every way has one connection, headers not counted."""

    def swallowed() -> tuple[float, int]:
        total = 0
        for process in sinks:
            assert process.stdin and process.stdout
            process.stdin.write("\n")
            process.stdin.flush()
            total += int(process.stdout.readline())
        return time.perf_counter(), total

    pourers = [worker(lab, a, "pour", lab.address(b)) for a, b in ways]
    time.sleep(WARM_S)
    from_s, before = swallowed()
    time.sleep(POUR_S)
    until_s, after = swallowed()
    for process in pourers:
        process.kill()
        process.wait()
    time.sleep(WARM_S / 2)  # what stands in queues drains
    return (after - before) / (until_s - from_s)


def check() -> list[Checked]:
    """One row per promise; rates are given without IP and TCP headers."""
    rows: list[Checked] = []
    payload = (MTU_BYTES - 52) / MTU_BYTES
    mbit = 1e6 / 8

    def rtt(what: str, lab: Lab, a: int, b: int) -> None:
        measured_s = statistics.median(round_trips_s(lab, a, b))  # the worst are this computer's, not the lab's
        rows.append(Checked(what, "ms", 1e3 * lab.network.rtt_s(a, b), 1e3 * measured_s))

    def rate(what: str, asked_bytes_s: float, measured_bytes_s: float) -> None:
        rows.append(Checked(what, "Mbit/s", asked_bytes_s * payload / mbit, measured_bytes_s / mbit))

    with Lab(Network.flat(4, rtt_s=0.05, rate_bytes_s=100 * mbit)) as lab:
        sinks = [sink_at(lab, host) for host in range(4)]
        rtt("round trip", lab, 0, 1)
        rate("one uplink", 100 * mbit, rate_bytes_s(lab, sinks, [(0, 1)]))
        rate("one uplink to three", 100 * mbit, rate_bytes_s(lab, sinks, [(0, 1), (0, 2), (0, 3)]))
        rate("three to one downlink", 100 * mbit, rate_bytes_s(lab, sinks, [(1, 0), (2, 0), (3, 0)]))
        ring = [(host, (host + 1) % 4) for host in range(4)]
        rate("all four at once", 400 * mbit, rate_bytes_s(lab, sinks, ring))
    with Lab(Network.flat(2, rtt_s=0.05, rate_bytes_s=100 * mbit, jitter_s=0.005)) as lab:
        sinks = [sink_at(lab, 1)]
        trips_s = round_trips_s(lab, 0, 1)
        rows.append(Checked("round trip with ±10 ms", "ms", 50, 1e3 * statistics.fmean(trips_s)))
        rate("one uplink with jitter", 100 * mbit, rate_bytes_s(lab, sinks, [(0, 1)]))
    with Lab(Network.clustered((2, 2), 0.005, 0.12, trunk_bytes_s=20 * mbit, rate_bytes_s=100 * mbit)) as lab:
        sinks = [sink_at(lab, host) for host in range(4)]
        rtt("round trip inside a cluster", lab, 0, 1)
        rtt("round trip across", lab, 0, 2)
        rate("inside a cluster", 100 * mbit, rate_bytes_s(lab, sinks, [(0, 1)]))
        rate("two share the trunk", 20 * mbit, rate_bytes_s(lab, sinks, [(0, 2), (1, 3)]))
        rate("the trunk both ways", 40 * mbit, rate_bytes_s(lab, sinks, [(0, 2), (3, 1)]))
    with Lab(Network.flat(2, rtt_s=0.01, loss_rate=0.05)) as lab:
        worker(lab, 0, "scatter", lab.address(1)).wait()
        time.sleep(0.1)
        counted = lab.counted()
        rows.append(Checked("packets lost", "%", 5, 100 * counted.lost / counted.packets))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure what the lab does, and compare (70 s)")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    parser.add_argument("--router", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.router:
        route()
    elif arguments.worker:
        name, *words = arguments.worker
        WORKERS[name](*words)
    elif arguments.check:
        try:
            rows = check()
        except PermissionError as why:
            raise SystemExit(str(why)) from None
        if arguments.json:
            figures = [dataclasses.asdict(row) | {"off": round(row.off, 4)} for row in rows]
            print(json.dumps({"bench": "lab", "congestion": congestion(), "mtu": MTU_BYTES, "figures": figures}))
        else:
            print(f"{'':28}{'asked':>9}{'measured':>10}{'off':>8}   TCP {congestion()}, MTU {MTU_BYTES}")
            for row in rows:
                print(f"{row.what:28}{row.asked:9.1f}{row.measured:10.1f}{row.off:+8.1%}   {row.unit}")
        if far := [row.what for row in rows if abs(row.off) > NEAR]:
            raise SystemExit(f"further than {NEAR:.0%} from what was asked: {', '.join(far)}")
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
