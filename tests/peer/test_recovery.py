"""Recovery: when a quorum is gone for good, only the recovery identity can start a new epoch."""

import msgspec
import pytest

from atoll.base.errors import PeerFault
from atoll.base.machine import Persist, Send
from atoll.capabilities import CAPABILITIES
from atoll.peer import operator_commands
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.operator_commands import turnout
from atoll.peer.round.vertex_body import write_recovery
from atoll.peer.verify.chain import StoredHistory, verify_history
from atoll.protocol.history.chain import recovery_bytes
from atoll.simulation.signatures import VirtualSigner, sign_as_identity
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, honest, peer_name
from atoll.wire.codec import decode_body, encode
from atoll.wire.messages.statements import LeaveReport, SignedStatement
from atoll.wire.messages.vertex import Vertex

CREATOR = peer_name(0)
CREATOR_KEY = VirtualSigner(CREATOR).vote_key


def paused_swarm() -> VirtualSwarm:
    """Two of four crash for good: two are left where three votes are needed."""
    knobs = SwarmKnobs(peers=4)
    knobs.run = msgspec.structs.replace(knobs.run, recovery=CREATOR.encode())
    swarm = VirtualSwarm(3, knobs)
    swarm.world.run(8)
    for index in (2, 3):
        swarm.world.crash(peer_name(index))
    swarm.world.run(40)
    return swarm


def recover(swarm: VirtualSwarm) -> None:
    node = swarm.world.nodes[CREATOR]
    sign = lambda data: sign_as_identity(CREATOR.encode(), data)  # noqa: E731  # reads like the word it is
    swarm.world.carry_out(node, operator_commands.recover(node.machine, sign, node.clock.local(swarm.world.now)))


def test_a_run_without_a_quorum_pauses_and_goes_on_after_recovery():
    """The two that are left close new rounds in epoch 1; one of the lost comes back later and follows."""
    swarm = paused_swarm()
    stuck_at = swarm.heads()
    swarm.world.run(60)
    assert swarm.heads() == stuck_at
    recover(swarm)
    swarm.world.run(90)
    history = swarm.world.nodes[CREATOR].machine.history
    assert min(swarm.heads()) > stuck_at[0] + 3
    assert history.head_body.epoch == 1
    assert [m.standing for m in history.head_body.members] == ["member", "member", "away", "away"]
    swarm.world.start(peer_name(2))
    swarm.world.run(130)
    assert history.head_body.members[2].standing == "member"


def test_a_recovery_is_on_disk_before_anybody_sees_it():
    """Otherwise a signer killed in between would sign another one for the same round: two epochs of one number."""
    swarm = paused_swarm()
    node = swarm.world.nodes[CREATOR]
    signed: list[bytes] = []

    def sign(data: bytes) -> bytes:
        signed.append(data)
        return sign_as_identity(CREATOR.encode(), data)

    effects = operator_commands.recover(node.machine, sign, node.clock.local(swarm.world.now))
    vertex = node.machine.history.vertices[node.machine.history.head]
    assert signed == [recovery_bytes(swarm.run_id, vertex.body)]
    kept = [i for i, e in enumerate(effects) if isinstance(e, Persist) and e.blob and vertex.body in e.blob]
    shown = [i for i, e in enumerate(effects) if isinstance(e, Send) and vertex.body in encode(e.message)]
    assert kept and shown and kept[0] < shown[0]


def test_recovery_is_refused_while_the_run_can_go_on_by_itself():
    swarm = VirtualSwarm(3, SwarmKnobs(peers=4))
    swarm.world.run(8)
    with pytest.raises(ValueError, match="can go on by itself"):
        recover(swarm)


def test_in_a_large_swarm_nobody_is_counted_on_whose_silence_is_not_watched():
    """Three of twenty are left, the others freeze; each watches four. One recovery is enough."""
    knobs = SwarmKnobs(peers=20)
    knobs.run = msgspec.structs.replace(knobs.run, recovery=CREATOR.encode())
    swarm = VirtualSwarm(5, knobs)
    swarm.world.run(4)
    here, lost = {peer_name(i) for i in range(3)}, [peer_name(i) for i in range(3, 20)]
    for name in lost:
        swarm.world.sleep(name)
    swarm.world.run(60)
    machine = swarm.world.nodes[CREATOR].machine
    assert sum(machine.heartbeat.is_gone(name) for name in lost) < 17
    recover(swarm)
    after = machine.history.head_body
    assert after.epoch == 1 and {m.peer for m in after.members if m.votes} == here


