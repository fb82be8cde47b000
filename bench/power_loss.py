"""What a peer's store loses when its process is killed, or its computer's power, in the middle of writing.

A real process keeps vertices as peers do and says so after each one (`tests/runtime/test_power_loss.py`, whose long
form asserts what this counts). Each point is a fresh store: the writer gets SIGKILL while it is somewhere in the
write after a random vertex; for a power cut the sectors that were written since the last sync are then kept or
dropped at random. The store is opened again, and everything that was acknowledged is looked for.

    python bench/power_loss.py [--points 500] [--seed 1000] [--quick] [--json]

    acknowledged    vertices, over all points
    lost, altered   of those: not there any more, there with other bytes
    unreadable      stores that do not open, or that sqlite finds broken

Ends with status 1 if there is any of the last three.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from form import asking, lines, report, versions

from atoll.runtime.storage.store import PeerStore

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "runtime"))

from test_power_loss import Writer, killed_at, value_of

POINTS, QUICK_POINTS = 500, 25
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
    asked = ask.parse_args()
    points = QUICK_POINTS if asked.quick else asked.points
    counts = {kind: measure(kind, range(asked.seed, asked.seed + points)) for kind in KINDS}
    if asked.json:
        settings = {"points": points, "seed": asked.seed, "cores": os.cpu_count(), "sqlite": sqlite3.sqlite_version}
        figures = {kind: asdict(count) for kind, count in counts.items()}
        print(report("power_loss", settings, figures, versions()))
    else:
        print("\n".join(f"{kind}\n{lines(asdict(count))}" for kind, count in counts.items()))
    return 1 if any(c.lost or c.altered or c.unreadable for c in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
