"""What a recipe reaches and what it sends, beside synchronous data parallelism with the same data and steps.

    python bench/convergence.py --recipe streaming --peers 4 --steps 1500 --seeds 1 [--json] [--quick]
    python bench/convergence.py --recipe streaming --set outer_momentum=0.8 --set phases=0.9:8:int8:int8

The setting is that of the reference study: a byte GPT of 167 936 parameters, the sources of Python's standard
library, 4 sequences of 64 bytes per peer and step (16 over all), AdamW 4e-3 with 100 steps of warm-up and a cosine
to a tenth. `--set` changes a number of the recipe; `phases` is since:inner_steps:up:down, more with commas.
`gap_percent` compares validation losses of the agreed model; with several seeds, the median of the gaps, each to
the baseline of its own seed (`gap_percent_by_seed`); losses are medians, too. Ratios count every copy of every
tensor payload that one peer sends and hears (`atoll.training.experiment.api`). The baseline's losses are kept in
`--baselines`, a JSON file, by setting, so that many recipes need it only once. `--absent 5:300 4:0:600`: peer 5
vanishes after step 300 for good, peer 4 comes after step 600. The baseline knows no trouble.

`wire_ratio` is what sockets count, with all that is said beside tensors (bench/wire.py): real peers run the recipe
for a few rounds where `--wire MODEL` names one of 10 M parameters or so. Without it, or where real runs cannot do
this, it is null, and `wire` says why.

`modelled_h` is arithmetic, not measured: hours for as many steps of 1 s of a model of 100 M parameters, by this
very recipe among as many peers, every one on a link of 20, 100 or 1000 Mbit/s each way and 50 ms from the others,
by the forecast of `atoll plan`. `bench/pareto.py` makes a table and a picture of many of these reports.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import time
from pathlib import Path

import msgspec
import torch
from form import asking, report, versions

import wire
from atoll.cli.plan import LinkAssumptions, row_of
from atoll.peer.config.validate import RECIPES
from atoll.training.data import Data, data_digest, load_data
from atoll.training.experiment.api import (
    ExperimentOptions,
    ExperimentResult,
    FaultSpec,
    MemberAbsence,
    SyncRecord,
    experiment,
)
from atoll.training.experiment.cost_model import layout_of_size
from atoll.training.recipe.methods import METHODS
from atoll.training.recipe.recipes import Recipe, UpdateCoding
from atoll.training.recipe.schedule import parse_phases

QUICK_STEPS = 300
MODELLED, STEP_S, LATENCY_S = 100_000_000, 1.0, 0.05  # parameters of the modelled run, its steps and its links
RATES_MBIT = (20, 100, 1000)


def value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def absence(text: str) -> MemberAbsence:
    """PEER:SINCE or PEER:SINCE:UNTIL, in steps."""
    return MemberAbsence(*(int(word) for word in text.split(":")))


def recipe_of(name: str, given: dict[str, object], steps: int, seed: int) -> Recipe:
    """The method's recipe for so many steps; what its function does not take is set on its pieces."""
    make, given = METHODS[name], dict(given)
    pieces = {key: given.pop(key) for key in ("phases", "closing", "answer") if key in given}
    probe = make("gpt-tiny", **given)
    rounds = -(-steps // probe.schedule.inner_steps)
    recipe = make("gpt-tiny", rounds=rounds, seed=seed, **given)
    schedule, coding = recipe.schedule, recipe.coding
    if "phases" in pieces:
        schedule = msgspec.structs.replace(schedule, phases=parse_phases(str(pieces["phases"])))
    if "closing" in pieces:
        schedule = msgspec.structs.replace(schedule, closing=str(pieces["closing"]))
    if "answer" in pieces:
        coding = msgspec.convert(msgspec.to_builtins(coding) | {"answer": pieces["answer"]}, UpdateCoding)
    return msgspec.structs.replace(recipe, schedule=schedule, coding=coding)


def baseline(data: Data, asked: argparse.Namespace, seed: int) -> float:
    """Synchronous data parallelism's loss, from the file if it was measured before."""
    kept = Path(asked.baselines) if asked.baselines else None
    known = json.loads(kept.read_text()) if kept and kept.exists() else {}
    key = f"{data_digest(data).hex()[:16]} M={asked.peers} steps={asked.steps} seed={seed}"
    if key not in known:
        done = run(recipe_of("data_parallel", {}, asked.steps, seed), data, asked, FaultSpec())
        known = json.loads(kept.read_text()) if kept and kept.exists() else {}
        known[key] = done.val_loss
        if kept:
            kept.write_text(json.dumps(known, indent=1))
    return known[key]


def run(recipe: Recipe, data: Data, asked: argparse.Namespace, trouble: FaultSpec) -> ExperimentResult:
    def say(one: SyncRecord) -> None:
        if one.fragment == 0 and one.step - say.last >= 250:
            say.last = one.step
            print(f"{one.step} {one.train_loss:.4f}", file=sys.stderr, flush=True)

    say.last = 0
    options = ExperimentOptions(feedback_precision=asked.feedback)
    return experiment(
        recipe, data=data, peers=asked.peers, steps=asked.steps, trouble=trouble, progress=say, options=options
    )


def measured(asked: argparse.Namespace) -> dict:
    given = {key: value(text) for key, _, text in (one.partition("=") for one in asked.set)}
    data = load_data(asked.data)
    late, speeds, absent = (tuple(one) for one in (asked.late, asked.speeds, asked.absent))
    trouble = FaultSpec(lost=asked.lost, late=late, speeds=speeds, absent=absent)
    began, seeds = time.monotonic(), range(asked.seed, asked.seed + asked.seeds)
    outcomes = [run(recipe_of(asked.recipe, given, asked.steps, seed), data, asked, trouble) for seed in seeds]
    wall_s = time.monotonic() - began
    figures = {
        "recipe": asked.recipe,
        "set": asked.set,
        "feedback": asked.feedback,
        "peers": asked.peers,
        "steps": asked.steps,
        "seeds": asked.seeds,
        "val_loss": round(statistics.median(one.val_loss for one in outcomes), 5),
        "live_loss": round(statistics.median(one.live_loss for one in outcomes), 5),
        "upload_ratio": _ratio(outcomes[0].upload_ratio),
        "download_ratio": _ratio(outcomes[0].download_ratio),
        **on_the_wire(asked),
        "rounds": outcomes[0].rounds,
        "wall_s": round(wall_s, 1),
        "modelled_h": modelled_h(recipe_of(asked.recipe, given, asked.steps, asked.seed), asked.steps, asked.peers),
    }
    if not asked.alone:
        theirs = [baseline(data, asked, seed) for seed in seeds]
        gaps = [100 * (one.val_loss / their - 1) for one, their in zip(outcomes, theirs, strict=True)]
        figures |= {
            "val_loss_data_parallel": round(statistics.median(theirs), 5),
            "gap_percent": round(statistics.median(gaps), 2),
            "gap_percent_by_seed": [round(gap, 2) for gap in gaps],
        }
    return figures


def on_the_wire(asked: argparse.Namespace) -> dict[str, object]:
    """`wire_ratio` by sockets' counters, and what it was measured with; null, and why, where it was not."""
    why = ""
    if not asked.wire:
        why = "not asked for: --wire gpt-10m"
    elif asked.recipe not in RECIPES:
        why = f"real runs have no {asked.recipe}"
    elif asked.set:
        why = "real runs here have a recipe's own numbers, and --set asks for others"
    if why:
        return {"wire_ratio": None, "wire": why}
    found = wire.measured(asked.recipe, asked.wire, asked.peers, wire.ROUNDS)
    told = f"{found['rounds']} rounds of {found['peers']} peers, {found['parameters']} parameters, by the plan"
    return {"wire_ratio": found["wire_ratio"], "wire": f"{told} {found['upload_ratio']}"}


def modelled_h(recipe: Recipe, steps: int, peers: int) -> dict[str, float | None]:
    """Hours of a large run by this recipe, by the links' rate in Mbit/s; None where it cannot be cut like that."""
    layout, hours = layout_of_size(MODELLED), {}
    for rate in RATES_MBIT:
        links = LinkAssumptions(peers, rate * 125_000, rate * 125_000, LATENCY_S)
        round_s = row_of("", recipe, layout, links, STEP_S, 1)["round_s"]
        whole = None if round_s is None else round_s * steps / recipe.schedule.inner_steps / 3600
        hours[str(rate)] = None if whole is None else round(whole, 2)
    return hours


def _ratio(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 1)


def main() -> None:
    torch.set_num_threads(1)
    parser = asking(__doc__, f"{QUICK_STEPS} steps", json="one object instead of lines")
    parser.add_argument("--recipe", default="auto" if "auto" in METHODS else "streaming", choices=sorted(METHODS))
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--feedback", default="fp32", choices=("fp32", "bf16"), help="precision of error feedback")
    parser.add_argument("--lost", type=float, default=0.0, help="share of updates that never arrive")
    parser.add_argument("--late", type=int, nargs="*", default=[], help="steps that each peer's updates take")
    parser.add_argument(
        "--speeds", type=float, nargs="*", default=[], help="steps of each peer per step, at most 1"
    )
    parser.add_argument("--absent", type=absence, nargs="*", default=[], metavar="PEER:SINCE[:UNTIL]")
    parser.add_argument("--data", default="stdlib", metavar="FILE")
    parser.add_argument("--baselines", default="", metavar="FILE")
    parser.add_argument("--wire", default="", metavar="MODEL", help="count sockets' bytes of a short real run, too")
    parser.add_argument("--alone", action="store_true", help="without the baseline")
    asked = parser.parse_args()
    if asked.quick:
        asked.steps = QUICK_STEPS
    figures = measured(asked)
    if asked.json:
        told = {name: getattr(asked, name) for name in ("data", "seed", "lost", "late", "absent")}
        print(report("convergence", {"model": "gpt-tiny"} | told, figures, versions("torch")))
        return
    for name, figure in figures.items():
        print(f"{name:24}{figure}")


if __name__ == "__main__":
    main()