@pytest.mark.parametrize("founders", [1, 2])
def test_a_newcomer_that_vanishes_once_it_votes_stops_a_lone_founder_until_that_recovers(founders: int):
    """Two founders are two of three and go on; one of two is no majority, knows why it stands, and recovers."""
    knobs = SwarmKnobs(peers=founders)
    knobs.run = msgspec.structs.replace(knobs.run, recovery=CREATOR.encode())
    swarm = VirtualSwarm(3, knobs)
    world = swarm.world
    world.run(3)
    machine = world.nodes[CREATOR].machine
    joiner = swarm.join(founders, via=CREATOR)
    votes = lambda: joiner in {m.peer for m in machine.history.head_body.members if m.votes}  # noqa: E731  # a word
    world.run(60, stop=votes)
    assert votes()
    world.crash(joiner)
    stuck_at = machine.history.head
    world.run(world.now + 15)
    there = turnout(machine, world.nodes[CREATOR].clock.local(world.now))
    if founders == 1:
        assert machine.history.head == stuck_at and there == ((CREATOR, joiner), (joiner,), (), 2)
        recover(swarm)
        world.run(world.now + 15)
    assert machine.history.head > stuck_at + 2 and not votes()


@pytest.mark.parametrize("others", [1, 2])
def test_a_member_that_lost_its_disk_comes_back_with_another_key(others: int):
    """It forgot what it signed, so the old key is silent for good. Of three members, two admit the new key, and
    expect no messages of the old one meanwhile; of two, the remaining one cannot, sees why, and recovers.
    """
    knobs = SwarmKnobs(peers=1 + others)
    knobs.run = msgspec.structs.replace(knobs.run, recovery=CREATOR.encode())
    swarm, lost = VirtualSwarm(3, knobs), peer_name(others)
    world, node = swarm.world, swarm.world.nodes[lost]
    world.run(5)
    world.crash(lost)
    node.kept.clear()
    signer = VirtualSigner(lost, session=1)
    node.make = lambda: honest(swarm.run_id, signer, swarm.keys, DesiredRole(), None, (CREATOR,))
    world.start(lost)
    node.contacts.add(CREATOR)
    world.dial(lost, CREATOR)
    machine = world.nodes[CREATOR].machine
    world.run(world.now + 15)
    if others == 1:
        there = turnout(machine, world.nodes[CREATOR].clock.local(world.now))
        assert not machine.heartbeat.is_gone(lost) and there == ((CREATOR, lost), (), (lost,), 2)
        recover(swarm)
        world.run(world.now + 15)
    (line,) = (m for m in machine.history.head_body.members if m.peer == lost)
    assert line.standing == "member" and line.vote_key == signer.vote_key


def test_nobody_but_the_recovery_identity_can_start_an_epoch():
    """A member forges the same vertex with its own signature: histories refuse it and blame the sender."""
    swarm = paused_swarm()
    recover(swarm)
    history = swarm.world.nodes[peer_name(1)].machine.history
    mine = swarm.world.nodes[CREATOR].machine.history
    real = mine.vertices[mine.head]
    forged = Vertex(real.body, None, sign_as_identity(b"somebody else", recovery_bytes(swarm.run_id, real.body)))
    with pytest.raises(PeerFault, match="neither a quorum nor the recovery key"):
        history.append(forged, peer_name(3))


def test_an_epoch_may_not_slip_in_a_member_or_a_state():
    """Signed by the right key, but with one more trained round than agreed: refused all the same."""
    swarm = paused_swarm()
    recover(swarm)
    history = swarm.world.nodes[peer_name(1)].machine.history
    mine = swarm.world.nodes[CREATOR].machine.history
    body = decode_body(mine.vertices[mine.head].body)
    raw = encode(msgspec.structs.replace(body, trained=body.trained + 1))
    vertex = Vertex(raw, None, sign_as_identity(CREATOR.encode(), recovery_bytes(swarm.run_id, raw)))
    with pytest.raises(PeerFault, match="neither a quorum nor the recovery key"):
        history.append(vertex, CREATOR)


