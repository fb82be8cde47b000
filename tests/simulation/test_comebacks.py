"""A member is killed while another one comes back: no survivor's round takes longer for it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import LinkDown
from atoll.peer.events import RoundClosed
from atoll.peer.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs

PEERS, LAN = 8, NetworkKnobs(0.0003, 0.003, jitter_s=0.002)
RUN = RunSettings(open_to_all=True, round=RoundSettings(inner_steps=20, first_train_s=10))
SURPLUS_S = 1.0  # beyond an undisturbed round


class Comeback:
    """Of eight, one was killed and has restarted; a second one is killed while the first is on its way back."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.swarm = VirtualSwarm(seed, SwarmKnobs(PEERS, LAN, WorkerKnobs(step_s=0.05, overlap=4), run=RUN))
        self.world = self.swarm.world
        self.closed: dict[PeerId, list[Seconds]] = {node: [] for node in self.swarm.founders}
        self.world.watchers.append(
            lambda now, node, fact: self.closed[node.name].append(now) if isinstance(fact, RoundClosed) else None
        )
        self.world.run(60, stop=lambda: min(self.swarm.heads()) >= 5)
        back, self.killed = map(peer_name, self.draw.sample(range(PEERS), 2))
        self.survivors = [name for name in self.swarm.founders if name not in (back, self.killed)]
        self.usual_s = self.longest_s(0.0)
        self.world.kill(back)
        self.world.run(self.world.now + 5 + self.draw.random())
        self.world.start(back)
        self.world.run(self.world.now + self.draw.uniform(0, 5.5))

    def longest_s(self, since: Seconds) -> Seconds:
        """The longest time between two rounds of a survivor, without the first round."""
        gaps = [(a, b - a) for name in self.survivors for a, b in pairwise(self.closed[name][1:])]
        return max(gap for a, gap in gaps if a >= since)

    def kill(self) -> Seconds:
        """The longest round of a survivor around this death."""
        at = self.world.now
        self.world.kill(self.killed)
        self.world.run(at + 15)
        return self.longest_s(at - 2)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_kill_while_another_comes_back_delays_no_survivor(seed: int):
    """With seed 3, messages of the dead that were read after its redial was refused brought it back for 6 s."""
    comeback = Comeback(seed)
    assert comeback.kill() < comeback.usual_s + SURPLUS_S


@pytest.mark.parametrize("seed", range(3))
def test_a_member_whose_redial_is_not_refused_delays_nobody(seed: int):
    """It learns of the death by the suspicions of the others. All once waited until its six seconds were over."""
    comeback = Comeback(seed)
    cut_off = comeback.world.nodes[comeback.draw.choice(comeback.survivors)].machine
    handle = cut_off.handle
    cut_off.handle = lambda event, now: handle(
        LinkDown(event.peer, refused=False) if isinstance(event, LinkDown) else event, now
    )
    assert comeback.kill() < comeback.usual_s + SURPLUS_S


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("away_s", [4.0, 9.0, 14.0])
def test_a_member_that_comes_back_asks_for_its_place_with_the_first_vertices(seed: int, away_s: Seconds):
    """The next vertex makes it an observer, and the one after that lets it train. It waited up to two seconds for
    its next heartbeat, and for parts of rounds that the others had dropped."""
    swarm = VirtualSwarm(seed, SwarmKnobs(PEERS, LAN, WorkerKnobs(step_s=0.05, overlap=4), run=RUN))
    world, back, counted = swarm.world, peer_name(seed), list[int]()
    world.run(60, stop=lambda: min(swarm.heads()) >= 4)
    world.kill(back)
    world.run(world.now + away_s)
    head = max(swarm.heads())
    world.watchers.append(
        lambda now, node, fact: (
            counted.append(fact.round) if isinstance(fact, RoundClosed) and back in fact.counted else None
        )
    )
    world.start(back)
    world.run(world.now + 20, stop=lambda: bool(counted))
    assert counted and counted[0] <= head + 4
