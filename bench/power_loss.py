"""What a peer's store loses when its process is killed, or its computer's power, in the middle of writing.

A real process keeps vertices as peers do and says so after each one (`tests/host/test_power_loss.py`, whose long
form asserts what this only counts). Each point is a fresh store: the writer gets SIGKILL while it is somewhere in
the write after a random vertex; for a power cut the sectors that were written since the last sync are then kept or
dropped at random. The store is opened again, and everything that was acknowledged is looked for.

    python bench/power_loss.py [--points 500] [--seed 1000] [--quick]

One line of JSON per kind of loss. Exit status 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "host"))

from test_power_loss import Writer, killed_at, value_of

from atoll.host.store import Store

QUICK_POINTS = 40


@dataclass
class Count:
    kind: str
    points: int = 0
    acknowledged: int = 0  # vertices, over all points
    lost: int = 0  # of those, not there any more
    altered: int = 0  # there, with other bytes
    unreadable: int = 0  # stores that do not open, or that sqlite finds broken
    seconds: float = 0.0

    def look(self, folder: Path, newest: int) -> None:
        self.points += 1
        self.acknowledged += newest + 1
        try:
            store = Store(folder)
            whole = store._database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            kept = {number: store.value(f"vertex/{number}") for number in range(newest + 1)}
            store.close()
        except sqlite3.DatabaseError:
            self.unreadable += 1
            return
        self.unreadable += not whole
        self.lost += sum(value is None for value in kept.values())
        self.altered += sum(value not in (None, value_of(number)) for number, value in kept.items())


def measure(kind: str, points: range) -> Count:
    count, began = Count(kind), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), cuts=kind == "power cut")
        try:
            for seed in points:
                place, newest = killed_at(writer, seed)
                count.look(place, newest)
                shutil.rmtree(place)
        finally:
            writer.close()
    count.seconds = round(time.monotonic() - began, 1)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1000, help="the first one; each point has its own")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_POINTS} points")
    args = parser.parse_args()
    points = range(args.seed, args.seed + (QUICK_POINTS if args.quick else args.points))
    counts = [measure(kind, points) for kind in ("killed", "power cut")]
    for count in counts:
        print(json.dumps(asdict(count)), flush=True)
    return 1 if any(c.lost or c.altered or c.unreadable for c in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
