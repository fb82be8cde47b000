"""DES-LOC in real rounds: moments of the members' optimizers are averaged now and then, and agreed on."""

from __future__ import annotations

import msgspec
import pytest
import torch
from members import PEERS, Inside, Members, story
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.peer.settings import RunSettings
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.data import load_data
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.inner import InnerState
from atoll.training.recipe.methods import des_loc
from atoll.training.recipe.schedule import SyncSchedule

RECIPE = des_loc("gpt-nano", rounds=7, inner_steps=2, batch=2, seq_len=16)


def moments_of(members: Members, index: int) -> InnerState:
    return members.trainers[index].child.inner


def alike(members: Members) -> tuple[bool, bool]:
    one, two = (moments_of(members, index) for index in range(PEERS))
    return torch.equal(one.first_P, two.first_P), torch.equal(one.second_P, two.second_P)


def test_members_average_moments_on_their_clocks_and_come_to_the_experiments_state(tmp_path, book):
    """Seven rounds: the first moments in the third, both in the sixth; every state by its name, moments and all."""
    steps = RECIPE.schedule.steps
    run = ExperimentSimulator(
        RECIPE, build_model("gpt-nano", 0), load_data(book), PEERS, steps, FaultSpec(), loss_of
    )
    seen = []

    async def tell(members: Members) -> None:
        for turn in range(1, RECIPE.schedule.rounds + 1):
            await members.play()
            while run.now < turn * RECIPE.schedule.inner_steps:
                run.step()
            assert members.state == run.state(), turn
            for index, worker in enumerate(run.workers):
                assert torch.equal(moments_of(members, index).first_P, worker.inner.first_P), turn
                assert torch.equal(moments_of(members, index).second_P, worker.inner.second_P), turn
            seen.append(alike(members))

    torch.manual_seed(0)
    story(tell, Members(tmp_path, RECIPE, book))
    neither = (False, False)
    assert seen == [neither, neither, (True, False), neither, neither, (True, True), neither]


def test_who_begins_afresh_has_the_agreed_moments_once_there_are_both(tmp_path, book):
    """A disk that lost what was private: nothing after the third round, after the sixth what all had agreed on."""

    async def again(members: Members, index: int) -> InnerState:
        await members.islands[index].close()
        for ahead in (False, True):
            members.stores[index].private.write(b"", ahead=ahead)
        members.trainers[index] = Inside()
        members.islands[index] = island = members.island(index)
        assert await island.run(members.restore(index))
        await island._ready()
        return moments_of(members, index)

    async def tell(members: Members) -> None:
        for _ in range(3):
            await members.play()
        early = await again(members, 1)
        assert not early.first_P.any() and early.steps == 0, "a first moment over no second would be a leap"
        for _ in range(3):
            await members.play()
        head = members.islands[0].head
        late = await again(members, 1)
        assert torch.equal(late.first_P, head.momentum_P) and bool(late.first_P.any())
        assert torch.equal(late.second_P, head.second_P) and late.steps == head.steps == 12
        await members.play()
        assert torch.equal(members.islands[0].head.anchor_F, members.islands[1].head.anchor_F)

    story(tell, Members(tmp_path, RECIPE, book))


def test_who_was_not_counted_takes_the_moments_of_the_others(tmp_path, book):
    """Of three rounds the third: member 1 is late, and holds what member 0 had."""

    async def tell(members: Members) -> None:
        for _ in range(2):
            await members.play()
        await members.play(encoding=(0,), counted=(0,))
        assert alike(members) == (True, False)
        assert torch.equal(moments_of(members, 1).first_P, members.islands[1].head.momentum_P)

    story(tell, Members(tmp_path, RECIPE, book))


@pytest.mark.parametrize(
    "odd",
    [
        {"coding": replace(RECIPE.coding, up="int8")},
        {"schedule": replace(RECIPE.schedule, moments=(4, 6))},
        {"schedule": SyncSchedule(2, 7)},
        {"merge": "delta"},
    ],
    ids=["rounded", "clocks", "never", "merge"],
)
def test_moments_that_are_no_plain_means_are_refused_in_genesis(book, odd):
    """It comes from whoever founded the run."""
    founded = founding_blobs(start_of_built_in(RECIPE, book), RunSettings()).settings
    assert founded.update_bytes == 3 * 4 * parse_training_spec(founded).layout.floats
    bad = replace(parse_training_spec(founded), recipe=replace(RECIPE, **odd))
    with pytest.raises(PeerFault, match="moments are plain means"):
        parse_training_spec(replace(founded, learning=msgspec.msgpack.encode(bad)))
