"""Members read one data set under churn: every sample is counted, or recorded as dropped or repeated."""

from __future__ import annotations

import pytest

from atoll.policy.data import positions as data_positions
from atoll.policy.data.claims import UncountedSampleRanges
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.training.data.shards.dataset import AssignedShardsDataset


def test_no_sample_is_lost_without_account():
    """20 seeds with kills, torn writes, sleeps, partitions, joins and leaves. Few samples are counted again."""
    told = [run_scenario("data_churn", seed, peers=4, rounds=4).measured for seed in range(20)]
    assert all(one["samples"] > 500 for one in told)
    assert sum(one["repeated"] + one["dropped"] for one in told) < sum(one["samples"] for one in told) / 10


@pytest.mark.parametrize("mutant", ["skips", "forgets", "moves"])
def test_the_checker_notices_what_is_lost_or_counted_again(monkeypatch: pytest.MonkeyPatch, mutant: str):
    """A loop that skips a sample that it claims, one that forgets uncounted ones, a fold that moves too far."""
    if mutant == "skips":
        take = AssignedShardsDataset.take_step
        monkeypatch.setattr(AssignedShardsDataset, "take_step", lambda shards: take(shards)[:1])
    if mutant == "forgets":
        settle = UncountedSampleRanges.settle

        def forgets(claims: UncountedSampleRanges, *closed) -> None:
            settle(claims, *closed)
            claims._left = ()

        monkeypatch.setattr(UncountedSampleRanges, "settle", forgets)
    if mutant == "moves":
        claim = data_positions._ShardLedger.claim

        def moves(book, by, claimed, undone):
            claim(book, by, claimed._replace(until=claimed.until + 1), undone)

        monkeypatch.setattr(data_positions._ShardLedger, "claim", moves)
    with pytest.raises(ScenarioFailed, match="samples"):
        for seed in range(20):
            run_scenario("data_churn", seed, peers=4, rounds=4)


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_no_sample_is_lost_in_hundreds_of_seeds(block: int):
    for seed in range(block * 50, block * 50 + 50):
        run_scenario("data_churn", seed, peers=4 + seed % 4, rounds=6)
