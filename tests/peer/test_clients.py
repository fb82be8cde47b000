"""Members that cannot be dialed: they train and count, own no part, have no vote, and never need each other."""

from itertools import pairwise

from atoll.peer.events import RoundClosed
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name


def swarm_with_two_clients() -> tuple[VirtualSwarm, list[RoundClosed]]:
    """Three founders, two clients that join later; nothing at all passes between the two."""
    swarm = VirtualSwarm(11, SwarmKnobs(peers=3))
    closed: list[RoundClosed] = []

    def watch(_now, node, fact):
        if isinstance(fact, RoundClosed) and node.name == peer_name(0):
            closed.append(fact)

    swarm.world.watchers.append(watch)
    swarm.world.network.split({peer_name(3)}, {peer_name(4)})
    swarm.world.run(2)
    for index in (3, 4):
        swarm.join(index, via=peer_name(0), role="client")
    swarm.world.run(60)
    return swarm, closed


def test_two_clients_that_cannot_reach_each_other_are_both_counted_in_every_part():
    swarm, closed = swarm_with_two_clients()
    clients = {peer_name(3), peer_name(4)}
    last = closed[-5:]
    assert all(clients <= set(fact.counted) and not fact.partly and not fact.missing for fact in last)
    assert min(swarm.head(c) for c in clients) >= last[0].body.round


def test_clients_own_no_part_and_cast_no_vote():
    _, closed = swarm_with_two_clients()
    body = closed[-1].body
    owners = {signed.signer for signed in body.parts if signed is not None}
    voters = {peer for peer, _ in closed[-1].vertex.certificate.votes}
    assert {m.peer for m in body.members if m.role == "client" and m.standing == "member"} == {
        peer_name(3),
        peer_name(4),
    }
    assert not (owners | voters) & {peer_name(3), peer_name(4)}


def test_a_client_waits_for_nobody_it_cannot_hear():
    """Rounds are as short with two clients as without: no phase ends by its deadline."""
    _, closed = swarm_with_two_clients()
    times = [fact.body.time_s for fact in closed]
    lengths = [b - a for a, b in pairwise(times)]
    assert max(lengths[-5:]) < 2 * max(lengths[:2])
