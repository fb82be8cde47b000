"""Memory of closed rounds: no reference cycle keeps a round, whose rows and wires take several updates."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from atoll.peer.round.machine import RoundMachine
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm


def test_a_closed_round_is_freed_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch):
    """Four peers for twenty seconds; each holds its own round alone, though the collector never ran."""
    begun: list[weakref.ref[RoundMachine]] = []
    create = RoundMachine.__init__

    def counted(self: RoundMachine, *args: Any) -> None:
        create(self, *args)
        begun.append(weakref.ref(self))

    monkeypatch.setattr(RoundMachine, "__init__", counted)
    gc.disable()
    try:
        swarm = VirtualSwarm(3, SwarmKnobs(peers=4))
        swarm.world.run(20.0)
        alive = sum(round() is not None for round in begun)
    finally:
        gc.enable()
    assert len(begun) > 20 and alive <= 4 * 2, (len(begun), alive)
