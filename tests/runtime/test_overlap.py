"""Training that goes on while a round is agreed: islands beside the experiment, and the trainer by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from members import PEERS, Inside, Members, recipe_for, story
from msgspec.structs import replace

from atoll.peer.settings import RunSettings
from atoll.peer.tasks import AdoptState, AdvanceState, EndTrainingEarly, RestoreState
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer import TrainerCommandError, TrainerSpec
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.data import load_data
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.inner import AdamW, Muon, inner_from_bytes
from atoll.training.recipe.merge import MixMerge
from atoll.training.recipe.methods import (
    auto,
    cooperative,
    decoupled,
    delayed_nesterov,
    eager,
    sparseloco,
    streaming,
)
from atoll.training.recipe.recipes import Recipe, diloco, for_real_run, with_overlap
from atoll.training.recipe.reducer import ReductionSettings
from atoll.training.recipe.schedule import parse_phases

WAYS = {
    "overlap": {"fragments": 1, "overlap": 5, "merge": "delta"},
    "fragments": {"fragments": 3, "overlap": 0},
    "both": {"fragments": 3, "overlap": 2, "merge": "delta"},
    "mixed": {"fragments": 2, "overlap": 3, "merge": MixMerge(0.5)},
    "neither": {"fragments": 1, "overlap": 0},
}


@pytest.fixture(params=WAYS)
def how(request) -> Iterator[dict]:
    yield WAYS[request.param]


# ---- what it promises --------------------------------------------------------------------------------------


def beside_the_experiment(base: Path, recipe: Recipe, book: str) -> None:
    """Anchor and outer momentum after each round are the same bits, and at the end the name of the whole state."""
    schedule = recipe.schedule
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, schedule.steps, FaultSpec(), loss_of
    )
    sizes = {hi - lo for lo, hi in run.fragments}
    assert (len(run.fragments) == schedule.fragments and max(sizes) < run.layout.floats) or schedule.fragments == 1

    async def tell(members: Members) -> None:
        for turn in range(1, schedule.turns + 1):
            await members.play()
            landed = turn * schedule.turn_steps + schedule.overlap
            while run.now < min(landed, schedule.steps):
                run.step()
            heads = [island.head.anchor_F for island in members.islands]
            assert torch.equal(heads[0], run.agreed()) and torch.equal(heads[1], run.agreed()), turn
            momenta = torch.equal(members.islands[0].head.momentum_P, run.momentum_P)
            assert momenta, turn
        assert members.state == run.state()

    torch.manual_seed(0)
    story(tell, Members(base, recipe, book))


@pytest.mark.parametrize(("up", "down"), [("fp32", "fp32"), ("2bit", "int8")])
def test_islands_do_what_the_experiment_does_bit_for_bit(tmp_path, book, how, up, down):
    """Three turns of every fragment."""
    beside_the_experiment(tmp_path, recipe_for(how, up=up, down=down), book)


def test_what_we_recommend_does_in_islands_what_it_does_in_the_experiment(tmp_path, book):
    """Muon inside, fragments that overlap, a momentum that settles: as `auto` runs among real peers."""
    recipe = for_real_run(auto("gpt-nano", rounds=3, inner_steps=12, fragments=3, overlap=2, batch=2, seq_len=16))
    assert isinstance(recipe.inner, Muon) and recipe.outer.settle and recipe.merge == "delta"
    assert (recipe.coding.down, recipe.coding.answer) == ("2bit", "remembered")
    beside_the_experiment(tmp_path, recipe, book)


def test_a_closing_average_is_the_experiments_whatever_the_rounds_before_it_were(tmp_path, book):
    """Fragments that overlap, owners that remember, an outer momentum: the last round has none of these."""
    sizes = {"rounds": 3, "inner_steps": 12, "fragments": 3, "overlap": 2, "batch": 2, "seq_len": 16}
    recipe = for_real_run(streaming("gpt-nano", closing="int8", **sizes))
    assert recipe.coding.answer == "remembered" and recipe.outer.momentum
    beside_the_experiment(tmp_path, recipe, book)


def test_rounds_that_change_their_length_and_codecs_are_the_experiments(tmp_path, book):
    """Rounds of 6, 8, 4, 4 and 2 steps, the last two with updates in two bits: phases begin within rounds."""
    recipe = diloco("gpt-nano", rounds=4, inner_steps=6, batch=2, seq_len=16, up="int8", down="int8")
    schedule = replace(recipe.schedule, phases=parse_phases("0.4:4,0.8:3:2bit:fp16"))
    recipe = replace(recipe, schedule=schedule)
    run = ExperimentSimulator(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, 24, FaultSpec(), loss_of)

    async def tell(members: Members) -> None:
        for turn in range(1, schedule.turns + 1):
            members.steps = schedule.begun(turn) - schedule.begun(turn - 1)
            await members.play()
            while run.now < schedule.begun(turn):
                run.step()
            assert torch.equal(members.islands[0].head.anchor_F, run.agreed()), turn
        assert members.state == run.state() and run.now == 24

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book, settings=RunSettings(rounds=schedule.turns)))


def test_delayed_momentum_is_the_experiments_also_in_a_round_without_a_late_member(tmp_path, book):
    """Two members, a round that one of them misses: half as much is learned, and the renewal waits for that."""
    recipe = for_real_run(delayed_nesterov("gpt-nano", rounds=4, inner_steps=6, batch=2, seq_len=16, every=2))
    run = ExperimentSimulator(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, 24, FaultSpec(), loss_of)

    async def tell(members: Members) -> None:
        for turn in range(1, 5):
            late = turn == 2
            await members.play(counted=(0,) if late else (0, 1))
            run.trouble = FaultSpec(late=(0, 50) if late else ())
            while run.now < turn * 6:
                run.step()
            head = members.islands[0].head
            assert torch.equal(head.anchor_F, run.agreed()), turn
            assert torch.equal(head.momentum_P, run.momentum_P) and float(head.momentum_P.norm()) > 0
            assert head.tokens == sum(2 * 6 * 16 * (1 if played == 2 else 2) for played in range(1, turn + 1))

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


SAYING_MORE = {
    "sparseloco": sparseloco("gpt-nano", rounds=4, inner_steps=6, batch=2, seq_len=16),
    "gathered": sparseloco("gpt-nano", rounds=4, inner_steps=6, batch=2, seq_len=16, clip=False),
    "cooperative": cooperative("gpt-nano", rounds=4, inner_steps=6, batch=2, seq_len=16, peers_min=2),
}


@pytest.mark.parametrize("recipe", SAYING_MORE.values(), ids=SAYING_MORE)
def test_owners_that_say_more_than_a_mean_say_what_the_experiment_does(tmp_path, book, recipe):
    """Gathered and clipped rows, momentum by agreement, half of one's own parameters kept: four rounds.

    Where lengths decide, sums of rows are taken in another order than there, so the last bits may differ.
    """
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, recipe.schedule.steps, FaultSpec(), loss_of
    )

    async def tell(members: Members) -> None:
        for turn in range(1, recipe.schedule.rounds + 1):
            await members.play()
            while run.now < turn * recipe.schedule.inner_steps:
                run.step()
            heads = [island.head.anchor_F for island in members.islands]
            assert torch.equal(heads[0], heads[1])
            if recipe.reducer.statistic == "mean":
                assert torch.equal(heads[0], run.agreed()), turn
            moved = float((run.agreed() - build_flat("gpt-nano", 0)).norm())
            assert float((heads[0] - run.agreed()).norm()) < 1e-3 * moved, turn

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


def test_a_cooperative_round_weighs_members_by_their_records_as_the_experiment_does(tmp_path, book):
    """Influence 3 : 1 times as many steps, as commitments have it: bit for bit, and not what equal rows come to."""
    recipe = SAYING_MORE["cooperative"]
    steps, records = recipe.schedule.inner_steps, (9000, 3000)
    run, plain = (
        ExperimentSimulator(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, 24, FaultSpec(), loss_of)
        for _ in range(2)
    )
    run.records = records

    async def tell(members: Members) -> None:
        for turn in (1, 2):
            await members.play(weights={peer: worth * steps for peer, worth in enumerate(records)})
            while run.now < turn * steps:
                run.step()
                plain.step()
            head_F = members.islands[0].head.anchor_F
            assert torch.equal(head_F, run.agreed()) and not torch.equal(head_F, plain.agreed())

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


@pytest.mark.parametrize("statistic", ["mean", "radial"])
def test_a_round_without_a_late_member_is_what_the_experiment_makes_of_it(tmp_path, book, statistic):
    """Decoupled: member 1 is late in every other round, and what it said waits in its feedback. Six rounds.

    Of several rows' lengths sums are taken in another order than there, so the last bits may differ.
    """
    recipe = decoupled("gpt-nano", rounds=3, inner_steps=12, fragments=2, overlap=2, batch=2, seq_len=16)
    reducer = replace(recipe.reducer, statistic=statistic)
    recipe = replace(with_overlap(recipe, None, None), reducer=reducer)
    assert (recipe.merge, reducer.quorum, reducer.weight) == ("delta", 1, "tokens")
    schedule = recipe.schedule
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, schedule.steps, FaultSpec(), loss_of
    )

    async def tell(members: Members) -> None:
        for turn in range(1, schedule.turns):
            late = turn % 2 == 0
            await members.play(counted=(0,) if late else (0, 1))
            run.trouble = FaultSpec(late=(0, 50) if late else ())
            while run.now < turn * schedule.turn_steps + schedule.overlap:
                run.step()
            assert run.history[-1].counted == ((0,) if late else (0, 1))
            heads = [island.head.anchor_F for island in members.islands]
            assert torch.equal(heads[0], heads[1])
            if statistic == "mean":
                assert torch.equal(heads[0], run.agreed()), turn
            moved = float((run.agreed() - build_flat("gpt-nano", 0)).norm())
            assert float((heads[0] - run.agreed()).norm()) < 1e-3 * moved, turn

    torch.manual_seed(0)
    story(tell, Members(tmp_path, recipe, book))


def test_whoever_is_hurried_hands_over_what_it_has_and_goes_on(tmp_path, book):
    """Told between two steps: one step, handed over, ahead it goes. Told before it began: what it took ahead."""
    recipe = with_overlap(replace(recipe_for(WAYS["overlap"]), reducer=ReductionSettings(quorum=1)), None, None)

    async def tell(members: Members) -> None:
        island, trainer = members.islands[1], members.trainers[1]
        await island.run(TrainAsked(0, 0, 600.0, 1, PEERS))  # it starts
        take, steps = trainer.child._take_step, []

        def watched(job):
            take(job)
            steps.append(job.job)
            if len(steps) == 3:
                trainer.hand_over()

        trainer.child._take_step = watched
        trained = await island.run(TrainAsked(0, 12, 600.0, 1, PEERS))
        assert trained.steps == 3 and trainer.child.span.steps == recipe.schedule.overlap
        await island.run(EndTrainingEarly(1))
        again = await island.run(TrainAsked(1, 12, 600.0, 1, PEERS))
        assert again.steps == 3 + recipe.schedule.overlap and again.samples == 2 * again.steps
        await island.run(EndTrainingEarly(2))
        trainer.quiet = False
        trainer.child.onward = None
        assert (await island.run(TrainAsked(2, 12, 600.0, 1, PEERS))).steps == 3 + 2 * recipe.schedule.overlap
        assert (await island.run(TrainAsked(2, 12, 600.0, 1, PEERS))).steps == 3 + 2 * recipe.schedule.overlap
        assert (await island.run(TrainAsked(3, 12, 600.0, 1, PEERS))).steps == 15 + 2 * recipe.schedule.overlap

    story(tell, Members(tmp_path, recipe, book))


@pytest.mark.parametrize(("up", "down"), [("fp32", "fp32"), ("2bit", "int8")])
def test_eager_members_have_the_anchors_of_the_experiment_and_agree_on_one_more(tmp_path, book, up, down):
    """All of them bit for bit, momentum and the last state's name too, though trainers go on as far as they may."""
    recipe = eager("gpt-nano", rounds=4, inner_steps=6, batch=2, seq_len=16, up=up, down=down)
    steps = recipe.schedule.steps
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, steps, FaultSpec(), loss_of
    )

    async def tell(members: Members) -> None:
        for turn in range(1, 5):
            await members.play()
            while run.now < turn * 6:
                run.step()
            for island, own in zip(members.islands, run.anchor_set.local, strict=True):
                assert torch.equal(island.head.anchor_F, run.agreed())
                assert torch.equal(island.mine.own.anchor_F, own.anchor_F), turn
                assert not torch.equal(own.anchor_F, run.agreed())
        assert members.state == run.state()

    story(tell, Members(tmp_path, recipe, book))


