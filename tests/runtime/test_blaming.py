"""What a peer does first when it is asked who damaged a round."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.base.errors import AtollError
from atoll.peer.tasks import CheckStateStored
from atoll.runtime.control.attribution import blame_round
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name


class Host:
    """As far as blame needs one: a machine of a virtual swarm, a disk with the state or without it, no rows."""

    tended, trains = SimpleNamespace(attached=False), True

    def __init__(self, machine: Any, has_state: bool) -> None:
        self.machine, self.has_state, self.island = machine, has_state, self
        self.asked: list[Any] = []

    async def run(self, work: Any) -> bool:
        self.asked.append(work)
        return self.has_state

    async def gather_rows(self, round: int) -> None:
        self.asked.append(round)
        raise ValueError("another one is being looked at")


@pytest.mark.parametrize(("has_state", "code"), [(True, "E-BLM-02"), (False, "E-BLM-05")])
def test_the_state_before_is_held_before_rows_are_gathered_and_nobody_is_asked_if_it_is_gone(has_state, code):
    """Rounds go on while rows come, and the oldest state would go with the next of them."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=2))
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= 4)
    machine = swarm.world.nodes[peer_name(0)].machine
    host, round = Host(machine, has_state), machine.history.head
    trained = machine.history.bodies[round].trained
    with pytest.raises(AtollError, match=rf"{code} .*history round {round} \(after {trained} trained rounds?\)"):
        asyncio.run(blame_round(host, round))  # type: ignore[arg-type]
    first = CheckStateStored(machine.history.bodies[round - 1].state)
    assert host.asked == ([first, round] if has_state else [first])
