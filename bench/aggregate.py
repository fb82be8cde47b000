"""What robust rules cost beside byzfl's, in CPU seconds of all threads, same process, turn by turn.

fp32 rows of normal values, f = n / 5 (Bulyan: the most it can take); medians. The settings are byzfl's where the
two differ (Krum's neighbours, Weiszfeld's three steps from zero, one clipping step), so that both do the same work.
`floor_ratio` is our time over that of reading all rows once (torch's sum of them on one core, in the same process);
`extra_mib` is how far the process grew above what it held before, answer included, by the kernel's peak counter.
Without byzfl the comparison is skipped and says so; to have it, apart from the project's environment:

    python -m pip install --no-deps --target bench/.venv/robust byzfl==0.0.11 scipy
    python bench/aggregate.py [--n 10 20] [--d 1000000] [--against byzfl|nobody] [--quick] [--json]
    python bench/aggregate.py --n 50 --d 10000000 --against nobody        # 2 GB of rows
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import time
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from form import asking, report, versions
from torch import Tensor

from atoll.training.codec.compiled import native
from atoll.training.robust import aggregate

N, D, ROUNDS = (10, 20), 1_000_000, 7
REST_S = 0.05
QUICK_D, QUICK_ROUNDS = 200_000, 3
BYZFL = "0.0.11"
HERE = Path(__file__).resolve().parent / ".venv" / "robust"

WEISZFELD = {"steps": 3, "floor": 0.1, "from_origin": True}
CLIPPED = {"steps": 1, "radius": 100.0}
KRUM = {"neighbours": None}  # n - f - 1, byzfl's number of neighbours
Asked = tuple[str, dict, str, float | None]  # our rule and its settings, byzfl's name for it, the ratio to reach
RULES: dict[str, Asked] = {
    "mean": ("mean", {}, "Average()", None),
    "krum": ("krum", KRUM, "Krum(f)", 2.5),
    "multi-krum": ("multi_krum", KRUM, "MultiKrum(f)", 4.0),
    "median": ("coordinate_median", {}, "Median()", 10.0),
    "trimmed mean": ("trimmed_mean", {}, "TrMean(f)", 10.0),
    "meamed": ("meamed", {}, "Meamed(f)", 15.0),
    "geometric median": ("geometric_median", WEISZFELD, "GeometricMedian()", 7.0),
    "centred clipping": ("centered_clipping", CLIPPED, "CenteredClipping()", 7.0),
    "centred clipping, 3 steps": ("centered_clipping", CLIPPED | {"steps": 3}, "CenteredClipping(L=3)", 7.0),
    "mda": ("mda", {}, "MDA(f)", None),
    "monna": ("monna", {"own": 0}, "MoNNA(f, 0)", None),
    "caf": ("caf", {}, "CAF(f)", None),
    "blended caf": ("blended_caf", {}, "", None),
    "nnm + multi-krum": ("multi_krum", KRUM | {"pre": ["nnm"]}, "NNM(f)+MultiKrum(f)", 12.0),
    "nnm + trimmed mean": ("trimmed_mean", {"pre": ["nnm"]}, "NNM(f)+TrMean(f)", 12.0),
    "nnm + geometric median": ("geometric_median", WEISZFELD | {"pre": ["nnm"]}, "NNM(f)+GeometricMedian()", 12.0),
    "bulyan": ("bulyan", {}, "", None),
}
SLOW = ("mda",)  # byzfl tries all C(20, 4) subsets of 16 whole vectors' distances in Python
ORDER = ("median", "trimmed mean", "meamed")
MANY, MANY_TARGET = 50, 5.0  # what is asked of order statistics among many


def byzfl_rules() -> dict[str, Callable] | None:
    """byzfl's classes without its package's own imports, which ask for torchvision and two plotting libraries."""
    sys.path.append(str(HERE))
    spec = importlib.util.find_spec("byzfl")
    if spec is None or version("byzfl") != BYZFL:
        return None
    for name in ("byzfl", "byzfl.aggregators"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(spec.submodule_search_locations[0], *name.split(".")[1:]))]
        sys.modules[name] = package
    found: dict[str, Callable] = {}
    for name in ("aggregators", "preaggregators"):
        found |= vars(importlib.import_module(f"byzfl.aggregators.{name}"))
    return found


def theirs(words: str, f: int, classes: dict[str, Callable]) -> Callable[[Tensor], Tensor]:
    """`NNM(f)+TrMean(f)` as one function; the words are this file's own."""
    known = classes | {"f": f}

    def run(rows: Tensor) -> Tensor:
        for word in words.split("+"):
            # anew: CenteredClipping goes on where it was
            rows = eval(word, {"__builtins__": {}}, known)(rows)  # noqa: S307  # what the caller typed
        return rows

    return run