def test_an_eager_member_whose_round_was_agreed_without_it_sends_all_of_it_again(tmp_path, book):
    """Member 1 is not counted, then encodes nothing, then starts anew: states stay equal, nothing is lost."""
    recipe = eager("gpt-nano", rounds=9, inner_steps=6, batch=2, seq_len=16, up="fp32", down="fp32")

    async def tell(members: Members) -> None:
        await members.play()
        await members.play(counted=(0,))
        assert float(members.islands[1].mine.memory_F.norm()) > 0, "what was not counted waits in the feedback"
        await members.play(encoding=(0,), counted=(0,))
        await members.play()
        assert float(members.islands[1].mine.memory_F.norm()) == 0
        gap = float((members.islands[1].mine.own.anchor_F - members.islands[0].mine.own.anchor_F).norm())
        moved = float((members.islands[0].head.anchor_F - build_flat("gpt-nano", 0)).norm())
        assert 0 < gap < moved
        await members.islands[1].close()
        members.trainers[1] = Inside()
        members.islands[1] = island = members.island(1)
        assert await island.run(members.restore(1))
        assert torch.equal(island.mine.own.anchor_F, island.head.anchor_F)
        await members.play()
        assert torch.equal(island.head.anchor_F, members.islands[0].head.anchor_F)

    story(tell, Members(tmp_path, recipe, book))


