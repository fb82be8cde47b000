"""What the bulk lane costs: 256 MB, encrypted, between two processes on loopback.

Against raw blocking TCP (nothing can be cheaper) and torch's gloo send/recv (what PyTorch uses), all three in
the same two processes and interleaved, because boxes are busy. Medians; CPU seconds count both processes.

    python bench/transport.py [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from form import asking, congestion, report, versions

from atoll.base.ids import PeerId
from atoll.base.limits import BULK_FRAME_MAX, MIB
from atoll.base.machine import Lane
from atoll.crypto.identity import Identity
from atoll.runtime.network.connection_manager import ConnectionManager
from atoll.runtime.network.libp2p import Libp2pSecurity
from atoll.runtime.network.link_settings import LinkCallbacks

TOTAL_BYTES = 256 * MIB
ROUNDS, QUICK_ROUNDS = 7, 3  # after one to warm up
NETWORK = b"bench"


class Ends:
    """What each process has: a raw socket, a gloo group, links, and a loop that runs while links are measured."""

    def __init__(self, sock: socket.socket, store_path: str, rank: int) -> None:
        torch.set_num_threads(1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.buffer = torch.randint(0, 256, (TOTAL_BYTES,), dtype=torch.uint8)
        self.view = memoryview(self.buffer.numpy())
        self.ack = torch.zeros(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.FileStore(store_path, 2), rank=rank, world_size=2)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.links = self.loop.run_until_complete(self._open())
        self.missing = 0
        self.done = asyncio.Event()

    async def _open(self) -> ConnectionManager:
        identity = Identity.generate()
        return ConnectionManager(
            identity.peer, Libp2pSecurity(identity, NETWORK), LinkCallbacks(lambda event: None, self._on_message)
        )

    def _on_message(self, sender: PeerId, message: bytes, payload: memoryview | None, _: bytes | None) -> None:
        self.missing -= 1
        if self.missing <= 0:
            self.done.set()

    async def heard(self, messages: int) -> None:
        self.missing += messages
        while self.missing > 0:
            self.done.clear()
            await self.done.wait()


# ---- sending and receiving ---------------------------------------------------------------------------------


def send_raw(ends: Ends) -> None:
    ends.sock.sendall(ends.view)
    assert ends.sock.recv(1) == b"k"


def receive_raw(ends: Ends) -> None:
    got = 0
    while got < TOTAL_BYTES:
        got += ends.sock.recv_into(ends.view[got:], min(TOTAL_BYTES - got, 4 * MIB))
    ends.sock.sendall(b"k")


def send_gloo(ends: Ends) -> None:
    dist.send(ends.buffer, 1)
    dist.recv(ends.ack, 1)


def receive_gloo(ends: Ends) -> None:
    dist.recv(ends.buffer, 0)
    dist.send(ends.ack, 0)


def send_atoll(ends: Ends) -> None:
    (peer,) = ends.links.stats()
    for at in range(0, TOTAL_BYTES, BULK_FRAME_MAX):
        assert ends.links.send(peer, b"part", Lane.BULK, ends.view[at : at + BULK_FRAME_MAX])
    ends.loop.run_until_complete(ends.heard(1))


def receive_atoll(ends: Ends) -> None:
    async def receive() -> None:
        await ends.heard(TOTAL_BYTES // BULK_FRAME_MAX)
        (peer,) = ends.links.stats()
        ends.links.send(peer, b"done")
        await asyncio.sleep(0.005)  # the loop stands still between measurements: let the word leave

    ends.loop.run_until_complete(receive())


SENDERS: dict[str, Callable[[Ends], None]] = {"raw": send_raw, "gloo": send_gloo, "atoll": send_atoll}
RECEIVERS: dict[str, Callable[[Ends], None]] = {"raw": receive_raw, "gloo": receive_gloo, "atoll": receive_atoll}


# ---- two processes -----------------------------------------------------------------------------------------


def receiver(port: int, store_path: str) -> None:
    """The child: does what its standard input says, answers with the CPU seconds it took."""
    sock = socket.create_connection(("127.0.0.1", port))
    ends = Ends(sock, store_path, rank=1)
    (address,) = ends.loop.run_until_complete(ends.links.listen(["/ip4/127.0.0.1/tcp/0"]))
    print(address, flush=True)
    ends.loop.run_until_complete(ends.heard(1))  # the dialer's greeting
    for line in sys.stdin:
        print("ready", flush=True)
        began_s = time.process_time()
        RECEIVERS[line.strip()](ends)
        print(time.process_time() - began_s, flush=True)
    ends.loop.run_until_complete(ends.links.close())


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Per transport the (seconds, CPU seconds of both processes) of each round."""
    store_path = Path(tempfile.mkdtemp()) / "gloo"
    server = socket.create_server(("127.0.0.1", 0))
    child = subprocess.Popen(
        [sys.executable, __file__, "--receiver", str(server.getsockname()[1]), str(store_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in SENDERS}
    try:
        ends = Ends(server.accept()[0], str(store_path), rank=0)
        peer = ends.loop.run_until_complete(ends.links.dial(child.stdout.readline().strip()))
        ends.links.send(peer, b"hello", Lane.BULK)
        ends.loop.run_until_complete(asyncio.sleep(0.3))
        for round in range(rounds + 1):
            for name, send in SENDERS.items():
                child.stdin.write(name + "\n")
                child.stdin.flush()
                assert child.stdout.readline() == "ready\n"
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                send(ends)
                took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
                cpu_s += float(child.stdout.readline())
                if round > 0:
                    taken[name].append((took_s, cpu_s))
        child.stdin.close()
        ends.loop.run_until_complete(ends.links.close())
        child.wait(10)
    finally:
        child.kill()
        shutil.rmtree(store_path.parent)
    return taken


def main() -> None:
    parser = asking(__doc__, f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--receiver", nargs=2, metavar=("PORT", "STORE"), help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receiver:
        receiver(int(arguments.receiver[0]), arguments.receiver[1])
        return
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    taken = measure(rounds)
    rate = {
        name: statistics.median(TOTAL_BYTES / 1e6 / took_s for took_s, _ in each) for name, each in taken.items()
    }
    cpu = {name: statistics.median(cpu_s / TOTAL_BYTES * 1e9 for _, cpu_s in each) for name, each in taken.items()}
    settings = {
        "payload_bytes": TOTAL_BYTES,
        "frame_bytes": BULK_FRAME_MAX,
        "rounds": rounds,
        "cores": os.cpu_count(),
        "net.ipv4.tcp_congestion_control": congestion(),
    }
    figures = {
        "ratio_to_raw_tcp": round(rate["atoll"] / rate["raw"], 3),
        "ratio_to_gloo": round(rate["atoll"] / rate["gloo"], 3),
        "cpu_s_per_gb": round(cpu["atoll"], 3),
        "mb_per_s": round(rate["atoll"], 1),
        "raw_tcp_cpu_s_per_gb": round(cpu["raw"], 3),
        "raw_tcp_mb_per_s": round(rate["raw"], 1),
        "gloo_cpu_s_per_gb": round(cpu["gloo"], 3),
        "gloo_mb_per_s": round(rate["gloo"], 1),
    }
    if arguments.json:
        print(report("transport", settings, figures, versions("torch", "cryptography")))
        return
    print(f"{'':8}{'MB/s':>8}{'CPU s/GB':>10}   {TOTAL_BYTES // MIB} MiB, median of {rounds}")
    for name in taken:
        print(f"{name:8}{rate[name]:8.0f}{cpu[name]:10.2f}")
    print(f"atoll: {rate['atoll'] / rate['raw']:.2f} of raw TCP, {rate['atoll'] / rate['gloo']:.2f} of gloo")


if __name__ == "__main__":
    main()
