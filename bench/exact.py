"""Do four real processes end with the very bits of the experiment? Peers on loopback beside `atoll.experiment`.

    python bench/exact.py [--recipe auto ...] [--quick] [--json]

Founds a run of a small model, lets the others join, and waits until it is over. Then the experiment runs the recipe
that genesis names, on the same data, with as many peers, and the names of both last states are compared: a name is
a digest of the whole state, so equal names are equal bits of model, outer momentum and counts. Every round before
is compared, too, so that what differs is found where it began. Threads are one everywhere; both sides are on this
processor. What it takes from the real run beside genesis: in which order the peers' ids stand, since rows are added
up in that order, while shares of the data are dealt out in the order of joining; and the number of the first round
that trained, by which `randk` draws. `decoupled` and `delayed_nesterov` are asked to wait for all four: who is late
where a quorum is fewer, no experiment knows. Beside the names stand the bytes that one peer's sockets sent in a
round, with all that was said.

A run that differs where a round lacked a peer, as on a busy computer, shows nothing: it says so, and is done once
more. The topology is fixed: the planner goes by measured links, and a tree adds rows up in another order. Parts are
sized by measured uplinks, which the experiment takes for equal; they are cut between blocks of most codecs, so that
most recipes come to the same bits. Where one does not, a round of fewer parts tells so.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from form import asking, report, versions
from real_swarm import Swarm

from atoll.base.ids import PeerId
from atoll.cli.stored_vertices import read_vertex
from atoll.cli.verify import kept_in
from atoll.peer.round.candidate import opened
from atoll.peer.settings import decode_settings
from atoll.runtime.training_spec import parse_training_spec
from atoll.training.data import load_data
from atoll.training.experiment.api import ExperimentOptions, ExperimentSimulator, FaultSpec
from atoll.training.models import build_model
from atoll.training.recipe.state import state_bytes, state_from_bytes, state_hash
from atoll.training.spec import TrainingSpec

if TYPE_CHECKING:
    from atoll.wire.messages.vertex import VertexBody

PEERS = 4
SMALL = (
    "model.name=gpt-nano",
    "train.seq_len=32",
    "train.batch=2",
    "sync.topology=butterfly",  # on a busy computer the planner takes a tree now and then: other sums
)
ROUNDS = (*SMALL, "run.rounds=4", "train.inner_steps=8")
TURNS = (*SMALL, "run.rounds=2", "train.inner_steps=18", "sync.fragments=3", "sync.overlap=2")
STEPS = (*SMALL, "run.rounds=8")
RECIPES = {
    "diloco": ROUNDS,
    "streaming": TURNS,
    "auto": TURNS,
    "local_sgd": ROUNDS,
    "muloco": ROUNDS,
    "fedavg": ROUNDS,
    "opendiloco": ROUNDS,
    "data_parallel": STEPS,
    "demo_": STEPS,
    "powersgd": STEPS,
    "pipelined": STEPS,
    "des_loc": (*SMALL, "run.rounds=7", "train.inner_steps=4"),
    "sparta": STEPS,
    "eager": ROUNDS,
    "sparseloco": ROUNDS,
    "cooperative": ROUNDS,
    "decoupled": (*SMALL, "run.rounds=2", "train.inner_steps=24", "sync.fragments=3", "sync.quorum=4"),
    "parameter_server": (*STEPS, "sync.topology=star"),
    "delayed_nesterov": (*ROUNDS, "run.start_peers=4", "sync.quorum=4"),
    "phases": ("train.recipe=diloco", *ROUNDS, "sync.phases=0.4:4,0.8:3:2bit:int8"),
}


@dataclass(frozen=True)
class Told:
    """What a run that is over says of itself, in the folder of one of its peers."""

    learning: TrainingSpec
    bodies: tuple[VertexBody, ...]  # of the rounds that trained
    shares: tuple[PeerId, ...]  # whose share of the data is the first, the second, …
    last: bytes  # the last state
    sent_bytes: int  # by this peer in a round, on sockets: the median

    @property
    def order(self) -> list[int]:
        """Of the ids of those whose shares are 0, 1, … ."""
        return sorted(range(len(self.shares)), key=lambda k: self.shares[k])

    def unlike(self) -> str:
        """Why this run was not one that the experiment repeats; empty if it was."""
        for before, body in pairwise(self.bodies):
            if body.round != before.round + 1:  # whoever had begun to train for it went on from later samples
                return f"between rounds {before.round} and {body.round} one ended without training"
        schedule = self.learning.recipe.schedule
        parts = 1 if self.learning.recipe.reducer.group == "server" else len(self.shares)
        for body in self.bodies:
            if len(body.parts) != parts:
                return f"round {body.round} was cut into {len(body.parts)} parts: owners' measured uplinks differed"
            if None in body.parts:
                return f"round {body.round} has parts without an answer"
            for part, answer in enumerate(body.parts):
                said = set(opened(answer).contributors) if answer is not None else set[str]()
                if lacking := sorted({*self.shares} - said):
                    return f"round {body.round} lacked {', '.join(lacking)} in part {part}"
            if tuple(m.peer for m in body.members if m.may_train) != self.shares:
                return f"round {body.round} changed who trains"
            expected = schedule.begun(body.trained) - schedule.begun(body.trained - 1)
            if body.metrics.steps != expected * len(self.shares):
                return f"round {body.round} has {body.metrics.steps} steps, not {expected} of every peer"
        wanted = schedule.turns
        return "" if len(self.bodies) == wanted else f"{len(self.bodies)} rounds trained, not {wanted}"


@dataclass(frozen=True)
class Compared:
    state: str  # of the real run, hex
    experiment: str
    rounds: int
    differs: int | None  # the first round after which the states are not the same one, from 1 on
    values: int  # of the model that differ at the end
    unlike: str  # why they may differ though nothing is wrong; empty if they may not
    sent_bytes: int

    @property
    def same(self) -> bool:
        """However the run went: no chance makes two different runs equal to the bit."""
        return self.state == self.experiment and self.differs is None and self.values == 0


def real(base: Path, settings: Sequence[str], peers: int = PEERS) -> Told:
    """A run of real processes from its founding to its end."""
    base.mkdir(exist_ok=True)
    with Swarm(base, [*settings, f"run.start_peers={peers}"]) as swarm:
        swarm.found()
        for index in range(1, peers):
            swarm.join(index)
        ended = swarm.wait(lambda f: f["fact"] in ("Ended", "Exit") and f["by"] == 0, patience_s=300.0)
        if ended["fact"] == "Exit":
            raise RuntimeError((base / "peer-0.stderr").read_text(errors="replace"))
    return told(base / "peer-0")


def told(folder: Path) -> Told:
    with kept_in(folder) as kept:
        genesis = read_vertex(kept, folder, -1)[1]
        bodies = [read_vertex(kept, folder, number)[1] for number in kept.rounds]
    trained = tuple(body for body in bodies if body.parts)
    learning = parse_training_spec(decode_settings(genesis.settings))
    shares = tuple(m.peer for m in trained[0].members if m.may_train)
    return Told(
        learning, trained, shares, (folder / "blobs" / trained[-1].state.hex()).read_bytes(), sent_in(folder)
    )


def sent_in(folder: Path) -> int:
    """Bytes that this peer's sockets sent from one round that trained to the next, the median."""
    facts = [json.loads(line) for line in (folder / "facts.jsonl").read_text().splitlines()]
    sent = [fact["bytes_out"] for fact in facts if fact["fact"] == "RoundClosed" and fact["counted"]]
    return round(median(b - a for a, b in pairwise(sent)))


