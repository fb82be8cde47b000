"""Pause and resume by the recovery identity: no training in between, and no other identity can order it."""

from __future__ import annotations

import re

import pytest
from amendable import BOB, CARL, CREATOR, DORA, EVE, as_creator, history_of, reach, swarm_of
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Received
from atoll.capabilities import CAPABILITIES
from atoll.peer import operator_commands
from atoll.peer.events import ProtocolFault, RoundBegan
from atoll.peer.governance.orders import goal_of, pauses_in, word_bytes
from atoll.peer.round.vertex_body import check_body, write_body
from atoll.peer.tasks import TrainRound
from atoll.peer.verify.chain import PauseRecord, StoredHistory, verify_history
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner, sign_as_identity
from atoll.simulation.swarm import VirtualSwarm
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import PauseOrder
from atoll.wire.messages.vertex import VertexBody


def head_of(swarm: VirtualSwarm, name: PeerId = CREATOR) -> VertexBody:
    return history_of(swarm, name).head_body


def say(swarm: VirtualSwarm, paused: bool) -> None:
    node = swarm.world.nodes[CREATOR]
    local = node.clock.local(swarm.world.now)
    swarm.world.carry_out(node, operator_commands.pause(node.machine, paused, as_creator, local))


def until_all(swarm: VirtualSwarm, paused: bool) -> VertexBody:
    """The newest vertex, once every member holds a pause or resume."""
    say(swarm, paused)
    up = [n.name for n in swarm.honest if n.machine is not None]

    def heard() -> bool:
        return all((head_of(swarm, name).paused is not UNSET) == paused for name in up)

    swarm.world.run(swarm.world.now + 120.0, stop=heard)
    assert heard()
    return head_of(swarm)


def test_nobody_trains_while_the_run_is_paused_and_members_come_and_go():
    """Carl leaves, Dora crashes and returns, Eve joins.

    Then the run continues at the same place in the data, and every reader of the history agrees.
    """
    swarm = swarm_of()
    reach(swarm, 5)
    with pytest.raises(ValueError, match=r"not paused$"):
        say(swarm, paused=False)
    say(swarm, paused=True)
    with pytest.raises(ValueError, match="not paused yet"):
        say(swarm, paused=False)
    held = until_all(swarm, paused=True)
    assert held.paused == held.round and held.trained == held.round + 1  # the round that holds the word trained
    asked: list[TrainRound] = []
    began: list[RoundBegan] = []
    told = swarm.world.watchers
    told.append(lambda now, node, fact: began.append(fact) if isinstance(fact, RoundBegan) else None)
    for node in swarm.world.nodes.values():
        node.island.takes_s = lambda work, takes=node.island.takes_s: (
            (asked.append(work) if isinstance(work, TrainRound) else None) or takes(work)
        )
    swarm.world.crash(DORA)
    swarm.join(4, via=BOB)
    swarm.world.carry_out(
        carl := swarm.world.nodes[CARL],
        operator_commands.farewell(carl.machine, "enough", carl.clock.local(swarm.world.now)),
    )
    swarm.world.run(swarm.world.now + 60)
    swarm.world.start(DORA)
    swarm.world.run(swarm.world.now + 200)
    now = head_of(swarm)
    standings = {m.peer: m.standing for m in now.members}
    assert standings == {CREATOR: "member", BOB: "member", CARL: "away", DORA: "member", EVE: "member"}, standings
    assert not asked and began and all(fact.paused and fact.assembling for fact in began)
    assert (now.trained, now.state, now.paused) == (held.trained, held.state, held.paused)
    assert [head_of(swarm, p).paused for p in (DORA, EVE)] == [held.paused] * 2
    on = until_all(swarm, paused=False)
    assert on.trained == held.trained and on.state == held.state
    swarm.world.run(swarm.world.now + 200, stop=lambda: head_of(swarm).trained >= held.trained + 3)
    assert head_of(swarm).trained == held.trained + 3 and asked
    node = swarm.world.nodes[CREATOR]
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}
    audit = verify_history(
        StoredHistory(swarm.run_id, node.kept["genesis"], sorted(rows), rows.get),
        VirtualSignatureVerifier(),
        CAPABILITIES.verifiers,
    )
    assert audit.intact and audit.pauses == [PauseRecord(held.round, True), PauseRecord(on.round, False)]


