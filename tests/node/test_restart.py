"""A peer that comes back goes on from the state that it really holds."""

from msgspec.structs import replace

from atoll.base.machine import Ask, Done, Received, Start
from atoll.node.facts import CaughtUp, Refused
from atoll.node.jobs import Restore
from atoll.node.settings import RULES, RunSettings, encode_settings
from atoll.sim.swarm import Swarm, SwarmKnobs, peer_name
from atoll.wire.codec import decode_body, encode, vertex_id
from atoll.wire.messages.history import Vertices
from atoll.wire.messages.vertex import Vertex


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


def test_who_joins_a_run_of_other_rules_is_told_so_once_and_for_good():
    """The genesis is the one that the ticket names, but its vertices follow rules that this program lacks."""
    swarm = Swarm(5, SwarmKnobs(peers=4))
    swarm.world.run(1)
    peer = swarm.world.nodes[swarm.join(4, via=peer_name(0))].make()
    peer.handle(Start({}), 0.0)
    body = decode_body(swarm.world.nodes[peer_name(0)].machine.genesis.body)
    raw = encode(replace(body, settings=encode_settings(RunSettings(rules=RULES + 1))))
    peer.run = vertex_id(raw)
    effects = peer.handle(Received(peer_name(0), Vertices((Vertex(raw, None),), 3)), 0.1)
    (told,) = [e.fact for e in effects if hasattr(e, "fact")]
    assert isinstance(told, Refused) and told.code == "E-RUN-15" and told.for_good
    assert f"rules {RULES + 1}" in told.what and "atoll up" in told.fix and peer.history is None


def test_a_visitor_gets_the_newest_state_and_nobody_hears_that_it_was_there():
    """It reads along for twenty seconds of an open run: no vertex ever names it or holds a report of its own."""
    swarm = Swarm(5, SwarmKnobs(peers=3))
    world = swarm.world
    world.run(5)
    visitor = swarm.join(3, peer_name(0), role="visitor")
    said = []
    world.watchers.append(lambda now, node, fact: said.append(fact) if node.name == visitor else None)
    world.run(25)
    assert any(isinstance(f, CaughtUp) for f in said)
    history = world.nodes[peer_name(0)].machine.history
    assert all({m.peer for m in b.members} == set(swarm.founders) for b in history.bodies.values())
    assert not any(signed.signer == visitor for b in history.bodies.values() for signed in b.reports)
