"""Replay audits: are honest trainers accepted, cheats found, and what does it cost?

Lone trainers train rounds of 50 steps, record them, and are audited segment by segment. Honest pairs: the auditor
is another process, has two threads, AVX2, SSE4, or takes each batch in four pieces. Cheats are committed in every
step (or in one of 20) by trainers that lie consistently: their chain names the states that they really had, and
counts are as they should be. Distances are relative L2, of x or of the moments, whichever is further off.
`cheats_rejected_share` is over audits of segments that the cheat touched, of those cheats that a bar is about;
`honest_accepted_share` over honest pairs, by the tolerances that the library has (`calibrated`: what these pairs
alone would give).
Costs are CPU seconds of this process beside those of training, at the default rate of audits; bytes beside those
of the same rounds' updates and answers in int8, with and without the state at the segment's end.

    python bench/audit.py [--quick] [--json]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
from cheats import Cheat, at_each_boundary, cheats, honest, poison, trained
from form import asking, report, versions
from torch import Tensor

from atoll.base.ids import PeerId
from atoll.crypto.digest import digest, merkle_root
from atoll.training.codec import codec_named
from atoll.training.data import Data, data_digest, load_data
from atoll.training.data.images import ImageDataset
from atoll.training.recipe.error_feedback import EncodedUpdate, encode_update
from atoll.training.recipe.inner import fresh_inner
from atoll.training.recipe.outer import outer_step
from atoll.training.recipe.recipes import Recipe, diloco
from atoll.training.recipe.update import Bounds, part_bounds
from atoll.verification.replay_audit.judge import (
    ExhibitHashMismatch,
    ReplayAccepted,
    ReplayMismatch,
    Verdict,
    furthest,
    judge_segment,
    judge_update,
)
from atoll.verification.replay_audit.replay import (
    ChainLink,
    ReplayReplica,
    TrainerSnapshot,
    TrainingAssignment,
    live_bytes,
    live_from_bytes,
    name_of,
    name_of_x,
    segments,
)
from atoll.verification.replay_audit.state_chain import ChainClaim, StateChain, memory_name
from atoll.verification.replay_audit.tolerance import (
    PINS,
    TrainingProfile,
    profile_here,
    tolerance_from,
    tolerance_of,
)

RUN, PEER = digest(b"bench/audit"), PeerId("ada")
ROUNDS, QUICK_ROUNDS = 4, 2
STEPS, SHARDS = 50, 4
INT8 = codec_named("int8")
SSE4 = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
REPLICAS: dict[str, tuple[int, int, dict[str, str]]] = {  # threads, pieces of a batch, environment
    "another process": (1, 1, {}),
    "2 threads": (2, 1, {}),
    "AVX2": (1, 1, AVX2),
    "SSE4": (1, 1, SSE4),
    "4 pieces": (1, 4, {}),
    "pinned": (1, 1, PINS),
    "pinned again": (1, 1, PINS),
}
MODELS = {"gpt-tiny": 8, "llama-tiny": 8, "cnn-mnist": 32}  # batch
QUICK_MODELS, QUICK_STEPS = ("gpt-tiny", "cnn-mnist"), 20
QUICK_KINDS = ("2 threads", "AVX2", "4 pieces", "pinned", "pinned again")
PINNED = TrainingProfile(torch.__version__, 1, tuple(PINS.values()))
UNSEEN = "poison, half a tolerance"
RATE = 0.05  # of all rounds of all trainers that are audited: a stake of 20 rounds' gain, 2 to 3 % more work


# ---- honest rounds -----------------------------------------------------------------------------------------


@dataclass
class Round:
    """One recorded round and the update that came of it."""

    assignment: TrainingAssignment
    record: StateChain
    anchor_F: Tensor
    memory_F: Tensor | None
    update: EncodedUpdate

    @cached_property
    def claim(self) -> ChainClaim:
        root = merkle_root(tuple(digest(wire) for wire in self.update.wires))
        left, head = memory_name(self.update.memory_F), self.record.head
        return ChainClaim(head, self.record.steps, root, profile_here(), memory_name(self.memory_F), left)

    @property
    def segments(self) -> int:
        return len(segments(self.assignment, self.record.steps))


@dataclass
class Scene:
    """A model, its data and the rounds that one honest trainer made of them."""

    recipe: Recipe
    replica: ReplayReplica
    bounds: Bounds
    rounds: list[Round]


def images() -> ImageDataset:
    """Grey pictures of ten classes: a pattern each, shifted and under noise."""
    draw = np.random.Generator(np.random.PCG64(10))
    patterns = draw.random((10, 28, 28)) < 0.3

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = draw.integers(0, 10, count).astype(np.uint8)
        shifts = draw.integers(-3, 4, (count, 2))
        clean = [np.roll(patterns[a], tuple(by), (0, 1)) for a, by in zip(labels, shifts, strict=True)]
        return (np.stack(clean) * 160 + draw.integers(0, 96, (count, 28, 28))).astype(np.uint8), labels

    return ImageDataset(*some(4000), *some(500))


def data_of(model: str) -> Data:
    return images() if model.startswith("cnn") else load_data("stdlib")


def recipe_of(model: str, rounds: int) -> Recipe:
    return diloco(
        model, rounds=rounds, inner_steps=STEPS, batch=MODELS[model], lr=6e-3 if "tiny" in model else 2e-3
    )


def scene_of(model: str, rounds: int) -> Scene:
    """Rounds as they are in a run of one: the outer step between them, moments carried on, int8 both ways."""
    recipe, data = recipe_of(model, rounds), data_of(model)
    name = data_digest(data)
    replica = ReplayReplica(recipe, data, name)
    x_F, counters_K = replica.live().x_F, replica.live().counters_K
    bounds = part_bounds(len(x_F), [1] * SHARDS)
    live = TrainerSnapshot(x_F, counters_K, fresh_inner(replica.layout.parameters))
    outer_P, memory_F, made = torch.zeros(replica.layout.parameters), None, []
    for index in range(rounds):
        assignment = TrainingAssignment(
            *(RUN, index, PEER, recipe, name, name_of_x(live.x_F)),
            *(1, SHARDS, index * STEPS * recipe.batch, index * STEPS, STEPS),
            carried=name_of(live).private,
            memory=memory_name(memory_F),
        )
        record = trained(replica, assignment, live, keep_every=1)
        end = record.kept[len(record.links) - 1]
        update = encode_update(live.x_F, end.x_F, memory_F, bounds, INT8, recipe.coding.beta)
        made.append(Round(assignment, record, live.x_F, memory_F, update))
        pairs = zip(update.wires, bounds, strict=True)
        combined_F = torch.cat([INT8.decode(wire, hi - lo) for wire, (lo, hi) in pairs])
        x_F, outer_P = outer_step(recipe.outer, live.x_F, outer_P, combined_F, index * STEPS)
        live, memory_F = TrainerSnapshot(x_F, counters_K, end.inner), update.memory_F
    return Scene(recipe, replica, bounds, made)


# ---- other machines ----------------------------------------------------------------------------------------


class Errand(msgspec.Struct):
    """A segment that another process takes again: state in and out by file."""

    file: str
    assignment: TrainingAssignment
    first: int
    end: int


def errands(scenes: dict[str, Scene], folder: Path) -> Iterator[Errand]:
    for model, scene in scenes.items():
        for made in scene.rounds:
            for segment, (first, end) in enumerate(segments(made.assignment, made.record.steps)):
                name = f"{model}.{made.assignment.round}.{segment}"
                (folder / name).write_bytes(live_bytes(made.record.kept[segment]))
                yield Errand(name, made.assignment, first, end)


def run_errands(folder: Path, kind: str) -> None:
    """In a process of its own, since instruction sets are chosen when torch is loaded."""
    threads, pieces, _ = REPLICAS[kind]
    torch.set_num_threads(threads)
    replicas: dict[str, ReplayReplica] = {}
    for errand in msgspec.msgpack.decode((folder / "errands").read_bytes(), type=list[Errand]):
        recipe, name = errand.assignment.recipe, errand.assignment.data
        replica = replicas.get(recipe.model) or ReplayReplica(recipe, data_of(recipe.model), name, pieces)
        replicas[recipe.model] = replica
        begin = live_from_bytes((folder / errand.file).read_bytes(), replica.layout)
        end = replica.replay(errand.assignment, begin, errand.first, errand.end)
        (folder / f"{errand.file}.{kind}").write_bytes(live_bytes(end))


def replayed_elsewhere(
    scenes: dict[str, Scene], folder: Path, kinds: tuple[str, ...]
) -> dict[str, dict[str, list[TrainerSnapshot]]]:
    """By kind of replica and model: the state that it reached at the end of every segment."""
    todo = list(errands(scenes, folder))
    (folder / "errands").write_bytes(msgspec.msgpack.encode(todo))
    found: dict[str, dict[str, list[TrainerSnapshot]]] = {}
    for kind in kinds:
        threads, _, settings = REPLICAS[kind]
        env = os.environ | settings | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "0"}
        subprocess.run([sys.executable, __file__, "--errands", str(folder), kind], env=env, check=True)
        found[kind] = {model: [] for model in scenes}
        for errand in todo:
            model = errand.assignment.recipe.model
            data = (folder / f"{errand.file}.{kind}").read_bytes()
            found[kind][model].append(live_from_bytes(data, scenes[model].replica.layout))
    return found


def share_below(bound: float, distances: list[float]) -> float:
    return sum(distance <= bound for distance in distances) / len(distances)


def honest_table(scenes: dict[str, Scene], folder: Path, kinds: tuple[str, ...]) -> list[dict]:
    """Distances between honest pairs, and whether the library accepts them."""
    elsewhere, rows = replayed_elsewhere(scenes, folder, kinds), []
    for kind, by_model in elsewhere.items():
        for model, ends in by_model.items():
            scene, distances = scenes[model], []
            places = [(made, segment) for made in scene.rounds for segment in range(made.segments)]
            for (made, segment), end in zip(places, ends, strict=True):
                shown = made.record.kept[segment + 1]
                if kind == "pinned again":  # beside the other pinned process, not beside this one
                    shown = elsewhere["pinned"][model][len(distances)]
                _, distance = furthest(made.record.kept[segment], end, shown)
                distances.append(distance)
            tolerance = 0.0 if kind == "pinned again" else tolerance_of(scene.rounds[0].assignment)
            ordered = sorted(distances)
            rows.append(
                {
                    "model": model,
                    "replica": kind,
                    "segments": len(distances),
                    "median": ordered[len(ordered) // 2],
                    "largest": ordered[-1],
                    "same_bits_share": share_below(0.0, distances),
                    "tolerance": tolerance,
                    "accepted_share": tolerance if tolerance is None else share_below(tolerance, distances),
                    "distances": distances,
                }
            )
    return rows


# ---- cheats ------------------------------------------------------------------------------------------------


def cheat_table(scene: Scene, model: str, steps: int) -> list[dict]:
    """Every touched segment of every cheat in every round but the first, which has none before it."""
    rows: dict[str, dict] = {}
    tolerance = tolerance_of(scene.rounds[0].assignment) or 0.0
    here = profile_here() if tolerance else PINNED  # one process: its bits are the same
    for before, made in pairwise(scene.rounds):
        assignment = msgspec.structs.replace(made.assignment, steps=steps)
        end_F = before.record.kept[before.segments].x_F
        chosen = cheats(before.anchor_F - end_F, tolerance)
        if tolerance:
            chosen[UNSEEN] = Cheat(at_each_boundary(poison(0.5 * tolerance)))
        begin, stale = made.record.kept[0], before.record.kept[0]
        tried = [(name, cheat, begin) for name, cheat in chosen.items()]
        tried.append(("stale anchor", Cheat(honest), TrainerSnapshot(stale.x_F, stale.counters_K, begin.inner)))
        for name, cheat, start in tried:
            record = trained(scene.replica, assignment, start, cheat.take, keep_every=1)
            claim = msgspec.structs.replace(made.claim, head=record.head, steps=steps, profile=here)
            cuts = segments(assignment, steps)
            touched = [segment for segment, cut in enumerate(cuts) if cheat.touches(*cut)]
            row = rows.setdefault(name, _new_row(model, name, cheat.saves, len(touched) / len(cuts)))
            for segment in touched:
                states = record.kept[segment], record.kept[segment + 1]
                ask = (assignment, claim, record.links, segment, *states, scene.replica)
                _count(row, judge_segment(*ask, here=here))
        for name, verdict in update_cheats(scene, made):
            _count(rows.setdefault(name, _new_row(model, name, 0.0, 0.0)), verdict)
    for row in rows.values():
        row["rejected_share"] = row["rejected"] / row["audits"]
    return list(rows.values())


def _new_row(model: str, name: str, saves: float, touched: float) -> dict:
    told = {"model": model, "cheat": name, "saves": saves, "touched_share": touched}
    return told | {"audits": 0, "rejected": 0, "least": None}


def _count(row: dict, verdict: Verdict) -> None:
    assert isinstance(verdict, ReplayAccepted | ReplayMismatch | ExhibitHashMismatch), verdict
    row["audits"] += 1
    row["rejected"] += not isinstance(verdict, ReplayAccepted)
    if not isinstance(verdict, ExhibitHashMismatch) and 0.0 < verdict.distance < float("inf"):
        row["least"] = min(row["least"] or float("inf"), verdict.distance)


def update_cheats(scene: Scene, made: Round) -> Iterator[tuple[str, Verdict]]:
    """The chain is honest; only the payload is not."""
    end = made.record.kept[made.segments]
    ask = (made.anchor_F, end.x_F, made.memory_F, scene.bounds, INT8, scene.replica.layout)
    told = judge_update(made.assignment, made.claim, made.record.links, *ask)
    assert isinstance(told, ReplayAccepted), told
    wrong = bytearray(made.update.wires[0])
    wrong[-1] ^= 1
    root = merkle_root(tuple(digest(wire) for wire in (wrong, *made.update.wires[1:])))
    claim = msgspec.structs.replace(made.claim, root=root)
    yield "one bit of the int8 update", judge_update(made.assignment, claim, made.record.links, *ask)
    memory_F = torch.zeros_like(end.x_F) if made.memory_F is None else made.memory_F * 1.5
    update = encode_update(made.anchor_F, end.x_F, memory_F, scene.bounds, INT8, scene.recipe.coding.beta)
    root, left = merkle_root(tuple(digest(wire) for wire in update.wires)), memory_name(update.memory_F)
    claim = msgspec.structs.replace(made.claim, root=root, memory=memory_name(memory_F), left=left)
    ask = (made.anchor_F, end.x_F, memory_F, scene.bounds, INT8, scene.replica.layout)
    yield "poison in error feedback", judge_update(made.assignment, claim, made.record.links, *ask)


# ---- costs -------------------------------------------------------------------------------------------------


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def costs(scene: Scene) -> dict[str, float]:
    """Of one round, at the default rate, with the record as a trainer keeps it."""
    made, replica = scene.rounds[-1], scene.replica
    begin, record = made.record.kept[0], made.record

    def train() -> None:
        replica.load(begin)
        for step in range(STEPS):
            honest(replica, made.assignment, step)

    train()  # warm
    train_s = min(cpu_s(train), cpu_s(train))
    note_s = min(cpu_s(lambda: [name_of(replica.live()) for _ in record.links]) for _ in range(2))
    kept = trained(replica, made.assignment, begin)
    retake_s = audit_s = 0.0
    for segment in range(made.segments):
        retake_s += cpu_s(lambda at=segment: _shown(kept, at, replica)) / made.segments
        states = made.record.kept[segment], made.record.kept[segment + 1]
        ask = (made.assignment, made.claim, record.links, segment, *states, replica)
        audit_s += cpu_s(lambda ask=ask: judge_segment(*ask)) / made.segments
    layout, end = replica.layout, record.kept[made.segments]
    ask = (made.anchor_F, end.x_F, made.memory_F, scene.bounds, INT8, layout)
    update_s = cpu_s(lambda: judge_update(made.assignment, made.claim, record.links, *ask))
    state_bytes = len(live_bytes(begin))
    links_bytes = sum(len(part) for link in record.links for part in ChainLink(*link))
    update_bytes = (
        4 * layout.floats * (2 - 1 / made.segments)
    )  # error feedback, and x unless it is the segment's end
    round_bytes = 2 * sum(len(wire) for wire in made.update.wires)
    return {
        "chain_share": note_s / train_s,
        "audit_share": RATE * (audit_s + update_s) / train_s,
        "regenerate_share": RATE * retake_s / train_s,
        "audit_bytes": state_bytes + links_bytes + update_bytes,
        "end_bytes": state_bytes,
        "round_bytes": round_bytes,
        "storage_bytes": len(kept.kept) * state_bytes + 4 * layout.floats + links_bytes,
        "states_kept": len(kept.kept),
    }


def _shown(record: StateChain, segment: int, replica: ReplayReplica) -> None:
    """Both states around a segment; the second is made from the first."""
    begin = record.state_at(segment, replica)
    if segment + 1 not in record.kept:
        first, end = segments(record.assignment, record.steps)[segment]
        name_of(replica.replay(record.assignment, begin, first, end))


# ---- what audits are worth, in shares of one round's training ---------------------------------------------


def caught_share(rate: float, power: float = 1.0, touched: float = 1.0) -> float:
    """p': chance per round that a cheater is caught. The rate, times how often a replay of what it touched finds it
    out, times the share of its segments that it touched, since one of them is drawn."""
    return rate * power * touched


def stake_needed(gain: float, caught: float) -> float:
    """The least stake with which honesty is best: g (1 − p') − S p' ≤ 0, so S ≥ g (1 − p') / p'.

    A cheater that touches a share m of its segments gains m g and is caught with m p', so it must lose
    (g / p') (1 − m p'): the fewer it touches, the more, up to g / p'. `stake_for_any` is that bound.
    """
    return gain * (1 - caught) / caught


def stake_for_any(gain: float, caught: float) -> float:
    """The stake that also keeps those honest who would cheat in few of their segments."""
    return gain / caught


def expected_gain(gain: float, caught: float, stake: float) -> float:
    """Per round, of a cheater: what it saves while unseen, less what it loses when it is not."""
    return gain * (1 - caught) - stake * caught


def unseen_share(caught: float, rounds: int) -> float:
    """Chance that so many cheating rounds are never caught: (1 − p')^r."""
    return (1 - caught) ** rounds


def odds_table() -> list[dict]:
    """For one who saves half of its training in every segment."""
    rows, gain = [], 0.5
    for rate in (0.02, RATE, 0.1, 0.2):
        caught = caught_share(rate)
        stake = stake_for_any(gain, caught)
        rows.append(
            {
                "rate": rate,
                "stake_per_gain": stake_needed(1.0, caught),
                "stake_for_any_per_gain": stake_for_any(1.0, caught),
                "gain_without_stake": expected_gain(gain, caught, 0.0),
                "gain_at_stake": expected_gain(gain, caught, stake),
                "unseen_after_50": unseen_share(caught, 50),
            }
        )
    return rows


# ---- the whole ---------------------------------------------------------------------------------------------


def measure(models: tuple[str, ...], rounds: int, quick: bool) -> dict:
    scenes = {model: scene_of(model, rounds) for model in models}
    with tempfile.TemporaryDirectory() as folder:
        pairs = honest_table(scenes, Path(folder), QUICK_KINDS if quick else tuple(REPLICAS))
    steps = QUICK_STEPS if quick else STEPS
    tried = [row for model, scene in scenes.items() for row in cheat_table(scene, model, steps)]
    spent = costs(next(iter(scenes.values())))
    barred = [row for row in tried if row["cheat"] != UNSEEN]
    judged = [row for row in pairs if row["accepted_share"] is not None]
    noise = {model: [d for row in pairs if row["model"] == model for d in row["distances"]] for model in models}
    return {
        "honest_accepted_share": share_of(judged, "accepted_share", "segments"),
        "cheats_rejected_share": sum(r["rejected"] for r in barred) / sum(r["audits"] for r in barred),
        "cost_share": spent["chain_share"] + spent["audit_share"] + spent["regenerate_share"],
        "audit_bytes_share": RATE * (spent["audit_bytes"] + spent["end_bytes"]) / spent["round_bytes"],
        "audit_bytes_share_same_bits": RATE * spent["audit_bytes"] / spent["round_bytes"],
        "storage_bytes": spent["storage_bytes"],
        "least_cheat_distance": min(r["least"] for r in barred if r["least"] is not None),
        "pinned_same_bits_share": min(r["same_bits_share"] for r in pairs if r["replica"] == "pinned again"),
        "costs": spent,
        "calibrated": {model: tolerance_from(values) for model, values in noise.items()},
        "pairs": [{k: v for k, v in row.items() if k != "distances"} for row in pairs],
        "cheats": tried,
        "odds": odds_table(),
    }


def share_of(rows: list[dict], share: str, count: str) -> float:
    return sum(row[share] * row[count] for row in rows) / sum(row[count] for row in rows)


def table(rows: list[dict]) -> str:
    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)

    head = "| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0])
    return "\n".join([head, *("| " + " | ".join(map(cell, row.values())) + " |" for row in rows)])


def main() -> None:
    if sys.argv[1:2] == ["--errands"]:
        return run_errands(Path(sys.argv[2]), sys.argv[3])
    asked = asking(__doc__, f"{QUICK_ROUNDS} rounds of two models instead of {ROUNDS} of three").parse_args()
    torch.set_num_threads(1)
    models, rounds = (QUICK_MODELS, QUICK_ROUNDS) if asked.quick else (tuple(MODELS), ROUNDS)
    figures = measure(models, rounds, asked.quick)
    if asked.json:
        settings = {"models": models, "rounds": rounds, "inner_steps": STEPS, "rate": RATE, "cores": os.cpu_count()}
        print(report("audit", settings, figures, versions("torch")))
        return None
    for name, value in figures.items():
        print(f"\n{name}\n{table(value)}" if isinstance(value, list) else f"{name:28} {value}")
    return None


if __name__ == "__main__":
    main()
