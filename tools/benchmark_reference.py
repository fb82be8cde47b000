"""Benchmark results: measures them, writes docs/reference/benchmarks.md and the README's table of measured facts.

Usage:
    python tools/benchmark_reference.py                     # write the page and the README's table from the results
    python tools/benchmark_reference.py --measure           # first run every bench of RUNS, one after the other
    python tools/benchmark_reference.py --measure kill wire # first run only these

Each file of bench/results holds one run: command, date, machine, what was measured, its summary in one line, and
the object that the bench printed with --json. A README row is `measured` and `summary` of one file.

Not responsible for: measuring (bench/), or judging a figure (bench/RESULTS.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
README = ROOT / "README.md"
README_BEGIN, README_END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
KEPT = ("settings", "figures", "versions")  # of a bench's object; `kill` also prints every trial

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One command that this page reports, and how its object reads in one line."""

    name: str  # of its file in bench/results
    command: str  # without --json
    measured: Callable[[Report], str]
    summary: Callable[[Report], str]


def _engine(rows: Iterable[Report], engine: str, members: int) -> Report:
    """The row of one agreement engine with Ed25519 votes."""
    wanted = {"engine": engine, "vote": "ed25519", "n": members}
    return next(row for row in rows if wanted.items() <= row.items())


def _kill_measured(report: Report) -> str:
    s = report["settings"]
    return (
        f"{s['kill']} of {s['peers']} members killed during an all-reduce of {s['megabytes']:g} MB, "
        f"{report['figures']['trials']} times"
    )


def _kill_summary(report: Report) -> str:
    f = report["figures"]
    return (
        f"{f['hangs']} hangs, {f['disagreements']} disagreements; {f['recovery_s_median']} s longer (median), "
        f"{f['recovery_s_max']} s at most"
    )


def _power_summary(report: Report) -> str:
    kinds = report["figures"].values()
    lost, altered = (sum(kind[key] for kind in kinds) for key in ("lost", "altered"))
    return f"{lost} acknowledged vertices or states lost, {altered} altered"


def _power_measured(report: Report) -> str:
    points = sum(kind["points"] for kind in report["figures"].values())
    return f"a writer killed, or its power cut, at {points} points"


def _allreduce_summary(report: Report) -> str:
    rows = [row for row in report["figures"] if row["system"] == "atoll"]
    return "; ".join(f"{row['codec']}: {row['ratio_to_gloo_fp32']} × its time" for row in rows)


def _allreduce_measured(report: Report) -> str:
    row = next(row for row in report["figures"] if row["system"] == "atoll")
    return f"all-reduce of {row['peers']} × {row['megabytes']:g} MB, encrypted, beside plain gloo in fp32"


def _convergence_summary(report: Report) -> str:
    f = report["figures"]
    gaps = f["gap_percent_by_seed"]
    spread = f" (median of {len(gaps)} seeds, {min(gaps):+.1f} to {max(gaps):+.1f})" if len(gaps) > 1 else ""
    return f"{f['gap_percent']:+.1f} % validation loss{spread} with {f['upload_ratio']:.0f} × fewer bytes"


def _convergence_measured(report: Report) -> str:
    f = report["figures"]
    model = f"GPT of 168 k parameters, {f['peers']} peers, {f['steps']} steps"
    return f"`{f['recipe']}` beside data-parallel training: {model}"


def _hostile_measured(report: Report) -> str:
    s, liars = report["settings"], len(report["figures"]["villains"])
    return f"{s['peers']} processes, {liars} of them liars, audit rate {s['audit_rate']:g}"


def _hostile_summary(report: Report) -> str:
    f = report["figures"]
    ends = ", ".join(f"{v['kind']} {v['became']} in round {v['rounds']}" for v in f["villains"])
    return f"{ends} of its lies; {f['honest_harmed']} honest members lost their place"


def _codec_summary(report: Report) -> str:
    best = {row["codec"]: row for row in report["figures"]}  # kernels come after torch
    int8 = best["int8"]
    figures = f"{int8['encode_gb_s']} and {int8['decode_accumulate_gb_s']} GB/s"
    return f"int8 ({int8['engine']}): {figures} to encode, and to decode and add"