def test_eager_members_rest_in_a_round_that_counts_nobody(tmp_path, book):
    """They sent, and their own anchors had moved. An experiment whose updates are all lost rests, too."""
    recipe = eager("gpt-nano", rounds=5, inner_steps=6, batch=2, seq_len=16, up="fp32", down="fp32")
    lost = FaultSpec(lost=1.0)
    run = ExperimentSimulator(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, 6, lost, loss_of)
    run.step()
    first_F = run.agreed().clone()
    while run.now < run.steps:
        run.step()
    assert torch.equal(run.agreed(), first_F) and torch.equal(run.anchor_set.local[1].anchor_F, first_F)

    async def tell(members: Members) -> None:
        for _ in range(2):
            await members.play()
        island = members.islands[1]
        await island.live.wait_merged()
        head, own = island.head, island.mine.own
        before = own.anchor_F, own.momentum_P
        assert float(head.momentum_P.abs().max()) > 0
        sent = await members.train(1)
        assert not torch.equal(own.anchor_F, before[0]), "what it sends moves its own at once"
        nobody = AdvanceState(2, members.state, (None,) * PEERS, 0, 0, PEERS, members.shares)
        state = (await island.run(nobody)).state
        counted = (False,) * PEERS
        members.round += 1
        await island.run(AdoptState(2, members.vertex(), state, counted, mine=members.counts(1, sent, counted)))
        await island.live.wait_merged()
        assert torch.equal(island.head.anchor_F, head.anchor_F)
        assert torch.equal(island.head.momentum_P, head.momentum_P)
        assert torch.equal(own.anchor_F, before[0]) and torch.equal(own.momentum_P, before[1])
        assert float(island.mine.memory_F.norm()) > 0, "it waits in the feedback"

    story(tell, Members(tmp_path, recipe, book))


