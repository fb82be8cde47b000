"""The time of a body: what a proposer writes, what voters take, and what every history takes are one rule."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.limits import CLOCK_FAR_S, CLOCK_WRONG_S
from atoll.peer.round.vertex_body import CLOCK_SLACK_S, _time_fits, next_time
from atoll.protocol.history.chain import is_too_old
from atoll.wire.messages.vertex import SwarmRoundMetrics, VertexBody

NOW = 1.7e9
AHEAD_S = (-5.0, 0.5, 30.0, 59.5, 60.5, 61.5, 89.0, 91.0, 300.0, 599.0, 601.0, 86400.0)


def parent(ahead_s: float) -> VertexBody:
    empty = ZERO_DIGEST, 6, 0, ZERO_DIGEST, NOW, PeerId("a"), (), ZERO_DIGEST, (), (), (), ()
    return replace(VertexBody(*empty, SwarmRoundMetrics(0.0, 0, 0)), time_s=NOW + ahead_s)


@pytest.mark.parametrize("ahead_s", AHEAD_S)
def test_no_voter_takes_a_time_that_histories_refuse(ahead_s: float):
    """Such a round could never close: all would decide it, and none could append it."""
    before = parent(ahead_s)
    for k in range(-1000, 20):
        time_s = NOW + k / 10
        if _time_fits(before, time_s, NOW):
            assert not is_too_old(before, time_s)


@pytest.mark.parametrize("ahead_s", [a for a in AHEAD_S if a < 1 or a > CLOCK_WRONG_S])
def test_voters_take_what_a_proposer_writes_also_in_later_views(ahead_s: float):
    before = parent(ahead_s)
    time_s = next_time(before, NOW)
    assert not is_too_old(before, time_s)
    assert all(_time_fits(before, time_s, NOW + later_s) for later_s in (-0.5, 0.0, 10.0, 80.0))


def test_a_run_dated_ahead_waits_for_its_clock_for_a_minute_and_a_half_at_most():
    """A quarter of an hour ahead, and two minutes, are set right at once."""
    assert CLOCK_FAR_S < CLOCK_WRONG_S <= 90
    for ahead_s in (120.0, 900.0):
        assert next_time(parent(ahead_s), NOW) == NOW


@pytest.mark.parametrize("ahead_s", [-1.0, CLOCK_SLACK_S])
def test_a_proposer_cannot_set_a_right_time_back(ahead_s: float):
    assert not _time_fits(parent(ahead_s), NOW - CLOCK_FAR_S, NOW)


def test_a_proposer_cannot_set_a_wrong_time_back_by_a_day():
    assert not _time_fits(parent(86400.0), NOW - 3600, NOW)