def _wire_measured(report: Report) -> str:
    row = report["figures"][0]
    return f"all bytes of a short run of {row['peers']} peers (`{row['recipe']}`, {row['parameters']:,} parameters)"


RUNS = (
    Run(
        "convergence",
        "python bench/convergence.py --recipe auto --steps 4500 --seeds 3",
        _convergence_measured,
        _convergence_summary,
    ),
    Run(
        "kill",
        "python bench/kill.py --peers 4 --megabytes 100 --kill 1 --trials 100 --patience 600",
        _kill_measured,
        _kill_summary,
    ),
    Run(
        "allreduce",
        "python bench/allreduce.py --codec fp32,int8 --against gloo",
        _allreduce_measured,
        _allreduce_summary,
    ),
    Run("hostile", "python bench/hostile.py", _hostile_measured, _hostile_summary),
    Run("power_loss", "python bench/power_loss.py", _power_measured, _power_summary),
    Run("kill-quick", "python bench/kill.py --quick", _kill_measured, _kill_summary),
    Run("power_loss-quick", "python bench/power_loss.py --quick", _power_measured, _power_summary),
    Run(
        "transport",
        "python bench/transport.py --quick",
        lambda report: "encrypted transfer of 256 MB between two processes",
        lambda report: (
            f"{report['figures']['ratio_to_raw_tcp']} × the rate of raw TCP, "
            f"{report['figures']['cpu_s_per_gb']} CPU-s per GB (both ends)"
        ),
    ),
    Run(
        "handshake",
        "python bench/handshake.py --quick",
        lambda report: "handshakes per CPU second, both sides together",
        lambda report: (
            f"{report['figures']['per_second_per_core']:.0f} hybrid, "
            f"{report['figures']['classical_per_second_per_core']:.0f} classical"
        ),
    ),
    Run(
        "codec",
        "python bench/codec.py --quick --codec fp32,int8,int4,2bit,sign,topk:0.1+int8,sparseloco",
        lambda report: "codecs on one core",
        _codec_summary,
    ),
    Run(
        "wire",
        "python bench/wire.py --quick",
        _wire_measured,
        lambda report: (
            f"{report['figures'][0]['wire_ratio']} × fewer than data-parallel training in fp32, by the sockets"
        ),
    ),
    Run(
        "consensus",
        "python bench/consensus.py --quick",
        lambda report: "one decision of 16 members 50 to 100 ms apart (simulated)",
        lambda report: ", ".join(
            f"{name} {_engine(report['figures']['rows'], name, 16)['virtual_s']} s"
            for name in ("agreement", "raft")
        ),
    ),
    Run(
        "verify",
        "python bench/verify.py --quick",
        lambda report: f"`atoll verify` of {report['settings']['vertices']:,} vertices",
        lambda report: f"{report['figures']['vertices_per_cpu_s']} vertices per CPU second",
    ),
    Run(
        "round_cost",
        "python bench/round_cost.py --quick",
        lambda report: f"processor time of a round besides its steps, {report['settings']['model']}",
        lambda report: (
            f"{report['figures']['all']['peer_s']} CPU-s of the peer, "
            f"{report['figures']['all']['trainer_s']} of the trainer"
        ),
    ),
    Run(
        "meet",
        "python bench/meet.py --quick",
        lambda report: "members of `atoll.reduce` that join at once",
        lambda report: ", ".join(
            f"{name.removeprefix('joined_s_')} members: {value} s"
            for name, value in report["figures"].items()
            if name.startswith("joined_s_")
        ),
    ),
)
# the README's rows, in this order; the second file is used while the first has not been measured
README_ROWS = (
    ("convergence",),
    ("kill", "kill-quick"),
    ("allreduce",),
    ("power_loss", "power_loss-quick"),
)

