"""What becomes of a model when a minority is cut off, trains on, and comes back: rules for what it brings.

    python bench/apart.py [--quick] [--json]

Byte GPT of 22 k parameters, DiLoCo, seven members, 2 bits up, int8 down, 30 steps a round; all in one process
(`atoll.experiment`). Two or three of them hear nobody for ten rounds or for twenty. They take as many steps as the
others meanwhile, at most `bound` rounds' worth, and send the difference d with their next update u:

    wait    they stand still, as everybody does who is cut off where genesis says nothing
    whole   d
    model   their model as it is: the difference to what the others have reached
    root    d / sqrt(1 + rounds away), as FedBuff weighs staleness (2106.06639)
    share   d / (1 + rounds away)
    twice   d, as long as 2 u at the most
    merge   d, as long as u at the most: what real rounds do (`features/partition_training/tensors.carried`)

Figures are validation losses of the agreed model, before they are back, one round after, four rounds after and at
the end; means over seeds. `length` is that of d, in lengths of u.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from form import asking, report, versions
from torch import Tensor

from atoll.features.partition_training.tensors import UpdateWithoutQuorum, carried
from atoll.training.data import Data, load_data
from atoll.training.experiment.api import ExperimentSimulator
from atoll.training.experiment.faults import FaultSpec, MemberAbsence
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.error_feedback import EncodedUpdate, encode_update
from atoll.training.recipe.recipes import UpdateCoding, diloco
from atoll.training.recipe.update import Bounds

MODEL, PEERS, STEPS, SAMPLES = "gpt-nano", 7, 30, 512
RULES = ("wait", "whole", "model", "root", "share", "twice", "merge")


class Cut(NamedTuple):
    away: int  # members
    since: int  # rounds
    until: int
    rounds: int
    bound: int  # rounds' worth of steps


CUTS = (Cut(2, 8, 18, 30, 10), Cut(3, 8, 28, 40, 10))
QUICK = (Cut(2, 4, 8, 12, 4),)


class Healed(ExperimentSimulator):
    """Members that are away train on by themselves, and bring what they did."""

    rule, bound = "wait", 0

    def __init__(self, *what: object) -> None:
        super().__init__(*what)  # pyright: ignore[reportArgumentType]
        self.out: dict[int, tuple[Tensor, int]] = {}  # member -> (anchor that it left, steps since)
        self.late: dict[int, tuple[Tensor, int]] = {}  # member -> (what it did, rounds away)
        self.lengths: list[float] = []

    def step(self):
        done = super().step()
        for peer, (anchor_F, steps) in self.out.items():
            if self.rule != "wait" and steps < self.bound:
                self.workers[peer].train(self.recipe, self.shares[peer], self.now - 1)
                self.out[peer] = anchor_F, steps + 1
        return done

    def _update_presence(self, step: int) -> None:
        before = set(self.present)
        here = {peer for peer in range(PEERS) if not self.trouble.is_away(peer, step)}
        self.out |= {peer: (self.anchors[0].clone(), 0) for peer in before - here}
        for peer in here - before:
            anchor_F, steps = self.out.pop(peer)
            away = max(one.until or 0 for one in self.trouble.absent) - self.trouble.absent[0].since
            if steps:
                left_F = self.anchors[0] if self.rule == "model" else anchor_F
                self.late[peer] = left_F - self.workers[peer].x_F, away // STEPS
        super()._update_presence(step)

    def _encoded(
        self, peer: int, lo: int, hi: int, bounds: Bounds, ups: tuple, coding: UpdateCoding
    ) -> EncodedUpdate:
        worker = self.workers[peer]
        begin_F, end_F = worker.progress(self.recipe.inner, self._anchor_of(peer), lo, hi)
        if peer in self.late:
            late_F, rounds = self.late.pop(peer)
            fresh_F = begin_F - end_F
            self.lengths.append(float(late_F.norm() / fresh_F.norm()))
            end_F = end_F - self._brought(late_F, fresh_F, rounds)
        return encode_update(begin_F, end_F, worker.memory_F[lo:hi], bounds, ups, coding.beta)

    def _brought(self, late_F: Tensor, fresh_F: Tensor, rounds: int) -> Tensor:
        match self.rule:
            case "root":
                return late_F / (1 + rounds) ** 0.5
            case "share":
                return late_F / (1 + rounds)
            case "twice":
                return carried(UpdateWithoutQuorum(late_F, 0, 1, 1), 2 * fresh_F)
            case "merge":
                return carried(UpdateWithoutQuorum(late_F, 0, 1, 1), fresh_F)
            case _:
                return late_F


def played(rule: str, cut: Cut, seed: int, data: Data) -> dict[str, float]:
    recipe = diloco(MODEL, rounds=cut.rounds, inner_steps=STEPS, seed=seed, up="2bit", down="int8")
    absent = tuple(MemberAbsence(peer, cut.since * STEPS, cut.until * STEPS) for peer in range(cut.away))
    trouble = FaultSpec(absent=absent)
    run = Healed(recipe, build_model(MODEL, seed), data, PEERS, recipe.schedule.steps, trouble, loss_of)
    run.rule, run.bound = rule, cut.bound * STEPS
    losses = {step // STEPS: loss for step, loss in run.run_to_end(STEPS, SAMPLES, None).curve}
    at = {"before": cut.until, "one_after": cut.until + 1, "four_after": cut.until + 4, "end": cut.rounds}
    length = sum(run.lengths) / len(run.lengths) if run.lengths else 0.0
    return {name: losses[round] for name, round in at.items()} | {"length": length}


def main() -> None:
    asked = asking(__doc__, "one short cut, one seed, three rules").parse_args()
    torch.set_num_threads(1)
    data, figures = load_data("stdlib"), list[dict[str, object]]()
    seeds, rules = (1, ("wait", "whole", "merge")) if asked.quick else (2, RULES)
    for cut in QUICK if asked.quick else CUTS:
        for rule in rules:
            runs = [played(rule, cut, seed, data) for seed in range(seeds)]
            mean = {name: round(sum(run[name] for run in runs) / seeds, 4) for name in runs[0]}
            figures.append({"away": cut.away, "rounds_away": cut.until - cut.since, "rule": rule} | mean)
    if asked.json:
        settings = {"model": MODEL, "peers": PEERS, "steps": STEPS, "seeds": seeds, "quick": asked.quick}
        print(report("apart", settings, figures, versions("torch")))
        return
    print("| away | for rounds | rule | before | one round after | four after | at the end | length |")
    print("|---|---|---|---|---|---|---|---|")
    for row in figures:
        print("| " + " | ".join(str(cell) for cell in row.values()) + " |")


if __name__ == "__main__":
    main()
