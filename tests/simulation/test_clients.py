"""Rounds for which members are drawn, with members that rest, decline, die and come back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer import operator_commands
from atoll.peer.events import RoundBegan, RoundClosed
from atoll.policy.participation import ParticipationPolicy
from atoll.policy.reputation import scores_of
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.vertex import VertexBody


@pytest.mark.parametrize("seed", [1, 2])
def test_all_come_to_their_turns_though_some_rest_or_decline_or_die(seed: int):
    """Where members may lie, and where they do not and have groups; the story reckons turns by itself."""
    report = run_scenario("clients", seed, rounds=20)
    assert report.rounds >= 19 and report.attempts_failed == 0 and report.faults["rests"] > 5


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_rounds_weather_everything(seed: int):
    report = run_scenario("sampled_churn", seed, peers=5, rounds=6)
    assert report.rounds >= 6 and report.members >= 5


@pytest.mark.parametrize("topology", ["ring", "tree", "star", "hierarchical", "butterfly"])
def test_who_is_not_drawn_hands_rows_on_owns_parts_and_is_not_missed(topology: str):
    """Three of seven: each round counts its three whole, whatever way rows take."""
    run = replace(SwarmKnobs().run, topology=topology)
    swarm = sampled(run, ParticipationPolicy(peers=3), peers=7)
    closed: list[RoundClosed] = []
    swarm.world.watchers.append(
        lambda now, node, fact: closed.append(fact) if isinstance(fact, RoundClosed) else None
    )
    swarm.world.run(15.0)
    assert min(swarm.heads()) > 4
    assert all(len(fact.counted) == 3 and not (fact.missing or fact.partly) for fact in closed)


def test_a_member_that_says_it_rests_keeps_its_record_and_one_that_just_passes_does_not():
    """Six members with records, all wanted in every round. Two trainers fail; one member says so."""
    run = replace(SwarmKnobs().run, reputation=True)
    run = replace(run, round=replace(run.round, quorum="two-thirds"))
    swarm = VirtualSwarm(5, SwarmKnobs(6, run=run, island=WorkerKnobs()))
    world, (says, keeps_quiet) = swarm.world, swarm.founders[:2]
    bodies: dict[int, VertexBody] = {}
    fail_from = 100

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            bodies[fact.body.round] = fact.body
        if isinstance(fact, RoundBegan) and node.name == says and fact.round >= fail_from:
            world.at(now, lambda: rest(says))

    def rest(name: PeerId) -> None:
        node = world.nodes[name]
        assert node.machine is not None
        world.carry_out(node, operator_commands.rest(node.machine, 1, node.clock.local(world.now), at_once=True))

    world.watchers.append(watch)
    world.run(12.0)
    fail_from = max(swarm.heads()) + 1  # or one round later, if this is in the middle of its training
    for name in (says, keeps_quiet):
        swarm.world.nodes[name].island.knobs = WorkerKnobs(train_failure_rate=1.0)
    world.run(22.0)
    last = max(bodies)
    before, after = scores_of(bodies[fail_from]), scores_of(bodies[last])
    assert last > fail_from + 2 and after[says] >= before[says] and after[keeps_quiet] < before[keeps_quiet]
    missed = {m.peer: m.missed for m in bodies[last].members}
    assert missed[says] <= 1 < missed[keeps_quiet]


def sampled(run, sample: ParticipationPolicy, peers: int) -> VirtualSwarm:
    return VirtualSwarm(4, SwarmKnobs(peers, run=replace(run, round=replace(run.round, sample=sample))))
