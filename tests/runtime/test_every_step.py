"""Recipes that agree on the gradient of every step, in real rounds: data parallelism and DeMo, islands beside both
the experiment and torch's own AdamW."""

from __future__ import annotations

import msgspec
import pytest
import torch
from members import PEERS, SHARES, Inside, Members, story
from msgspec.structs import replace
from test_overlap import build_flat

from atoll.base.errors import PeerFault
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import EncodeUpdate
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.data import batch, cursor_after, load_data
from atoll.training.exchange.layout import bind, layout_of
from atoll.training.exchange.tensorfile import dump, load
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.inner import AdamW
from atoll.training.recipe.methods import data_parallel, demo_, parameter_server, pipelined, powersgd
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import apply_update, initial_state, state_bytes, state_from_bytes

SMALL = {"batch": 2, "seq_len": 16}


@pytest.mark.parametrize(
    "recipe",
    [
        data_parallel("gpt-nano", rounds=12, lr=4e-3, **SMALL),
        parameter_server("gpt-nano", rounds=12, lr=4e-3, **SMALL),
        demo_("gpt-nano", rounds=12, **SMALL),
        powersgd("gpt-nano", rounds=12, **SMALL),
    ],
    ids=["data_parallel", "parameter_server", "demo_", "powersgd"],
)
def test_every_step_of_the_islands_is_the_experiments_bit_for_bit(tmp_path, book, recipe: Recipe):
    """Twelve rounds of one step; the last falls to the floor of the rate, the first warms up."""
    steps = recipe.schedule.steps
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, steps, FaultSpec(), loss_of
    )

    async def tell(members: Members) -> None:
        for turn in range(1, steps + 1):
            await members.play()
            run.step()
            for island in members.islands:
                assert torch.equal(island.head.anchor_F, run.agreed()), turn
                assert torch.equal(members.trainers[0].child.x_F, run.agreed()), "x begins the next step from it"
        assert not torch.equal(run.agreed(), build_flat("gpt-nano", 0))

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


def test_data_parallelism_over_rounds_is_torchs_adamw_on_the_joined_batch(tmp_path, book):
    """Twenty steps of two members beside torch.optim.AdamW on all their samples at once, clipped, to fp32 noise."""
    flat = AdamW(lr=4e-3, warmup_steps=0, floor=1.0, total_steps=20)
    recipe = replace(data_parallel("gpt-nano", rounds=20, **SMALL), outer=flat)
    theirs, data = build_model("gpt-nano", 0), load_data(book)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=4e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    async def tell(members: Members) -> None:
        for step in range(20):
            await members.play()
            shards = [batch(data, shard, PEERS, step * 2, 2, 16, 0) for shard in range(PEERS)]
            adamw.zero_grad()
            loss_of(theirs, tuple(torch.cat(pieces) for pieces in zip(*shards, strict=True))).backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            adamw.step()
        expected = torch.cat([p.detach().reshape(-1) for p in theirs.parameters()])
        mine = members.islands[0].head.anchor_F
        moved = float((mine - build_flat("gpt-nano", 0)).abs().max())
        assert float((mine - expected).abs().max()) < 1e-4 * moved

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


def test_a_gradient_that_comes_too_late_is_dropped_and_one_that_did_not_count_too(tmp_path, book):
    """It is one of another anchor. Who was late stands at the new anchor with nothing gathered, as all do."""
    recipe = data_parallel("gpt-nano", rounds=9, **SMALL)

    async def tell(members: Members) -> None:
        await members.play()
        await members.play(encoding=(0,), counted=(0,))
        island, child = members.islands[1], members.trainers[1].child
        assert torch.equal(child.x_F, island.head.anchor_F) and island.live.steps_since == 0
        assert not child.inner.first_P.any()
        await members.play(counted=(0,))
        assert recipe.coding.beta == 0.0, "what lies in the feedback of an exact codec is never looked at"
        before_F = island.head.anchor_F
        await island.run(TrainAsked(members.round, 1, 600.0, 1, PEERS))
        alone = batch(load_data(book), 1, PEERS, 3 * 2, 2, 16, 0)
        await island.run(EncodeUpdate(members.round, SHARES))
        assert torch.equal(sums_sent(members, 1), gradient_at(before_F, alone)), "of this step alone"

    story(tell, Members(tmp_path, recipe, book))


PIPELINED = pipelined("gpt-nano", rounds=9, **SMALL)


def sums_sent(members: Members, index: int) -> torch.Tensor:
    """What its update of this round decodes to, (F,)."""
    mine = members.islands[index].mine
    wires = zip(mine.up, mine.update.wires, mine.update.bounds, strict=True)
    return torch.cat([up.decode(wire, hi - lo) for up, wire, (lo, hi) in wires])


def gradient_at(x_F: torch.Tensor, samples: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    twin = build_model("gpt-nano", 0)
    twin_F, gradient_P = bind(twin, layout_of(twin))
    twin_F.copy_(x_F)
    gradient_P.zero_()
    loss_of(twin, samples).backward()
    return gradient_P


@pytest.mark.parametrize("eager", [True, False])
def test_pipelined_gradients_are_the_experiments_however_fast_a_trainer_is(tmp_path, book, eager: bool):
    """Nine rounds, a queue of three. An eager trainer has taken all the steps that it may when the mean comes, the
    other none: the mean waits for it. What is agreed is what the experiment comes to three steps later."""
    recipe, depth, steps = PIPELINED, PIPELINED.inner.depth, PIPELINED.schedule.steps
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, steps, FaultSpec(), loss_of
    )

    async def tell(members: Members) -> None:
        members.trainers[1].quiet = eager
        for turn in range(1, steps + 1):
            await members.play()
            while run.now < min(turn + depth, steps):
                run.step()
            if turn + depth < steps or turn == steps:
                heads = [island.head.anchor_F for island in members.islands]
                assert torch.equal(heads[0], run.agreed()) and torch.equal(heads[1], run.agreed()), turn
        assert members.state == run.state()

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


