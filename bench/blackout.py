"""All peers of a run are killed at once, again and again, at random moments: does it go on as if nothing happened?

    python bench/blackout.py [--quick] [--json] [--rounds N] [--kills K] [--seed S] [--png FILE] [--dir FOLDER]

Four `atoll` processes train a tiny model. At moments drawn by the seed all of them get SIGKILL, and are started
again from their folders. Looked at afterwards, in the folders and in what the peers told:

    loss        of every round that counted somebody, beside an experiment of as many such rounds in one process,
                which nothing disturbs: the mean and the largest difference, and both agreed models on held-out data
    alike       rounds from the first on with the very loss of that experiment, beside rounds from the first on
                that counted all steps of all in every part (on a busy computer some come late after a blackout) and
                come before any that counted nobody though somebody trained for it: its moments and feedback moved
    samples     used twice: in two updates that counted; skipped: handed out, and in no update that counted; and how
                many specs/effort.md (place in the data) lets these rounds skip
    made again  samples learned from in a round that counted nobody, and once more when they were dealt out again
    extra       what a blackout costs: from the kill to the end of the next round, beside the median round

Ends with status 1 if a round after none but whole ones has another loss, a sample is used twice, more are skipped
than may be, a round has two states, an honest peer is blamed, or anybody's log holds an error. `--png` draws both
curves and the blackouts; needs matplotlib.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
from form import asking, lines, report, versions
from real_swarm import Swarm
from soak_judge import (
    Judged,
    Turn,
    count_samples,
    judge_blame,
    judge_folders,
    judge_states,
    judge_words,
    record_of,
    turns_of,
)

from atoll.cli.stored_vertices import read_vertex
from atoll.cli.verify import kept_in
from atoll.peer.settings import decode_settings
from atoll.runtime.training_spec import parse_training_spec
from atoll.training.data import cursor_after, load_data
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.state import state_from_bytes
from atoll.training.spec import TrainingSpec
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment, OwnerResult
from atoll.wire.messages.vertex import VertexBody

PEERS = 4
SETS = [
    "model.name=gpt-nano",
    "train.seq_len=32",
    "train.batch=4",
    "train.inner_steps=32",
    "run.rounds=0",
    f"run.start_peers={PEERS}",
    f"run.min_peers={PEERS}",
    "sync.topology=butterfly",  # the planner may find another way cheaper, and sums in a tree have other bits
]
PATIENCE_S = 300.0  # for all to be there again, on a busy computer
LATEST = 2.0  # a moment within so many rounds after the one that it is to come behind
SAMPLES = 1024  # of the held-out data


@dataclass(frozen=True)
class Blackout:
    after: int  # training rounds
    took_s: float  # until the next one closed


def play(swarm: Swarm, rounds: int, kills: int, draw: random.Random) -> list[Blackout]:
    swarm.found()
    for index in range(1, PEERS):
        swarm.join(index)
    first, second = (swarm.closed(number, peer=0, patience_s=PATIENCE_S) for number in (1, 2))
    round_s, done = second["at"] - first["at"], list[Blackout]()
    trained = second["trained"]
    for number in range(1, kills + 1):
        trained = max(trained, number * rounds // (kills + 1))
        swarm.closed(trained, peer=0, patience_s=PATIENCE_S)
        with suppress(TimeoutError):
            swarm.wait(lambda _: False, len(swarm.facts), draw.uniform(0.0, LATEST * round_s))
        began = min([swarm.kill(index) for index in range(PEERS)])
        for index in range(PEERS):
            swarm.resume(index)
        trained = max(f["trained"] for f in swarm.facts if f["fact"] == "RoundClosed") + 1
        end = swarm.closed(trained, peer=0, patience_s=PATIENCE_S)
        done.append(Blackout(trained - 1, end["at"] - began))
    for index in range(PEERS):
        swarm.closed(max(rounds, trained), peer=index, patience_s=PATIENCE_S)
    return done


def may_skip(bodies: list[VertexBody], turns: dict[int, Turn], learning: TrainingSpec) -> int:
    """Of the samples that these rounds hand out; worked out of the vertices alone."""
    allowed = 0
    for body in bodies:
        turn = turns[body.round]
        if turn.after == turn.samples:
            continue
        allowed += cursor_after(turn.samples, len(turn.shares)) * len(turn.shares) - turn.samples
        longest = turn.steps * learning.recipe.batch
        said = {signed.signer: decode_statement(signed.body, signed.signer) for signed in body.commits}
        own = {peer: commit.samples for peer, commit in said.items() if isinstance(commit, Commitment)}
        allowed += sum(longest - min(own.get(peer, 0), longest) for peer in turn.shares)
    return allowed


def is_whole(body: VertexBody, learning: TrainingSpec) -> bool:
    said = [decode_statement(signed.body, signed.signer) for signed in body.commits]
    answers = [decode_statement(signed.body, signed.signer) for signed in body.parts if signed is not None]
    return (
        len(said) == PEERS
        and all(isinstance(one, Commitment) and one.steps == learning.recipe.schedule.turn_steps for one in said)
        and len(answers) == len(body.parts)
        and all(isinstance(one, OwnerResult) and len(one.contributors) == PEERS for one in answers)
    )


def first_in_vain(bodies: Iterable[VertexBody], recorded: Iterable[Iterable[dict[str, Any]]]) -> float:
    """The first round that counted nobody, and for which somebody trained who lived to see its end."""
    nobody = {body.round for body in bodies if body.parts and not body.commits}
    found = [math.inf]
    for entries in recorded:
        trained: set[int] = set()
        for entry in entries:
            match entry["fact"]:
                case "GenesisKnown":
                    trained.clear()  # a new life, with the moments of the round before
                case "LocalTrainingEnded":
                    trained.add(entry["round"])
                case "RoundClosed" if entry["round"] in nobody & trained:
                    found.append(entry["round"])
                case _:
                    pass
    return min(found)


def leading(each: Iterable[bool]) -> int:
    """How many of them are true before the first that is not."""
    return len(list(takewhile(bool, each)))


def undisturbed(learning: TrainingSpec, rounds: int) -> tuple[list[float], ExperimentSimulator]:
    torch.set_num_threads(1)
    recipe, data = learning.recipe, load_data(learning.data)
    run = ExperimentSimulator(
        *(recipe, build_model(recipe.model, recipe.seed), data, PEERS),
        *(recipe.schedule.turn_steps * rounds, FaultSpec(), loss_of),
    )
    while run.now < run.steps:
        run.step()
    return [one.train_loss for one in run.history], run


def judged(
    base: Path, swarm: Swarm, blackouts: list[Blackout], deep: bool
) -> tuple[Judged, list[float], list[float]]:
    folders = [base / f"peer-{index}" for index in range(PEERS)]
    recorded = {folder: list(record_of(folder)) for folder in folders}
    ids = {f["by"]: f["peer"] for f in swarm.facts if f["fact"] == "Opened"}
    result = Judged([], {})
    judge_states(result, base, list(range(PEERS)), recorded)
    judge_blame(result, ids, recorded)
    judge_words(result, base, folders)
    if deep:
        judge_folders(result, folders)
    wrong, result.figures = result.wrong, {}
    with kept_in(folders[0]) as kept:
        genesis = read_vertex(kept, folders[0], -1)[1]
        bodies = [read_vertex(kept, folders[0], number)[1] for number in kept.rounds]
    settings = decode_settings(genesis.settings)
    learning = parse_training_spec(settings)
    turns = turns_of([genesis, *bodies], settings.round, learning)
    counting = [body for body in bodies if body.commits]
    here, (beside, run) = [body.metrics.loss for body in counting], undisturbed(learning, len(counting))
    state = state_from_bytes((folders[0] / "blobs" / bodies[-1].state.hex()).read_bytes(), learning.layout)
    losses = run.loss_at(state.anchor_F, SAMPLES), run.loss_at(run.agreed(), SAMPLES)
    apart = [abs(a / b - 1) for a, b in zip(here, beside, strict=True)]
    in_vain = first_in_vain(bodies, recorded.values())
    whole = leading(body.round < in_vain and is_whole(body, learning) for body in counting)
    alike = leading(a == b for a, b in zip(here, beside, strict=True))
    samples = count_samples(turns, recorded, ids, learning, bool(settings.audited_share))
    allowed = may_skip(bodies, turns, learning)
    lasted = [b.time_s - a.time_s for a, b in pairwise(counting)]
    result.figures |= {
        "blackouts": len(blackouts),
        "rounds_counting": len(counting),
        "rounds_counting_all": sum(len(body.commits) == PEERS for body in counting),
        "rounds_counting_nobody": sum(bool(body.parts) and not body.commits for body in bodies),
        "rounds_whole_first": whole,
        "rounds_alike_first": alike,
        "loss_apart_mean": round(statistics.mean(apart), 5),
        "loss_apart_most": round(max(apart), 5),
        "val_loss": round(losses[0], 4),
        "val_loss_undisturbed": round(losses[1], 4),
        "same_model": bool(torch.equal(state.anchor_F, run.agreed())),
        "samples_dealt": samples.dealt,
        "samples_twice": len(samples.twice),
        "samples_skipped": samples.left_out,
        "samples_may_skip": allowed,
        "samples_made_again": samples.again,
        "round_s": round(statistics.median(lasted), 2),
        "extra_s": round(statistics.median(b.took_s for b in blackouts) - statistics.median(lasted), 2),
    }
    if alike < whole:
        wrong.append(f"of {whole} rounds that counted everybody whole only {alike} have the loss undisturbed")
    wrong += [f"samples used twice: {one}" for one in samples.twice]
    if samples.left_out > allowed:
        wrong.append(f"{samples.left_out} samples are in no update, and at most {allowed} may be")
    return result, here, beside


def draw_curves(path: Path, here: list[float], beside: list[float], blackouts: list[Blackout]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    axes.plot(range(1, len(beside) + 1), beside, color="tab:blue", label="undisturbed")
    axes.plot(range(1, len(here) + 1), here, "--", color="tab:orange", label="all killed at the grey lines")
    for blackout in blackouts:
        axes.axvline(blackout.after + 0.5, color="lightgrey", zorder=0)
    axes.set_xlabel("round")
    axes.set_ylabel("training loss, nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = asking(__doc__, "9 rounds and 2 blackouts", json="one object instead of lines")
    parser.add_argument("--rounds", type=int, default=0, help="default 40, quick 9")
    parser.add_argument("--kills", type=int, default=0, help="default 10, quick 2")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--png", type=Path, help="where to draw; needs matplotlib")
    parser.add_argument("--dir", type=Path, help="where the folders of the peers stay")
    asked = parser.parse_args()
    rounds, kills = asked.rounds or (9 if asked.quick else 40), asked.kills or (2 if asked.quick else 10)
    with tempfile.TemporaryDirectory() as folder:
        base = asked.dir or Path(folder)
        base.mkdir(parents=True, exist_ok=True)
        with Swarm(base, SETS) as swarm:
            blackouts = play(swarm, rounds, kills, random.Random(asked.seed))
        result, here, beside = judged(base, swarm, blackouts, deep=not asked.quick)
    if asked.png:
        draw_curves(asked.png, here, beside, blackouts)
    if asked.json:
        told = {"peers": PEERS, "rounds": rounds, "kills": kills, "seed": asked.seed, "set": SETS}
        curves = {"losses": here, "losses_undisturbed": beside, "after_rounds": [b.after for b in blackouts]}
        print(report("blackout", told, result.figures, versions("torch"), wrong=result.wrong, curves=curves))
    else:
        print(lines(result.figures))
        print("\n".join(f"WRONG  {one}" for one in result.wrong) or "nothing is wrong")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
