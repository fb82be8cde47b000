"""All-reduce between processes on this computer: Atoll beside gloo, hivemind, torchft and what TCP itself can do.

    python bench/allreduce.py --setup                      once: hivemind and torchft in an environment of the bench
    python bench/allreduce.py [--peers 4] [--megabytes 100] [--codec fp32,int8] [--topology butterfly]
                              [--way-back same,gathered,remembered] [--against gloo,hivemind,torchft]
                              [--beside FOLDER] [--device cuda]
                              [--repeat 7] [--quick] [--json]

One process per peer, one thread each. Every repetition fills fresh N(0, 1) vectors and runs every system once, in
turn, because boxes are busy; the first repetition is not counted. A time is that of the slowest peer, from the
moment at which all may start until it holds the mean. Bytes are those of `lo` in a network namespace of our own,
headers and encryption included. Several `--peers` and `--megabytes` (comma between them) make a matrix. `--beside`
takes the `src` of another version: the peers of both run in turn, so that what the box does befalls both alike.

`--device cuda` has the vectors of atoll and gloo lie on the GPU, one for all peers; a time ends when the mean is
there. `make gpu` runs that, after the tests of it.

`--way-back` is how means come back: in the same codec, in another one by its name, as the rows themselves
(`gathered`), or from owners that remember what answers left out (`remembered`; the errors below are then those of
one call, in which that of the call before is made good: what remains of many is `bench/way_back.py --groups`).

    seconds_median       of the slowest peer; seconds_min, seconds_max beside it
    ratio_to_gloo_fp32   this median over gloo's, same peers and megabytes, same run
    ratio_to_bound       this median over that of plain TCP moving the 2(n−1)/n × bytes × n of fp32 (systems/tcp.py)
    wire_mb              10^6 bytes on `lo` per repetition, of all peers together, median
    rms_error, max_error against the exact mean in fp64, over all counted repetitions
    same_bits            whether all peers held the same bits after every repetition
    cpu_s                CPU seconds of all processes per repetition, mean
    memory_ratio         peak memory of the greediest peer beyond what it held before the first all-reduce, as a
                         multiple of the vector's bytes
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from form import asking, congestion, report, versions
from systems import BENCH, CODECS, DEVICES, OPTIONAL, OWN_PYTHON, PINS, probe
from systems.crew import Crew, CrewError

MB = 10**6
REPEAT, QUICK_REPEAT = 7, 3  # after one to warm up
MEGABYTES, QUICK_MEGABYTES = "100", "20"
BESIDE = "beside"  # what rows of another version say behind the system's name
SAME = "same"  # codec back as there
LEAD_S = 0.02  # from saying when to start until then: every process has read it and sleeps


class Row:
    """One system in one setting, and what was measured of it so far."""

    def __init__(
        self,
        system: str,
        codec: str,
        topology: str,
        peers: int,
        megabytes: float,
        source: str = "",
        way_back: str = "",
        device: str = "cpu",
    ) -> None:
        self.system, self.codec, self.topology, self.source = system, codec, topology, source
        self.way_back, self.device = way_back, device
        self.peers, self.megabytes = peers, megabytes
        self.values = round(megabytes * MB / 4)
        self.seconds: list[float] = []
        self.wire_bytes: list[int] = []
        self.cpu_s: list[float] = []
        self.peak_ratio = 0.0
        self.square_sum, self.checked, self.max_error, self.same_bits = 0.0, 0, 0.0, True
        self.crew: Crew | None = None
        self.trouble = ""

    @property
    def name(self) -> str:
        return f"{self.version} {self.codec} {self.topology} {self.way_back}".strip()

    @property
    def version(self) -> str:
        return f"{self.system} {BESIDE}" if self.source else self.system

    def open(self) -> None:
        back = "" if self.way_back == SAME else self.way_back
        asked = self.system, self.peers, self.values, self.codec, self.topology, self.source, back, self.device
        self.crew = Crew(*asked)

    def gather(self) -> None:
        assert self.crew is not None
        self.crew.gather()
        self.crew.all("fill", round=0)  # so that the vector's own memory is there before memory is looked at
        self.before_bytes = [probe.memory_bytes(p.pid, peak=False) for p in self.crew.processes]

    def repeat(self, round: int) -> None:
        """One repetition; round 0 warms up and counts for memory only."""
        assert self.crew is not None
        processes = self.crew.processes
        self.crew.all("fill", round=round)
        for process in processes:
            probe.forget_peak(process.pid)
        cpu_s = sum(probe.cpu_s(p.pid) for p in processes)
        wire_bytes = probe.loopback_bytes()
        at = time.monotonic() + LEAD_S
        ended = max(answer["ended"] for answer in self.crew.all("average", at=at))
        wire_bytes = probe.loopback_bytes() - wire_bytes
        cpu_s = sum(probe.cpu_s(p.pid) for p in processes) - cpu_s
        for process, before in zip(processes, self.before_bytes, strict=True):
            grown = probe.memory_bytes(process.pid, peak=True) - before
            self.peak_ratio = max(self.peak_ratio, grown / (4 * self.values))
        if self.system != "tcp":  # the only one that does not average
            self._judge(round)
        if round > 0:
            self.seconds.append(ended - at)
            self.wire_bytes.append(wire_bytes)
            self.cpu_s.append(cpu_s)

    def forget(self, round: int) -> None:
        """The times of this repetition mean nothing: it is done again. Its errors count, they are no less true."""
        for measured in (self.seconds, self.wire_bytes, self.cpu_s):
            del measured[round - 1 if round > 0 else 0 :]

    def _judge(self, round: int) -> None:
        assert self.crew is not None
        found = [answer["errors"] for answer in self.crew.all("check", round=round)]
        if round > 0:
            self.square_sum += sum(e["square_sum"] for e in found)
            self.checked += sum(e["values"] for e in found)
            self.max_error = max([self.max_error, *(e["max"] for e in found)])
            self.same_bits &= len({e["digest"] for e in found}) == 1

    def end(self) -> None:
        if self.crew is not None:
            self.crew.end()
            self.crew = None

    def figures(self, gloo_s: float | None, bound_s: float | None) -> dict[str, Any]:
        row: dict[str, Any] = {
            "system": self.version,
            "codec": self.codec,
            "topology": self.topology,
            "way_back": self.way_back,
            "device": self.device,
            "peers": self.peers,
            "megabytes": self.megabytes,
            "repetitions": len(self.seconds),
        }
        if self.trouble:
            row["trouble"] = self.trouble
        if not self.seconds:
            return row
        median_s = statistics.median(self.seconds)
        row |= {
            "seconds_median": round(median_s, 4),
            "seconds_min": round(min(self.seconds), 4),
            "seconds_max": round(max(self.seconds), 4),
            "ratio_to_gloo_fp32": round(median_s / gloo_s, 2) if gloo_s else None,
            "ratio_to_bound": round(median_s / bound_s, 2) if bound_s else None,
            "wire_mb": round(statistics.median(self.wire_bytes) / MB, 2),
            "cpu_s": round(statistics.fmean(self.cpu_s), 3),
            "memory_ratio": round(self.peak_ratio, 2),
        }
        if self.checked:
            row |= {
                "rms_error": float(f"{math.sqrt(self.square_sum / self.checked):.3g}"),
                "max_error": float(f"{self.max_error:.3g}"),
                "same_bits": self.same_bits,
            }
        return row


def measure(rows: list[Row], repeat: int, watch: probe.Watch) -> None:
    """Run rows of one size beside each other; a row that fails keeps its counted repetitions and says why."""

    def carefully(row: Row, work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except CrewError as trouble:
            row.trouble = str(trouble)
            note(f"{row.name}, {row.peers} peers, {row.megabytes:g} MB: stopped. {trouble}")
            row.end()

    try:
        for row in rows:
            row.open()
        for row in rows:
            carefully(row, row.gather)
        for round in range(repeat + 1):
            for row in rows:
                while not row.trouble:
                    stops = watch.stops
                    carefully(row, row.repeat, round)
                    if watch.stops == stops:
                        break
                    row.forget(round)
    finally:
        for row in rows:
            row.end()


def planned(
    systems: list[str],
    codecs: list[str],
    topologies: list[str],
    sources: list[str],
    backs: list[str],
    peers: int,
    megabytes: float,
    device: str,
) -> list[Row]:
    """One row per setting that the system knows; another's missing codec costs a row, not an error."""
    rows = []
    for system in systems:
        if system == "atoll":
            ways = product(codecs, topologies, sources, backs)
        else:
            ways = product([c for c in CODECS[system] if c in {"fp32", *codecs}], [""], [""], [""])
        where = device if system in DEVICES else "cpu"
        rows += [
            Row(system, codec, way, peers, megabytes, source, back, where) for codec, way, source, back in ways
        ]
    return rows


