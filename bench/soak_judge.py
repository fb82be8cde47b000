"""What is not as it should be after a soak test: read from the folders of the peers, from what they told and wrote.

    states    all peers closed every round with the same state; `atoll verify --deep` accepts every folder
    blame     nobody honest was refused, expelled or named at fault
    words     no traceback in any log or output
    samples   no sample is in the model twice; skipped ones are within what `training/data` promises
    memory    of those that lived long, and their open files
    loss      beside the experiment: as many rounds of as many members, undisturbed
    rounds    which took long or counted nobody, and what happened meanwhile

Everything but the last two makes a run wrong. Starts nothing but `atoll verify`.
"""

from __future__ import annotations

import bisect
import json
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.cli.stored_vertices import read_vertex
from atoll.cli.verify import kept_in
from atoll.peer.round.candidate import trial_of
from atoll.peer.settings import decode_settings
from atoll.policy.plan import RoundSettings, plan_round
from atoll.runtime.event_log import entries_in
from atoll.runtime.training_spec import parse_training_spec
from atoll.training.data import cursor_after, load_data, position_after
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.state import state_from_bytes
from atoll.training.spec import TrainingSpec
from atoll.wire.codec import encode
from atoll.wire.messages.vertex import VertexBody

BLAME = (
    "MemberAccused", "CorruptBlobSourceDetected", "ForkBranchDetected", "OwnerContradicted", "Equivocation",
    "ProtocolFault", "RowDecodeFailed", "FalseOwnerResultProven", "CommitmentsDiffer",
    "OtherSize", "JoinRejected", "MalformedRowDetected",
)  # fmt: skip
LONG_S = 90.0  # a life from which growth can be told
WARM_S = 40.0  # from its beginning, until everything is loaded
GROWTH_MB = 64.0  # of memory since then
GROWTH_FILES = 12
SLOW = 4.0  # times the median: a round that took long
LOSS_RATIO = 1.25  # beside the undisturbed run


@dataclass
class Life:
    """One process of a peer, and what it took: (age in s, resident MB, open files, threads)."""

    index: int
    process: int
    began: float
    looked: float = 0.0
    over: bool = False
    seen: list[tuple[float, float, int, int]] = field(default_factory=list[tuple[float, float, int, int]])


@dataclass
class Judged:
    wrong: list[str]
    figures: dict[str, Any]

    def lines(self) -> Iterator[str]:
        for name, value in self.figures.items():
            if isinstance(value, list):
                yield from (f"{name if k == 0 else '':24}{one}" for k, one in enumerate(value))
            else:
                yield f"{name:24}{value}"
        yield from (f"WRONG  {one}" for one in self.wrong)
        if not self.wrong:
            yield "nothing is wrong"


def judged(
    base: Path,
    facts: list[dict[str, Any]],
    ids: Mapping[int, str],
    lives: list[Life],
    found: list[str],
    done: Mapping[str, int],
    alive: list[int],
) -> Judged:
    result = Judged(list(found), {"troubles": dict(sorted(done.items()))})
    folders = [base / f"peer-{index}" for index in sorted({life.index for life in lives})]
    recorded = {folder: list(record_of(folder)) for folder in folders}
    judge_states(result, base, alive, recorded)
    judge_folders(result, folders)
    judge_blame(result, ids, recorded)
    judge_words(result, base, folders)
    judge_memory(result, lives)
    longest = base / f"peer-{alive[0]}" if alive else folders[0]
    judge_history(result, longest, recorded, ids)
    judge_rounds(result, base, facts)
    return result


