"""Real islands that hold two updates of the same samples against each other, and take the round again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from members import SHARES, Members, story
from msgspec.structs import replace
from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError, UsageError
from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import digest, merkle_root
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import (
    BuildUpdateExhibit,
    CompareRedundantUpdates,
    EncodeUpdate,
    RedundantUpdate,
    TrainRound,
    UpdateEncoded,
)
from atoll.runtime.config import load_config, recipe_of, settings_of
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.runtime.worker.capabilities import enable_checks
from atoll.training.codec import codec_named
from atoll.training.recipe.gradient import ComputeOptions
from atoll.training.recipe.inner import SGD
from atoll.training.recipe.methods import data_parallel, fedavg
from atoll.training.recipe.recipes import UpdateCoding, diloco
from atoll.training.recipe.update import part_bounds
from atoll.verification.redundant_training.machine import REDUNDANT_TRAINING
from atoll.verification.redundant_training.policy import APART_MOST, MILLION, TOLERANCE
from atoll.verification.redundant_training.tensors import twins_problem
from atoll.verification.shown_update import update_bytes

STEPS = 12
GUEST, HOST = PeerId("0"), PeerId("1")


class Twins(Members):
    """In every round the first member takes the samples of the second."""

    settings = RunSettings(twin_rate=0.5, reputation=True)
    halved = False  # the first takes half of the steps

    async def train(self, index: int, late: bool = False) -> UpdateEncoded:
        torch.set_num_threads(1 + index)  # sums come in another order
        try:
            steps = self.steps // 2 if self.halved and index == 0 else self.steps
            await self.islands[index].run(TrainRound(self.round, steps, 600.0, 1, self.peers))
            return await self.islands[index].run(EncodeUpdate(self.round, self.shares, late))
        finally:
            torch.set_num_threads(1)


def recipe(how: str = "fedavg"):
    setting = {"batch": 2, "seq_len": 16}
    if how == "data_parallel":
        return data_parallel("gpt-nano", rounds=9, **setting)
    return fedavg("gpt-nano", rounds=9, inner_steps=STEPS, **setting)


class Pair:
    """Two updates of the round that was closed last, both of the second member's samples."""

    def __init__(self, members: Members, before: Digest) -> None:
        self.members, self.before, self.round = members, before, members.round - 1

    async def work(self) -> CompareRedundantUpdates:
        rows = []
        for k, peer in enumerate((GUEST, HOST)):
            island = self.members.islands[k]
            wires = island.outbox.wires[self.round]
            blob = (await island.run(BuildUpdateExhibit(self.round))).blob
            rows.append(RedundantUpdate(peer, blob, merkle_root(tuple(map(digest, wires))), self._steps))
        return CompareRedundantUpdates(self.round, self.before, 1, 2, SHARES, (rows[0], rows[1]))

    @property
    def _steps(self) -> int:
        return self.members.recipe.schedule.turn_steps

    def other_row(self, row: RedundantUpdate, change: Callable[[Tensor], Tensor]) -> RedundantUpdate:
        """The same author, had it sent what `change` makes of its update (F,)."""
        learning = self.members.learning
        floats = learning.layout.floats
        codec = codec_named(learning.recipe.coding.up)
        wires = self.members.islands[1].outbox.wires[self.round]
        bounds = part_bounds(floats, SHARES)
        whole_F = torch.cat([codec.decode(w, hi - lo) for w, (lo, hi) in zip(wires, bounds, strict=True)])
        sent = tuple(bytes(codec.encode(change(whole_F)[lo:hi])) for lo, hi in bounds)
        blob = self.members.stores[1].put_blob(update_bytes(sent))
        return replace(row, blob=blob, root=merkle_root(tuple(map(digest, sent))))

    async def apart(self, work: CompareRedundantUpdates) -> tuple[int, int]:
        for store in self.members.stores:
            for row in work.rows:
                if store.has_blob(row.blob):
                    for other in self.members.stores:
                        other.put_blob(store.read_blob(row.blob))
        return (await self.members.islands[0].run(work)).apart


async def closed(members: Members) -> Pair:
    for _ in range(2):
        before = members.state
        await members.play()
    return Pair(members, before)


def play(tmp_path: Path, book: str, tell: Callable[[Members], Awaitable[None]], how: str = "fedavg") -> None:
    members = Twins(tmp_path / "a", recipe(how), book)
    for island in members.islands:
        enable_checks(island, [REDUNDANT_TRAINING])
    story(tell, members)


@pytest.mark.parametrize("how", ["fedavg", "data_parallel"])
def test_honest_twins_are_near_and_whoever_sends_something_else_is_far_alone(tmp_path: Path, book: str, how: str):
    """With threads of their own; then one of them had taken a tenth off, turned round, or nothing at all."""

    async def tell(members: Members) -> None:
        pair = await closed(members)
        work = await pair.work()
        assert max(await pair.apart(work)) < TOLERANCE // 10
        guest, host = work.rows
        for change in (lambda x_F: 0.8 * x_F, lambda x_F: -x_F, torch.zeros_like, lambda x_F: x_F.roll(1)):
            mine, its = await pair.apart(replace(work, rows=(guest, pair.other_row(host, change))))
            assert mine < TOLERANCE // 10 and TOLERANCE < its < APART_MOST
            mine, its = await pair.apart(replace(work, rows=(pair.other_row(guest, change), host)))
            assert TOLERANCE < mine < APART_MOST and its < TOLERANCE // 10

    play(tmp_path, book, tell, how)


