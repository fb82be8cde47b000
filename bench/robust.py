"""What robust rules cost beside byzfl's, in CPU seconds of all threads, same process, turn by turn.

fp32 rows of normal values, n = 20, f = 4, d = 1 000 000; medians. The settings are byzfl's where the two differ
(Krum's neighbours, Weiszfeld's three steps from zero, one clipping step), so that both do the same work.
Without byzfl the comparison is skipped and says so; to have it, apart from the project's environment:

    python -m pip install --no-deps --target bench/.venv/robust byzfl==0.0.11 scipy
    python bench/robust.py [--quick] [--json]
"""

from __future__ import annotations

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

from atoll.learn.aggregate import aggregate

N, F, D, ROUNDS = 20, 4, 1_000_000, 7
QUICK_D, QUICK_ROUNDS = 200_000, 3
BYZFL = "0.0.11"
HERE = Path(__file__).resolve().parent / ".venv" / "robust"

NEIGHBOURS = {"neighbours": N - F - 1}
WEISZFELD = {"steps": 3, "floor": 0.1, "from_origin": True}
Asked = tuple[str, dict, str, float | None]  # our rule and its settings, byzfl's name for it, the ratio to reach
RULES: dict[str, Asked] = {
    "mean": ("mean", {}, "Average()", None),
    "krum": ("krum", {"f": F} | NEIGHBOURS, "Krum(f)", 2.5),
    "multi-krum": ("multi_krum", {"f": F} | NEIGHBOURS, "MultiKrum(f)", 4.0),
    "median": ("coordinate_median", {"f": F}, "Median()", 10.0),
    "trimmed mean": ("trimmed_mean", {"f": F}, "TrMean(f)", 10.0),
    "meamed": ("meamed", {"f": F}, "Meamed(f)", 15.0),
    "geometric median": ("geometric_median", {"f": F} | WEISZFELD, "GeometricMedian()", 7.0),
    "centred clipping": ("centred_clipping", {"f": F, "steps": 1, "radius": 100.0}, "CenteredClipping()", 7.0),
    "centred clipping, 3 steps": (
        *("centred_clipping", {"f": F, "steps": 3, "radius": 100.0}, "CenteredClipping(L=3)", 7.0),
    ),
    "mda": ("mda", {"f": F}, "MDA(f)", None),
    "monna": ("monna", {"f": F, "own": 0}, "MoNNA(f, 0)", None),
    "caf": ("caf", {"f": F}, "CAF(f)", None),
    "nnm + multi-krum": ("multi_krum", {"f": F, "pre": ["nnm"]} | NEIGHBOURS, "NNM(f)+MultiKrum(f)", 12.0),
    "nnm + trimmed mean": ("trimmed_mean", {"f": F, "pre": ["nnm"]}, "NNM(f)+TrMean(f)", 12.0),
    "nnm + geometric median": (
        *("geometric_median", {"f": F, "pre": ["nnm"]} | WEISZFELD, "NNM(f)+GeometricMedian()", 12.0),
    ),
    "bulyan": ("bulyan", {"f": F}, "", None),
}
SLOW = ("mda",)  # byzfl tries all C(20, 4) subsets of 16 whole vectors' distances in Python


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
    found: dict[str, Callable] = {"f": F}
    for name in ("aggregators", "preaggregators"):
        found |= vars(importlib.import_module(f"byzfl.aggregators.{name}"))
    return found


def theirs(words: str, classes: dict[str, Callable]) -> Callable[[Tensor], Tensor]:
    """`NNM(f)+TrMean(f)` as one function; the words are this file's own."""

    def run(rows: Tensor) -> Tensor:
        for word in words.split("+"):
            rows = eval(word, {"__builtins__": {}}, classes)(rows)  # anew: CenteredClipping goes on where it was
        return rows

    return run


def cpu_s(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def measured(name: str, rows: Tensor, rounds: int, classes: dict[str, Callable] | None) -> dict:
    rule, settings, words, target = RULES[name]
    their_rule = theirs(words, classes) if classes and words and name not in SLOW else None
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
        "ours_cpu_s": round(ours, 4),
        "byzfl_cpu_s": other and round(other, 4),
        "ratio": other and round(other / ours, 2),
        "target": target,
        "largest_difference": apart and float(f"{apart:.1e}"),
    }


def main() -> None:
    arguments = asking(__doc__, "d = 200 000, three rounds")
    arguments.add_argument("--threads", type=int, default=2, help="of torch, for both; our engines use one")
    arguments.add_argument("--rounds", type=int, help="instead of 7, or 3 with --quick")
    asked = arguments.parse_args()
    torch.set_num_threads(asked.threads)
    size, rounds = (QUICK_D, QUICK_ROUNDS) if asked.quick else (D, ROUNDS)
    rounds = asked.rounds or rounds
    classes = byzfl_rules()
    if classes is None:
        print(f"byzfl {BYZFL} is not here: ours alone. {__doc__.split(chr(10) * 2)[2].strip()}", file=sys.stderr)
    rows = torch.randn(N, size, generator=torch.Generator().manual_seed(4012))
    aggregate("trimmed_mean", rows, f=F)  # warm
    if not asked.json:
        print(
            "| rule | ours, CPU-s | byzfl, CPU-s | ratio | target | largest difference |\n|---|---|---|---|---|---|"
        )
    figures = []
    for name in RULES:
        figures.append(measured(name, rows, rounds, classes))
        if not asked.json:
            cells = ("" if cell is None else cell for cell in figures[-1].values())
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if asked.json:
        settings = {"n": N, "f": F, "d": size, "rounds": rounds, "threads": asked.threads, "quick": asked.quick}
        print(report("robust", settings, figures, versions("torch") | {"byzfl": classes and BYZFL}))


if __name__ == "__main__":
    main()