@pytest.mark.parametrize(("links", "believed"), [(b"", True), (b"as before", True), (b"anew", False)])
def test_an_epoch_forgets_links_or_keeps_them_and_measures_nothing(links: bytes, believed: bool):
    """A late recovery may not rewrite what members measured, and no peer may invent it."""
    swarm = paused_swarm()
    history = swarm.world.nodes[peer_name(1)].machine.history
    parent = history.head_body
    replace = msgspec.structs.replace
    measured = replace(parent, members=tuple(replace(m, links=b"as before") for m in parent.members))
    history.bodies[history.head] = measured
    here = {CREATOR, peer_name(1)}
    body = write_recovery(measured, history.head_id, swarm.run_id, CREATOR, here, parent.time_s, CREATOR_KEY)
    raw = encode(replace(body, members=tuple(replace(m, links=links) for m in body.members)))
    vertex = Vertex(raw, None, sign_as_identity(CREATOR.encode(), recovery_bytes(swarm.run_id, raw)))
    if believed:
        assert history.append(vertex, CREATOR) is not None
    else:
        with pytest.raises(PeerFault, match="neither a quorum nor the recovery key"):
            history.append(vertex, CREATOR)


def test_an_epoch_may_not_slip_in_words_that_nobody_said():
    """Signed by the right key, with a report and a commitment in a member's name that no voter ever checked."""
    swarm = paused_swarm()
    recover(swarm)
    history = swarm.world.nodes[peer_name(1)].machine.history
    mine = swarm.world.nodes[CREATOR].machine.history
    body = decode_body(mine.vertices[mine.head].body)
    words = (SignedStatement(peer_name(3), encode(LeaveReport(body.round, "gone")), b"never signed"),)
    for slipped in ({"reports": words}, {"commits": words}):
        raw = encode(msgspec.structs.replace(body, **slipped))
        vertex = Vertex(raw, None, sign_as_identity(CREATOR.encode(), recovery_bytes(swarm.run_id, raw)))
        with pytest.raises(PeerFault, match="neither a quorum nor the recovery key"):
            history.append(vertex, CREATOR)


def founder_with_a_new_key() -> VirtualSwarm:
    """A lone founder that lost its session key, with its history and state whole."""
    knobs = SwarmKnobs(peers=1)
    knobs.run = msgspec.structs.replace(knobs.run, recovery=CREATOR.encode())
    swarm = VirtualSwarm(3, knobs)
    swarm.world.run(8)
    swarm.world.crash(CREATOR)
    swarm.world.nodes[CREATOR].make = swarm._maker(0, swarm.genesis, (), session=1)
    swarm.world.start(CREATOR)
    swarm.world.run(30)
    return swarm


def test_a_lone_founder_with_a_new_key_recovers_and_trains_on():
    """No quorum can admit the key: only its old one votes. Its identity can, and the offline check agrees."""
    swarm = founder_with_a_new_key()
    stuck_at = swarm.heads()[0]
    swarm.world.run(60)
    assert swarm.heads() == [stuck_at]
    recover(swarm)
    swarm.world.run(90)
    node = swarm.world.nodes[CREATOR]
    assert swarm.heads()[0] > stuck_at + 3 and node.machine.history.head_body.epoch == 1
    rows = {int(name.split("/")[1]): row for name, row in node.kept.items() if name.startswith("vertex/")}
    kept = StoredHistory(swarm.run_id, node.kept["genesis"], sorted(rows), rows.get)
    audit = verify_history(kept, swarm.keys.verifier, CAPABILITIES.verifiers)
    assert audit.problems == [] and audit.recoveries == [stuck_at + 1]


def test_an_epoch_may_not_change_another_members_key_nor_borrow_one():
    """The recovery identity may bring a new key of its own; all other keys stay as they were agreed."""
    swarm = paused_swarm()
    history = swarm.world.nodes[peer_name(1)].machine.history
    parent, replace = history.head_body, msgspec.structs.replace
    here = {CREATOR, peer_name(1)}
    written = write_recovery(parent, history.head_id, swarm.run_id, CREATOR, here, parent.time_s, CREATOR_KEY)
    first, *rest = written.members
    for wrong in (
        (first, replace(rest[0], vote_key=b"another"), *rest[1:]),
        (replace(first, vote_key=rest[0].vote_key), *rest),
        (replace(first, vote_key=b"of another length"), *rest),
    ):
        raw = encode(replace(written, members=wrong))
        vertex = Vertex(raw, None, sign_as_identity(CREATOR.encode(), recovery_bytes(swarm.run_id, raw)))
        with pytest.raises(PeerFault, match="neither a quorum nor the recovery key"):
            history.append(vertex, CREATOR)