def test_who_took_fewer_steps_than_it_says_is_far_and_who_says_so_is_near(tmp_path: Path, book: str):
    async def tell(members: Members) -> None:
        await members.play()
        before, members.halved = members.state, True
        await members.play()
        pair = Pair(members, before)
        work = await pair.work()
        guest, host = work.rows
        mine, its = await pair.apart(work)
        assert mine > TOLERANCE and its < TOLERANCE // 10
        told = replace(work, rows=(replace(guest, steps=STEPS // 2), host))
        assert max(await pair.apart(told)) < TOLERANCE // 10

    play(tmp_path, book, tell)


def test_other_samples_than_the_twins_are_far(tmp_path: Path, book: str):
    """Both are near each other, and neither is what the other shard's samples make."""

    async def tell(members: Members) -> None:
        pair = await closed(members)
        work = await pair.work()
        assert max(await pair.apart(replace(work, shard=0))) <= TOLERANCE, "alike: nobody takes steps again"
        nothing = pair.other_row(work.rows[0], torch.zeros_like)
        mine, its = await pair.apart(replace(work, shard=0, rows=(nothing, work.rows[1])))
        assert mine >= MILLION and its > TOLERANCE

    play(tmp_path, book, tell)


def test_what_was_not_committed_to_was_not_shown_and_says_nothing_of_the_other(tmp_path: Path, book: str):
    async def tell(members: Members) -> None:
        pair = await closed(members)
        work = await pair.work()
        guest, host = work.rows
        other = replace(work, rows=(replace(guest, root=digest(b"another")), host))
        assert await pair.apart(other) == (APART_MOST, 0)
        with pytest.raises(RunFailedError, match="E-SCO-02"):
            await members.islands[1].run(replace(work, before=digest(b"gone")))

    play(tmp_path, book, tell)


def test_taking_steps_again_changes_nothing(tmp_path: Path, book: str):
    """One swarm has a round taken again in every round, the other none: the same states, to the bit."""

    async def tell(members: Members) -> None:
        (tmp_path / "b").mkdir()
        others = Twins(tmp_path / "b", members.recipe, book)
        await others.begin()
        try:
            for _ in range(2):
                before = members.state
                await members.play()
                await others.play()
                pair = Pair(members, before)
                work = await pair.work()
                nothing = pair.other_row(work.rows[0], torch.zeros_like)
                await pair.apart(replace(work, rows=(nothing, work.rows[1])))
            assert members.state == others.state
        finally:
            await others.close()

    play(tmp_path, book, tell)


def test_only_recipes_whose_rounds_begin_alike_have_twins(tmp_path: Path, book: str):
    assert not twins_problem(recipe()) and not twins_problem(recipe("data_parallel"))
    refused = {
        "AdamW carries moments": diloco("gpt-nano", rounds=9, inner_steps=STEPS),
        "rounding of bf16": replace(recipe(), computing=ComputeOptions("bf16")),
        "a momentum of 0.9": replace(recipe(), inner=SGD(momentum=0.9)),
        "error feedback": replace(recipe(), coding=UpdateCoding("int8", "int8")),
        "rounds so much": replace(recipe(), coding=UpdateCoding("2bit", "int8", 0.0)),
    }
    for why, other in refused.items():
        assert why in twins_problem(other)
    settings = Twins.settings
    parse_training_spec(founding_blobs(start_of_built_in(recipe(), book), settings).settings)
    diloco_here = refused["AdamW carries moments"]
    with pytest.raises(UsageError, match="E-RUN-30"):
        founding_blobs(start_of_built_in(diloco_here, book), settings)
    founded = founding_blobs(start_of_built_in(diloco_here, book), RunSettings(reputation=True)).settings
    with pytest.raises(PeerFault, match="AdamW"):
        parse_training_spec(replace(founded, twin_rate=0.1))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("", "keeps none"),
        ('trust = "community"\nstart_peers = 4\nscore_rate = 0.1', "run.score_rate = 0.1"),
        ('trust = "community"\nstart_peers = 4\naudit_rate = 0.1', "run.audit_rate = 0.1"),
        ('trust = "community"\nstart_peers = 4\n[sync]\napart = "merge"', 'sync.apart = "merge"'),
    ],
)
def test_what_twins_cannot_stand_beside_is_refused_by_name(tmp_path: Path, more: str, why: str):
    path = tmp_path / "run.toml"
    path.write_text(f"[run]\ntwin_rate = 0.1\n{more}\n")
    with pytest.raises(UsageError, match=why):
        load_config(path)


def test_a_config_with_twins_founds_a_run_with_twins(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\ntwin_rate = 0.1\ntrust = "community"\nstart_peers = 4\n[train]\nrecipe = "fedavg"\n')
    config = load_config(path)
    assert settings_of(config, recipe_of(config)).twinned_share == 0.1
