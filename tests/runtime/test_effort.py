"""Rounds whose work follows the run, on real trainers: the same bits as in the experiment."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from members import PEERS, Members, recipe_for, story
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault, UsageError
from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import RestoreEarlierState
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.policy.plan import RoundSettings
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.data import load_data
from atoll.training.experiment.api import ExperimentOptions, ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.methods import auto, data_parallel, decoupled, eager
from atoll.training.recipe.recipes import Recipe, over_tokens
from atoll.training.recipe.state import state_bytes, state_hash
from atoll.training.spec import TrainingSpec

PLAIN = {"fragments": 1, "overlap": 0}
BOTH = {"fragments": 3, "overlap": 2, "merge": "delta"}


def beside(
    tmp_path,
    book: str,
    recipe: Recipe,
    effort: AdaptiveWorkloadPolicy | None = None,
    fewer: dict[int, int] | None = None,
) -> ExperimentSimulator:
    """Islands that are asked for what the experiment does, round by round, end with the state that it names."""
    steps = recipe.schedule.steps
    model = build_model("gpt-nano", 0)
    own, whole = fewer or {}, recipe.schedule.turn_steps
    slow = FaultSpec(speeds=tuple(own.get(k, whole) / whole for k in range(PEERS))) if own else FaultSpec()
    run = ExperimentSimulator(
        recipe, model, load_data(book), PEERS, steps, slow, loss_of, options=ExperimentOptions(effort=effort)
    )
    while run.now < steps:
        run.step()

    async def tell(members: Members) -> None:
        done, members.fewer = 0, own
        for one in run.history:
            if effort is not None:
                members.steps, members.batch = one.step - done, one.batch
            done = one.step
            await members.play()
        assert torch.equal(members.islands[0].head.anchor_F, run.agreed())
        assert members.state == state_hash(state_bytes(run.shared(), run.layout))
        assert run.state() in (members.state, None)  # None: the last round was cut short

    torch.manual_seed(0)
    tied = UNSET if recipe.schedule.total_tokens is UNSET else True
    asks = AdaptiveWorkloadPolicy(recipe.batch, bounded=tied) if effort is None else effort
    settings = RunSettings(round=RoundSettings(inner_steps=recipe.schedule.turn_steps, effort=asks))
    story(tell, Members(tmp_path, recipe, book, settings=settings))
    return run


@pytest.mark.parametrize("how", [PLAIN, BOTH], ids=["blocking", "overlapping"])
def test_rates_over_tokens_are_those_of_the_experiment(tmp_path, book, how):
    """A horizon of two thirds of the run: the rate is at its end before the last round, and not by steps."""
    recipe = recipe_for(how, up="fp32", down="fp32")
    total = PEERS * recipe.schedule.steps * recipe.batch * recipe.seq_len * 2 // 3
    run = beside(tmp_path, book, over_tokens(recipe, total))
    assert run.round_clock.rate_step(run.now - 1) >= recipe.schedule.steps


def test_outer_rates_over_tokens_are_those_of_the_experiment(tmp_path, book):
    """A momentum that settles over the last third of the run."""
    recipe = auto("gpt-nano", rounds=3, inner_steps=12, fragments=1, overlap=0, batch=2, seq_len=16)
    recipe = replace(recipe, merge="replace", coding=replace(recipe.coding, answer="once", down="int8"))
    beside(tmp_path, book, over_tokens(recipe, PEERS * 36 * 2 * 16 * 2 // 3))


def test_batches_and_steps_of_every_round_are_those_of_the_experiment(tmp_path, book):
    """Samples of a round bound its steps, its batch grows, rates go by tokens: the state agrees to the bit."""
    recipe = over_tokens(recipe_for(PLAIN, rounds=4), 2048)
    asks = AdaptiveWorkloadPolicy(
        2, samples=28, steps_min=2, batches=LossAdaptiveBatchSize(0.5, 2, 64), bounded=True
    )
    run = beside(tmp_path, book, recipe, asks)
    assert [one.batch for one in run.history[:4]] == [2, 3, 4, 5]
    assert [one.step for one in run.history[:3]] == [7, 12, 16]
    assert run.round_clock.rate_step(run.now) > 40 and run.now == 48, "the horizon is nearly reached"


def test_steps_by_each_members_own_speed_are_those_of_the_experiment(tmp_path, book):
    """One has a third of the others' speed: it takes four steps of twelve, and its update weighs as much less."""
    run = beside(tmp_path, book, recipe_for(PLAIN), AdaptiveWorkloadPolicy(2, by_speed=True), fewer={1: 4})
    assert run.round_clock.tokens == 3 * (12 + 4) * 2 * 16


