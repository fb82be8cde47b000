"""Twins: are updates of two peers that learn from the same samples nearer than others', and is a cheat's not?

Six members train in one process. In every round two pairs of them, drawn anew, learn from the same samples; the
other members have their own, as always. Moments and error feedback are each member's own. `ratio` is the distance
of the updates of two twins, as owners decode them, in units of the median distance of either to those that learned
from other samples: what the signed products of a run with distances give for nothing, and scorers can measure.
Then one of the first pair sends what a cheat, a crash or other arithmetic would send in its place, made from the
very state that it began with. `found_share` is the share of these above every honest ratio but the worst in a
hundred, so honest twins are sent to be looked at no more often than that; where they would have the length that
their author likes, it is the length of its last update. `hollow_share` and `taught_share` are what a loss score
says of the very same updates (`verification/loss_scoring/tensors.py`): what twins find beyond these is what they
are good for. `apart`
is the distance in lengths of the twin's update, as a referee measures it, and `strayed_share` what lies beyond the
tolerance of runs (`verification/redundant_training/policy.py`), which only recipes have whose rounds begin alike
everywhere.

    python bench/twins.py [--quick] [--only NAME] [--json]
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from form import asking, report, versions
from torch import Tensor

from atoll.crypto.digest import digest
from atoll.training.codec import Codec
from atoll.training.data import Data, batch, epoch_samples, load_data, samples_at
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec, built_in_loss
from atoll.training.experiment.simulator import InFlightFragment, SyncRecord
from atoll.training.models import build_model
from atoll.training.recipe import methods
from atoll.training.recipe.error_feedback import EncodedUpdate, encode_update
from atoll.training.recipe.gradient import ComputeOptions, GradientComputer
from atoll.training.recipe.inner import InnerState, fresh_inner, inner_step
from atoll.training.recipe.recipes import Recipe, UpdateCoding, diloco
from atoll.training.recipe.update import Bounds
from atoll.verification.loss_scoring.policy import FALL_MOST, NAT, opinion_of
from atoll.verification.loss_scoring.tensors import dealt, falls_of, fixed_point, losses_of, undealt
from atoll.verification.redundant_training.policy import MILLION, TOLERANCE
from atoll.verification.redundant_training.tensors import distance

PEERS, ROUNDS, QUICK_ROUNDS, STEPS = 6, 10, 4, 50
MODEL = "gpt-nano"
HONEST_SHARE = 0.99  # of honest ratios that lie below the line

Samples = tuple[Tensor, Tensor]


def recipes(rounds: int) -> dict[str, Recipe]:
    plain = diloco(MODEL, rounds=rounds, inner_steps=STEPS)
    return {
        "diloco": plain,
        "bf16": msgspec.structs.replace(plain, computing=ComputeOptions("bf16")),
        "2bit": diloco(MODEL, rounds=rounds, inner_steps=STEPS, up="2bit"),
        "muon": methods.muloco(MODEL, rounds=rounds, inner_steps=STEPS),
        "fedavg": methods.fedavg(MODEL, rounds=rounds, inner_steps=STEPS),
        "short": diloco(MODEL, rounds=rounds, inner_steps=STEPS // 5),
        "long": diloco(MODEL, rounds=rounds, inner_steps=4 * STEPS),
        "large batch": diloco(MODEL, rounds=rounds, inner_steps=STEPS, batch=16),
        "fresh": plain,
        "sparse": methods.sparseloco(MODEL, rounds=rounds, inner_steps=STEPS),
    }


@dataclass
class Begin:
    """What a member began its round with."""

    inner: InnerState
    memory_F: Tensor
    cursor: int


@dataclass
class Seen:
    """Of one recipe: ratios by kind, each with its round."""

    ratios: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    apart: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # in lengths of the twin's
    cosines: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # twins', others'
    opinions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # of loss scores


def same(samples: Samples) -> Samples:
    return samples


def half(samples: Samples) -> Samples:
    return samples[0][::2], samples[1][::2]


def wrong_labels(samples: Samples) -> Samples:
    targets = samples[1]
    return samples[0], targets.roll(1, 0)


class Twinned(ExperimentSimulator):
    """An experiment in which two pairs of members share their samples, in every round others."""

    def __init__(self, recipe: Recipe, data: Data, seen: Seen, afresh: bool) -> None:
        model = build_model(recipe.model, recipe.seed)
        super().__init__(recipe, model, data, PEERS, recipe.schedule.steps, FaultSpec(), built_in_loss)
        self.data, self.seen, self.draw = data, seen, random.Random(recipe.seed)
        self.afresh = afresh  # every round begins with fresh moments, at everybody
        self.order_drawn = list(range(PEERS))  # the first two are twins, the next two as well
        self.began: dict[int, Begin] = {}
        self.rows: dict[int, Tensor] = {}  # of the round before
        self.mean_F: Tensor | None = None  # that it agreed on
        gradients = {"fp32": ComputeOptions(), "bf16": ComputeOptions("bf16")}
        self.gradients = {
            name: GradientComputer(self.viewer.model, self.viewer.gradient_P, how)
            for name, how in gradients.items()
        }

    def step(self) -> list[SyncRecord]:
        if self.now % self.recipe.schedule.inner_steps == 0:
            self.draw.shuffle(self.order_drawn)
            one, two, three, four, *_ = self.order_drawn
            self.shares = [(self.data, shard, PEERS) for shard in range(PEERS)]
            self.shares[two], self.shares[four] = self.shares[one], self.shares[three]
            for worker in self.workers if self.afresh else ():
                worker.inner = fresh_inner(self.layout.parameters)
            self.began = {
                peer: Begin(deepcopy(worker.inner), worker.memory_F.clone(), worker.cursor)
                for peer, worker in enumerate(self.workers)
            }
        return super().step()

    def _reduce(
        self,
        flight: InFlightFragment,
        owners: list[int],
        counted: list[int],
        updates: dict[int, EncodedUpdate],
        bounds: Bounds,
        ups: tuple[Codec, ...],
        coding: UpdateCoding,
    ) -> None:
        rows = {peer: decoded(updates[peer], ups) for peer in counted}
        one, two, three, four, *_ = self.order_drawn
        others = [rows[p] for p in counted if p not in (one, two)]
        for first, second in ((one, two), (three, four)):
            usual = [rows[p] for p in counted if p not in (first, second)]
            self._note("honest", rows[second], rows[first], usual)
        self._score({"honest": rows[two]}, two)
        self.seen.cosines["twins"].append(cosine(rows[one], rows[two]))
        self.seen.cosines["others"].append(cosine(rows[one], rows[three]))
        instead = dict(self._instead(two, rows, ups, bounds, coding))
        for kind, row_F in instead.items():
            self._note(kind, row_F, rows[one], others)
        self._score(instead, two)
        super()._reduce(flight, owners, counted, updates, bounds, ups, coding)
        self.rows, self.mean_F = rows, flight.combined[0].clone()

    def _note(self, kind: str, row_F: Tensor, twin_F: Tensor, others: list[Tensor]) -> None:
        usual = sorted(
            [*(float((twin_F - o).norm()) for o in others), *(float((row_F - o).norm()) for o in others)]
        )
        middle = (usual[(len(usual) - 1) // 2] + usual[len(usual) // 2]) / 2
        self.seen.ratios[kind].append((self.launched - 1, float((row_F - twin_F).norm()) / middle))
        self.seen.apart[kind].append(distance(row_F, twin_F))

    def _score(self, rows: dict[str, Tensor], peer: int) -> None:
        """What a loss score says of each of these as the update of this peer."""
        recipe, cursor, viewer = self.recipe, self.began[peer].cursor, self.viewer
        samples = recipe.schedule.inner_steps * recipe.batch
        drawn = digest(b"%d %d" % (self.launched, peer))
        own = dealt(drawn, self.shares[peer][1], PEERS, cursor, samples)
        epoch = epoch_samples(self.data, recipe.seq_len)
        positions_B = np.array(own + undealt(drawn, (cursor + samples) * PEERS, epoch, len(own)), dtype=np.int64)
        found = samples_at(self.data, positions_B, recipe.seq_len, recipe.seed)

        def losses(x_F: Tensor) -> list[float]:
            viewer.x_F.copy_(x_F)
            return losses_of(viewer.model, found)

        before = losses(self.anchors[0])
        for kind, row_F in rows.items():
            falls = falls_of(before, losses(self.anchors[0] - row_F), len(own))
            self.seen.opinions[kind].append(opinion_of(fixed_point(falls, NAT, FALL_MOST)))

    def _instead(
        self, peer: int, rows: dict[int, Tensor], ups: tuple[Codec, ...], bounds: Bounds, coding: UpdateCoding
    ) -> list[tuple[str, Tensor]]:
        """What this peer would have sent, had it not done what it was told to."""
        mine, steps = rows[peer], self.recipe.schedule.inner_steps
        last, mean_F = self.rows.get(peer), self.mean_F
        long = mine.norm() if last is None else last.norm()

        def trained(take: Callable[[Samples], Samples] = same, **how: Any) -> Tensor:
            return decoded(self._trained(peer, take, ups, bounds, coding, **how), ups)

        if self.launched == 1 and not torch.equal(trained(), mine):
            raise AssertionError(
                "an honest round that is made again is another one: the figures below mean nothing"
            )
        halved, tenth = trained(until=steps // 2), trained(until=max(1, steps // 10))
        other = [row_F for p, row_F in rows.items() if p not in self.order_drawn[:2]]
        said = [
            ("crashed: fresh moments", trained(fresh=True)),
            ("other arithmetic", trained(precision="fp32" if self.precision == "bf16" else "bf16")),
            ("two threads", trained(threads=2)),
            ("sums in another order", trained(in_halves=True)),
            ("one step of ten left out", trained(leave_out=10)),
            ("half of each batch", trained(half)),
            ("half the steps", halved),
            ("half the steps, as long", halved * (long / halved.norm())),
            ("a tenth of the steps, as long", tenth * (long / tenth.norm())),
            ("other samples", other[0]),
            ("wrong labels", trained(wrong_labels)),
            ("the others' mean", torch.stack(other).mean(0)),
            ("nothing", torch.zeros_like(mine)),
        ]
        if last is not None and mean_F is not None:
            said += [
                ("its last update", last),
                ("the last mean", mean_F),
                ("the last mean, as long", mean_F * (long / mean_F.norm())),
            ]
        return said

    @property
    def precision(self) -> str:
        return "fp32" if not self.recipe.computing else self.recipe.computing.precision

    def _trained(
        self,
        peer: int,
        take: Callable[[Samples], Samples],
        ups: tuple[Codec, ...],
        bounds: Bounds,
        coding: UpdateCoding,
        until: int = 0,
        leave_out: int = 0,
        fresh: bool = False,
        precision: str = "",
        threads: int = 1,
        in_halves: bool = False,
    ) -> EncodedUpdate:
        """Its round again, from where it began, in the viewer's model."""
        recipe, viewer, began = self.recipe, self.viewer, self.began[peer]
        steps = recipe.schedule.inner_steps
        inner = fresh_inner(self.layout.parameters) if fresh else deepcopy(began.inner)
        memory_F = torch.zeros_like(began.memory_F) if fresh else began.memory_F
        viewer.x_F.copy_(self.anchors[0])
        gradient = self.gradients[precision or self.precision]
        x_P = viewer.x_F[: self.layout.parameters]
        data, shard, shards = self.shares[peer]
        torch.set_num_threads(threads)
        for step in range(until or steps):
            if leave_out and step % leave_out == leave_out - 1:
                continue
            cursor = began.cursor + step * recipe.batch
            samples = batch(data, shard, shards, cursor, recipe.batch, recipe.seq_len, recipe.seed)
            if in_halves:
                gradient.compute(tuple(one[::2] for one in samples))
                first_P = viewer.gradient_P.clone()
                gradient.compute(tuple(one[1::2] for one in samples))
                viewer.gradient_P.add_(first_P).mul_(0.5)
            else:
                gradient.compute(take(samples))
            inner_step(recipe.inner, inner, x_P, viewer.gradient_P, self.now - steps + step, viewer.matrices)
        torch.set_num_threads(1)
        owed_F = memory_F if coding.beta else None
        return encode_update(self.anchors[0], viewer.x_F, owed_F, bounds, ups, coding.beta)