def cpu_s(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """After a rest: OpenMP's threads wait for more work in a loop, and whoever came next would pay for that."""
    time.sleep(REST_S)
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def floor_s(rows: Tensor) -> float:
    """CPU-s of reading the rows once, on one core: the least that any rule can take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    least = min(cpu_s(rows.sum)[0] for _ in range(5))
    torch.set_num_threads(threads)
    return least


def grown_mib(work: Callable[[], Tensor]) -> float:
    """How far the resident memory of this process rose above what it was before, in MiB (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would be counted as here already
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = _kib("VmRSS")
    work()
    return (_kib("VmHWM") - before) / 1024


def _kib(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))


def measured(name: str, rows: Tensor, rounds: int, floor: float, classes: dict[str, Callable] | None) -> dict:
    n = len(rows)
    f = (n - 3) // 4 if name == "bulyan" else n // 5
    rule, settings, words, target = RULES[name]
    settings = settings | {"f": f} | ({"neighbours": n - f - 1} if "neighbours" in settings else {})
    their_rule = theirs(words, f, classes) if classes and words and name not in SLOW else None
    if n >= MANY:
        target = MANY_TARGET if name in ORDER else None
    extra = grown_mib(lambda: aggregate(rule, rows, **settings))
    ours_s, byzfl_s, apart = [], [], None
    for _ in range(rounds):
        seconds, answer = cpu_s(lambda: aggregate(rule, rows, **settings))
        ours_s.append(seconds)
        if their_rule is not None:
            seconds, other = cpu_s(lambda: their_rule(rows))
            byzfl_s.append(seconds)
            apart = float((answer - other).abs().max())
    ours, other = median(ours_s), median(byzfl_s) if byzfl_s else None
    return {
        "rule": name,
        "n": n,
        "d": rows.shape[1],
        "cpu_s": round(ours, 4),
        "cpu_s_byzfl": other and round(other, 4),
        "speedup": other and round(other / ours, 2),
        "target": target,
        "floor_ratio": round(ours / floor, 1),
        "extra_mib": round(extra, 1),
        "largest_difference": apart and float(f"{apart:.1e}"),
    }


def main() -> None:
    arguments = asking(__doc__, "d = 200 000, three rounds")
    arguments.add_argument("--n", type=int, nargs="+", default=N, help="numbers of rows")
    arguments.add_argument("--d", type=int, help="values per row, instead of a million")
    arguments.add_argument("--against", choices=("byzfl", "nobody"), default="byzfl")
    arguments.add_argument("--threads", type=int, default=2, help="of torch, for both; our engines use one")
    arguments.add_argument("--rounds", type=int, help="instead of 7, or 3 with --quick")
    asked = arguments.parse_args()
    torch.set_num_threads(asked.threads)
    size, rounds = (QUICK_D, QUICK_ROUNDS) if asked.quick else (D, ROUNDS)
    size, rounds = asked.d or size, asked.rounds or rounds
    classes = byzfl_rules() if asked.against == "byzfl" else None
    if classes is None and asked.against == "byzfl":
        print(f"byzfl {BYZFL} is not here: ours alone. {__doc__.split(chr(10) * 2)[2].strip()}", file=sys.stderr)
    native.load()  # not part of any figure
    figures = []
    for n in asked.n:
        rows = torch.empty(n, size)
        rows.normal_(generator=torch.Generator().manual_seed(4012))
        aggregate("trimmed_mean", rows[:, :65_536], f=n // 5)  # warm
        floor = floor_s(rows)
        for name in RULES:
            figures.append(measured(name, rows, rounds, floor, classes))
            if asked.json:
                continue
            if len(figures) == 1:
                print("| " + " | ".join(figures[0]) + " |\n|" + "---|" * len(figures[0]))
            cells = ("" if cell is None else cell for cell in figures[-1].values())
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        del rows
    if asked.json:
        settings = {"n": list(asked.n), "d": size, "rounds": rounds, "threads": asked.threads, "quick": asked.quick}
        print(report("aggregate", settings, figures, versions("torch") | {"byzfl": classes and BYZFL}))


if __name__ == "__main__":
    main()
