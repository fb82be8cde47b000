"""Long rounds over slow links: how much of the time members train."""

from __future__ import annotations

from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.wide_area import OVERLAP, STEP_S, STEPS, trained


def test_an_exchange_between_continents_is_hidden_behind_the_training_of_the_next_round():
    """Two members, rounds of 38 minutes, of which their links would take four."""
    assert trained(ScenarioContext("oceans", 1, 2, 3, "majority"), OVERLAP) > 0.98


def test_nobody_waits_for_a_downlink_that_all_others_send_to():
    """Three members with downlinks no faster than their uplinks: an exchange takes what its bytes take."""
    exchange_s = (1 / trained(ScenarioContext("oceans", 1, 3, 3, "majority"), 0) - 1) * STEPS * STEP_S
    assert 336 < exchange_s < 340, "two thirds of an update twice, at the rate of 469 s for a ring of fourteen"
