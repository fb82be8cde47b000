"""Extensions that a joiner names stand in the roster of every member, and stay when it comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.peer.peer import Peer
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, honest, peer_name
from atoll.wire.messages.statements import Extensions, MemberRecordExtension

JOINER = 4


def test_the_extensions_of_a_joiner_are_in_every_roster():
    """Four members and a joiner. It names a relay role and a payout key; restarted with others, it has those."""
    wanted: dict[str, Extensions] = {
        "now": (MemberRecordExtension("payout", b"0x12"), MemberRecordExtension("relay", b"\x01"))
    }

    def make(run: Any, signer: Any, keys: Any, wish: Any, *rest: Any) -> Peer:
        return honest(run, signer, keys, replace(wish, extensions=wanted["now"]), *rest)

    swarm = VirtualSwarm(5, SwarmKnobs(4), {JOINER: make})
    swarm.world.run(10.0)
    joiner = swarm.join(JOINER, via=peer_name(0))
    swarm.world.run(swarm.world.now + 60.0)
    assert rosters(swarm) == [wanted["now"]] * 5
    swarm.world.crash(joiner)
    wanted["now"] = ()
    swarm.world.run(swarm.world.now + 60.0)
    swarm.world.start(joiner)
    swarm.world.run(swarm.world.now + 60.0)
    assert len({*rosters(swarm)}) == 1 and rosters(swarm)[0] != ()
    swarm.world.crash(joiner)
    wanted["now"] = (MemberRecordExtension("relay", b"\x02"),)
    swarm.world.start(joiner)
    swarm.world.run(swarm.world.now + 60.0)
    assert rosters(swarm) == [wanted["now"]] * 5


def rosters(swarm: VirtualSwarm) -> list[Extensions]:
    """The joiner's extensions by the roster of each running peer."""
    machines = [node.machine for node in swarm.world.nodes.values() if node.machine is not None]
    return [machine.known.roster.extensions_of(peer_name(JOINER)) for machine in machines]
