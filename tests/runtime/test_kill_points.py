"""A peer that is killed at any moment of a round goes on with what is its own, whatever its disk got to hold of it.

The disk of one member is copied at every point between two writes, and in the middle of each. A life begins from
each copy: at the vertex of the round if that was kept by then, else at the one before, and hears of it from others.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from members import PEERS, SHARES, Inside, Members, recipe_for, story

from atoll.base.ids import PeerId
from atoll.peer.config.node_sections import FeedbackPrecision
from atoll.peer.tasks import AdoptState, AdvanceState, RestoreState
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.runtime.storage import staged_file
from atoll.runtime.storage.private_state import PrivateState, write_private
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.data import load_data
from atoll.training.experiment.api import ExperimentOptions, ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.error_feedback import FEEDBACK_DTYPES

PRIVATE = ("private.bin", "private.next", "private.tmp")
WHOLE = {"overlap": 0, "fragments": 1}


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text(" ".join(f"{i} squared is {i * i}." for i in range(4000)))
    return str(path)


@dataclass
class Copy:
    folder: Path
    kept: bool  # the round's vertex was


class Disk:
    """Copies the files of one member's own whenever something is about to change there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.copies, self.kept = folder, list[Copy](), False
        self.watching = False
        rename, write_over = Path.rename, staged_file.write_over

        def renamed(path: Path, target: Path) -> Path:
            if path.parent == folder:
                self.copy()
            return rename(path, target)

        def written(handle: int, pieces) -> None:
            if Path(os.readlink(f"/proc/self/fd/{handle}")).parent == folder:
                write_over(handle, pieces[: len(pieces) // 2])
                self.copy()
            write_over(handle, pieces)

        monkeypatch.setattr(Path, "rename", renamed)
        monkeypatch.setattr(staged_file, "write_over", written)

    def copy(self) -> None:
        if not self.watching:
            return
        into = self.folder.with_name(f"{self.folder.name}-copy-{len(self.copies)}")
        into.mkdir(mode=0o700)
        for name in PRIVATE:
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, into / name)
        self.copies.append(Copy(into, self.kept))


async def watched_round(members: Members, disks: list[Disk], parts: tuple[bool, ...]) -> None:
    """One round in which these parts count member 1, and these disks are watched."""
    for disk in disks:
        disk.watching = True
    updates = [await members.train(index) for index in range(PEERS)]
    answers = []
    for part in range(PEERS):
        rows = tuple(
            TaskRow(PeerId(str(k)), 24, update.parts[part], (PeerId(str(k)),))
            for k, update in enumerate(updates)
            if k == 0 or parts[part]
        )
        answers.append((await members.islands[part].run(CombineRows(members.round, part, SHARES, rows))).payload)
    steps = members.steps
    work = AdvanceState(members.round, members.state, tuple(answers), steps, 48, PEERS, SHARES)
    (state,) = {(await island.run(work)).state for island in members.islands}
    members.state = state
    for disk in disks:
        disk.copy()
        disk.kept = True
        disk.copy()
    members.round += 1
    for index, counted in enumerate(((True,) * PEERS, parts)):
        mine = members.counts(index, updates[index], counted)
        await members.islands[index].run(AdoptState(members.round - 1, members.vertex(), state, counted, mine=mine))
    for disk in disks:
        disk.copy()
        disk.watching = False


async def life_from(
    members: Members, index: int, copy: Copy, before: RestoreState, ready: bool = False
) -> TrainingWorker:
    """Another process that finds this disk, once it is where the others are."""
    for blob in (members.stores[index].folder / "blobs").iterdir():
        (copy.folder / "blobs").mkdir(mode=0o700, exist_ok=True)
        os.link(blob, copy.folder / "blobs" / blob.name)
    store, after = PeerStore(copy.folder, durable=False), members.restore(index)
    island = TrainingWorker(store, 1, trainer=Inside(), feedback=members.feedback)
    island.learning = members.learning
    island.equip(members.book)
    assert await island.run(after if copy.kept else before)
    if ready:
        await island._ready()
    if not copy.kept and after != before:
        await island.run(AdoptState(after.round, after.vertex, after.state, None, mine=after.mine[0]))
    return island


def owns(island: TrainingWorker) -> tuple[torch.Tensor, bytes]:
    assert island.mine.memory_F is not None
    return island.mine.memory_F, bytes(island.live.inner)


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        (WHOLE, (True, True)),
        (WHOLE, (True, False)),
        (WHOLE, (False, False)),
        ({"overlap": 0, "fragments": 2}, (True, True)),
    ],
    ids=["counted", "counted in part", "not counted", "a fragment"],
)
def test_whatever_the_moment_of_a_kill_what_is_its_own_goes_with_the_vertex(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch, how: dict[str, int], parts: tuple[bool, ...]
):
    """A life that another one left nothing of a round that did not count begins as before that round."""

    async def tell(members: Members) -> None:
        for _ in range(2):
            await members.play()
        disk, before = Disk(members.stores[1].folder, monkeypatch), members.restore(1)
        then = owns(members.islands[1])
        then = then[0].clone(), then[1]
        await watched_round(members, [disk], parts)
        now = owns(members.islands[1])
        assert not torch.equal(now[0], then[0]) and now[1] != then[1], "else this test would see nothing"
        assert len(disk.copies) > 5 and {copy.kept for copy in disk.copies} == {True, False}
        runs_on = how["fragments"] > 1  # moments are of the merge before
        for number, copy in enumerate(disk.copies):
            sent = any(parts) and (copy.kept or (copy.folder / "private.next").exists())
            # one life hears of the vertex while it has a trainer
            ready = number == max(k for k, one in enumerate(disk.copies) if not one.kept)
            island = await life_from(members, 1, copy, before, ready)
            memory_F, inner = owns(island)
            good_F, left = now if sent or number == len(disk.copies) - 1 else then
            assert torch.equal(memory_F, good_F), number
            assert runs_on or inner == left, number
            if ready and not runs_on:
                trainer = island.trainer
                assert torch.equal(trainer.read_x(), island.head.anchor_F)
                assert await trainer.inner_state() == inner
            await island.close()
            island.store.close()

    story(tell, Members(tmp_path, recipe_for(how, rounds=6), book))