def test_samples_are_counted_by_the_batch_that_was_asked_also_where_the_run_goes_back(tmp_path, book):
    async def tell(members: Members) -> None:
        first = members.state
        members.batch = 5
        await members.play()
        island = members.islands[0]
        done = await island.run(TrainAsked(1, 12, 600.0, 0, PEERS, 3))
        assert done.samples == 12 * 3
        back = await island.run(RestoreEarlierState(1, members.state, first, 12, PEERS, 5))
        assert island.states.load(back.state, members.learning.layout).samples == 2 * 12 * 5 * PEERS

    story(tell, Members(tmp_path, recipe_for(PLAIN), book))


def test_a_round_in_minutes_counts_them_from_when_its_trainer_runs(tmp_path, book):
    """However long that took to start; the end of the window comes first where there is less time."""

    async def tell(members: Members) -> None:
        island, trainer = members.islands[0], members.trainers[0]
        ready, train = island.live.ready, trainer.train
        runs, ends = list[float](), list[float]()

        async def starts(learning) -> None:
            await ready(learning)
            runs.append(time.monotonic())

        async def trains(steps, **how):
            ends.append(how["until"])
            return await train(min(steps, 1), **how)

        island.live.ready, trainer.train = starts, trains
        begun = time.monotonic()
        await island.run(TrainAsked(0, 10**6, 9000.0, 0, PEERS, limit_s=600.0))
        await island.run(TrainAsked(0, 10**6, 9000.0, 0, PEERS))
        await island.run(TrainAsked(0, 10**6, 60.0, 0, PEERS, limit_s=600.0))
        assert runs[0] + 600.0 <= ends[0] <= time.monotonic() + 600.0
        assert ends[1] >= begun + 9000.0 and ends[2] <= runs[2] + 60.0

    story(tell, Members(tmp_path, recipe_for(PLAIN), book))


# ---- what is refused ---------------------------------------------------------------------------------------

ASKS = {"samples": 64, "by_loss": True}
GROWS = {"batches": LossAdaptiveBatchSize(2.0, 1, 64)}
TINY = {"batch": 2, "seq_len": 16}


@pytest.mark.parametrize(
    ("recipe", "asks", "why"),
    [
        (data_parallel("gpt-nano", rounds=5, **TINY), {"train_s": 60.0}, "every step is a round"),
        (eager("gpt-nano", rounds=3, inner_steps=12, **TINY), ASKS, "run on for a whole round"),
        (recipe_for(BOTH), ASKS, "overlap of 2 steps"),
        (recipe_for(BOTH), {"by_speed": True, "steps_min": 2}, "overlap of 2 steps"),
        (recipe_for(BOTH), GROWS, "taken ahead"),
        (
            decoupled("gpt-nano", rounds=3, inner_steps=12, fragments=1, overlap=0, **TINY),
            GROWS,
            "excludes a quorum|without",
        ),
        (recipe_for(PLAIN), {"batch": 3, **GROWS}, "batches of 3"),
        (recipe_for(PLAIN), {"samples": 64, "steps_min": 13}, "at most 12"),
        (recipe_for(PLAIN), {"bounded": True}, "rates follow"),
        (over_tokens(recipe_for(PLAIN), 1000), {"samples": 64}, "rates follow"),
    ],
)
def test_rounds_that_cannot_follow_the_run_are_neither_founded_nor_joined(book, recipe, asks, why):
    """A stranger's genesis says it all the same."""
    effort = AdaptiveWorkloadPolicy(**{"batch": 2, **asks})
    settings = RunSettings(round=RoundSettings(inner_steps=recipe.schedule.turn_steps, effort=effort))
    beginning = start_of_built_in(recipe, book)
    with pytest.raises(UsageError, match=why) as refused:
        founding_blobs(beginning, settings)
    assert refused.value.code == "E-RUN-22"
    if recipe.reducer.quorum or effort.steps_min > 12:
        return  # genesis itself is refused: tests/policy/test_effort.py
    untied = replace(recipe, schedule=replace(recipe.schedule, total_tokens=UNSET))
    innocent = founding_blobs(replace(beginning, recipe=untied), RunSettings())
    learning = msgspec.msgpack.decode(innocent.settings.learning, type=TrainingSpec)
    forged = replace(learning, recipe=recipe)
    with pytest.raises(PeerFault, match=why):
        parse_training_spec(
            replace(innocent.settings, learning=msgspec.msgpack.encode(forged), round=settings.round)
        )
