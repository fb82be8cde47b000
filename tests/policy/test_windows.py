"""Windows that follow the pace: as short as rounds are, as long as trouble wants."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from atoll.base.ids import Digest, PeerId
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.policy.fault_tolerance import STRIKES, OwnerStrikes
from atoll.policy.plan import RoundSettings, plan_round
from atoll.policy.timeouts import GROWTH, MARGIN, ObservedRoundTiming, next_window, patience_shown, within
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

SHORTEST_S, LONGEST_S = 1.5, 6.0
QUICK = ObservedRoundTiming(took_s=0.4, training_s=0.2, attempt=0, late=False, whole=True, excused=False)
FIXED = RoundSettings()
PACED = RoundSettings(window_min_s=SHORTEST_S)
HEAD = Digest(b"h" * 32)

seconds = st.floats(0.0, 1e6)
rounds = st.lists(
    st.builds(
        ObservedRoundTiming,
        took_s=seconds,
        training_s=seconds,
        attempt=st.integers(0, 3),
        late=...,
        whole=...,
        excused=...,
    ),
    max_size=40,
)


def after(*shown: ObservedRoundTiming, window_s: float = LONGEST_S) -> float:
    for each in shown:
        window_s = next_window(window_s, each, SHORTEST_S, LONGEST_S)
    return window_s


def body(window_s: float | None, step_s: float = 0.01) -> VertexBody:
    members = tuple(Member(PeerId(f"p{i}"), b"", (), "trainer", "member", 0, step_s, "") for i in range(7))
    bare = VertexBody(
        HEAD, 5, 0, HEAD, 1000.0, PeerId("p0"), (), HEAD, (), members, (), (), SwarmRoundMetrics(0.0, 0, 0)
    )
    return bare if window_s is None else changed(bare, window_s=window_s)


# ---- the window of the next round --------------------------------------------------------------------------


def test_quick_rounds_make_windows_short_and_slow_ones_make_them_long():
    assert after(*[QUICK] * 8) == SHORTEST_S
    assert after(replace(QUICK, took_s=2.2)) == max(MARGIN * 2.0, LONGEST_S / GROWTH)
    assert after(replace(QUICK, took_s=60.0), window_s=SHORTEST_S) == LONGEST_S


def test_training_is_no_part_of_the_pace():
    """Hours of training, and an exchange of half a second."""
    assert after(*[replace(QUICK, took_s=7200.5, training_s=7200.0)] * 8) == SHORTEST_S


def test_one_proposer_that_lies_about_the_time_takes_a_third_of_a_window_and_no_more():
    assert after(replace(QUICK, took_s=0.0), window_s=6.0) == 4.0


def test_a_round_that_was_too_short_for_somebody_makes_the_next_one_more_patient():
    """Late, or with a member missing; not if all are there and it was late for skipped owners."""
    late, without = replace(QUICK, took_s=9.0, late=True), replace(QUICK, whole=False)
    for trouble in (late, without, replace(late, excused=True, whole=False)):
        assert after(trouble, window_s=2.0) == 2.0 * GROWTH
        assert after(*[trouble] * 9) == LONGEST_S
    assert after(replace(late, excused=True), window_s=2.0) == 2.0


def test_a_failed_attempt_brings_all_the_patience_back():
    assert after(replace(QUICK, attempt=1), window_s=SHORTEST_S) == LONGEST_S


@given(rounds)
def test_windows_stay_between_the_two_and_never_fall_in_trouble(story: list[ObservedRoundTiming]):
    window_s = LONGEST_S
    for shown in story:
        before_s, window_s = window_s, after(shown, window_s=window_s)
        assert SHORTEST_S <= window_s <= LONGEST_S
        assert window_s >= before_s / GROWTH - 1e-3
        if shown.attempt > 0 or shown.late or not shown.whole:
            assert window_s >= before_s - 1e-3


@pytest.mark.parametrize("number", [nan, inf, -inf, -1.0, 0.0, 1e300])
def test_whatever_number_a_vertex_holds_makes_a_window(number: float):
    assert SHORTEST_S <= within(number, SHORTEST_S, LONGEST_S) <= LONGEST_S


# ---- what plans make of it ---------------------------------------------------------------------------------


def test_without_a_shortest_window_plans_are_what_they_were():
    """Also where a vertex names one."""
    assert plan_round(HEAD, body(1.0), FIXED) == plan_round(HEAD, changed(body(1.0)), FIXED)
    assert plan_round(HEAD, body(1.0), FIXED).times(0) == plan_round(HEAD, body(None), FIXED).times(0)


def test_a_run_that_has_shown_no_pace_has_all_the_patience():
    paced, fixed = (plan_round(HEAD, body(None), settings) for settings in (PACED, FIXED))
    assert [paced.times(k) for k in range(9)] == [fixed.times(k) for k in range(9)]


def test_only_waits_inside_the_first_attempt_are_shorter():
    """It ends when it would have ended, so that there is time for as many proposers; the others are as ever."""
    paced, fixed = plan_round(HEAD, body(SHORTEST_S), PACED), plan_round(HEAD, body(None), FIXED)
    assert [paced.times(k) for k in range(1, 9)] == [fixed.times(k) for k in range(1, 9)]
    first = paced.times(0)
    assert first.agree_until == pytest.approx(fixed.times(0).agree_until)
    assert first.answer_until[0] - paced.begin < (fixed.times(0).answer_until[0] - fixed.begin) / 3
    assert first.begin < first.train_until < first.answer_until[0] < first.answer_until[-1] < first.agree_until
    assert paced.attempt_at(first.agree_until - 1e-6) == 0


def test_who_begins_too_late_to_train_goes_by_fixed_windows():
    """The votes on the last vertex took four seconds: no member skips for that. Two seconds leave time enough."""
    plan = plan_round(HEAD, body(SHORTEST_S), PACED)
    assert plan.begun(plan.begin + 2.0) == plan
    late = plan.begun(plan.begin + 4.0)
    assert late.times(0) == plan_round(HEAD, body(None), FIXED).times(0) and late.head == plan.head


def test_training_has_its_own_time_however_short_the_window():
    """Half as much again as the slowest needs, beside what the window gives."""
    slow, quick = (plan_round(HEAD, body(SHORTEST_S, step_s), PACED) for step_s in (1.0, 0.01))
    more_s = slow.times(0).train_until - quick.times(0).train_until
    assert more_s == pytest.approx(1.5 * 0.99 * PACED.inner_steps)


def test_genesis_may_leave_the_shortest_window_out_and_not_make_it_nothing():
    """Settings of runs that were begun before keep their bytes."""
    assert b"window_min_s" not in encode_settings(RunSettings())
    assert decode_settings(encode_settings(RunSettings(round=PACED))).round == PACED
    with pytest.raises(Exception, match="window_min_s"):
        decode_settings(encode_settings(RunSettings(round=RoundSettings(window_min_s=0.0))))


# ---- who is complained of ----------------------------------------------------------------------------------


def test_in_the_longest_window_a_failure_is_a_failure():
    assert patience_shown(30.0, LONGEST_S, LONGEST_S) == patience_shown(0.1, LONGEST_S, LONGEST_S) == 1.0


def test_an_owner_is_waited_for_as_long_in_all_as_if_the_others_had_never_been_quick():
    """Failures of three seconds each: the fourth makes two longest windows."""
    strikes, weight = OwnerStrikes(), patience_shown(3.0, SHORTEST_S, LONGEST_S)
    assert [strikes.note(PeerId("mute"), round, weight) for round in range(4)] == [False, False, False, True]
    assert STRIKES * LONGEST_S == 4 * 3.0


def test_one_long_wait_is_no_complaint():
    assert not OwnerStrikes().note(PeerId("slow"), 1, patience_shown(60.0, SHORTEST_S, LONGEST_S))


def test_failures_that_are_long_past_count_no_more():
    strikes = OwnerStrikes()
    assert not any(strikes.note(PeerId("unlucky"), round) for round, _ in pairwise(range(0, 100, 8)))