class HalfPrecisionMembers(Members):
    feedback = "bf16"


@pytest.mark.parametrize(
    ("kind", "seed"), [*((Members, seed) for seed in range(4)), *((HalfPrecisionMembers, s) for s in (1, 2))]
)
def test_after_all_were_killed_in_a_round_a_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch, kind: type[Members], seed: int
):
    """Each at a moment of its own: the experiment's model and all error feedback, bit for bit. Once in the first
    half of the round, which is taken again; else after all had voted, so that what is theirs was written ahead."""
    recipe, draw = recipe_for(WHOLE, rounds=5), random.Random(seed)
    steps, options = recipe.schedule.steps, ExperimentOptions(feedback_precision=kind.feedback)
    data = load_data(book)
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), data, PEERS, steps, FaultSpec(), loss_of, options=options
    )

    async def tell(members: Members) -> None:
        for _ in range(2):
            await members.play()
        disks = [Disk(store.folder, monkeypatch) for store in members.stores]
        before, then = [members.restore(k) for k in range(PEERS)], (members.round, members.state, [*members.mine])
        await watched_round(members, disks, (True,) * PEERS)
        voted = [
            [one for one in disk.copies if one.kept or (one.folder / "private.next").exists()] for disk in disks
        ]
        copies = [draw.choice(found if seed else disk.copies[:2]) for found, disk in zip(voted, disks, strict=True)]
        if not any(copy.kept for copy in copies):
            members.round, members.state, members.mine = then
        for index, old in enumerate(members.islands):
            await old.close()
            life = await life_from(members, index, copies[index], before[index])
            members.islands[index], members.trainers[index] = life, life.trainer
            members.stores[index].close()
            members.stores[index] = life.store
        while members.round < 5:
            await members.play()
        while run.now < run.steps:
            run.step()
        for island, worker in zip(members.islands, run.workers, strict=True):
            assert torch.equal(island.head.anchor_F, run.agreed()), copies
            assert torch.equal(island.mine.memory_F, worker.memory_F), copies
            assert island.mine.memory_F.dtype == FEEDBACK_DTYPES[kind.feedback]

    story(tell, kind(tmp_path, recipe, book))


@pytest.mark.parametrize("before", ["fp32", "bf16"])
def test_a_peer_that_starts_with_another_precision_of_error_feedback_keeps_it_so(
    tmp_path: Path, book: str, before: FeedbackPrecision
):
    """Fragments are written into the vector that was read, whose precision would stay."""
    after: FeedbackPrecision = "bf16" if before == "fp32" else "fp32"

    async def tell(members: Members) -> None:
        for _ in range(3):
            await members.play()
        work, (old, *_) = members.restore(0), members.islands
        then = owns(old)[0].clone()
        await old.close()
        island = TrainingWorker(members.stores[0], 1, trainer=Inside(), feedback=after)
        island.learning = members.learning
        island.equip(members.book)
        members.islands[0], members.trainers[0] = island, island.trainer
        assert await island.run(work)
        now = owns(island)[0]
        assert now.dtype == FEEDBACK_DTYPES[after] and torch.allclose(now.float(), then.float(), rtol=2**-7)
        await members.play()
        assert owns(island)[0].dtype == FEEDBACK_DTYPES[after]

    kind = Members if before == "fp32" else HalfPrecisionMembers
    story(tell, kind(tmp_path, recipe_for({"overlap": 0, "fragments": 2}, rounds=6), book))


@pytest.mark.parametrize(
    "trouble", [OSError(28, "No space left on device"), MemoryError("8 GB")], ids=["disk", "memory"]
)
def test_what_cannot_be_written_ahead_costs_no_round(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch, trouble: Exception
):
    """Nor can the member come back, where whatever it waits for has failed for good."""

    def write(store: PeerStore, private: PrivateState) -> PrivateState:
        if private.sent is not None:
            raise trouble
        return write_private(store, private)

    async def tell(members: Members) -> None:
        monkeypatch.setattr("atoll.runtime.worker.training_worker.write_private", write)
        await members.play()
        assert await members.islands[1].run(members.restore(1))
        assert owns(members.islands[1])[0].any()

    story(tell, Members(tmp_path, recipe_for(WHOLE), book))
