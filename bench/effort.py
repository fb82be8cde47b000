"""What rounds that follow the run buy, and what they cost: loss, samples and bytes beside fixed ones.

    python bench/effort.py [--quick] [--json]

Byte GPT of 22 k parameters, DiLoCo, int8 both ways; all in one process (`atoll.experiment`), so that rules can be
tried before machines are rented. Every line of a group goes on until the same number of samples was learned from,
or, in `growing`, for the same number of steps:

    growing   two of eight members begin, the others come a third later: rates by steps, or by tokens (nominal for
              all eight, or what is learned in fact); rounds of fixed steps, or of about as many samples
    slow      four members, of which one has a quarter of the speed and one half: rounds in minutes
    steps     rounds of 60 or 15 steps, or AdaComm's between them
    batch     batches of 2 or 16, or from 2 on by the loss

`val loss` is the agreed model's, nats per byte, the mean over seeds; `rounds` synchronisations, `MB` an average
peer's upload, `batch` that of the last round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from form import asking, report, versions

from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.training.data import Data, load_data
from atoll.training.experiment.api import ExperimentOptions, ExperimentSimulator
from atoll.training.experiment.faults import FaultSpec, MemberAbsence
from atoll.training.models import build_model
from atoll.training.recipe.recipes import Recipe, diloco, over_tokens, with_length

MODEL, SEQ, SAMPLES = "gpt-nano", 32, 1024
SPEEDS = FaultSpec(speeds=(1.0, 1.0, 0.5, 0.25))


@dataclass(frozen=True)
class Line:
    group: str
    name: str
    peers: int = 4
    steps: int = 30  # of a round
    batch: int = 4
    share: float | None = None  # horizon, of the tokens that all members could learn from; None: rates by steps
    effort: AdaptiveWorkloadPolicy | None = None
    trouble: FaultSpec = field(default_factory=FaultSpec)


def lines(total: int) -> list[Line]:
    """Of runs of so many steps at batches of four."""
    grows = FaultSpec(absent=tuple(MemberAbsence(peer, 0, total // 3) for peer in range(2, 8)))
    same = AdaptiveWorkloadPolicy(4, samples=2 * 60 * 4, steps_min=5)
    by_loss = AdaptiveWorkloadPolicy(2, batches=LossAdaptiveBatchSize(2.3, 2, 16), bounded=True)
    return [
        Line("growing", "rates by steps", 8, 15, trouble=grows),
        Line("growing", "rates by tokens, of eight", 8, 15, share=1.0, trouble=grows),
        Line("growing", "rates by tokens, as learned", 8, 15, share=0.75, trouble=grows),
        Line("growing", "as many samples, tokens as learned", 8, 60, share=0.75, effort=same, trouble=grows),
        Line("slow", "rates by steps", trouble=SPEEDS),
        Line("slow", "rates by tokens", share=11 / 16, trouble=SPEEDS),
        Line("steps", "60", steps=60),
        Line("steps", "15", steps=15),
        Line("steps", "by loss, 60 to 15", steps=60, effort=AdaptiveWorkloadPolicy(4, by_loss=True, steps_min=15)),
        Line("batch", "2", batch=2, share=1.0),
        Line("batch", "16", batch=16, share=1.0),
        Line("batch", "by loss, from 2 to 16", batch=2, share=1.0, effort=by_loss),
    ]


def recipe_for(line: Line, seed: int, total: int) -> Recipe:
    made = diloco(
        MODEL, rounds=-(-total // line.steps), inner_steps=line.steps, batch=line.batch, seq_len=SEQ, seed=seed
    )
    made = with_length(made, total * 4 // line.batch if line.group == "batch" else total)
    return made if line.share is None else over_tokens(made, round(line.share * line.peers * total * 4 * SEQ))


def played(line: Line, seed: int, total: int, data: Data) -> dict[str, float]:
    """A run of as many samples as `total` steps of batches of four are, but for who is slow or away."""
    recipe, model = recipe_for(line, seed, total), build_model(MODEL, seed)
    most = total * 4 // (2 if line.group == "batch" else 4)  # steps: of the smallest batches
    options = ExperimentOptions(effort=line.effort)
    run = ExperimentSimulator(recipe, model, data, line.peers, most, line.trouble, options=options)
    wanted = total * 4 * line.peers * SEQ if line.group == "batch" else None
    while run.now < run.steps and (wanted is None or run.round_clock.tokens < wanted):
        run.step()
    return {
        "val loss": run.loss_at(run.agreed(), SAMPLES),
        "samples": run.round_clock.tokens // SEQ,
        "rounds": len(run.history),
        "MB": run.traffic.upload_bytes / 1e6,
        "batch": run.history[-1].batch,
    }


def main() -> None:
    asked = asking(__doc__, "a fifth of the steps, one seed").parse_args()
    torch.set_num_threads(1)
    total, seeds = (120, 1) if asked.quick else (600, 2)
    data, figures = load_data("stdlib"), list[dict[str, object]]()
    if not asked.json:
        print("| group | | val loss | samples | rounds | MB | batch |\n|---|---|---|---|---|---|---|", flush=True)
    for line in lines(total):
        runs = [played(line, seed, total, data) for seed in range(seeds)]
        mean = {name: round(sum(run[name] for run in runs) / seeds, 4) for name in runs[0]}
        figures.append({"group": line.group, "line": line.name} | mean)
        if not asked.json:
            print("| " + " | ".join(str(cell) for cell in figures[-1].values()) + " |", flush=True)
    if asked.json:
        settings = {"model": MODEL, "steps": total, "seeds": seeds, "quick": asked.quick}
        print(report("effort", settings, figures, versions("torch")))


if __name__ == "__main__":
    main()