def test_an_update_that_was_not_counted_returns_to_the_feedback_and_only_there(tmp_path, book):
    """Member 1 encodes but is not in the vertex: memory takes back its message; other fragments rest."""
    recipe = recipe_for(WAYS["both"])

    async def tell(members: Members) -> None:
        await members.play()
        island = members.islands[1]
        before = island.mine.memory_F.clone()
        lo, hi = island.learning.turn(island.head)
        anchor_F = island.head.anchor_F
        await members.play(counted=(0,))
        x_F = members.trainers[1].child.x_F
        outside = torch.ones(len(before), dtype=torch.bool)
        outside[lo:hi] = False
        assert torch.equal(island.mine.memory_F[outside], before[outside])
        assert float(island.mine.memory_F[lo:hi].norm()) > 2 * float(before[lo:hi].norm())
        assert not torch.equal(x_F[lo:hi], anchor_F[lo:hi])

    story(tell, Members(tmp_path, recipe, book))


def test_whoever_encoded_nothing_keeps_all_its_steps_on_top_of_the_new_anchor(tmp_path, book):
    """Member 1 comes too late: its x moves by what the anchor moves, and its next update covers both spans."""
    recipe = recipe_for(WAYS["overlap"], up="fp32", down="fp32")

    async def tell(members: Members) -> None:
        island, trainer = members.islands[1], members.trainers[1]
        moved = []
        merge = trainer.merge

        async def watched(lo, value_N, how):
            begin = trainer.child.x_F.clone()
            trainer.quiet = False  # it stands, so that what the merge did can be seen
            await merge(lo, value_N, how)
            moved.append((how, trainer.child.x_F - begin))
            trainer.quiet = True

        trainer.merge = watched
        before_F = island.head.anchor_F
        await members.play(encoding=(0,), counted=(0,))
        (how, by_F), after_F = moved[0], island.head.anchor_F
        assert how == "shift" and torch.allclose(by_F, after_F - before_F, atol=1e-6)
        assert island.live.steps_since == recipe.schedule.turn_steps

        before_F = island.head.anchor_F
        trained = await island.run(TrainAsked(members.round, 12, 600.0, 1, PEERS))
        assert trained.steps == 24 and trained.samples == 48
        alone = trainer.read_x() - before_F
        assert float(alone.norm()) > 0

    story(tell, Members(tmp_path, recipe, book))


