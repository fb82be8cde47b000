"""The kernel alone: peers without any optional capability train, agree and survive an abandoned attempt."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.base.machine import LinkUp
from atoll.peer.capabilities import PeerPlugins
from atoll.peer.peer import Peer
from atoll.peer.sync.fork_monitor import ForkMonitor
from atoll.policy.capability_terms import ErasureParams, PartitionPolicy
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name


def bare(run, signer, keys, wish, genesis, bootstrap):
    return Peer(run, signer, keys.verifier, wish, genesis, bootstrap, capabilities=PeerPlugins())


def test_peers_without_capabilities_train_and_agree_by_a_genesis_that_has_them():
    """Genesis asks for an archive and for training apart; two of four peers are cut off for a while."""
    knobs = SwarmKnobs(4)
    knobs.run = replace(knobs.run, coded=ErasureParams(2, 4, 2), apart=PartitionPolicy("merge", 3))
    swarm = VirtualSwarm(1, knobs, dict.fromkeys(range(4), bare))

    def heads() -> list[int]:
        return [swarm.head(peer_name(i)) for i in range(4)]

    swarm.world.run(200.0, stop=lambda: min(heads()) >= 3)
    assert min(heads()) >= 3
    swarm.world.split({peer_name(0), peer_name(1)})
    swarm.world.run(swarm.world.now + 100)
    swarm.world.network.heal()
    reached = max(heads())
    swarm.world.run(swarm.world.now + 300, stop=lambda: min(heads()) >= reached + 3)
    assert min(heads()) >= reached + 3
    machine = swarm.world.nodes[peer_name(0)].machine
    assert machine.pieces is None and type(machine.known.forks) is ForkMonitor and not machine.verifiers.machines
    assert machine.handle(LinkUp(peer_name(3)), swarm.world.now)
