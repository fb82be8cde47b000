"""Rounds that adapt their work: steps, batches and times from a vertex and the number of members."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.workload import (
    AdaptiveWorkloadPolicy,
    AdaptiveWorkloadState,
    LossAdaptiveBatchSize,
    RoundWorkload,
    effort_problem,
    fastest_of,
    initial_progress,
    next_batch,
    progress_after,
    steps_at,
    workload_of,
)
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.policy.capability_terms import PartitionPolicy
from atoll.policy.plan import RoundPlan, RoundSettings, StragglerPolicy, plan_round
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

HEAD = Digest(b"h" * 32)
RULE = LossAdaptiveBatchSize(target_loss=2.0, least=2, most=40)


def body(
    members: int = 4, step_s: float = 0.5, reached: AdaptiveWorkloadState | None = None, slow: float = 1.0
) -> VertexBody:
    """`slow`: factor on the last member's times."""
    steps_s = [step_s] * (members - 1) + [step_s * slow]
    here = [Member(PeerId(f"p{i}"), b"", (), "trainer", "member", 0, s, "") for i, s in enumerate(steps_s)]
    bare = VertexBody(
        HEAD, 5, 0, HEAD, 1000.0, PeerId("p0"), (), HEAD, (), tuple(here), (), (), SwarmRoundMetrics(0.0, 0, 0)
    )
    return bare if reached is None else replace(bare, effort=reached)


def planned(effort: AdaptiveWorkloadPolicy, inner_steps: int = 100, **of) -> RoundPlan:
    return plan_round(HEAD, body(**of), RoundSettings(inner_steps=inner_steps, effort=effort))


# ---- off ---------------------------------------------------------------------------------------------------


def test_where_genesis_says_nothing_rounds_are_as_ever():
    """Also the bytes of genesis: an effort that is left out stands nowhere in them."""
    plain = plan_round(HEAD, body(), RoundSettings(inner_steps=100))
    assert (plain.steps, plain.batch, plain.samples_most, plain.quota) == (100, 0, None, None)
    assert plain.limit_s is None
    assert b"effort" not in encode_settings(RunSettings())


# ---- rounds in minutes -------------------------------------------------------------------------------------


def test_a_round_in_minutes_ends_for_everybody_after_them():
    """100 000 steps of half a second are most of a day; the window holds ten minutes and what is beside them."""
    minutes, steps = (
        planned(AdaptiveWorkloadPolicy(4, train_s=600.0), 100_000),
        planned(AdaptiveWorkloadPolicy(4, samples=10**9), 100_000),
    )
    assert minutes.steps == steps.steps == 100_000
    window_s = minutes.times(0).train_until - minutes.begin
    assert 600.0 < window_s < 620.0 and steps.times(0).train_until - steps.begin == 3600.0
    assert minutes.limit_s == 600.0 and steps.limit_s is None


def test_steps_that_are_done_before_the_time_is_over_end_the_round():
    """The earlier of both counts: windows are no longer than for the steps alone."""
    short = planned(AdaptiveWorkloadPolicy(4, train_s=600.0), 100)
    assert short.times(0) == plan_round(HEAD, body(), RoundSettings(inner_steps=100)).times(0)


def test_the_first_round_has_the_time_in_which_trainers_start():
    """While no speed is known a window of seconds would be over before the first step."""
    first = planned(AdaptiveWorkloadPolicy(4, train_s=5.0), 100, step_s=0.0)
    assert first.train_s == RoundSettings().first_train_s and first.limit_s == 5.0


def test_windows_that_follow_the_pace_know_how_long_training_lasts():
    settings = RoundSettings(inner_steps=100_000, window_min_s=1.5, effort=AdaptiveWorkloadPolicy(4, train_s=600.0))
    plan = plan_round(HEAD, replace(body(), window_s=1.5), settings)
    assert plan.pace is not None and plan.pace.training_s == 600.0 < plan.pace.train_s < 620.0
    assert plan.begun(plan.begin + 1.0) is plan


# ---- fixed samples per round ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "steps"), [(1, 100), (2, 100), (4, 50), (8, 25), (16, 13), (50, 4), (200, 3)])
def test_with_more_members_each_takes_fewer_steps(members: int, steps: int):
    """800 samples in batches of four, never more than 100 steps and never fewer than three."""
    plan = planned(AdaptiveWorkloadPolicy(4, samples=800, steps_min=3), 100, members=members)
    assert plan.steps == steps


def test_a_newcomer_whose_update_weighs_nothing_takes_nobodys_steps():
    here = body()
    new = replace(here, members=(*here.members[:3], replace(here.members[3], standing="new")))
    settings = RoundSettings(inner_steps=100, effort=AdaptiveWorkloadPolicy(4, samples=600))
    assert plan_round(HEAD, new, settings).steps == 50
    assert plan_round(HEAD, here, settings).steps == 38


# ---- steps follow the loss ---------------------------------------------------------------------------------