def record_of(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "facts.jsonl"
    return entries_in(path) if path.exists() else iter(())


# ---- states, folders, blame, words ---------------------------------------------------------------------------


def judge_states(
    result: Judged, base: Path, alive: list[int], recorded: Mapping[Path, list[dict[str, Any]]]
) -> None:
    """One state per round, whoever closed it; the living ended with the same."""
    states: dict[int, set[str]] = defaultdict(set)
    for entries in recorded.values():
        for e in entries:
            if e["fact"] == "RoundClosed":
                states[e["round"]].add(e["state"])
    for round, names in sorted(states.items()):
        if len(names) > 1:
            result.wrong.append(f"round {round} closed with {len(names)} states")
    last = {
        index: next((e for e in reversed(recorded[base / f"peer-{index}"]) if e["fact"] == "RoundClosed"), None)
        for index in alive
    }
    newest = max((e["round"] for e in last.values() if e), default=-1)
    for index, e in last.items():  # they are ended one after the other: the last round may be missing
        if e is None or e["round"] < newest - 2:
            result.wrong.append(f"peer {index} ended at round {e and e['round']}, others at {newest}")
    result.figures["rounds"] = newest + 1


def judge_folders(result: Judged, folders: list[Path]) -> None:
    for folder in folders:
        if not any(e["fact"] == "GenesisKnown" for e in record_of(folder)):
            continue  # killed before it had joined
        command = [sys.executable, "-m", "atoll", "verify", str(folder), "--deep"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "; ".join(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("E-"))
            result.wrong.append(
                f"atoll verify {folder.name}: status {done.returncode}: {said or done.stdout[-300:]}"
            )
    result.figures["folders verified"] = len(folders)


def judge_blame(result: Judged, ids: Mapping[int, str], recorded: Mapping[Path, list[dict[str, Any]]]) -> None:
    names = {peer: f"peer {index}" for index, peer in ids.items()}
    notes: Counter[str] = Counter()
    for folder, entries in recorded.items():
        for e in entries:
            if e["fact"] in BLAME:
                whom = names.get(e.get("peer") or e.get("owner") or e.get("by", ""), "?")
                rest = {k: v for k, v in e.items() if k not in ("at", "fact", "phase", "trace", "statement")}
                result.wrong.append(f"{folder.name}: {e['fact']} of {whom}: {rest}"[:400])
            elif e["fact"] in (
                "ProposalRejected",
                "PartOwnerFaultObserved",
                "RoundAttemptFailed",
                "LocalContributionSkipped",
                "StateDownloadBegan",
                "AgreedStateMissing",
            ):
                why = str(e.get("why", ""))
                notes[f"{e['fact']}: {why.split(':')[0][:90]}" if why else e["fact"]] += 1
            elif e["fact"] == "MembershipChanged":
                out = [m["name"] for m in e["members"] if m["standing"] == "expelled"]
                if out:
                    result.wrong.append(f"{folder.name}: expelled in round {e['round']}: {out}")
    result.figures["told"] = [f"{count:5} {what}" for what, count in notes.most_common(24)]


def judge_words(result: Judged, base: Path, folders: list[Path]) -> None:
    for path in (*(f / "atoll.log" for f in folders), *sorted(base.glob("*.stderr"))):
        if not path.exists():
            continue
        lines = path.read_text(errors="replace").splitlines()
        for k, line in enumerate(lines):
            if "Traceback" in line or " ERROR " in line or "E-INT" in line:
                result.wrong.append(f"{path.parent.name}/{path.name}: " + " | ".join(lines[k : k + 30])[-1200:])
            elif " WARNING " in line:
                result.figures.setdefault("warnings", []).append(f"{path.parent.name}: {line[:200]}")


def judge_memory(result: Judged, lives: list[Life]) -> None:
    rows: list[str] = []
    for life in lives:
        warm = [s for s in life.seen if s[0] >= WARM_S]
        if len(warm) < 4 or warm[-1][0] < LONG_S:
            continue
        age, half = warm[-1][0], len(warm) // 2
        (mb, files, threads), (end_mb, end_files, end_threads) = (
            [max(s[k] for s in some) for k in (1, 2, 3)] for some in (warm[:half], warm[half:])
        )
        rows.append(
            f"peer {life.index}, {age:.0f} s old: {mb:.0f} -> {end_mb:.0f} MB, "
            f"{files} -> {end_files} open files, {threads} -> {end_threads} threads"
        )
        if end_mb - mb > GROWTH_MB or end_files - files > GROWTH_FILES:
            result.wrong.append("grew: " + rows[-1])
    result.figures["long lives"] = rows[-8:]


# ---- samples and loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Where in the data a round stood."""

    samples: int  # before it
    after: int
    steps: int  # of the longest contributor
    shares: tuple[str, ...]  # whose are the first, the second, … of them
    counted: frozenset[str]  # by its vertex

    def places(self, peer: str, first: int, count: int) -> np.ndarray:
        """Positions of `count` samples of this peer, from its `first` one of this round on."""
        n = len(self.shares)
        cursor = cursor_after(self.samples, n) + first
        return (cursor + np.arange(count)) * n + self.shares.index(peer)


def judge_history(
    result: Judged, folder: Path, recorded: Mapping[Path, list[dict[str, Any]]], ids: Mapping[int, str]
) -> None:
    with kept_in(folder) as kept:
        genesis = read_vertex(kept, folder, -1)[1]
        bodies = [read_vertex(kept, folder, number)[1] for number in kept.rounds]
    settings = decode_settings(genesis.settings)
    learning = parse_training_spec(settings)
    turns = turns_of([genesis, *bodies], settings.round, learning)
    trained = [body for body in bodies if body.parts]
    result.figures["rounds that trained"] = len(trained)
    head = bodies[-1]
    state = state_from_bytes((folder / "blobs" / head.state.hex()).read_bytes(), learning.layout)
    end = turns[head.round].after
    if state.samples != end:
        result.wrong.append(f"the head's state stands at sample {state.samples}, its history at {end}")
    judge_samples(result, turns, recorded, ids, learning, bool(settings.audited_share))
    judge_loss(result, trained, state.anchor_F, learning)


def turns_of(bodies: list[VertexBody], settings: RoundSettings, learning: TrainingSpec) -> dict[int, Turn]:
    """By round; `bodies` are genesis and all that follow."""
    turns: dict[int, Turn] = {}
    samples = 0
    for parent, body in pairwise(bodies):
        plan = plan_round(body.parent, parent, settings)
        shares = tuple(m.peer for m in plan.trainers)
        steps = trial_of(body.parent, encode(body), plan).step.steps if body.parts else 0
        after = position_after(samples, len(shares), steps * learning.recipe.batch) if shares else samples
        turns[body.round] = Turn(samples, after, steps, shares, frozenset(signed.signer for signed in body.commits))
        samples = after
    return turns


def judge_samples(
    result: Judged,
    turns: Mapping[int, Turn],
    recorded: Mapping[Path, list[dict[str, Any]]],
    ids: Mapping[int, str],
    learning: TrainingSpec,
    undone: bool,
) -> None:
    """What every update that counted had learned from, by what its author recorded."""
    if learning.recipe.schedule.overlap > 0 or learning.recipe.own_anchors:
        result.figures["samples"] = "not looked at: trainers run ahead of rounds"
        return
    found = count_samples(turns, recorded, ids, learning, undone)
    result.figures["samples"] = (
        f"{found.dealt} handed out, {found.left_out} of them in no update; after rounds that counted nobody "
        f"{found.again} learned from once more"
    )
    if found.twice:
        result.wrong.append(f"samples learned from twice: {found.twice[0]} (and {len(found.twice) - 1} more)")


@dataclass
class Samples:
    dealt: int  # handed out by the rounds of this history
    left_out: int  # of those, in no update that counted
    again: int  # learned from in a round that counted nobody, and once more when they were dealt out again
    twice: list[str]  # in two updates that counted: where


def count_samples(
    turns: Mapping[int, Turn],
    recorded: Mapping[Path, list[dict[str, Any]]],
    ids: Mapping[int, str],
    learning: TrainingSpec,
    undone: bool,
) -> Samples:
    """Of a run whose trainers do not run ahead of rounds."""
    round_samples = learning.recipe.schedule.turn_steps * learning.recipe.batch
    size = max((t.after for t in turns.values()), default=0) + 4096
    used, brought = np.zeros(size, bool), np.zeros(size, bool)
    twice: list[str] = []
    for folder, entries in recorded.items():
        peer = ids.get(int(folder.name.split("-")[1]), "")
        for round, places in learned_from(entries, peer, turns, round_samples, undone):
            turn, places = turns[round], places[places < size]
            if turn.after == turn.samples:  # nobody counted and the data stood still: a later update has these
                brought[places] = True
                continue
            if len(wrong := places[used[places]]):
                twice.append(f"{folder.name}, round {round}: {len(wrong)} samples, the first is {wrong[0]}")
            used[places] = True
    end = max((t.after for t in turns.values()), default=0)
    return Samples(end, int((~(used | brought)[:end]).sum()), int((used & brought).sum()), twice)


def learned_from(
    entries: list[dict[str, Any]], peer: str, turns: Mapping[int, Turn], round_samples: int, undone: bool
) -> Iterator[tuple[int, np.ndarray]]:
    """(round, places of its samples) for every update of this peer that counted. What an update brings along from
    rounds whose training came too late to be told stands in no record: it is left out. `undone`: a round that does
    not count leaves nothing behind, as where rounds are audited. Who was killed between its word and the end of the
    round never tells of that end: the vertex does."""
    waiting: list[tuple[int, np.ndarray]] = []  # steps in x that no update has taken along
    sent: list[tuple[int, np.ndarray]] = []  # in an update
    shared = -1  # in which round it was sent last
    for e in entries:
        turn = turns.get(e.get("round", -9))
        match e["fact"]:
            case "GenesisKnown" | "LocalStateCaughtUp" if e["fact"] == "GenesisKnown" or e["by"] != "rounds":
                if shared in turns and peer in turns[shared].counted:
                    yield from sent
                waiting, sent = [], []  # a new life: what was under way is lost
            case "LocalTrainingEnded" if turn is not None and peer in turn.shares:
                before = sum(len(places) for _, places in waiting)
                fresh = min(e["samples"] - before, round_samples)
                waiting = [*waiting, (e["round"], turn.places(peer, 0, fresh))]
            case "UpdateSharingBegan" if peer in e["committed"] and waiting:
                sent, waiting, shared = [*sent, *waiting], [], e["round"]
            case "RoundClosed" if peer in e["counted"]:
                yield from sent
                sent = []
            case "RoundClosed" if undone:
                waiting, sent = [], []
            case _:
                pass


def judge_loss(result: Judged, trained: list[VertexBody], anchor_F: torch.Tensor, learning: TrainingSpec) -> None:
    """On held-out data, beside the experiment of as many rounds with as many members as counted in the middle."""
    torch.set_num_threads(1)
    recipe, data = learning.recipe, load_data(learning.data)
    counted = [len({c.signer for c in body.commits}) for body in trained]
    peers = max(1, round(statistics.median(counted))) if counted else 1
    steps = recipe.schedule.turn_steps * len(trained)
    model = build_model(recipe.model, recipe.seed)
    beside = ExperimentSimulator(recipe, model, data, peers, max(steps, 1), FaultSpec(), loss_of)
    first = beside.loss_at(beside.agreed(), 1024)
    here = beside.loss_at(anchor_F, 1024)
    while beside.now < steps:
        beside.step()
    there = beside.loss_at(beside.agreed(), 1024)
    size = f"{peers} members, {len(trained)} rounds"
    result.figures["loss"] = f"{first:.3f} -> {here:.3f}; undisturbed {there:.3f} ({size}): {here / there:.3f}"
    if here > LOSS_RATIO * there:
        result.wrong.append(f"the loss is {here:.3f}, undisturbed {there:.3f}")


# ---- rounds --------------------------------------------------------------------------------------------------


def judge_rounds(result: Judged, base: Path, facts: list[dict[str, Any]]) -> None:
    closed: dict[int, tuple[float, dict[str, Any]]] = {}
    for fact in facts:
        if fact["fact"] == "RoundClosed" and fact["round"] not in closed:
            closed[fact["round"]] = (fact["time_s"], fact)
    path = base / "trouble.jsonl"
    troubles = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    moments = [t["at"] for t in troubles]
    lengths: list[tuple[float, int, float]] = []
    order = sorted(closed)
    for before, round in pairwise(order):
        if round == before + 1:
            lengths.append((closed[round][0] - closed[before][0], round, closed[before][0]))
    if not lengths:
        return
    median = statistics.median(length for length, _, _ in lengths)
    rows: list[str] = []
    for length, round, began in sorted(lengths, reverse=True)[:10]:
        if length < SLOW * median:
            break
        lo, hi = bisect.bisect_left(moments, began - 15.0), bisect.bisect_right(moments, began + length)
        why = "; ".join(f"{t['at'] - began:+.0f} s {t['what']}" for t in troubles[lo:hi])
        rows.append(f"round {round}: {length:.1f} s, {len(closed[round][1]['counted'])} counted: {why[:400]}")
    first = next((round for round in order if closed[round][1]["counted"]), 0)  # before it members assemble
    empty = sum(not fact["counted"] for round, (_, fact) in closed.items() if round > first)
    late = sum(fact["attempt"] > 0 for _, fact in closed.values())
    result.figures["a round takes"] = f"{median:.2f} s (median)"
    result.figures["rounds without updates"] = f"{empty}; decided in a later attempt: {late}"
    result.figures["rounds that took long"] = rows