def test_a_round_closes_while_a_step_is_long_and_the_next_waits_for_its_merge(tmp_path, book):
    """Member 1's trainer answers no merge for a while: the round is adopted, the next training comes after."""
    recipe = recipe_for(WAYS["overlap"])

    async def tell(members: Members) -> None:
        island, trainer, gate = members.islands[1], members.trainers[1], asyncio.Event()
        merge = trainer.merge

        async def slow(lo, value_N, how):
            await gate.wait()
            await merge(lo, value_N, how)

        trainer.merge = slow
        await members.play()
        assert island.head.round == 1 and not island.live._merging.done()
        training = asyncio.create_task(island.run(TrainAsked(1, 12, 600.0, 1, PEERS)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not training.done()
        gate.set()
        assert (await training).steps == 12 and island.live._merging.done()

    story(tell, Members(tmp_path, recipe, book))


def test_a_trainer_that_began_anew_is_not_given_what_its_head_has(tmp_path, book):
    """Member 1's trainer dies with a merge waiting: the new one stands at the head, not beyond it."""
    recipe = recipe_for(WAYS["overlap"])

    async def tell(members: Members) -> None:
        island = members.islands[1]
        await members.play()
        await island.tended.turn.acquire()
        island.live._merging = asyncio.create_task(
            island.live._merge_running(island.tended.lives, 0, torch.ones(len(island.head.anchor_F)), "shift")
        )
        island.tended.ready = False
        await island._ready()
        members.trainers[1].quiet = False
        island.tended.turn.release()
        await island.live._merging
        assert torch.equal(members.trainers[1].child.x_F, island.head.anchor_F)

    story(tell, Members(tmp_path, recipe, book))


def test_a_restarted_member_goes_on_from_the_head_with_its_feedback(tmp_path, book):
    """A new island on the same disk: same state and feedback, moments, x at the anchor; a next round is agreed."""
    recipe = recipe_for(WAYS["both"])

    async def tell(members: Members) -> None:
        for _ in range(4):
            await members.play()
        old = members.islands[1]
        members.trainers[1] = Inside()
        members.islands[1] = island = members.island(1)
        assert await island.run(members.restore(1))
        assert torch.equal(island.mine.memory_F, old.mine.memory_F) and torch.equal(
            island.head.anchor_F, old.head.anchor_F
        )
        moments = inner_from_bytes(island.live.inner, members.learning.layout.parameters)
        assert moments.steps > 0 and bool(moments.second_P.any()), "those of the round before: x ran on"
        await old.close()
        await members.play()
        assert torch.equal(island.head.anchor_F, members.islands[0].head.anchor_F)

    story(tell, Members(tmp_path, recipe, book))


def test_who_fetched_the_state_begins_anew_from_it(tmp_path, book):
    """Member 1 missed two rounds and gets the state as a blob: what it has of an older vertex is not used."""
    recipe = recipe_for(WAYS["overlap"])

    async def tell(members: Members) -> None:
        await members.play()
        absent, data = members.islands.pop(), members.stores[0]
        await absent.close()
        both, members.islands = members.islands, [members.islands[0], members.islands[0]]
        await members.play(encoding=(0,), counted=(0,))
        members.stores[1].put_blob(data.read_blob(members.state))
        members.trainers[1] = Inside()
        members.islands = [*both, members.island(1)]
        island = members.islands[1]
        assert await island.run(RestoreState(members.round - 1, members.vertex(), members.state))
        assert island.mine.memory_F is None and not island.live.inner
        await members.play()
        assert torch.equal(island.head.anchor_F, both[0].head.anchor_F)

    story(tell, Members(tmp_path, recipe, book))


def test_trouble_in_steps_that_nobody_asked_for_is_told_when_the_next_are(tmp_path, book):
    """Parameters of NaN while it goes on: it stands, answers the merge, and fails the next `train`."""

    async def tell() -> None:
        inside = Inside()
        spec = TrainerSpec("gpt-nano", 0, book, batch=2, seq_len=16, inner=AdamW())
        await inside.start(spec)
        inside.quiet = False
        job = {"cursor": 0, "shard": 0, "shards": 1, "global_step": 0, "ahead": 3}
        assert (await inside.train(2, **job)).steps == 2
        inside.child.x_F.mul_(float("nan"))
        inside.quiet = True
        inside.child.step_ahead()
        assert inside.child.span.steps == 0
        await inside.merge(0, torch.zeros(len(inside.read_x())), "delta")
        with pytest.raises(TrainerCommandError, match="the loss is nan"):
            await inside.train(2, **job)
        await inside.write_x(build_flat(spec.model, spec.seed))
        assert (await inside.train(2, **job)).steps == 2

    asyncio.run(tell())


def build_flat(model: str, seed: int) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in build_model(model, seed).parameters()])