def test_a_pipelined_gradient_is_ready_when_its_round_begins_and_of_older_parameters(tmp_path, book):
    """Of the fourth round: taken where the run began. Nobody computes while it is asked for. A restart costs what
    waited, and none of its samples."""

    async def tell(members: Members) -> None:
        island, data = members.islands[1], load_data(book)
        await members.train(1)
        members.islands[1].mine.update = None
        for _ in range(3):
            await members.play()
        child = members.trainers[1].child
        assert len(child.waiting) == 3
        take, taken = child._take_step, []
        child._take_step = lambda job: (taken.append(job), take(job))
        members.trainers[1].quiet = False
        await members.train(1)
        assert not taken
        of_round_4 = batch(data, 1, PEERS, 3 * 2, 2, 16, 0)
        assert torch.equal(sums_sent(members, 1), gradient_at(build_flat("gpt-nano", 0), of_round_4))

        await island.close()
        members.trainers[1] = Inside()
        members.islands[1] = island = members.island(1)
        assert await island.run(members.restore(1))
        await members.train(1)
        assert torch.equal(sums_sent(members, 1), gradient_at(island.head.anchor_F, of_round_4))

    story(tell, Members(tmp_path, PIPELINED, book))


def test_who_was_late_fills_its_queue_anew_and_who_is_dealt_other_samples_too(tmp_path, book):
    """Member 1 hands over too late for a round; then there are three trainers."""

    async def tell(members: Members) -> None:
        await members.play()
        await members.play(encoding=(0,), counted=(0,))
        await members.islands[1].live.wait_merged()
        island, child = members.islands[1], members.trainers[1].child
        assert torch.equal(child.x_F, island.head.anchor_F) and not child.waiting
        await members.play()
        assert torch.equal(island.head.anchor_F, members.islands[0].head.anchor_F)
        await island.live.wait_merged()
        assert len(child.waiting) == 3
        await island.run(TrainAsked(members.round, 1, 600.0, 1, PEERS + 1))
        await island.run(EncodeUpdate(members.round, SHARES))
        cursor = cursor_after(island.head.samples, PEERS + 1)
        others = batch(load_data(book), 1, PEERS + 1, cursor, 2, 16, 0)
        assert torch.equal(sums_sent(members, 1), gradient_at(child.x_F, others))

    story(tell, Members(tmp_path, PIPELINED, book))


def test_a_queue_longer_than_anybody_would_keep_is_refused_in_genesis(book):
    founded = founding_blobs(start_of_built_in(PIPELINED, book), RunSettings()).settings
    learning = parse_training_spec(founded)
    endless = replace(PIPELINED, inner=replace(PIPELINED.inner, depth=10**9))
    genesis = replace(founded, learning=msgspec.msgpack.encode(replace(learning, recipe=endless)))
    with pytest.raises(PeerFault, match=r"inner\.depth"):
        parse_training_spec(genesis)


def test_a_restarted_member_has_both_moments_from_the_state(tmp_path, book):
    """They are shared, so whoever joins or restarts takes the very same next step."""
    recipe = data_parallel("gpt-nano", rounds=9, **SMALL)

    async def tell(members: Members) -> None:
        for _ in range(3):
            await members.play()
        await members.islands[1].close()
        members.trainers[1] = Inside()
        members.islands[1] = island = members.island(1)
        assert await island.run(members.restore(1))
        assert torch.equal(island.head.second_P, members.islands[0].head.second_P)
        assert bool((island.head.second_P > 0).any())
        await members.play()
        assert torch.equal(island.head.anchor_F, members.islands[0].head.anchor_F)

    story(tell, Members(tmp_path, recipe, book))


@pytest.mark.parametrize("wrong", [{"beta1": 1.0}, {"beta2": float("nan")}, {"eps": 0.0}, {"clip_norm": -1.0}])
def test_numbers_that_would_end_every_peer_are_refused_in_genesis(book, wrong: dict[str, float]):
    """They come from whoever founded the run, and are read by whoever follows its ticket."""
    good = data_parallel("gpt-nano", **SMALL)
    founded = founding_blobs(start_of_built_in(good, book), RunSettings()).settings
    learning = parse_training_spec(founded)
    bad = replace(learning, recipe=replace(good, outer=replace(good.outer, **wrong)))
    with pytest.raises(PeerFault, match=r"divide by zero|recipe\.outer"):
        parse_training_spec(replace(founded, learning=msgspec.msgpack.encode(bad)))


def test_a_state_with_impossible_squares_is_refused():
    """Its root would be no number, at everybody."""
    model = build_model("gpt-nano", 0)
    layout, outer = layout_of(model), AdamW(warmup_steps=0)
    first = initial_state(model)
    assert b"second" not in state_bytes(first, layout)[:400], "there are none before the first step"
    after = apply_update(first.anchor_F * 0.01, first, outer, steps=1, samples=1, tokens=1)
    data = state_bytes(after, layout)
    again = state_from_bytes(data, layout)
    assert torch.equal(again.second_P, after.second_P) and state_bytes(again, layout) == data
    tensors, metadata = load(data)
    tensors["second"][5] = -1e-9
    with pytest.raises(PeerFault, match="negative second moment"):
        state_from_bytes(dump(tensors, metadata), layout)
    with pytest.raises(PeerFault, match="not those of the layout"):
        state_from_bytes(dump(tensors | {"second": tensors["second"][:-1]}, metadata), layout)