def test_rounds_shorten_with_the_root_of_the_loss_and_never_below_the_least():
    """AdaComm's plain rule (1810.08313, section 4.2), from the first round that trained."""
    effort, reached = AdaptiveWorkloadPolicy(4, by_loss=True, steps_min=20), UNSET
    told = []
    for loss in (4.0, 3.0, 2.0, 1.0, 0.01, 9.0):
        reached = progress_after(effort, 100, reached, [loss])
        told.append(workload_of(effort, 100, reached, 4).steps)
    assert told == [100, 87, 71, 50, 20, 100]


def test_a_round_that_nobody_trained_in_changes_nothing():
    effort = AdaptiveWorkloadPolicy(4, by_loss=True, batches=RULE)
    before = AdaptiveWorkloadState(50, 10, 8, 4.0)
    assert progress_after(effort, 100, before, []) == AdaptiveWorkloadState(50, 10, 10, 4.0)
    assert progress_after(effort, 100, UNSET, []) == initial_progress(effort, 100)


def test_liars_about_their_loss_move_it_no_further_than_another_members():
    effort = AdaptiveWorkloadPolicy(4, by_loss=True, batches=RULE)
    honest = [1.9, 2.0, 2.05, 2.1, 2.15]
    low, high = (
        progress_after(effort, 100, AdaptiveWorkloadState(90, 10, 10, 4.0), [*honest, lie, lie])
        for lie in (0.0, 1e12)
    )
    assert (low.batch, high.batch) == (10, 10)
    assert 68 <= low.steps <= high.steps <= 74


# ---- batches follow the loss -------------------------------------------------------------------------------


def test_the_batch_grows_above_the_target_shrinks_below_it_and_rests_between():
    above, below = 2.0 * 1.1, 2.0 * 0.9
    assert [next_batch(RULE, b, above + 1e-9) for b in (2, 10, 36, 40)] == [3, 12, 40, 40]
    assert [next_batch(RULE, b, below - 1e-9) for b in (2, 3, 10, 40)] == [2, 2, 8, 32]
    assert [next_batch(RULE, 10, loss) for loss in (above, 2.0, below)] == [10, 10, 10]


def test_a_larger_batch_gets_the_time_that_its_steps_take():
    """Members report their steps' time of the batch before."""
    effort = AdaptiveWorkloadPolicy(10, batches=RULE)
    same, grown = (planned(effort, reached=AdaptiveWorkloadState(100, batch, 10, 4.0)) for batch in (10, 12))
    assert (same.batch, grown.batch) == (10, 12)
    assert grown.train_s - same.train_s == pytest.approx(0.2 * 1.5 * 0.5 * 100)


def test_a_larger_batch_leaves_a_round_as_many_samples():
    effort = AdaptiveWorkloadPolicy(10, samples=2000, batches=RULE)
    assert [planned(effort, reached=AdaptiveWorkloadState(100, b, b, 4.0)).steps for b in (5, 10, 20, 40)] == [
        100,
        50,
        25,
        13,
    ]
    assert 4 * 13 * 40 == 2080, "about"


@given(
    steps=st.integers(-(2**62), 2**62),
    batch=st.integers(-(2**62), 2**62),
    before=st.integers(-(2**62), 2**62),
    first=st.floats() | st.just(nan) | st.just(inf),
    losses=st.lists(st.floats(-1e12, 1e12), max_size=5),
    members=st.integers(0, 200),
)
def test_whatever_stands_in_a_vertex_the_next_round_is_within_genesis(steps, batch, before, first, losses, members):
    effort = AdaptiveWorkloadPolicy(8, samples=4000, steps_min=5, by_loss=True, batches=RULE)
    reached = AdaptiveWorkloadState(steps, batch, before, first)
    for one in (reached, progress_after(effort, 100, reached, losses)):
        quota = workload_of(effort, 100, one, members)
        assert 5 <= quota.steps <= 100 and 2 <= quota.batch <= 40 and 1.0 <= quota.stretch <= 40.0


# ---- steps by a member's own speed -------------------------------------------------------------------------


def shares(steps_s: list[float], quorum: str = "majority", new: tuple[int, ...] = (), least: int = 1) -> list[int]:
    """Steps that members with these speeds are asked for, of a hundred."""
    here = body(members=len(steps_s))
    lines = (replace(m, step_s=s) for m, s in zip(here.members, steps_s, strict=True))
    members = tuple(replace(m, standing="new") if k in new else m for k, m in enumerate(lines))
    settings = RoundSettings(
        inner_steps=100, quorum=quorum, effort=AdaptiveWorkloadPolicy(4, steps_min=least, by_speed=True)
    )
    plan = plan_round(HEAD, replace(here, members=members), settings)
    return [plan.steps_of(m.peer) for m in plan.members]