def available(asked: list[str]) -> list[str]:
    systems = ["tcp", "gloo"]
    for system in ["atoll", *asked]:
        if system in systems:
            continue
        if system not in {"atoll", *CODECS}:
            raise ValueError(f"no adapter for {system}; there are {', '.join(['atoll', *CODECS])}")
        if system == "atoll" and importlib.util.find_spec("atoll.reduce") is None:
            note("atoll: skipped, this version has no atoll.reduce")
        elif system in OPTIONAL and not any(BENCH.glob(f".venv/lib/*/site-packages/{system}")):
            note(f"{system}: skipped, not installed; next: python bench/allreduce.py --setup")
        else:
            systems.append(system)
    return systems


# ---- surroundings ------------------------------------------------------------------------------------------


def set_up() -> None:
    """The bench's own environment; which build of torch it gets is for pip's settings to say."""
    subprocess.run([sys.executable, "-m", "venv", str(OWN_PYTHON.parent.parent)], check=True)
    subprocess.run([str(OWN_PYTHON), "-m", "pip", "install", "--quiet", *PINS], check=True)


def enter_own_network(arguments: list[str]) -> str:
    """Start this program again in a network namespace with nothing but `lo`; says where it already is.

    ATOLL_BENCH_NETWORK is how the second start knows; without the privilege the first one goes on, in the open.
    """
    if "ATOLL_BENCH_NETWORK" in os.environ:
        return os.environ["ATOLL_BENCH_NETWORK"]
    inside = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode != 0:
        note("no privilege for a network namespace: bytes are those of everybody's loopback")
        return "shared"
    os.environ["ATOLL_BENCH_NETWORK"] = "own namespace"
    os.execvp(inside[0], [*inside, sys.executable, *arguments])


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def surroundings() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "net.ipv4.tcp_congestion_control": congestion(),
    }


