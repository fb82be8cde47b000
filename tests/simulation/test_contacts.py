"""Broadcasts: the contacts policy alone decides which peers of the roster get one."""

from __future__ import annotations

from collections import Counter

from atoll.base.ids import PeerId
from atoll.base.machine import Broadcast, Emit, Fact, Send, expand_broadcasts
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.wire.messages.history import VerticesRequest

ADA, BOB, CARL = PeerId("ada"), PeerId("bob"), PeerId("carl")
DEGREE = 3  # contacts of one peer in the mesh


class PartialMesh:
    """A contacts policy that picks `DEGREE` peers of every roster."""

    def __init__(self) -> None:
        self.skipped = Counter[str]()

    def __call__(self, topic: str, roster: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        self.skipped[topic] += max(0, len(roster) - DEGREE)
        return roster[:DEGREE]


def test_the_policy_picks_recipients_by_topic_and_other_effects_keep_their_order():
    before, after = Emit(Fact()), Send(CARL, VerticesRequest(1))
    wish = VerticesRequest(0)
    effects = [before, Broadcast("reports", wish, (ADA, BOB)), Broadcast("eras", wish, (ADA, BOB)), after]
    got = list(expand_broadcasts(effects, lambda topic, roster: roster[1:] if topic == "reports" else ()))
    assert got == [before, Send(BOB, wish), after]


def test_the_full_mesh_sends_to_the_whole_roster_in_its_order():
    wish = VerticesRequest(0)
    assert list(expand_broadcasts([Broadcast("eras", wish, (CARL, ADA))])) == [Send(CARL, wish), Send(ADA, wish)]


def test_rounds_close_in_a_partial_mesh():
    """Votes and commitments that the mesh skips arrive by the retransmissions, which are addressed."""
    swarm, mesh = VirtualSwarm(4, SwarmKnobs(peers=6)), PartialMesh()
    swarm.world.contacts = mesh
    swarm.world.run(600, stop=lambda: min(swarm.heads()) >= 4)
    assert min(swarm.heads()) >= 4
    assert mesh.skipped["agreement"] > 0 and mesh.skipped["commitments"] > 0
