"""Restart: a peer continues from the state that it really holds, and from no history that its disk changed.

Missing vertices come from members, and nothing else does.
"""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from atoll.base.machine import Broadcast, Emit, LinkUp, Persist, Received, RunTask, Send, Start, TaskDone
from atoll.peer.events import (
    HistoryVertexRecovered,
    JoinRejected,
    LocalStateCaughtUp,
    MembershipChanged,
    ProtocolFault,
)
from atoll.peer.operator_commands import farewell
from atoll.peer.settings import RULES, RunSettings, encode_settings
from atoll.peer.tasks import RestoreState, StateRestored
from atoll.protocol.history.chain import find_missing_vertex
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.messages.history import VerticesRequest, VerticesResponse
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import ReadyReport
from atoll.wire.messages.vertex import Vertex


def test_news_that_arrive_while_the_disk_is_read_do_not_age_the_state():
    """Stopped at round 2, three rounds are missed; the vertices come before the disk answers: it is still at 2."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=4))
    world, late = swarm.world, peer_name(2)
    world.run(1e3, stop=lambda: swarm.head(late) >= 2)
    world.crash(late)
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 5)
    node = world.nodes[late]
    peer = node.make()
    effects = peer.handle(Start(dict(node.kept)), 100.0)
    assert any(isinstance(e, RunTask) and isinstance(e.work, RestoreState) for e in effects)
    stopped_at = peer.history.head
    history = world.nodes[peer_name(0)].machine.history
    news = VerticesResponse(history.vertices_from(stopped_at + 1, 10**6), history.head)
    peer.handle(Received(peer_name(0), news), 100.1)
    assert peer.history.head > stopped_at
    effects = peer.handle(TaskDone("restore", StateRestored()), 100.2)
    facts = [e.fact for e in effects if hasattr(e, "fact")]
    assert [f.round for f in facts if isinstance(f, LocalStateCaughtUp)] == [stopped_at]
    assert peer.at == stopped_at


def test_who_joins_a_run_of_other_rules_is_told_so_once_and_for_good():
    """The ticket names this genesis, but its vertices follow rules that this program lacks."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=4))
    swarm.world.run(1)
    peer = swarm.world.nodes[swarm.join(4, via=peer_name(0))].make()
    peer.handle(Start({}), 0.0)
    body = decode_body(swarm.world.nodes[peer_name(0)].machine.genesis.body)
    raw = encode(replace(body, settings=encode_settings(RunSettings(rules=RULES + 1))))
    peer.run = vertex_id(raw)
    effects = peer.handle(Received(peer_name(0), VerticesResponse((Vertex(raw, None),), 3)), 0.1)
    (told,) = [e.fact for e in effects if hasattr(e, "fact")]
    assert isinstance(told, JoinRejected) and told.code == "E-RUN-15" and told.for_good
    assert f"rules {RULES + 1}" in told.what and "atoll up" in told.fix and peer.history is None


def test_a_visitor_gets_the_newest_state_and_nobody_hears_that_it_was_there():
    """It reads for twenty seconds in an open run: no vertex ever names it or holds a report of its own."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    world = swarm.world
    world.run(5)
    visitor = swarm.join(3, peer_name(0), role="visitor")
    said = []
    world.watchers.append(lambda now, node, fact: said.append(fact) if node.name == visitor else None)
    world.run(25)
    assert any(isinstance(f, LocalStateCaughtUp) for f in said)
    history = world.nodes[peer_name(0)].machine.history
    assert all({m.peer for m in b.members} == set(swarm.founders) for b in history.bodies.values())
    assert not any(signed.signer == visitor for b in history.bodies.values() for signed in b.reports)


def test_whoever_comes_to_hold_the_state_says_so_in_that_moment():
    """An observer restarts: `Ready` leaves when its disk has answered, not with its next heartbeat."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    joiner, world = swarm.join(3, via=peer_name(0)), swarm.world
    node = world.nodes[joiner]

    def standing() -> str:
        members = node.machine.history.head_body.members if swarm.head(joiner) >= 0 else ()
        return next((m.standing for m in members if m.peer == joiner), "")

    world.run(1e3, stop=lambda: standing() == "observer")
    world.crash(joiner)
    peer = node.make()
    peer.handle(Start(dict(node.kept)), 100.0)
    effects = peer.handle(TaskDone("restore", StateRestored()), 100.2)
    assert any(isinstance(e, Emit) and isinstance(e.fact, LocalStateCaughtUp) for e in effects)
    assert peer.admission.asked == (ReadyReport, 100.2)


