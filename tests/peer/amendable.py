"""A virtual swarm with a creator that holds the recovery identity, as stories about its words begin."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.protocol.history.chain import VertexChain
from atoll.simulation.signatures import sign_as_identity
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name

CREATOR, BOB, CARL, DORA, EVE = (peer_name(i) for i in range(5))


def swarm_of(peers: int = 4, seed: int = 3, **settings: object) -> VirtualSwarm:
    knobs = SwarmKnobs(peers=peers)
    knobs.run = replace(knobs.run, recovery=CREATOR.encode(), **settings)
    return VirtualSwarm(seed, knobs)


def as_creator(data: bytes) -> bytes:
    return sign_as_identity(CREATOR.encode(), data)


def history_of(swarm: VirtualSwarm, name: PeerId = CREATOR) -> VertexChain:
    return swarm.world.nodes[name].machine.history


def reach(swarm: VirtualSwarm, round: int, who: list[PeerId] | None = None, within_s: float = 300.0) -> None:
    heads: Callable[[], list[int]] = swarm.heads if who is None else lambda: [swarm.head(p) for p in who]
    swarm.world.run(swarm.world.now + within_s, stop=lambda: min(heads()) >= round)
    assert min(heads()) >= round, heads()