def all_versions() -> dict[str, str]:
    return versions("torch") | {system: pin.partition("==")[2] for system, pin in OPTIONAL.items()}


def table(rows: list[dict[str, Any]]) -> str:
    columns = {
        "system": "system",
        "codec": "codec",
        "topology": "topology",
        "way_back": "way back",
        "device": "device",
        "peers": "peers",
        "megabytes": "MB",
        "seconds_median": "median s",
        "seconds_min": "min",
        "seconds_max": "max",
        "ratio_to_gloo_fp32": "x gloo",
        "ratio_to_bound": "x bound",
        "wire_mb": "wire MB",
        "rms_error": "rms error",
        "max_error": "max error",
        "same_bits": "same bits",
        "cpu_s": "CPU s",
        "memory_ratio": "memory x",
    }
    cells = [list(columns.values())]
    for row in rows:
        cells.append(["-" if row.get(key) in (None, "") else str(row[key]) for key in columns])
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) for line in cells
    )


def main() -> None:
    asked = asking(__doc__, "at most 90 s on two cores")
    asked.add_argument("--peers", default="4", help="comma between several")
    asked.add_argument("--megabytes", help=f"10^6 bytes of fp32; {MEGABYTES}, with --quick {QUICK_MEGABYTES}")
    asked.add_argument("--codec", default="fp32", help="atoll's, and those of them that others have")
    asked.add_argument("--topology", default="butterfly", help="atoll's")
    asked.add_argument("--way-back", default=SAME, help="of atoll's means: same, gathered, remembered, or a codec")
    asked.add_argument("--against", default="gloo,hivemind,torchft")
    asked.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where atoll's and gloo's vectors lie"
    )
    asked.add_argument("--beside", help="the `src` of another version of atoll, to run in turn with this one")
    asked.add_argument("--repeat", type=int, help=f"{REPEAT}, with --quick {QUICK_REPEAT}")
    asked.add_argument("--setup", action="store_true", help=f"install {', '.join(PINS)} for this bench only")
    options = asked.parse_args()
    if options.setup:
        set_up()
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"--device cuda: PyTorch {torch.__version__} finds no GPU: there is none, no driver, or this build is "
            "for CPUs; next: python -c 'import torch; print(torch.cuda.device_count())', or leave --device out"
        )
    network = enter_own_network(sys.argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no peer is left behind
    repeat = options.repeat or (QUICK_REPEAT if options.quick else REPEAT)
    megabytes = options.megabytes or (QUICK_MEGABYTES if options.quick else MEGABYTES)
    systems = available(options.against.split(","))
    codecs, topologies = options.codec.split(","), options.topology.split(",")
    sources = ["", str(Path(options.beside).resolve())] if options.beside else [""]
    found, watch = [], probe.Watch()
    for peers in map(int, options.peers.split(",")):
        for size in map(float, megabytes.split(",")):
            rows = planned(
                systems, codecs, topologies, sources, options.way_back.split(","), peers, size, options.device
            )
            measure(rows, repeat, watch)
            median = {
                row.version: statistics.median(row.seconds) for row in rows if row.seconds and row.codec == "fp32"
            }
            found += [row.figures(median.get("gloo"), median.get("tcp")) for row in rows]
    if options.json:
        settings = {"repeat": repeat, "network": network} | surroundings()
        print(report("allreduce", settings, found, all_versions()))
        return
    print(table(found))


if __name__ == "__main__":
    main()
