"""All-reduces of up to 300 virtual peers: what is measured is what was counted, and the dead cost time only.

A part is a multiset of names, so who is in it is read off, not inferred.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from reduction_world import GIGABIT, Outcome, Reduction, ReductionKnobs
from traffic_counts import traffic_counts

from atoll.base.ids import PeerId
from atoll.policy.topology_cost import AgreedLinks, predict
from atoll.protocol.allreduce.topology import (
    ReduceTopology,
    butterfly,
    hierarchical,
    limit_fan,
    ring,
    star,
    tree,
)
from atoll.simulation.signatures import peer_name

TOPOLOGIES = ["butterfly", "hierarchical", "tree", "star", "ring"]
ALL_AT_ONCE = ReductionKnobs(death_rate=0.2, deaths_until_s=0.25, detect_spread_s=0.0)
ONE_AFTER_ANOTHER = ReductionKnobs(death_rate=0.2, deaths_until_s=0.25, detect_spread_s=0.5)


def names(count: int) -> tuple[PeerId, ...]:
    return tuple(peer_name(i) for i in range(count))


def topology_named(name: str, peers: tuple[PeerId, ...]) -> ReduceTopology:
    return {
        "butterfly": lambda: butterfly(peers, b"seed"),
        "hierarchical": lambda: hierarchical(limit_fan(peers, b"seed", fan=4), b"seed"),
        "tree": lambda: tree(peers, b"seed", pieces=4),
        "star": lambda: star(peers, b"seed", pieces=4),
        "ring": lambda: ring(peers, b"seed"),
    }[name]()


def played(name: str, count: int, seed: int, knobs: ReductionKnobs | None = None) -> Outcome:
    peers = names(count)
    return Reduction(seed, peers, topology_named(name, peers), knobs).run()


def check_counting(outcome: Outcome) -> None:
    """No member twice, every member who lives in every result, and a result for all or, without owners, for few."""
    assert not outcome.miscounted
    for part in outcome.parts:
        assert part.twice == 0 and part.left_out == 0
        assert part.without == 0 or part.owners_alive == 0


def test_the_same_seed_plays_the_same_history():
    """With deaths; another seed is another history."""
    first, again = (played("hierarchical", 40, 7, ALL_AT_ONCE) for _ in range(2))
    assert first == again
    assert first.digest != played("hierarchical", 40, 8, ALL_AT_ONCE).digest


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("count", [1, 2, 7, 16, 40])
def test_peers_send_what_the_plan_counts(name: str, count: int):
    """Message for message and byte for byte, the busiest and the mean; nothing beside; rows go as many hops."""
    peers = names(count)
    topology = topology_named(name, peers)
    knobs = ReductionKnobs(update_bytes=1000 * len(topology.parts))
    outcome, planned = Reduction(3, peers, topology, knobs).run(), traffic_counts(topology, peers)
    messages, sent = outcome.messages.values(), outcome.sent_bytes.values()
    assert max(messages) == planned.messages_max
    assert sum(messages) / count == pytest.approx(planned.messages_mean, rel=1e-12)
    assert max(sent) == pytest.approx(planned.sent_max * knobs.update_bytes, rel=1e-12)
    assert sum(sent) / count == pytest.approx(planned.sent_mean * knobs.update_bytes, rel=1e-12)
    assert outcome.hops == planned.hops
    assert outcome.control == 0
    check_counting(outcome)
    assert all(len(part.holders) == 1 and sum(part.holders.values()) == count for part in outcome.parts)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_what_is_played_takes_the_time_that_was_predicted(name: str):
    """Sixteen peers on the same links; combining and disks cost nothing here, as in the planner."""
    peers = names(16)
    topology = topology_named(name, peers)
    game = Reduction(5, peers, topology, ReductionKnobs(combine_bytes_s=1e15, fsync_s=0.0))
    outcome = game.run()
    latency_s = [[0.0 if a == b else game.network.one_way_s(a, b) for b in peers] for a in peers]
    links = AgreedLinks(peers, latency_s, [GIGABIT.uplink_bytes_s] * 16, [GIGABIT.downlink_bytes_s] * 16)
    assert outcome.seconds == pytest.approx(predict(topology, 1_000_000, links).seconds, rel=0.05)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 12))]
)
def test_deaths_cost_their_detection_and_nobody_who_lives(name: str, seed: int):
    """A fifth of 20 die while rows and answers fly and all notice a second later: one result, no deadline."""
    outcome = played(name, 20, seed, ALL_AT_ONCE)
    check_counting(outcome)
    assert outcome.alive == 16 and all(len(part.holders) <= 1 for part in outcome.parts)
    assert outcome.seconds < ALL_AT_ONCE.window_s / 3


@pytest.mark.parametrize("name", ["butterfly", "hierarchical"])
def test_who_notices_a_death_first_is_not_forgotten_by_who_notices_later(name: str):
    """Four peers, seed 1: one dies, and the first to notice asks a member who learns of it half a second later."""
    knobs = ReductionKnobs(death_rate=0.25, deaths_until_s=0.25, detect_spread_s=0.5)
    outcome = played(name, 4, 1, knobs)
    check_counting(outcome)
    assert outcome.seconds < knobs.window_s / 3


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 6))])
def test_nobody_is_counted_twice_whoever_notices_first(name: str, seed: int):
    """Deaths are noticed by one after the other, so some climb past a peer that others still wait for."""
    outcome = played(name, 20, seed, ONE_AFTER_ANOTHER)
    assert not outcome.miscounted and all(part.twice == 0 for part in outcome.parts)


@pytest.mark.long
def test_three_hundred_peers_with_deaths_are_reduced_hierarchically():
    """Fifteen die; the busiest of the others still sends a handful of updates, not hundreds."""
    peers = names(300)
    knobs = ReductionKnobs(death_rate=0.05, deaths_until_s=0.25, detect_spread_s=0.0)
    outcome = Reduction(1, peers, hierarchical(limit_fan(peers, b"seed"), b"seed"), knobs).run()
    check_counting(outcome)
    assert outcome.alive == 285 and outcome.seconds < 3 * knobs.detect_s
    assert max(outcome.sent_bytes.values()) < 20 * knobs.update_bytes


def test_everybody_holds_one_copy_of_each_answer():
    """The longest names make answers of 270 peers as long as those of more; only who made one has its own, too."""
    peers = tuple(PeerId(f"{'x' * 61}{i:03}") for i in range(270))
    game = Reduction(1, peers, hierarchical(limit_fan(peers, b"seed"), b"seed"))
    game.run()
    for part in range(game.plan.parts):
        assert len({id(game.machines[peer].results[part].result) for peer in peers}) == 2