def test_who_starts_again_says_who_is_here_now():
    """One joined after genesis: a record that begins with this life has the joiner's name all the same."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    world = swarm.world
    joiner = swarm.join(3, via=peer_name(0))
    world.run(1e3, stop=lambda: swarm.head(joiner) >= 4)
    told = list[MembershipChanged]()
    world.crash(peer_name(1))
    world.watchers.append(
        lambda now, node, fact: (
            told.append(fact) if isinstance(fact, MembershipChanged) and node.name == peer_name(1) else None
        )
    )
    world.start(peer_name(1))
    assert {m.peer for m in told[0].members} == {*swarm.founders, joiner} and not told[0].joined + told[0].left


Kept = dict[str, bytes]


def _flip(name: str) -> Callable[[Kept], None]:
    def change(kept: Kept) -> None:
        data = bytearray(kept[name])
        data[len(data) // 3] ^= 1
        kept[name] = bytes(data)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda kept: None, None),
        (lambda kept: kept.update({"vertex/2": b"\xc1"}), 2),
        (lambda kept: kept.update({"vertex/2": kept["vertex/1"]}), 2),
        (lambda kept: kept.pop("vertex/2"), 2),
        (_flip("vertex/2"), 2),
        (_flip("vertex/4"), 4),  # the newest: nothing follows that could tell
        (_flip("genesis"), -1),
        (lambda kept: [kept.pop(f"vertex/{r}") for r in range(3)], None),  # older than a starting peer is given
        (lambda kept: [kept.pop(f"vertex/{r}") for r in range(5)], None),
    ],
)
def test_a_vertex_that_the_disk_changed_or_lost_is_named_before_the_peer_starts(
    change: Callable[[Kept], object], named: int | None
):
    """Otherwise it would refuse all that the others agree on after it, and blame them."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    swarm.world.run(1e3, stop=lambda: swarm.head(peer_name(1)) >= 4)
    kept = {name: value for name, value in swarm.world.nodes[peer_name(1)].kept.items() if name != "vertex/5"}
    change(kept)
    hole = find_missing_vertex(kept, swarm.run_id)
    assert (hole and hole.round) == named
    assert hole is None or (hole.id is not None) == (named in (2,))  # the one after it tells which one is lacking


def _lost_two(kept: Kept) -> Kept:
    """What members should give back."""
    before = {name: kept[name] for name in ("vertex/0", "vertex/3")}
    _flip("vertex/0")(kept)
    del kept["vertex/3"]
    return before


