"""A peer that comes back goes on from the state that it really holds."""

from atoll.base.machine import Ask, Done, Received, Start
from atoll.node.jobs import Restore
from atoll.node.peer import CaughtUp
from atoll.sim.swarm import Swarm, SwarmKnobs, peer_name
from atoll.wire.messages.history import Vertices


def test_news_that_arrive_while_the_disk_is_read_do_not_age_the_state():
    """Stopped at round 2, three rounds are missed; the vertices come before the disk answers: it is still at 2."""
    swarm = Swarm(5, SwarmKnobs(peers=4))
    world, late = swarm.world, peer_name(2)
    world.run(1e3, stop=lambda: swarm.head(late) >= 2)
    world.crash(late)
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 5)
    node = world.nodes[late]
    peer = node.make()
    effects = peer.handle(Start(dict(node.kept)), 100.0)
    assert any(isinstance(e, Ask) and isinstance(e.work, Restore) for e in effects)
    stopped_at = peer.history.head
    history = world.nodes[peer_name(0)].machine.history
    news = Vertices(history.since(stopped_at + 1, 10**6), history.head)
    peer.handle(Received(peer_name(0), news), 100.1)
    assert peer.history.head > stopped_at
    effects = peer.handle(Done("restore", True), 100.2)
    facts = [e.fact for e in effects if hasattr(e, "fact")]
    assert [f.round for f in facts if isinstance(f, CaughtUp)] == [stopped_at]
    assert peer.at == stopped_at
