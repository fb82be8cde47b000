"""The training loss that a status shows: of the newest update in the model, as the vertices hold it."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.runtime.control.agreed_loss import agreed_loss, newest_counted
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name


def test_the_loss_is_that_of_the_newest_counted_round_and_not_of_an_older_log():
    """The log of this member ends before the newest round; a round after it only admitted a member."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=2))
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= 4)
    history = swarm.world.nodes[peer_name(0)].machine.history
    head, logged = history.head_body, 9.0
    assert any(head.parts)
    assert agreed_loss(head, history.bodies.get, logged) == head.metrics.reported_loss != logged
    admitting = replace(head, round=head.round + 1, parts=())
    assert newest_counted(admitting, history.bodies.get) is head
    assert agreed_loss(admitting, {}.get, logged) == logged, "that vertex is not in this folder"
