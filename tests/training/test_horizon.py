"""Rates that follow the learned tokens, and rounds with work that follows the run, in experiments."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import torch
from msgspec.structs import replace
from toy import DATA, begun, model, short, tried

from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.training.experiment.api import ExperimentOptions, ExperimentSimulator, FaultSpec, MemberAbsence
from atoll.training.models import loss_of
from atoll.training.recipe.inner import rate_at
from atoll.training.recipe.lr_position import ScheduleHorizon, later, position_of, step_at, step_of_run
from atoll.training.recipe.methods import auto, diloco, local_sgd, streaming
from atoll.training.recipe.recipes import Recipe, over_tokens
from atoll.training.recipe.schedule import SyncSchedule
from atoll.training.recipe.state import SharedState

PEERS, ROUNDS, STEPS, BATCH, SEQ = 4, 3, 10, 4, 16
ALL = PEERS * ROUNDS * STEPS * BATCH * SEQ  # tokens of a run in which nothing goes wrong


def plain(**more) -> Recipe:
    return diloco(rounds=ROUNDS, inner_steps=STEPS, batch=BATCH, up="fp32", down="fp32", **more)


# ---- positions ---------------------------------------------------------------------------------------------


def test_without_a_horizon_a_position_is_steps():
    state = SharedState(torch.zeros(1), torch.zeros(1), torch.zeros(0), steps=37, tokens=999)
    recipe = short(plain())
    assert position_of(recipe, state) == step_of_run(recipe, state) == 37
    assert step_at(None, later(None, 37, 5, 1000)) == 42


def test_with_a_horizon_a_position_is_tokens_spread_over_the_nominal_steps():
    state = SharedState(torch.zeros(1), torch.zeros(1), torch.zeros(0), steps=37, tokens=ALL // 2)
    recipe = over_tokens(short(plain()), ALL)
    assert position_of(recipe, state) == ALL // 2 and step_of_run(recipe, state) == ROUNDS * STEPS // 2
    horizon = ScheduleHorizon(30, 1000)
    assert [step_at(horizon, later(horizon, 0, k, 10)) for k in (0, 3, 4, 100, 200)] == [0, 0, 1, 30, 60]


def test_a_horizon_that_is_none_leaves_no_trace_in_genesis():
    assert b"total_tokens" not in msgspec.msgpack.encode(SyncSchedule())
    with pytest.raises(ValueError, match="0 tokens"):
        over_tokens(plain(), 0)


# ---- in experiments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        plain(),
        streaming(rounds=ROUNDS, inner_steps=12, batch=BATCH, fragments=3, overlap=2),
        auto(rounds=ROUNDS, inner_steps=12, batch=BATCH, fragments=3, overlap=2),
    ],
    ids=["diloco", "streaming", "auto"],
)
def test_where_all_take_all_their_steps_a_horizon_changes_no_bit(recipe: Recipe):
    """Inner rates, outer momentum that settles over the run, fragments and overlap."""
    steps = recipe.schedule.steps
    tied = over_tokens(recipe, PEERS * steps * BATCH * SEQ)
    assert torch.equal(tried(recipe).model_F, tried(tied).model_F)


def test_rates_follow_what_was_learned_and_not_how_often_a_clock_ticked():
    """Half of the members are away after the first round: by tokens the run is then about half as far."""
    away = FaultSpec(absent=(MemberAbsence(2, STEPS), MemberAbsence(3, STEPS)))
    by_steps, by_tokens = begun(plain(), trouble=away), begun(over_tokens(plain(), ALL), trouble=away)
    for run in (by_steps, by_tokens):
        for _ in range(2 * STEPS):
            run.step()
    assert [run.round_clock.rate_step(2 * STEPS) for run in (by_steps, by_tokens)] == [20, 15]
    assert by_tokens.round_clock.tokens == ALL // 2
    inner = by_tokens.recipe.inner
    assert rate_at(inner, 15) > rate_at(inner, 20)


def test_within_a_round_rates_go_on_by_what_its_members_take_together():
    away = FaultSpec(absent=(MemberAbsence(2, 0), MemberAbsence(3, 0)))
    run = begun(over_tokens(plain(), ALL), trouble=away)
    steps = []
    for now in range(STEPS):
        run.step()
        steps.append(run.round_clock.rate_step(now) if now < STEPS - 1 else -1)
    assert steps[:9] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_an_update_that_is_lost_moves_no_rate():
    run = begun(over_tokens(plain(), ALL), trouble=FaultSpec(lost=1.0))
    for _ in range(STEPS):
        run.step()
    assert run.round_clock.tokens == 0 and run.round_clock.rate_step(STEPS) == 0


# ---- rounds with work that follows the run -----------------------------------------------------------------


def test_an_effort_that_asks_for_what_the_recipe_has_changes_no_bit():
    asks = AdaptiveWorkloadPolicy(BATCH, samples=PEERS * STEPS * BATCH)
    first, second = tried(plain()), tried(plain(), effort=asks)
    assert torch.equal(first.model_F, second.model_F) and first.history == second.history
    assert first.state == second.state


def test_rounds_learn_from_as_many_samples_whoever_is_here():
    """Half of the members leave in the second round: from the third on each takes twice as many steps."""
    asks = AdaptiveWorkloadPolicy(BATCH, samples=PEERS * 5 * BATCH)
    done = tried(plain(), effort=asks, trouble=FaultSpec(absent=(MemberAbsence(2, 7), MemberAbsence(3, 7))))
    assert [one.step for one in done.history] == [5, 10, 20, 30]


def test_rounds_shorten_as_the_loss_falls():
    done = tried(
        local_sgd(rounds=6, inner_steps=20, lr=0.02), effort=AdaptiveWorkloadPolicy(4, by_loss=True, steps_min=5)
    )
    ends = [0, *(one.step for one in done.history)]
    lengths = [after - before for before, after in pairwise(ends)][:-1]
    losses = [one.train_loss for one in done.history]
    assert lengths[0] == 20 and min(lengths) >= 5 and losses[-2] < losses[0]
    for length, loss in zip(lengths[1:], losses, strict=False):
        assert length == pytest.approx(20 * (loss / losses[0]) ** 0.5, abs=1.1)
    assert min(lengths) < 20


def test_batches_follow_the_loss_and_no_sample_is_dealt_twice():
    """The target is what the toy reaches on its way: batches grow, then shrink."""
    seen: list[set[int]] = [set() for _ in range(PEERS)]
    asks = AdaptiveWorkloadPolicy(BATCH, batches=LossAdaptiveBatchSize(target_loss=3.5, least=2, most=12))
    recipe = short(local_sgd(rounds=8, inner_steps=12, batch=BATCH, lr=0.02))
    run = ExperimentSimulator(
        recipe, model(), DATA, PEERS, 96, FaultSpec(), loss_of, options=ExperimentOptions(effort=asks)
    )
    batches, cursors = [], []
    for _ in range(96):
        before = [worker.cursor for worker in run.workers]
        batch = run.round_clock.recipe.batch
        for one in run.step():
            batches.append(one.batch)
            cursors.append(run.workers[0].cursor)
        for peer, worker in enumerate(run.workers):
            taken = set(range(before[peer], worker.cursor))
            assert not taken & seen[peer] and len(taken) in (batch, run.round_clock.recipe.batch)
            seen[peer] |= taken
    assert batches[0] == BATCH and max(batches) > BATCH and batches[-1] < max(batches)
    assert cursors[-1] == 12 * sum(batches), "nothing is skipped either"
    assert run.round_clock.dealt == PEERS * cursors[-1] == run.shared().samples


def test_a_round_in_minutes_is_one_in_which_the_slow_take_fewer_steps_and_weigh_less():
    """What a time limit makes of members of unequal speed: rounds of 10 ticks, of which the last takes 2."""
    run = begun(plain(), trouble=FaultSpec(speeds=(1.0, 1.0, 1.0, 0.2)))
    weights = []
    reduce = run._reduce

    def looked(*told) -> None:
        weights.extend(run._weight(peer, 0) for peer in range(PEERS))
        reduce(*told)

    run._reduce = looked
    for _ in range(STEPS):
        run.step()
    assert weights == [40, 40, 40, 8]


def test_what_cannot_follow_the_run_is_refused_by_name():
    with pytest.raises(ValueError, match="fragments=1"):
        tried(streaming(rounds=2, inner_steps=20), effort=AdaptiveWorkloadPolicy(4, samples=100))
    with pytest.raises(ValueError, match="batches of 8"):
        tried(plain(), effort=AdaptiveWorkloadPolicy(8, samples=100))
    with pytest.raises(ValueError, match="at most 10"):
        tried(plain(), effort=AdaptiveWorkloadPolicy(4, samples=100, steps_min=11))
    with pytest.raises(ValueError, match="closing"):
        closing = replace(plain().schedule, closing="fp32")
        tried(replace(plain(), schedule=closing), effort=AdaptiveWorkloadPolicy(4, samples=100))