def test_each_takes_the_share_of_the_steps_that_its_speed_is_of_the_fastests():
    """max(1, floor(H v / v of the fastest)), so that all arrive together; a thousandth of the speed is one step."""
    assert shares([0.1, 0.1, 0.2, 0.4]) == [100, 100, 50, 25]
    assert shares([0.3, 0.1, 0.11, 100.0]) == [33, 100, 90, 1]
    assert shares([0.1, 0.1, 0.2, 0.4], least=30) == [100, 100, 50, 30]


def test_while_the_speed_of_most_is_unknown_all_take_all_and_later_only_who_is_new():
    assert shares([0.0, 0.0, 0.2, 0.4]) == [100] * 4
    assert shares([0.1, 0.1, 0.2, 0.0]) == [100, 100, 50, 100]
    assert shares([0.1, 0.1, 0.2, 0.001], new=(3,)) == [100, 100, 50, 100], "a newcomer starves nobody"


def test_who_claims_to_be_fast_starves_nobody_where_members_may_lie():
    """Two of seven claim a thousand times the speed, or none: the others are assigned steps by an honest
    member's.
    """
    honest = [0.1, 0.1, 0.1, 0.2, 0.4]
    assert shares([*honest, 1e-4, 1e-4], "two-thirds") == [100, 100, 100, 50, 25, 100, 100]
    assert shares([*honest, 1e9, 1e9], "two-thirds") == [100, 100, 100, 50, 25, 1, 1]
    assert shares([*honest, 1e-4, 1e-4])[:5] == [1] * 5, "where nobody lies the fastest decides"


def test_the_window_is_that_of_the_fewer_steps():
    """One of four takes three times as long for a step: the round lasts as if all were fast."""
    slow = planned(AdaptiveWorkloadPolicy(4, by_speed=True), slow=3.0)
    assert (
        slow.steps_of(PeerId("p3")) == 33
        and slow.train_s == planned(AdaptiveWorkloadPolicy(4, by_speed=True)).train_s
    )
    assert planned(AdaptiveWorkloadPolicy(4), slow=3.0).train_s > 2 * slow.train_s


@given(
    steps_s=st.lists(st.floats(0, 2**40), min_size=1, max_size=8),
    liars=st.integers(0, 2),
    steps=st.integers(1, 2**31 - 1),
    least=st.integers(1, 2**31 - 1),
)
def test_whatever_members_say_of_their_speed_they_are_asked_for_some_steps_and_no_more_than_all(
    steps_s, liars, steps, least
):
    fastest_s = fastest_of(steps_s, liars)
    for step_s in steps_s if fastest_s is not None else ():
        assert min(least, steps) <= steps_at(step_s, fastest_s, steps, least) <= steps
    assert fastest_s is None or steps_at(fastest_s, fastest_s, steps, least) in (steps, min(least, steps))


# ---- genesis -----------------------------------------------------------------------------------------------


def test_settings_survive_their_encoding_and_those_that_cannot_be_are_refused():
    def with_effort(effort: AdaptiveWorkloadPolicy, **more) -> bytes:
        return encode_settings(RunSettings(round=RoundSettings(inner_steps=32, effort=effort), **more))

    whole = AdaptiveWorkloadPolicy(8, 60.0, 4096, 4, True, LossAdaptiveBatchSize(2.0, 2, 64), True)
    assert decode_settings(with_effort(whole)).round.effort == whole
    for wrong in (
        AdaptiveWorkloadPolicy(8, steps_min=33),
        AdaptiveWorkloadPolicy(80, batches=LossAdaptiveBatchSize(2.0, 2, 64)),
        AdaptiveWorkloadPolicy(8, samples=64, by_speed=True),
    ):
        assert effort_problem(wrong, 32)
        with pytest.raises(PeerFault, match="genesis"):
            decode_settings(with_effort(wrong))
    with pytest.raises(PeerFault, match="apart"):
        decode_settings(with_effort(whole, apart=PartitionPolicy("merge", 3)))
    slow = RoundSettings(inner_steps=32, effort=whole, acceptance=StragglerPolicy(2, 3))
    with pytest.raises(PeerFault, match="two batch sizes"):
        decode_settings(encode_settings(RunSettings(round=slow)))
    assert workload_of(UNSET, 32, UNSET, 4) == RoundWorkload(32)


def test_a_first_loss_that_was_an_outlier_does_not_keep_rounds_short_for_ever():
    """It was a bad sample, or a lie: from the next round on it counts for 64 times that round's loss at most."""
    effort = AdaptiveWorkloadPolicy(4, steps_min=1, by_loss=True)
    reached = progress_after(effort, 400, UNSET, [1e30])
    for loss in (4.0, 4.0, 2.0):
        reached = progress_after(effort, 400, reached, [loss])
    assert isinstance(reached, AdaptiveWorkloadState) and reached.first_loss == 128.0 and reached.steps == 50
    usual = progress_after(effort, 400, AdaptiveWorkloadState(400, 4, 4, 8.0), [2.0])
    assert isinstance(usual, AdaptiveWorkloadState) and usual.first_loss == 8.0 and usual.steps == 200
