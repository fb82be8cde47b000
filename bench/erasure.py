"""What older states in pieces cost: disk, processor time, traffic of repairs.

One state of random bytes on a real disk is cut (k of n), made again from its data pieces and from as many coded
ones as there are, and one piece is made of k others, each through the very jobs of a peer
(`features/archive/worker.py`):
CPU-seconds per GB of the state, best of three, names checked. Repairs are measured in the virtual world:
members leave for good, their pieces of states that are whole nowhere are made anew, and the bytes that holders
served are held against the prediction, k pieces for each lost one.

    python bench/erasure.py [--quick] [--json]
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from form import asking, lines, report, versions

from atoll.base.ids import Digest
from atoll.base.machine import Fact
from atoll.features.archive.policy import PieceSet
from atoll.features.archive.reed_solomon import piece_bytes
from atoll.features.archive.worker import cut_state, rebuild_blob
from atoll.peer.events import ErasurePieceStored
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import DecodeErasurePieces, EncodeErasurePieces
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.plan import RoundSettings
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer

K, N = 6, 10
MIB, QUICK_MIB = 1024, 128
TRIALS = 3
MEMBERS, LEAVERS = 13, 2


def cpu_s_per_gb(work: Callable[[], object], undo: Callable[[], object], size_bytes: int) -> float:
    best = float("inf")
    for _ in range(TRIALS):
        undo()
        began = time.process_time()
        assert work()
        best = min(best, time.process_time() - began)
    return round(best / size_bytes * 1e9, 2)


def on_disk(folder: Path, mib: int) -> dict[str, object]:
    store = PeerStore(folder, durable=False)
    states = FileStateStore(store, BlobRetention(store))
    blob = store.new_blob()
    for i in range(mib):
        blob.write(blake3(i.to_bytes(4, "big")).digest(length=2**20))
    state, size = blob.finish(), mib * 2**20
    assert state is not None

    def ignore(name: bytes) -> None:
        pass

    def cut(index: int) -> PieceSet:
        names = cut_state(states, store, EncodeErasurePieces(state, K, N, index), ignore)
        assert names is not None
        return names

    names = cut(0)
    pieces = [names.pieces[cut(i).pieces.index(names.pieces[i])] for i in range(N)]
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def made_of(indices: range, goal: Digest, index: int | None = None) -> float:
        of = tuple((i, pieces[i]) for i in indices)
        path = store.blob_path(goal)
        return cpu_s_per_gb(
            lambda: rebuild_blob(store, DecodeErasurePieces(goal, size, K, N, of, index), ignore),
            lambda: path.unlink(missing_ok=True),
            size,
        )

    figures: dict[str, object] = {
        "disk_all_members": round(sum(store.blob_path(p).stat().st_size for p in pieces) / size, 4),
        "disk_predicted": round(N / K, 4),
        "cut_cpu_s_per_gb": cpu_s_per_gb(lambda: cut(9), lambda: store.blob_path(pieces[9]).unlink(), size),
        "restore_from_data_cpu_s_per_gb": made_of(range(K), state),
        "restore_from_coded_cpu_s_per_gb": made_of(range(N - K, N), state),
        "repair_cpu_s_per_gb": made_of(range(1, K + 1), pieces[0], 0),
    }
    figures["more_memory_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mib, 1)
    store.close()
    return figures


def repairs() -> dict[str, object]:
    """Bytes that holders gave when two members left, and what k pieces for each lost one are."""
    coded = ErasureParams(K, N, every_rounds=3, lost_s=15.0)
    plan = RoundSettings(inner_steps=20, first_train_s=10)
    run = RunSettings(open_to_all=True, round=plan, coded=coded)
    swarm = VirtualSwarm(3, SwarmKnobs(MEMBERS, island=WorkerKnobs(states_kept=4), run=run))
    world, made = swarm.world, dict[tuple[int, int], int]()

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, ErasurePieceStored) and fact.repaired:
            made[fact.of, fact.index] = fact.size_bytes

    def given() -> int:
        return sum(node.island.given_bytes for node in world.nodes.values())

    world.watchers.append(watch)
    while min(swarm.heads(), default=-1) < 20:
        world.run(world.now + 1.0)
    placing = given()
    machine = swarm.honest[0].machine
    assert machine is not None and machine.pool is not None
    old = [e for e in machine.pool.ledger.entries if e.round <= 8]
    leavers = old[0].holders[:LEAVERS]
    lost = {(e.round, i) for e in old for i, p in enumerate(e.holders) if p in leavers}
    for peer in leavers:
        world.leave(peer)
    while not lost <= made.keys() or any(n.machine.pieces.making for n in swarm.honest if n.machine):
        world.run(world.now + 1.0)
    took = given() - placing
    return {
        "placing_bytes": placing,
        "pieces_repaired": len(made),
        "repair_bytes": took,
        "repair_bytes_predicted": sum(K * size for size in made.values()),
    }


def main() -> None:
    asked = asking(__doc__, f"a state of {QUICK_MIB} MiB instead of {MIB}").parse_args()
    mib = QUICK_MIB if asked.quick else MIB
    with tempfile.TemporaryDirectory() as folder:
        figures = on_disk(Path(folder), mib) | repairs()
    settings = {
        "state_mib": mib,
        "k": K,
        "n": N,
        "cores": os.cpu_count(),
        "piece_bytes": piece_bytes(mib * 2**20, K),
    }
    if asked.json:
        print(report("erasure", settings, figures, versions("pyeclib", "blake3")))
    else:
        print(lines(figures))


if __name__ == "__main__":
    main()