def decoded(update: EncodedUpdate, ups: tuple[Codec, ...]) -> Tensor:
    pieces = zip(ups, update.wires, update.bounds, strict=True)
    return torch.cat([codec.decode(wire, hi - lo) for codec, wire, (lo, hi) in pieces])


def cosine(one: Tensor, two: Tensor) -> float:
    return float(torch.dot(one, two) / (one.norm() * two.norm()))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def told(seen: Seen) -> dict[str, Any]:
    honest = [ratio for _, ratio in seen.ratios["honest"]]
    line = quantile(honest, HONEST_SHARE)
    kinds: dict[str, Any] = {}
    for kind, found in seen.ratios.items():
        ratios = [ratio for _, ratio in found]
        later = [ratio for round, ratio in found if round]
        kinds[kind] = {
            "twins": len(ratios),
            "first_round": max(ratio for round, ratio in found if not round) if found[0][0] == 0 else None,
            "least": min(later),
            "median": quantile(later, 0.5),
            "most": max(later),
            "apart_median": quantile(seen.apart[kind], 0.5),
            "apart_least": min(seen.apart[kind]),
            "apart_most": max(seen.apart[kind]),
            "strayed_share": sum(apart * MILLION > TOLERANCE for apart in seen.apart[kind]) / len(seen.apart[kind]),
            "found_share": sum(ratio > line for ratio in ratios) / len(ratios),
            "hollow_share": seen.opinions[kind].count("hollow") / len(seen.opinions[kind]),
            "taught_share": seen.opinions[kind].count("taught") / len(seen.opinions[kind]),
        }
    means = {name: sum(of) / len(of) for name, of in seen.cosines.items()}
    return {"line": line, "cosine_of_twins": means["twins"], "cosine_of_others": means["others"], "kinds": kinds}


