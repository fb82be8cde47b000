"""What a late joiner waits for: one checkpoint from four peers on loopback, each its own process, all encrypted.

`transport` is the same four links carrying as many bytes, one block of zeros again and again, with nothing read,
hashed or written; `memory` is the same with blocks that no cache holds. `fetch` is the joiner of
`protocol/transfer`: manifest, verified chunks, durable file. `bad` has one source that changes a byte in every
chunk and one that answers a few chunks and then falls silent. `resume` kills the joiner (SIGKILL) when half of the
chunks came and starts it again: what came before it died and after, more than there is (`redownload`); what had
come and the next one did not find on disk (`lost_chunks`, the most of all repeats); and what sources gave to their
sockets, more than there is (`sent`), on loopback some megabytes that nobody had read. All are interleaved, medians
of several repeats. They share the cores with each other and with whatever else runs, so processor time, of the
joiner and of all sources together, says more.
`others` has a trainer beside every source: how much slower its steps get per second of processor time while the
joiner fetches (caches and memory are shared), and what the sources take of the processor. `read` is what a
member does next: the state into its memory. `--floors` measures what the pieces of a fetch cost by themselves.

    python bench/join.py [--quick] [--json] [--floors]
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import SUPPRESS
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from form import asking, lines, report, versions

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import BLOB_CHUNK, MIB
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Lane,
    Payload,
    Received,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TimerFired,
)
from atoll.crypto.digest import digest
from atoll.crypto.identity import Identity
from atoll.crypto.seal import TAG_BYTES
from atoll.protocol.transfer.download import (
    BlobDownload,
    BlobFetched,
    CorruptBlobSourceDetected,
    DownloadSourceStalled,
    FetchFailed,
)
from atoll.protocol.transfer.serve import BlobServer
from atoll.protocol.transfer.tasks import BlobStoragePrepared, ReadChunk, StoreChunk
from atoll.runtime.network.bulk_channel import SLAB_BYTES
from atoll.runtime.network.connection_manager import ConnectionManager
from atoll.runtime.network.libp2p import Libp2pSecurity
from atoll.runtime.network.link_settings import LinkCallbacks
from atoll.runtime.storage.chunk_disk_queue import ChunkDiskQueue
from atoll.runtime.storage.store import PeerStore, run_store_task
from atoll.wire.codec import decode_message, encode
from atoll.wire.messages.history import ChunkResponse

SIZE, QUICK_SIZE = 1024 * MIB, 96 * MIB
REPEATS, QUICK_REPEATS = 3, 2
SOURCES = 4
BLOCKS = 64  # megabytes that a source sends in turn where they shall come from memory, as a checkpoint's do
QUIET_S = 6.0  # for which trainers are alone, before and after
TRAINED_BATCH, TRAINED_TOKENS = 8, 64
STALLS_AFTER = 6  # chunks that the stalling source gives
NETWORK = b"bench"
PUSH = b"push"


class Host:
    """One process: links, a store, a thread for its work, and a machine."""

    def __init__(self, folder: Path, machine: Any) -> None:
        self.store, self.machine = PeerStore(folder), machine
        self.threads = ThreadPoolExecutor(1)
        self.chunks = ChunkDiskQueue(self.store)
        self.loop = asyncio.get_running_loop()
        identity = Identity.generate()
        self.links = ConnectionManager(
            identity.peer, Libp2pSecurity(identity, NETWORK), LinkCallbacks(lambda event: None, self.hear)
        )
        self.timers: dict[str, asyncio.TimerHandle] = {}

    def hear(self, sender: PeerId, data: bytes, payload: memoryview | None, name: bytes | None) -> None:
        message = decode_message(data, sender)
        if payload is not None:
            assert isinstance(message, ChunkResponse)
            self.chunks.receive_chunk(message, payload, lambda named: self.handle(Received(sender, message, named)))
            return
        self.handle(Received(sender, message))

    def handle(self, event: Event) -> None:
        for effect in self.machine.handle(event, self.loop.time()):
            self.do(effect)

    def do(self, effect: Effect) -> None:
        match effect:
            case Send(to, message, lane, payload):
                self.links.send(to, encode(message), lane, payload.data if payload is not None else None)
            case RunTask(job, StoreChunk() | ReadChunk() as work):
                self.chunks.run(work, lambda result: self.handle(TaskDone(job, result)))
            case RunTask(job, work):
                future = self.loop.run_in_executor(self.threads, run_store_task, self.store, work)
                future.add_done_callback(lambda done: self.handle(TaskDone(job, done.result())))
            case SetTimer(name, at):
                if name in self.timers:
                    self.timers.pop(name).cancel()
                if at is not None:
                    self.timers[name] = self.loop.call_at(at, self.handle, TimerFired(name))
            case Emit(fact):
                self.on_fact(fact)
            case _:
                raise AssertionError(effect)

    def on_fact(self, fact: Any) -> None:
        pass


# ---- sources -----------------------------------------------------------------------------------------------


class Source(Host):
    def __init__(self, folder: Path, habit: str) -> None:
        super().__init__(folder, BlobServer())
        self.habit, self.given = habit, 0
        self.blocks: list[memoryview] = []
        self.heard, self.cpu_before_s = 0, 0.0
        self.pushed_bytes = 0

    def hear(self, sender: PeerId, data: bytes, payload: memoryview | None, name: bytes | None) -> None:
        self.heard += 1
        if self.heard == 2:  # the first word only made the connection and the blocks
            self.cpu_before_s = time.process_time()
        if not data.startswith(PUSH):
            super().hear(sender, data, payload, name)
            return
        count, blocks = map(int, data[len(PUSH) :].split())
        self.pushed_bytes += count * BLOB_CHUNK
        while len(self.blocks) < blocks:
            self.blocks.append(memoryview(os.urandom(BLOB_CHUNK) if blocks > 1 else bytes(BLOB_CHUNK)))
        for number in range(count):
            self.links.send(sender, PUSH, Lane.BULK, self.blocks[number % blocks])

    def do(self, effect: Effect) -> None:
        match effect:
            case Send(to, ChunkResponse() as message, lane, Payload() as payload) if self.habit != "good":
                self.given += 1
                if self.habit == "stall" and self.given > STALLS_AFTER:
                    return
                if self.habit == "corrupt":
                    wrong = bytearray(bytes(payload.data))
                    wrong[len(wrong) // 2] ^= 1
                    payload = Payload(digest(wrong), len(wrong), wrong)
                super().do(Send(to, message, lane, payload))
            case _:
                super().do(effect)


async def serve(folder: Path, habit: str) -> None:
    source = Source(folder, habit)
    for blob in (folder / "blobs").glob("?" * 64):  # looked at, as by a member that starts from its state
        source.store.read_blob(Digest(bytes.fromhex(blob.name)))
    print((await source.links.listen(["/ip4/127.0.0.1/tcp/0"]))[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(time.process_time() - source.cpu_before_s, source.links.traffic()[0] - source.pushed_bytes, flush=True)
    source.chunks.close()
    await source.links.close()


# ---- trainers beside the sources -----------------------------------------------------------------------------


def train() -> None:
    """Steps of a small GPT without end; a line on stdin is answered with how many, and their processor time."""
    import torch

    from atoll.training.models import build_model

    torch.set_num_threads(1)
    model = build_model("gpt-tiny", 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (TRAINED_BATCH, TRAINED_TOKENS + 1))
    steps, began_s = 0, 0.0
    while True:
        if steps == 1:
            began_s = time.process_time()  # the first step also finds its memory
            print("ready", flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            print(steps - 1, time.process_time() - began_s, flush=True)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1


# ---- the joiner --------------------------------------------------------------------------------------------


class Joiner(Host):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.over = asyncio.Event()
        self.received, self.expected = 0, 0
        self.counted = _outliving(folder.with_suffix(".received"))
        self.here = 0  # chunks that were on disk when the fetch began
        self.tell_at = 0  # chunks, after which this process is going to be killed
        self.named: dict[str, set[str]] = {"bad": set(), "stalling": set()}
        self.failed = ""

    def hear(self, sender: PeerId, data: bytes, payload: memoryview | None, name: bytes | None) -> None:
        if payload is not None:
            self.received += 1
            self.counted[0] = self.received
        if data == PUSH:
            if self.received >= self.expected:
                self.over.set()
            return
        super().hear(sender, data, payload, name)
        if payload is not None and self.received == self.tell_at:
            print(self.received, flush=True)

    def handle(self, event: Event) -> None:
        match event:
            case TaskDone(_, BlobStoragePrepared(have)):
                self.here = len(have)
            case _:
                pass
        super().handle(event)

    def on_fact(self, fact: Any) -> None:
        match fact:
            case CorruptBlobSourceDetected(peer=peer):
                self.named["bad"].add(peer)
            case DownloadSourceStalled(peer=peer):
                self.named["stalling"].add(peer)
            case FetchFailed(why=why):
                self.failed = why
                self.over.set()
            case BlobFetched():
                self.over.set()
            case _:
                pass


def _outliving(path: Path) -> memoryview:
    """A number in pages of a file, which a SIGKILL leaves as they are."""
    with path.open("w+b") as file:
        file.truncate(mmap.PAGESIZE)
        return memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")


async def join(folder: Path, blob: str, addresses: list[str], chunks: int, blocks: int, tell_at: int) -> None:
    """`blocks`: so many different ones are what the transport carries; 0: the blob is fetched."""
    joiner = Joiner(folder)
    peers = [await joiner.links.dial(address) for address in addresses]
    for peer in peers:  # bulk connections stand before the clock starts
        joiner.links.send(peer, PUSH + b"1 %d" % max(1, blocks), Lane.CONTROL)
    joiner.expected = len(peers)
    await joiner.over.wait()
    joiner.over.clear()
    joiner.received, joiner.expected, joiner.tell_at = 0, chunks, tell_at
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    if blocks:
        for peer in peers:
            joiner.links.send(peer, PUSH + b"%d %d" % (chunks // len(peers), blocks))
    else:
        joiner.machine = BlobDownload(Digest(bytes.fromhex(blob)), peers)
        joiner.handle(Start({}))
    await joiner.over.wait()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    named = {kind: [peers.index(PeerId(p)) for p in who] for kind, who in joiner.named.items()}
    began_cpu_s = time.process_time()
    if not blocks and not joiner.failed:
        assert joiner.store.read_blob(Digest(bytes.fromhex(blob))) is not None
    read_cpu_s = time.process_time() - began_cpu_s
    result = {
        "s": took_s,
        "cpu_s": cpu_s,
        "read_cpu_s": read_cpu_s,
        "received": joiner.received,
        "here": joiner.here,
        "failed": joiner.failed,
        **named,
    }
    print("result " + json.dumps(result), flush=True)
    joiner.chunks.close()
    await joiner.links.close()


# ---- the measurement ---------------------------------------------------------------------------------------


class Bench:
    def __init__(self, size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-join-"))
        self.chunks = size // BLOB_CHUNK
        first = PeerStore(self.folder / "source0")
        self.blob = first.put_blob(os.urandom(size))
        first.close()
        for index in range(1, SOURCES):
            to = self.folder / f"source{index}" / "blobs"
            to.mkdir(parents=True)
            for name in (self.blob.hex(), f"{self.blob.hex()}.manifest"):
                os.link(self.folder / "source0" / "blobs" / name, to / name)

    def sources(self, habits: list[str]) -> tuple[list[subprocess.Popen[str]], list[str]]:
        started = [
            self._start("--serve", str(self.folder / f"source{i}"), habit, stdin=subprocess.PIPE)
            for i, habit in enumerate(habits)
        ]
        return started, [s.stdout.readline().strip() for s in started if s.stdout is not None]

    def fetch(self, habits: list[str], blocks: int = 0, kill_at: float = 0.0) -> dict[str, Any]:
        """One joiner in a new folder; killed and started again if `kill_at` is a share of the chunks."""
        sources, addresses = self.sources(habits)
        folder = self.folder / "joiner"
        shutil.rmtree(folder, ignore_errors=True)
        self._touch_memory()
        try:
            before = self._join(folder, addresses, blocks, kill_at)["received"] if kill_at else 0
            result = {**self._join(folder, addresses, blocks, 0.0), "received_before": before}
            told = [source.communicate("")[0].split() for source in sources]
            result["sources_cpu_s"] = sum(float(cpu_s) for cpu_s, _ in told)
            result["sent_bytes"] = sum(int(sent) for _, sent in told)
            return result
        finally:
            for source in sources:
                source.kill()
                source.wait()

    def _touch_memory(self) -> None:
        """A virtual machine may give free memory back to its host within seconds, and touching it again costs five
        times what writing to it does (1.0 instead of 0.2 CPU-s per GB here): no business of what is measured."""
        path, block = self.folder / "touched", bytes(BLOB_CHUNK)
        with path.open("wb", buffering=0) as file:
            for _ in range(3 * self.chunks):  # more than is needed: other work on this computer takes some of it
                file.write(block)
        path.unlink()

    def _join(self, folder: Path, addresses: list[str], blocks: int, kill_at: float) -> dict[str, Any]:
        numbers = map(str, (self.chunks, blocks, int(kill_at * self.chunks)))
        joiner = self._start("--join", str(folder), self.blob.hex(), *numbers, *addresses)
        assert joiner.stdout is not None
        for line in joiner.stdout:
            if line.startswith("result "):
                joiner.wait(30)
                return json.loads(line.removeprefix("result "))
            joiner.send_signal(signal.SIGKILL)
        joiner.wait()
        assert kill_at, "the joiner died"
        with folder.with_suffix(".received").open("rb") as counted:
            return {"received": int.from_bytes(counted.read(8), sys.byteorder)}

    def _start(self, *arguments: str, **pipes: Any) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)

    def beside_training(self) -> float:
        """Steps per second of processor time while one joiner fetches, over those before and after."""
        trainers = [self._start("--train", stdin=subprocess.PIPE) for _ in range(SOURCES)]
        try:
            for trainer in trainers:
                assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
            told = [self._steps(trainers)]
            time.sleep(QUIET_S)
            told.append(self._steps(trainers))
            self.fetch(["good"] * SOURCES)
            told.append(self._steps(trainers))
            time.sleep(QUIET_S)
            told.append(self._steps(trainers))
        finally:
            for trainer in trainers:
                trainer.kill()
                trainer.wait()
        spans = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(told)]
        alone = (spans[0][0] + spans[2][0]) / (spans[0][1] + spans[2][1])
        return spans[1][0] / spans[1][1] / alone

    def _steps(self, trainers: list[subprocess.Popen[str]]) -> tuple[int, float]:
        """Of all of them together so far, and the processor time that these took."""
        told: list[tuple[int, float]] = []
        for trainer in trainers:
            assert trainer.stdin is not None and trainer.stdout is not None
            trainer.stdin.write("\n")
            trainer.stdin.flush()
        for trainer in trainers:
            assert trainer.stdout is not None
            steps, cpu_s = trainer.stdout.readline().split()
            told.append((int(steps), float(cpu_s)))
        return sum(steps for steps, _ in told), sum(cpu_s for _, cpu_s in told)

    def close(self) -> None:
        shutil.rmtree(self.folder)


def measure(size: int, repeats: int) -> dict[str, Any]:
    bench = Bench(size)
    good = ["good"] * SOURCES
    bad = ["good", "corrupt", "good", "stall"]
    runs: dict[str, list[dict[str, Any]]] = {"transport": [], "memory": [], "fetch": [], "bad": []}
    killed: list[dict[str, Any]] = []
    others: list[float] = []
    try:
        for _ in range(repeats):
            runs["transport"].append(bench.fetch(good, blocks=1))
            runs["memory"].append(bench.fetch(good, blocks=BLOCKS))
            runs["fetch"].append(bench.fetch(good))
            named = bench.fetch(bad)
            assert named["bad"] == [1] and not named["failed"], named  # on a busy box good ones may be late too
            runs["bad"].append(named)
            killed.append(bench.fetch(good, kill_at=0.5))
            others.append(bench.beside_training())
    finally:
        bench.close()
    took = {name: statistics.median(each["s"] for each in of) for name, of in runs.items()}
    joiner, sources = (
        {name: round(statistics.median(each[key] for each in of) / size * 1e9, 2) for name, of in runs.items()}
        for key in ("cpu_s", "sources_cpu_s")
    )
    at_a_gigabit = sources["fetch"] / 8 / SOURCES  # of one core at each source
    return {
        "ratio_to_transport": round(took["transport"] / took["fetch"], 3),
        "ratio_to_memory": round(took["memory"] / took["fetch"], 3),
        "cpu_ratio_to_transport": round(_cpu_s(runs["transport"]) / _cpu_s(runs["fetch"]), 3),
        "cpu_ratio_to_memory": round(_cpu_s(runs["memory"]) / _cpu_s(runs["fetch"]), 3),
        "bad_sources_time_ratio": round(took["bad"] / took["fetch"], 3),
        "resume_redownload_share": round(
            statistics.median(each["received"] + each["received_before"] for each in killed) / bench.chunks - 1, 4
        ),
        "resume_lost_chunks": max(each["received_before"] - each["here"] for each in killed),
        "resume_sent_share": round(statistics.median(each["sent_bytes"] for each in killed) / size - 1, 4),
        "others_steps_per_cpu_s_ratio": round(statistics.median(others), 3),
        "others_at_1_gbit_per_s": round(statistics.median(others) * (1 - at_a_gigabit), 3),
        "joiner_read_cpu_s_per_gb": round(
            statistics.median(each["read_cpu_s"] for each in runs["fetch"]) / size * 1e9, 2
        ),
        **{f"{name}_mb_per_s": round(size / 1e6 / took[name], 1) for name in ("transport", "memory", "fetch")},
        **{f"joiner_{name}_cpu_s_per_gb": joiner[name] for name in ("transport", "memory", "fetch")},
        **{f"sources_{name}_cpu_s_per_gb": sources[name] for name in ("transport", "memory", "fetch")},
    }


def _cpu_s(runs: list[dict[str, Any]]) -> float:
    """Of the joiner and its sources together."""
    return statistics.median(each["cpu_s"] + each["sources_cpu_s"] for each in runs)


# ---- the pieces of a fetch by themselves ---------------------------------------------------------------------


def floors(size: int, repeats: int) -> dict[str, float]:
    """CPU-s per GB, the least of some repeats: megabytes in a core's cache, or (`far`) 64 of them in turn."""
    near, far = (memoryview(bytearray(os.urandom(count * BLOB_CHUNK))) for count in (1, BLOCKS))
    blocks = [far[at : at + BLOB_CHUNK] for at in range(0, len(far), BLOB_CHUNK)]
    turns = range(size // BLOB_CHUNK)
    slab = memoryview(bytearray(SLAB_BYTES + TAG_BYTES))
    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    cipher.encrypt_into(nonce, near[:SLAB_BYTES], b"", slab)

    def decrypt(to: list[memoryview]) -> None:
        for turn in turns:
            for at in range(0, BLOB_CHUNK, SLAB_BYTES):
                cipher.decrypt_into(nonce, slab, b"", to[turn % len(to)][at : at + SLAB_BYTES])

    def hashed(of: list[memoryview]) -> None:
        for turn in turns:
            digest(of[turn % len(of)])

    with (
        tempfile.TemporaryDirectory(prefix="atoll-join-") as folder,
        socket.create_server(("127.0.0.1", 0)) as door,
    ):
        path = Path(folder) / "file"

        def write(handle: int) -> None:
            for turn in turns:
                os.pwrite(handle, near, turn * BLOB_CHUNK)

        def write_new() -> None:
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                write(file.fileno())

        def write_over() -> None:
            with path.open("r+b") as file:
                write(file.fileno())

        def read() -> None:
            with path.open("rb") as file:
                for turn in turns:
                    os.preadv(file.fileno(), [near], turn * BLOB_CHUNK)

        def send() -> None:
            with socket.create_connection(door.getsockname()) as out:
                for turn in turns:
                    out.sendall(blocks[turn % len(blocks)])

        def receive() -> None:
            sender = threading.Thread(target=send)
            sender.start()
            with door.accept()[0] as come:
                while come.recv_into(near[:SLAB_BYTES]):
                    pass
            sender.join()

        pieces = {
            "receive": receive,
            "decrypt": lambda: decrypt([near]),
            "decrypt_far": lambda: decrypt(blocks),
            "blake3": lambda: hashed([near]),
            "blake3_far": lambda: hashed(blocks),
            "write_new": write_new,
            "write_over": write_over,
            "read": read,
        }
        return {
            f"{name}_cpu_s_per_gb": round(min(_thread_s(do) for _ in range(repeats)) / size * 1e9, 3)
            for name, do in pieces.items()
        }


def _thread_s(do: Callable[[], None]) -> float:
    began_s = time.thread_time()
    do()
    return time.thread_time() - began_s


def main() -> None:
    parser = asking(__doc__, f"{QUICK_SIZE // MIB} MiB instead of {SIZE // MIB}, two repeats instead of three")
    parser.add_argument("--serve", nargs=2, help=SUPPRESS)
    parser.add_argument("--join", nargs="+", help=SUPPRESS)
    parser.add_argument("--train", action="store_true", help=SUPPRESS)
    parser.add_argument("--floors", action="store_true", help="only what the pieces of a fetch cost by themselves")
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(serve(Path(asked.serve[0]), asked.serve[1]))
        return
    if asked.train:
        train()
        return
    if asked.join:
        folder, blob, chunks, blocks, tell_at, *addresses = asked.join
        asyncio.run(join(Path(folder), blob, addresses, int(chunks), int(blocks), int(tell_at)))
        return
    size, repeats = (QUICK_SIZE, QUICK_REPEATS) if asked.quick else (SIZE, REPEATS)
    figures = floors(size, repeats) if asked.floors else measure(size, repeats)
    settings = {"blob_bytes": size, "sources": SOURCES, "repeats": repeats, "cores": os.cpu_count()}
    print(report("join", settings, figures, versions()) if asked.json else lines(figures))


if __name__ == "__main__":
    main()