HEAD = """# Benchmarks

One section per committed run of `bench/results`. The judgement of these figures, and what falls short of its aim:
[bench/RESULTS.md](../../bench/RESULTS.md).

This page is generated. `python tools/benchmark_reference.py --measure` runs all commands below one after the other
and writes this page and the README's table; with names of files after it, it runs only those.

| measured | figure | command |
|---|---|---|
"""


def measure(run: Run) -> None:
    """Runs the bench and writes its file."""
    load = os.getloadavg()[0]
    words = run.command.split()[1:]
    done = subprocess.run([sys.executable, *words, "--json"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    result = {
        "command": run.command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _machine(),
        "load_1min_before": round(load, 1),
        "measured": run.measured(report),
        "summary": run.summary(report),
    }
    text = json.dumps(result | {key: report[key] for key in KEPT}, indent=1, ensure_ascii=False)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{run.name}.json").write_text(text + "\n")


def results() -> dict[str, dict[str, Any]]:
    """The committed runs, in the order of RUNS."""
    files = ((run.name, RESULTS / f"{run.name}.json") for run in RUNS)
    return {name: json.loads(file.read_text()) for name, file in files if file.exists()}


def page_text() -> str:
    found = results()
    return HEAD + "".join(map(_fact, found.values())) + "".join(_section(*item) for item in found.items())


def readme_table() -> str:
    """The README's table of measured facts, without its two markers."""
    found = results()
    names = (next((name for name in row if name in found), None) for row in README_ROWS)
    rows = (f"| {found[name]['measured']} | {found[name]['summary']} |\n" for name in names if name)
    return "| measured | figure |\n|---|---|\n" + "".join(rows)


def readme_text(text: str) -> str:
    """The README with the table of today between its two markers."""
    head, begin, rest = text.partition(README_BEGIN)
    _, end, tail = rest.partition(README_END)
    if not (begin and end):
        raise ValueError(f"README.md: put {README_BEGIN} and {README_END} on lines around the measured facts")
    return f"{head}{begin}\n{readme_table()}{end}{tail}"


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = " ".join(names[0].split()) if names else cpu
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = "with a GPU" if Path("/dev/nvidia0").exists() else "no GPU"
    return f"{cpu}, {os.cpu_count()} cores, {gib:.0f} GiB of memory, {gpu}, {platform.system()}"


def _fact(result: Report) -> str:
    return f"| {result['measured']} | {result['summary']} | `{result['command']}` |\n"


def _section(name: str, result: Report) -> str:
    versions = ", ".join(
        f"{package} {version}" for package, version in result["versions"].items() if package != "kernel"
    )
    lines = [
        f"## {name}",
        f"`{result['command']}`, {result['date']}; {result['machine']}; "
        f"load {result['load_1min_before']} before the run; {versions}.",
        *_tables(result["figures"]),
    ]
    return "\n" + "\n\n".join(lines) + "\n"


def _tables(figures: Any) -> list[str]:
    """Rows become a table, and all other figures a table of two columns."""
    if isinstance(figures, list):
        return [_table(figures)]
    if all(isinstance(value, dict) for value in figures.values()):
        return [_table([{"": key, **value} for key, value in figures.items()])]
    rows = {key: value for key, value in figures.items() if _is_rows(value)}
    single = [{"figure": key, "value": value} for key, value in figures.items() if key not in rows]
    return ([_table(single)] if single else []) + [_table(value) for value in rows.values()]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(key)) for key in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    match value:
        case None | [] | "":
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
        case dict():
            return ", ".join(f"{key}: {_cell(part)}" for key, part in value.items())
        case list():
            return ", ".join(map(_cell, value))
        case _:
            return str(value).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", metavar="NAME", choices=[run.name for run in RUNS])
    asked = parser.parse_args()
    if asked.measure is not None:
        for run in RUNS:
            if not asked.measure or run.name in asked.measure:
                print(f"{run.name}: {run.command}", file=sys.stderr, flush=True)
                measure(run)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page_text())
    README.write_text(readme_text(README.read_text()))


if __name__ == "__main__":
    main()
