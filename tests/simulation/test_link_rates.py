"""Members measure their links while they use them, and share out the update by that."""

from __future__ import annotations

import pytest

from atoll.simulation.scenarios import run_scenario


@pytest.mark.parametrize("name", ["equal_links", "slow_uplink", "slow_downlink", "changing_link"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_shares_follow_links_and_no_exchange_takes_much_longer_than_its_bytes(name: str, seed: int):
    """The scenario demands it of every round, from the third after a change on."""
    assert run_scenario(name, seed).measured["wait"] < 1.3
