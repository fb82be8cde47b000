"""Long rounds over slow links: how much of the time members train."""

from __future__ import annotations

from atoll.sim.scenarios.oceans import OVERLAP, STEP_S, STEPS, trained
from atoll.sim.scenarios.stage import Stage


def test_an_exchange_between_continents_is_hidden_behind_the_training_of_the_next_round():
    """Two members, rounds of 38 minutes: without overlap the links cost what their rate says, with it next to
    nothing."""
    waiting, overlapped = (trained(Stage("oceans", 1, 2, 3, "majority"), steps) for steps in (0, OVERLAP))
    exchange_s = (1 / waiting - 1) * STEPS * STEP_S
    assert 252 < exchange_s < 280, "half of an update twice, at the rate of 469 s for a ring of fourteen"
    assert overlapped > 0.98