def compared(run: Told) -> Compared:
    """The experiment beside it, round by round, and as everybody calls it."""
    torch.set_num_threads(1)
    recipe, layout = run.learning.recipe, run.learning.layout
    schedule, peers, order = recipe.schedule, len(run.shares), run.order
    data = load_data(run.learning.data)
    model = build_model(recipe.model, recipe.seed)
    beside = ExperimentSimulator(
        recipe, model, data, peers, schedule.steps, FaultSpec(), options=ExperimentOptions(order=order)
    )
    beside.first_round = run.bodies[0].round
    differs = None
    for turn, body in enumerate(run.bodies, 1):
        landed = schedule.begun(turn) + recipe.hidden_steps
        while beside.now < min(landed, schedule.steps):
            beside.step()
        if landed >= schedule.steps and turn < len(run.bodies):
            continue  # there the last step waits for all that is under way
        if state_hash(state_bytes(beside.shared(), layout)) != body.state:
            differs = turn
            break
    done = beside.run_to_end(0, 256, None)
    model_F = state_from_bytes(run.last, layout).anchor_F
    values = int((model_F.view(torch.int32) != done.model_F.view(torch.int32)).sum())
    found = done.state.hex() if done.state is not None else ""
    found_there = run.bodies[-1].state.hex()
    return Compared(found_there, found, len(run.bodies), differs, values, run.unlike(), run.sent_bytes)


def shown(settings: Sequence[str], base: Path, peers: int = PEERS) -> Compared:
    """Once, and once more if that differed for a reason which is nobody's fault."""
    first = compared(real(base / "first", settings, peers))
    return compared(real(base / "again", settings, peers)) if first.unlike and not first.same else first


def row_of(name: str, found: Compared, took_s: float) -> dict[str, Any]:
    differs = f"differs from round {found.differs} on, {found.values} values of the model at the end"
    says = "the same state" if found.same else found.unlike or differs
    states = {"state": found.state[:16], "experiment": found.experiment[:16]}
    sent = {"sent_bytes": found.sent_bytes}
    return {"recipe": name, "rounds": found.rounds, **states, "says": says, **sent, "wall_s": round(took_s)}


def main() -> int:
    asked = asking(__doc__, "the first recipe only")
    asked.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    asked.add_argument("--data", default="", help="a text file; default: a small one that is written for this")
    asked.add_argument("--dir", type=Path, help="where the folders of the peers stay, to look at what differs")
    given = asked.parse_args()
    rows = list[dict[str, Any]]()
    same = True
    for name in given.recipe[: 1 if given.quick else None]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="atoll-exact-") as folder:
            base = given.dir / name if given.dir else Path(folder)
            base.mkdir(parents=True, exist_ok=True)
            source = given.data or str(book(base))
            found = shown([f"train.recipe={name}", *RECIPES[name], f"data.source={source}"], base)
        same &= found.same
        rows.append(row_of(name, found, time.monotonic() - began))
        if not given.json:
            print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    if given.json:
        print(report("exact", {"peers": PEERS}, rows, versions("torch")))
    return 0 if same else 1


def book(base: Path) -> Path:
    """Text enough for some hundred steps."""
    path = base / "book.txt"
    path.write_text(" ".join(f"{i} squared is {i * i}." for i in range(4000)))
    return path


if __name__ == "__main__":
    sys.exit(main())
