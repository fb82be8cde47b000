"""What a peer's disk loses when its process is killed, or its computer's power, in the middle of writing.

A real process keeps vertices as peers do and says so after each one (`tests/runtime/test_power_loss.py`, whose long
form asserts what this counts). Each point is a fresh store: the writer gets SIGKILL while it is somewhere in the
write after a random vertex; for a power cut the sectors that were written since the last sync are then kept or
dropped at random. The store is opened again, and everything that was acknowledged is looked for.

States of the model (`tests/runtime/test_states_killed.py`): the writer dies in a random write, sync or rename of
one of several states, which are written over the files of removed ones. For a power cut, blocks of 4 KiB without a
sync get back what was there before, at random, and renames without a sync of the folder are undone.

    python bench/power_loss.py [--points 500] [--state-points 1M:300,50M:20] [--seed 1000] [--quick] [--json]

    acknowledged    vertices, or the newest head and staged state, over all points
    lost, altered   of those: not there any more, there with other bytes
    unreadable      stores that do not open, or that sqlite finds broken

Ends with status 1 if there is any of the last three.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from form import asking, lines, report, versions

from atoll.runtime.storage.store import PeerStore
from atoll.worker.state_store import MissingStateError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "runtime"))

from test_power_loss import Writer, killed_at, value_of
from test_states_killed import OPERATIONS, OwedState, StateWriter, content, opened, point

POINTS, QUICK_POINTS = 500, 25
STATE_POINTS, QUICK_STATE_POINTS = "1M:300,50M:20", "1M:10"
STATE_BYTES = 8  # per value: parameter and momentum
STATES = 6  # the writer dies in one of so many; the last three are written over removed ones
KINDS = ("killed", "power cut")


@dataclass
class Count:
    points: int = 0
    acknowledged: int = 0
    lost: int = 0
    altered: int = 0
    unreadable: int = 0
    seconds: float = 0.0

    def look(self, folder: Path, newest: int) -> None:
        self.points += 1
        self.acknowledged += newest + 1
        try:
            store = PeerStore(folder)
            whole = store._database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            kept = {number: store.value(f"vertex/{number}") for number in range(newest + 1)}
            store.close()
        except sqlite3.DatabaseError:
            self.unreadable += 1
            return
        self.unreadable += not whole
        self.lost += sum(value is None for value in kept.values())
        self.altered += sum(value not in (None, value_of(number)) for number, value in kept.items())

    def look_for(self, folder: Path, owed: list[OwedState], size: int) -> None:
        self.points += 1
        self.acknowledged += len(owed)
        store, _, states = opened(folder)
        for one in owed:
            try:
                self.altered += states.view(one.name) != content(one.number, size)
            except MissingStateError:
                self.lost += 1
        store.close()


def measure_states(kind: str, values: int, seeds: range) -> Count:
    count, began, size = Count(), time.monotonic(), STATE_BYTES * values
    with tempfile.TemporaryDirectory() as folder:
        writer, place = StateWriter(size), Path(folder) / "peer"
        try:
            for seed in seeds:
                draw = random.Random(seed)
                owed = point(writer, place, draw.randrange(1, STATES * OPERATIONS), draw, kind == "power cut")
                count.look_for(place, owed, size)
                shutil.rmtree(place)
        finally:
            writer.close()
    count.seconds = round(time.monotonic() - began, 1)
    return count


def measure(kind: str, seeds: range) -> Count:
    count, began = Count(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), cuts=kind == "power cut")
        try:
            for seed in seeds:
                place, newest = killed_at(writer, seed)
                count.look(place, newest)
                shutil.rmtree(place)
        finally:
            writer.close()
    count.seconds = round(time.monotonic() - began, 1)
    return count


def main() -> int:
    ask = asking(__doc__, f"{QUICK_POINTS} points instead of {POINTS}")
    ask.add_argument("--points", type=int, default=POINTS)
    ask.add_argument("--seed", type=int, default=1000, help="the first one; each point has its own")
    ask.add_argument("--state-points", default=STATE_POINTS, help="points for each size of a state")
    asked = ask.parse_args()
    points = QUICK_POINTS if asked.quick else asked.points
    counts = {kind: measure(kind, range(asked.seed, asked.seed + points)) for kind in KINDS}
    for size in (QUICK_STATE_POINTS if asked.quick else asked.state_points).split(","):
        values, _, many = size.partition(":")
        for kind in KINDS:
            seeds = range(asked.seed, asked.seed + int(many))
            counts[f"states of {values}, {kind}"] = measure_states(kind, int(values.rstrip("M")) * 10**6, seeds)
    if asked.json:
        settings = {"points": points, "seed": asked.seed, "cores": os.cpu_count(), "sqlite": sqlite3.sqlite_version}
        figures = {kind: asdict(count) for kind, count in counts.items()}
        print(report("power_loss", settings, figures, versions()))
    else:
        print("\n".join(f"{kind}\n{lines(asdict(count))}" for kind, count in counts.items()))
    return 1 if any(c.lost or c.altered or c.unreadable for c in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