def table(name: str, figures: dict[str, Any]) -> str:
    cosines = f"cosines {figures['cosine_of_twins']:.3f} of twins, {figures['cosine_of_others']:.3f} of others"
    paid = f"loss {figures['val_loss']:.3f}, {figures['cpu_s']:.0f} CPU-s"
    lines = [f"{name}: line {figures['line']:.3f}; {cosines}; {paid}"]
    lines.append(f"  {'':30} first  least median   most  found hollow taught  apart: least median most strayed  of")
    for kind, of in figures["kinds"].items():
        first = "     " if of["first_round"] is None else f"{of['first_round']:5.2f}"
        numbers = f"{of['least']:6.2f} {of['median']:6.2f} {of['most']:6.2f} {of['found_share']:6.2f}"
        numbers += f" {of['hollow_share']:6.2f} {of['taught_share']:6.2f}"
        numbers += f"  {of['apart_least']:12.4f} {of['apart_median']:6.4f} {of['apart_most']:6.4f}"
        numbers += f" {of['strayed_share']:5.2f}"
        lines.append(f"  {kind:30} {first} {numbers}  {of['twins']}")
    return "\n".join(lines)


def main() -> None:
    parser = asking(__doc__, f"{QUICK_ROUNDS} rounds instead of {ROUNDS}, one recipe")
    parser.add_argument("--only", metavar="NAME", help="one recipe: " + ", ".join(recipes(1)))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    names = [asked.only] if asked.only else ["diloco"] if asked.quick else list(recipes(1))
    data, figures = load_data("stdlib"), {}
    for name in names:
        seen, began = Seen(), time.process_time()
        run = Twinned(recipes(rounds)[name], data, seen, name == "fresh")
        while run.now < run.steps:
            run.step()
        figures[name] = told(seen) | {
            "val_loss": run.loss_at(run.agreed(), 512),
            "cpu_s": time.process_time() - began,
        }
        if not asked.json:
            print(table(name, figures[name]), flush=True)
    if asked.json:
        print(
            report(
                "twins",
                {"model": MODEL, "peers": PEERS, "rounds": rounds, "steps": STEPS},
                figures,
                versions("torch"),
            )
        )


if __name__ == "__main__":
    main()