def test_vertices_that_the_disk_changed_or_lost_come_from_a_member_before_the_peer_goes_on():
    """One is changed, one is gone; the peer asks, its disk holds what was agreed, and it trains on."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=4))
    world, late, faults, mended = swarm.world, peer_name(2), list[ProtocolFault](), list[int]()
    world.watchers.append(lambda now, node, fact: faults.append(fact) if isinstance(fact, ProtocolFault) else None)
    world.watchers.append(
        lambda now, node, fact: mended.append(fact.lacked) if isinstance(fact, HistoryVertexRecovered) else None
    )
    world.run(1e3, stop=lambda: swarm.head(late) >= 5)
    world.crash(late)
    kept = world.nodes[late].kept
    before = _lost_two(kept)
    world.start(late)
    world.run(world.now + 100, stop=lambda: min(swarm.heads()) >= 9)
    assert min(swarm.heads()) >= 9 and mended == [3, 0] and not faults
    assert all(decode_vertex(kept[name]).body == decode_vertex(was).body for name, was in before.items())


def test_only_the_vertex_that_the_next_one_names_with_its_votes_closes_a_hole():
    """Another round's vertex, made-up content and too few votes are refused; the right one is kept.

    Until then this peer sends nothing of its own, and serves what it holds.
    """
    swarm = VirtualSwarm(5, SwarmKnobs(peers=4))
    world, late = swarm.world, peer_name(2)
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 5)
    node, true = world.nodes[late], world.nodes[peer_name(0)].machine.history.vertices
    kept = dict(node.kept)
    _flip("vertex/3")(kept)
    peer = node.make()
    effects = peer.handle(Start(kept), 100.0)
    assert not any(isinstance(e, RunTask | Send | Broadcast) for e in effects)
    forged = Vertex(encode(replace(decode_body(true[3].body), time_s=1e9)), true[3].certificate)
    few = replace(true[3], certificate=replace(true[3].certificate, votes=true[3].certificate.votes[:1]))
    for lie in ((true[2], forged), (true[1], true[2]), (true[3],), (), (forged, true[4])):
        assert peer.handle(Received(peer_name(0), VerticesResponse(lie, 5)), 100.1) == [], lie
    (fault,) = peer.handle(Received(peer_name(1), VerticesResponse((true[2], few), 5)), 100.2)
    assert isinstance(fault.fact, ProtocolFault) and "no quorum signed" in fault.fact.what
    (shown,) = peer.handle(Received(peer_name(3), VerticesRequest(0)), 100.3)
    (answer,) = peer.handle(TaskDone(shown.job, [kept[f"vertex/{r}"] for r in range(4)]), 100.4)
    assert isinstance(answer, Send) and [decode_body(v.body).round for v in answer.message.vertices] == [0, 1, 2]
    effects = peer.handle(Received(peer_name(0), VerticesResponse((true[2], true[3], true[4]), 5)), 100.5)
    assert next(e for e in effects if isinstance(e, Persist)) == Persist("vertex/3", encode(true[3]))
    assert any(isinstance(e, RunTask) and isinstance(e.work, RestoreState) for e in effects)
    assert set(range(-1, peer.history.head + 1)) == set(peer.history.bodies)


@pytest.mark.parametrize("change", [lambda data: b"\xc1", lambda data: data.replace(b"ember", b"umber", 1)])
def test_a_vertex_that_a_disk_damaged_is_shown_to_nobody_and_costs_a_newcomer_nothing(
    change: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
):
    """It joins through the very member with that disk: that member lives on, none is blamed, and others send the
    right vertex to it, too: its disk then holds what was agreed.
    """
    monkeypatch.setattr("atoll.protocol.history.chain.WINDOW", 8)
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    world, faults = swarm.world, list[ProtocolFault]()
    world.watchers.append(lambda now, node, fact: faults.append(fact) if isinstance(fact, ProtocolFault) else None)
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 14)
    kept = world.nodes[peer_name(0)].kept
    before = kept["vertex/3"]
    kept["vertex/3"] = change(before)
    assert kept["vertex/3"] != before
    newcomer = swarm.join(3, via=peer_name(0))
    world.run(world.now + 60, stop=lambda: swarm.head(newcomer) >= 14)
    assert swarm.head(newcomer) >= 14 and not faults
    assert decode_vertex(kept["vertex/3"]).body == decode_vertex(before).body


def test_who_is_back_before_its_farewell_was_carried_keeps_its_place():
    """It left while the others trained, and was here again before they had agreed: no vertex sends it away."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=4))
    world, hasty = swarm.world, peer_name(2)
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 2)
    began = swarm.head(hasty)
    world.leave(hasty)
    world.run(world.now + 0.2)
    others = [world.nodes[name].machine for name in swarm.founders if name != hasty]
    assert all(peer.pool.said_by(hasty, "LeaveReport") and peer.history.head == began for peer in others)
    world.start(hasty)
    world.run(1e3, stop=lambda: min(swarm.heads()) >= began + 4)
    bodies = others[0].history.bodies
    standings = {m.standing for body in bodies.values() for m in body.members if m.peer == hasty}
    assert standings == {"member"}, standings


def test_who_is_leaving_says_so_again_to_whom_it_links():
    """A link that broke and is mended is no return: the farewell is carried."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=4))
    world, goes, other = swarm.world, peer_name(2), peer_name(0)
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 2)
    node = world.nodes[goes]
    world.carry_out(node, farewell(node.machine, "enough", node.clock.local(world.now)))
    words = node.machine.handle(LinkUp(other), node.clock.local(world.now))
    said = [e.message.statement for e in words if isinstance(e, Send) and isinstance(e.message, ReportMessage)]
    assert said == node.machine.pool.said_by(goes, "LeaveReport") != []
    peer = world.nodes[other].machine
    world.run(world.now + 0.2)
    assert peer.pool.said_by(goes, "LeaveReport") == said
    peer.handle(LinkUp(goes), world.nodes[other].clock.local(world.now))
    assert not peer.pool.said_by(goes, "LeaveReport")
    peer.handle(Received(goes, ReportMessage(said[0])), world.nodes[other].clock.local(world.now))
    assert peer.pool.said_by(goes, "LeaveReport") == said
