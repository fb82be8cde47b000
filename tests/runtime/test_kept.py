"""SPARTA in real rounds: members agree on a few values at a time and keep parameters of their own."""

from __future__ import annotations

import msgspec
import pytest
import torch
from members import PEERS, Inside, Members, story
from msgspec.structs import replace
from test_overlap import build_flat

from atoll.base.errors import PeerFault
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import RestoreState
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.data import load_data
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.methods import cooperative, sparta

RECIPE = sparta("gpt-nano", rounds=6, share=0.1, batch=2, seq_len=16)
COOPERATIVE = cooperative("gpt-nano", peers_min=2, batch=2, seq_len=16, inner_steps=2)


def x_of(members: Members, index: int) -> torch.Tensor:
    return members.trainers[index].child.x_F


async def restarted(members: Members, index: int):
    """Another process on the same disk, which finds the agreed state there."""
    await members.islands[index].close()
    members.trainers[index] = Inside()
    members.islands[index] = island = members.island(index)
    assert await island.run(members.restore(index))
    return island


@pytest.mark.parametrize("overlap", [0, 2])
def test_members_swap_what_the_experiment_swaps_and_end_on_the_mean_of_all(tmp_path, book, overlap: int):
    """The agreed state and every member's own x, bit for bit; the last round averages everything."""
    recipe = RECIPE
    if overlap:
        schedule = replace(RECIPE.schedule, inner_steps=4, overlap=overlap)
        recipe = replace(RECIPE, schedule=schedule)
    schedule = recipe.schedule
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, schedule.steps, FaultSpec(), loss_of
    )

    async def tell(members: Members) -> None:
        for trainer in members.trainers:
            trainer.quiet = overlap > 0
        for turn in range(1, schedule.turns + 1):
            await members.play()
            while run.now < min(turn * schedule.turn_steps + overlap, schedule.steps):
                run.step()
            for index, island in enumerate(members.islands):
                await island.live.wait_merged()
                assert torch.equal(island.head.anchor_F, run.agreed()), turn
                if turn < schedule.turns and not overlap:
                    assert torch.equal(x_of(members, index), run.workers[index].x_F), turn
            if turn < schedule.turns:
                assert not torch.equal(x_of(members, 0), x_of(members, 1)), "each has its own"
        assert members.state == run.state()
        assert torch.allclose(run.agreed(), run.live_F, atol=1e-3), "the mean of what all held"

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


def test_who_restarts_goes_on_from_its_own_parameters(tmp_path, book):
    """Member 1 after three rounds: the agreed values that it never held are not what it begins with."""

    async def tell(members: Members) -> None:
        for _ in range(3):
            await members.play()
        await members.islands[1].live.wait_merged()
        x_F = x_of(members, 1).clone()
        island = await restarted(members, 1)
        await island._ready()
        assert torch.equal(x_of(members, 1), x_F) and not torch.equal(x_F, island.head.anchor_F)
        await members.play()
        assert torch.equal(island.head.anchor_F, members.islands[0].head.anchor_F)

    story(tell, Members(tmp_path, RECIPE, book))


@pytest.mark.parametrize("alive", [True, False])
def test_who_missed_rounds_takes_what_moved_since_and_keeps_its_own_of_the_rest(tmp_path, book, alive: bool):
    """Member 1 misses two rounds and gets the state as a blob, as a process that lived on or as a new one."""

    async def tell(members: Members) -> None:
        await members.play()
        await members.islands[1].live.wait_merged()
        x_F, then_F = x_of(members, 1).clone(), members.islands[1].head.anchor_F
        for _ in range(2):
            await members.play(here=(0,))
        members.stores[1].put_blob(members.stores[0].read_blob(members.state))
        island = members.islands[1]
        if alive:
            assert await island.run(members.restore(1))
        else:
            island = await restarted(members, 1)
        await island._ready()
        now_F = island.head.anchor_F
        moved = now_F != then_F
        assert 0.05 < float(moved.float().mean()) < 0.5
        assert torch.equal(x_of(members, 1), torch.where(moved, now_F, x_F))

    story(tell, Members(tmp_path, RECIPE, book))


def test_who_comes_late_gives_way_where_the_others_agreed_and_keeps_its_steps_elsewhere(tmp_path, book):
    """Member 1 encodes nothing; then its update is not counted. What was agreed replaces what it had both times."""

    async def tell(members: Members) -> None:
        await members.play()
        island = members.islands[1]
        for how in ({"encoding": (0,)}, {"counted": (0,)}):
            before_F = island.head.anchor_F
            await members.play(**how)
            await island.live.wait_merged()
            moved = island.head.anchor_F != before_F
            assert torch.equal(x_of(members, 1)[moved], island.head.anchor_F[moved])
            assert not torch.equal(x_of(members, 1), island.head.anchor_F)
        assert island.live.steps_since == 0, "what it sent was of all its steps"

    story(tell, Members(tmp_path, RECIPE, book))


def test_whoever_went_back_begins_from_the_agreed_state(tmp_path, book):
    """What it kept belongs to a later state than the one that it comes to."""

    async def tell(members: Members) -> None:
        first, begun = members.state, members.vertex()
        await members.play()
        island = members.islands[1]
        assert island.mine.kept is not None
        assert await island.run(RestoreState(-1, begun, first))
        assert island.mine.kept is None and torch.equal(
            island.mine.start_point(island.head), build_flat("gpt-nano", 0)
        )

    story(tell, Members(tmp_path, RECIPE, book))


@pytest.mark.parametrize("recipe", [RECIPE, COOPERATIVE], ids=["sparta", "cooperative"])
def test_what_is_looked_at_is_the_agreed_model_where_members_hold_others(tmp_path, book, recipe):
    """A loop that ends, too, ends on it."""

    async def tell(members: Members) -> None:
        await members.play()
        island = members.islands[0]
        await island.live.wait_merged()
        assert not torch.equal(x_of(members, 0), island.head.anchor_F)
        assert torch.equal(island.live.head_if_different(recipe), island.head.anchor_F)
        await island.end_on_head()
        assert torch.equal(x_of(members, 0), island.head.anchor_F)

    story(tell, Members(tmp_path, recipe, book))


def test_a_swap_with_error_feedback_or_another_outer_step_is_refused_in_genesis(book):
    """It comes from whoever founded the run: values would move that nobody drew, or be made good twice."""
    founded = founding_blobs(start_of_built_in(RECIPE, book), RunSettings()).settings
    learning = parse_training_spec(founded)
    for bad in (
        replace(RECIPE, coding=replace(RECIPE.coding, beta=1.0)),
        replace(RECIPE, outer=replace(RECIPE.outer, momentum=0.5)),
    ):
        genesis = replace(founded, learning=msgspec.msgpack.encode(replace(learning, recipe=bad)))
        with pytest.raises(PeerFault, match="merge='swap'"):
            parse_training_spec(genesis)
