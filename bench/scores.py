"""Loss scores: do honest updates score above every cheat, what does a score cost, and how many bytes travel?

Four members train in one process, by several recipes; in every round each member's update is scored as in a run
(`verification/loss_scoring/tensors.py`): 128 samples that were dealt to it, 128 that were dealt to nobody. Then
the same member sends
what a cheat would send in its place. `taught_share` and `hollow_share` are what scores of that kind were found to
be (`verification/loss_scoring/policy.py`), `above_share` how many honest updates of a run have a wider gap between
own and others
than this cheat in their place, and `errors` the mean of that gap in standard errors.
`cost_share` is CPU seconds of one score beside those of the round of training that it is about, for one scorer;
bytes are those of the update that is shown.

    python bench/scores.py [--quick] [--only NAME] [--json]
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from form import asking, report, versions
from torch import Tensor, nn

from atoll.crypto.digest import digest
from atoll.training.codec import Codec
from atoll.training.data import Data, epoch_samples, load_data, samples_at
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec, built_in_loss
from atoll.training.experiment.member import Loss
from atoll.training.experiment.simulator import InFlightFragment
from atoll.training.models import build_model, loss_of
from atoll.training.recipe import methods
from atoll.training.recipe.error_feedback import EncodedUpdate
from atoll.training.recipe.recipes import Recipe, UpdateCoding, diloco, with_overlap
from atoll.training.recipe.update import Bounds, moved
from atoll.verification.loss_scoring.policy import FALL_MOST, NAT, opinion_of
from atoll.verification.loss_scoring.tensors import (
    SAMPLES,
    LossDrops,
    dealt,
    falls_of,
    fixed_point,
    losses_of,
    undealt,
)
from atoll.verification.shown_update import ShownUpdate, update_bytes

PEERS, ROUNDS, QUICK_ROUNDS, STEPS = 4, 12, 4, 50


def bf16(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, batch)


def recipes(rounds: int) -> dict[str, tuple[Recipe, Loss]]:
    plain = diloco("gpt-tiny", rounds=rounds, inner_steps=STEPS)
    two_bit = diloco("gpt-tiny", rounds=rounds, inner_steps=STEPS, up="2bit")
    return {
        "diloco": (plain, built_in_loss),
        "2bit": (two_bit, built_in_loss),
        "bf16": (plain, bf16),
        "muon": (methods.muloco("gpt-tiny", rounds=rounds, inner_steps=STEPS), built_in_loss),
        "overlap": (with_overlap(plain, STEPS // 5, None), built_in_loss),
        "fragments": (with_overlap(plain, STEPS // 5, 2), built_in_loss),
        "sparse": (methods.sparseloco("gpt-tiny", rounds=rounds, inner_steps=STEPS), built_in_loss),
    }


@dataclass
class Seen:
    """Scores of one recipe: by kind, (round, member) -> what was measured."""

    falls: dict[str, dict[tuple[int, int], LossDrops]] = field(default_factory=lambda: defaultdict(dict))
    score_s: list[float] = field(default_factory=list)  # of one honest update
    looking_s: float = 0.0  # at all updates, those of cheats among them
    update_bytes: list[int] = field(default_factory=list)


class Watched(ExperimentSimulator):
    """An experiment whose updates are scored when they are reduced."""

    def __init__(self, recipe: Recipe, data: Data, loss: Loss, seen: Seen) -> None:
        model = build_model(recipe.model, recipe.seed)
        super().__init__(recipe, model, data, PEERS, recipe.schedule.steps, FaultSpec(), loss)
        self.seen = seen
        self.last: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # (member, fragment) -> its update before
        self.viewer.model.eval()

    def _reduce(
        self,
        flight: InFlightFragment,
        members: list[int],
        counted: list[int],
        updates: dict[int, EncodedUpdate],
        bounds: Bounds,
        ups: tuple[Codec, ...],
        coding: UpdateCoding,
    ) -> None:
        anchor_F = self.anchors[0].clone()
        rows = {
            p: tuple(u.decode(w, b - a) for u, w, (a, b) in zip(ups, updates[p].wires, bounds, strict=True))
            for p in members
        }
        began = time.process_time()
        for member in members:
            self._score(flight, member, anchor_F, updates, rows, bounds, ups)
        self.seen.looking_s += time.process_time() - began
        super()._reduce(flight, members, counted, updates, bounds, ups, coding)

    def _score(
        self,
        flight: InFlightFragment,
        member: int,
        anchor_F: Tensor,
        updates: dict[int, EncodedUpdate],
        rows: dict[int, tuple[Tensor, ...]],
        bounds: Bounds,
        ups: tuple[Codec, ...],
    ) -> None:
        began = time.process_time()
        recipe, cursor = self.recipe, self.workers[member].cursor
        samples = recipe.schedule.inner_steps // recipe.schedule.fragments * recipe.batch
        drawn = digest(b"%d %d" % (self.launched, member))
        own = dealt(drawn, member, PEERS, cursor - samples, samples)
        epoch = epoch_samples(self.held_out, recipe.seq_len)
        positions = own + undealt(drawn, cursor * PEERS, epoch, len(own))
        before = self._losses(anchor_F, positions)

        def scored(x_F: Tensor) -> LossDrops:
            return falls_of(before, self._losses(x_F, positions), len(own))

        def cheat(values: tuple[Tensor, ...]) -> LossDrops:
            x_F = anchor_F.clone()
            for value_N, (lo, hi) in zip(values, bounds, strict=True):
                x_F[flight.lo + lo : flight.lo + hi] -= value_N
            return scored(x_F)

        place, falls = (self.launched, member), self.seen.falls
        sent_F = anchor_F.clone()
        ShownUpdate(updates[member].wires, moved(bounds, flight.lo), ups).subtract_from(sent_F)
        falls["honest"][place] = scored(sent_F)
        self.seen.score_s.append(time.process_time() - began)
        self.seen.update_bytes.append(len(update_bytes(updates[member].wires)))
        mine, others = rows[member], [rows[p] for p in rows if p != member]
        falls["another's update"][place] = cheat(others[self.launched % len(others)])
        falls["the others' mean"][place] = cheat(
            tuple(torch.stack(each).mean(0) for each in zip(*others, strict=True))
        )
        falls["sign flip"][place] = cheat(tuple(-value_N for value_N in mine))
        falls["ten times as much"][place] = cheat(tuple(10 * value_N for value_N in mine))
        falls["nothing"][place] = cheat(tuple(torch.zeros_like(value_N) for value_N in mine))
        falls["noise"][place] = cheat(tuple(self._noise(value_N) for value_N in mine))
        key = member, flight.fragment
        if (last := self.last.get(key)) is not None:
            falls["its last update again"][place] = cheat(last)
        self.last[key] = mine

    def _noise(self, value_N: Tensor) -> Tensor:
        noise_N = torch.randn(len(value_N), generator=torch.Generator().manual_seed(self.launched))
        return noise_N * (value_N.norm() / noise_N.norm())

    def _losses(self, x_F: Tensor, positions: tuple[int, ...]) -> list[float]:
        self.viewer.x_F.copy_(x_F)
        at_B = np.array(positions, dtype=np.int64)
        halves = (at_B[: len(at_B) // 2], at_B[len(at_B) // 2 :])
        return [
            loss
            for half in halves
            for loss in losses_of(
                self.viewer.model, samples_at(self.held_out, half, self.recipe.seq_len, self.recipe.seed)
            )
        ]


def _worth(falls: LossDrops) -> float:
    """Nothing, where the step leads nowhere."""
    return falls.own - falls.others if falls.own > 0 else 0.0


def told(seen: Seen, train_s: float, rounds: int) -> dict[str, object]:
    honest = seen.falls["honest"]
    gaps = [falls.own - falls.others for falls in honest.values()]
    kinds: dict[str, object] = {}
    for kind, of in seen.falls.items():
        found = [opinion_of(fixed_point(falls, NAT, FALL_MOST)) for falls in of.values()]
        above = [_worth(honest[at]) > _worth(f) for at, f in of.items() if at in honest]
        finite = [f for f in of.values() if f.error > 0]
        kinds[kind] = {
            "scores": len(of),
            "taught_share": found.count("taught") / len(found),
            "hollow_share": found.count("hollow") / len(found),
            "above_share": None if kind == "honest" else sum(above) / len(above),
            "errors": sum((f.own - f.others) / f.error for f in finite) / len(finite) if finite else None,
        }
    score_s = sorted(seen.score_s)[len(seen.score_s) // 2]
    return {
        "kinds": kinds,
        "gap_nats": sum(gaps) / len(gaps),
        "score_s": score_s,
        "cost_share": score_s / (train_s / rounds / PEERS),
        "update_bytes": sum(seen.update_bytes) // len(seen.update_bytes),
    }


def main() -> None:
    parser = asking(__doc__, f"{QUICK_ROUNDS} rounds instead of {ROUNDS}, one recipe")
    parser.add_argument("--only", metavar="NAME", help="one recipe: " + ", ".join(recipes(1)))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    names = [asked.only] if asked.only else ["diloco"] if asked.quick else list(recipes(1))
    data, figures = load_data("stdlib"), {}
    for name in names:
        recipe, loss = recipes(rounds)[name]
        seen = Seen()
        run = Watched(recipe, data, loss, seen)
        began = time.process_time()
        while run.now < run.steps:
            run.step()
        figures[name] = told(seen, time.process_time() - began - seen.looking_s, rounds)
        if not asked.json:
            print(name, msgspec.json.format(msgspec.json.encode(figures[name]), indent=1).decode(), flush=True)
    if asked.json:
        settings = {"peers": PEERS, "rounds": rounds, "steps": STEPS, "samples": SAMPLES}
        print(report("scores", settings, figures, versions("torch")))


if __name__ == "__main__":
    main()
