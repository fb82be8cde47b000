"""Clocks that are wrong, and runs that slept: what is agreed on goes on once clocks are right."""

import pytest

from atoll.capabilities import CAPABILITIES
from atoll.peer.verify.chain import StoredHistory, verify_history
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.world import DriftingClock

DAY_S, YEAR_S = 86400.0, 365 * 86400.0
OFF = peer_name(1)


def running(peers: int) -> VirtualSwarm:
    swarm = VirtualSwarm(1, SwarmKnobs(peers=peers))
    swarm.world.run(20)
    assert min(swarm.heads()) > 5
    return swarm


def stop(swarm: VirtualSwarm) -> None:
    for name in swarm.world.nodes:
        swarm.world.crash(name)


def start(swarm: VirtualSwarm) -> None:
    for name in swarm.world.nodes:
        swarm.world.start(name)


def trains_on(swarm: VirtualSwarm, within_s: float) -> bool:
    """All members come at least ten rounds farther than the farthest one now."""
    machines = [node.machine for node in swarm.honest]
    first = max(m.history.head for m in machines if m.history is not None)
    swarm.world.run(swarm.world.now + within_s, stop=lambda: min(swarm.heads()) > first + 10)
    return min(swarm.heads()) > first + 10


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("peers", [1, 4])
def test_a_run_that_slept_for_a_hundred_days_trains_on(peers: int, stops: bool):
    """Its processes ended, or its computers were suspended with them."""
    swarm = running(peers)
    for name in swarm.world.nodes:
        (swarm.world.crash if stops else swarm.world.sleep)(name)
    swarm.world.run(swarm.world.now + 100 * DAY_S)
    for name in swarm.world.nodes:
        (swarm.world.start if stops else swarm.world.wake)(name)
    assert trains_on(swarm, 120)


@pytest.mark.parametrize("off_s", [YEAR_S, -YEAR_S])
@pytest.mark.parametrize("peers", [1, 4])
def test_one_start_of_the_whole_run_with_a_clock_a_year_off_does_no_lasting_harm(peers: int, off_s: float):
    """All rounds of that start are dated by the wrong clock; the next round sets the time right."""
    swarm = running(peers)
    right = {name: node.clock for name, node in swarm.world.nodes.items()}
    stop(swarm)
    for node in swarm.world.nodes.values():
        node.clock = DriftingClock(off_s)
    start(swarm)
    swarm.world.run(swarm.world.now + 30)
    stop(swarm)
    for name, node in swarm.world.nodes.items():
        node.clock = right[name]
    start(swarm)
    assert trains_on(swarm, 60)
    times = [node.machine.history.head_body.time_s - swarm.world.now for node in swarm.honest]
    assert all(abs(off) < 10 for off in times)
    kept = swarm.world.nodes[peer_name(0)].kept
    rows = {int(name.split("/")[1]): row for name, row in kept.items() if name.startswith("vertex/")}
    audit = verify_history(
        StoredHistory(swarm.run_id, kept["genesis"], sorted(rows), rows.get),
        swarm.keys.verifier,
        CAPABILITIES.verifiers,
    )
    assert audit.problems == []


@pytest.mark.parametrize("off_s", [YEAR_S, -YEAR_S])
@pytest.mark.parametrize("starts", [True, False])
def test_one_member_whose_clock_is_a_year_off_moves_nobody(off_s: float, starts: bool):
    """At its start or in the middle, and when it jumps back: the median of clocks dates the rounds."""
    swarm = running(4)
    node = swarm.world.nodes[OFF]
    right = node.clock
    if starts:
        swarm.world.crash(OFF)
        swarm.world.run(swarm.world.now + 5)
    node.clock = DriftingClock(off_s)
    if starts:
        swarm.world.start(OFF)
    assert trains_on(swarm, 120)
    assert abs(swarm.world.nodes[peer_name(0)].machine.history.head_body.time_s - swarm.world.now) < 10
    node.clock = right
    assert trains_on(swarm, 120)