def test_a_trainer_stands_after_its_overlap_and_may_take_a_whole_round_once_merged(book):
    """Handed over after 6 steps: 2 more, then it stands; merged: up to 6 in all, which the next `train` counts."""

    async def tell() -> None:
        inside = Inside()
        await inside.start(TrainerSpec("gpt-nano", 0, book, batch=2, seq_len=16, inner=AdamW()))
        job = {"shard": 0, "shards": 1, "ahead": 2}
        first = await inside.train(6, cursor=0, global_step=0, **job)
        assert (first.steps, first.cursor, inside.child.span.steps) == (6, 12, 2)
        sent = inside.child.sent_F.clone()
        x_F = inside.child.x_F.clone()
        inside.quiet = False
        anchor = sent * 0.5
        await inside.merge(0, anchor, "delta")
        assert torch.equal(inside.child.x_F, anchor + (x_F - sent))
        inside.quiet = True
        inside.child.step_ahead()
        assert inside.child.span.steps == 6
        second = await inside.train(6, cursor=12, global_step=6, **job)
        assert (second.steps, second.samples, second.cursor) == (6, 12, 24)

    asyncio.run(tell())


def test_a_trainer_that_is_to_stand_takes_no_step_ahead_until_it_is_asked(book):
    """Told after a hand-over, as a paused round begins: also what is merged then frees none; what it had counts."""

    async def tell() -> None:
        inside = Inside()
        await inside.start(TrainerSpec("gpt-nano", 0, book, batch=2, seq_len=16, inner=AdamW()))
        job = {"shard": 0, "shards": 1, "ahead": 2}
        assert (await inside.train(6, cursor=0, global_step=0, **job)).steps == 6
        inside.stand()
        await inside.merge(0, inside.child.sent_F * 0.5, "delta")
        inside.child.step_ahead()
        assert inside.child.span.steps == 2
        assert (await inside.train(6, cursor=12, global_step=6, **job)).steps == 6
        assert inside.child.span.steps == 2

    asyncio.run(tell())


def test_a_private_file_holds_what_was_written_last_whatever_was_there_before(tmp_path):
    """Longer, shorter, longer: two files take turns, and none shows the end of another."""
    store = PeerStore(tmp_path, durable=False)
    for data in (b"a" * 1000, b"b" * 10, b"c" * 5000, b"", b"d" * 100):
        store.private.write(data)
        assert store.private.read() == data
    store.close()
    torn = tmp_path / "private.tmp"
    torn.write_bytes(b"x")
    again = PeerStore(tmp_path, durable=False)
    assert again.private.read() == b"d" * 100
    again.close()


def test_streaming_as_a_real_run_has_it_can_be_founded(book):
    founding_blobs(start_of_built_in(for_real_run(streaming("gpt-nano", fragments=2)), book), RunSettings())