def test_a_word_is_good_once_so_an_old_pause_does_nothing_after_the_resume():
    swarm = swarm_of()
    reach(swarm, 4)
    held = until_all(swarm, paused=True)
    ((old, _),) = pauses_in(held.reports)
    peer = swarm.world.nodes[CREATOR].machine
    with pytest.raises(ValueError, match="it is paused already"):
        say(swarm, paused=True)
    plain = PauseOrder(peer.history.head_id, True, b"")
    twice = peer.notary.sign(replace(plain, signature=as_creator(word_bytes(swarm.run_id, plain))))
    assert "the run is paused" in (peer.pool.add(twice, swarm.world.now).wrong or "")
    ((on, _),) = pauses_in(until_all(swarm, paused=False).reports)
    for word, why in ((old, "is out of date"), (on, "is out of date")):
        pooled = peer.pool.add(word, swarm.world.now)
        assert pooled is not None and pooled.wrong is not None and pooled.wrong.startswith(why)
    assert not pauses_in(peer.pool.chosen())
    reach(swarm, head_of(swarm).round + 3)
    assert head_of(swarm).paused is UNSET


def test_going_back_and_starting_over_keep_the_pause():
    """Back to round 2 while paused; then all others are gone for good, and the creator begins a new epoch."""
    swarm = swarm_of()
    reach(swarm, 5)
    held = until_all(swarm, paused=True)
    node = swarm.world.nodes[CREATOR]
    history = node.machine.history
    earlier = goal_of(history.bodies[2], history.ids[2])
    local = node.clock.local(swarm.world.now)
    swarm.world.carry_out(node, operator_commands.go_back(node.machine, earlier, as_creator, local))
    swarm.world.run(swarm.world.now + 120, stop=lambda: head_of(swarm).trained == earlier.trained)
    assert head_of(swarm).trained == earlier.trained and head_of(swarm).paused == held.paused
    for name in (BOB, CARL, DORA):
        swarm.world.crash(name)
    swarm.world.run(swarm.world.now + 60)
    swarm.world.carry_out(
        node, operator_commands.recover(node.machine, as_creator, node.clock.local(swarm.world.now))
    )
    swarm.world.run(swarm.world.now + 60)
    assert (head_of(swarm).epoch, head_of(swarm).paused, head_of(swarm).trained) == (
        1,
        held.paused,
        earlier.trained,
    )
    on = until_all(swarm, paused=False)
    swarm.world.run(swarm.world.now + 100, stop=lambda: head_of(swarm).trained > on.trained)
    assert head_of(swarm).trained > earlier.trained


def test_of_two_that_are_said_at_once_a_body_carries_one():
    """Signed by the same identity through two members, after two heads: both are valid, and no voter accepts a body
    with both.
    """
    swarm = swarm_of()
    reach(swarm, 4)
    say(swarm, paused=True)
    peer = swarm.world.nodes[CREATOR].machine
    history = peer.history
    plain = PauseOrder(history.ids[history.head - 1], True, b"")
    other = replace(plain, signature=as_creator(word_bytes(swarm.run_id, plain)))
    again = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier()).sign(other)
    assert peer.pool.add(again, swarm.world.now).fresh
    assert len(pauses_in(peer.pool.pool.values())) == 2 and len(pauses_in(peer.pool.chosen())) == 1
    ground, now = peer.round.ground, swarm.world.now
    nothing = [None] * len(ground.owners)
    body = write_body(ground, peer.notary, 0, nothing, {}, peer.pool.chosen(), state=ground.parent.state, now=now)
    assert body.paused == body.round and check_body(ground, peer.notary, body, now) is None
    lies = replace(body, reports=(*body.reports, again)), replace(body, paused=UNSET), replace(body, paused=1)
    for lie in lies:
        flaw = check_body(ground, peer.notary, lie, now)
        assert flaw is not None and re.search("pauses or resumes the run twice|whether the run is paused", flaw)


def test_a_pause_that_somebody_else_signed_is_its_bringers_fault_and_no_body_may_hold_it():
    swarm = swarm_of()
    reach(swarm, 4)
    peer = swarm.world.nodes[CREATOR].machine
    plain = PauseOrder(peer.history.head_id, True, b"")
    forged = replace(plain, signature=sign_as_identity(BOB.encode(), word_bytes(swarm.run_id, plain)))
    bob = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier())
    for word in (plain, forged):
        signed = bob.sign(word)
        effects = peer.handle(Received(BOB, ReportMessage(signed)), swarm.world.now)
        (fault,) = [e.fact for e in effects if hasattr(e, "fact") and isinstance(e.fact, ProtocolFault)]
        assert fault.peer == BOB and "pause or resume in a name that is not its own" in fault.what
    reach(swarm, 7)
    assert head_of(swarm).paused is UNSET
