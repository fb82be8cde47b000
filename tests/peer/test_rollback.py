"""Rollback by the recovery identity: all go to the earlier state, once, and no other identity can order it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from amendable import BOB, CARL, CREATOR, DORA, EVE, as_creator, history_of, reach, swarm_of
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Event, Received, RunTask
from atoll.capabilities import CAPABILITIES
from atoll.peer import operator_commands
from atoll.peer.events import ProtocolFault, RollbackStateUnavailable, RoundAttemptFailed
from atoll.peer.governance.orders import RollbackGoal, amend_of, amends_in, goal_of, word_bytes
from atoll.peer.round.proposal import ProposalBuilder
from atoll.peer.round.vertex_body import _judge_reports
from atoll.peer.tasks import AdoptState, CheckStateStored, ReadVertices, RestoreEarlierState
from atoll.peer.verify.chain import RollbackRecord, StoredHistory, verify_history
from atoll.policy.capability_terms import PartitionPolicy
from atoll.policy.committee import on_circle
from atoll.policy.plan import RoundSettings
from atoll.protocol.transfer.tasks import ReadManifest
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner, sign_as_identity
from atoll.simulation.swarm import VirtualSwarm, peer_name
from atoll.simulation.worker import VirtualState
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.envelope import StatementSigner, signed_bytes
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import QuorumCertificate, RollbackOrder, SignedStatement, TicketInvite, Vote
from atoll.wire.messages.vertex import Vertex, VertexBody


def facts_of(swarm: VirtualSwarm, *kinds: type) -> list:
    """Whatever of these kinds is told from now on."""
    told: list = []
    swarm.world.watchers.append(lambda now, node, fact: told.append(fact) if isinstance(fact, kinds) else None)
    return told


def goal(swarm: VirtualSwarm, round: int) -> RollbackGoal:
    history = history_of(swarm)
    return goal_of(history.bodies[round], history.ids[round])


def go_back(swarm: VirtualSwarm, round: int, by: PeerId = CREATOR, to: RollbackGoal | None = None) -> None:
    node = swarm.world.nodes[by]
    local = node.clock.local(swarm.world.now)
    swarm.world.carry_out(
        node, operator_commands.go_back(node.machine, to or goal(swarm, round), as_creator, local)
    )


def until_returned(swarm: VirtualSwarm, within_s: float = 120.0) -> VertexBody:
    """The vertex of the rollback, once any peer has closed it."""
    found: list[VertexBody] = []

    def look() -> bool:
        histories = [n.machine.history for n in swarm.honest if n.machine and n.machine.history]
        newest = max(histories, key=lambda h: h.head)
        found[:] = [b for b in newest.bodies.values() if amend_of(b) is not None]
        return bool(found)

    swarm.world.run(swarm.world.now + within_s, stop=look)
    assert found
    return found[-1]


def state_of(swarm: VirtualSwarm, state: Digest, name: PeerId = CREATOR) -> VirtualState:
    return msgspec.msgpack.decode(swarm.world.nodes[name].island.blobs[state], type=VirtualState)


def returns(swarm: VirtualSwarm, name: PeerId = CREATOR) -> list[tuple[int, int]]:
    """(round, back to) as this peer's history tells them."""
    bodies = history_of(swarm, name).bodies.values()
    return [(b.round, back.round) for b in bodies if (back := amend_of(b)) is not None]


def test_what_somebody_did_apart_from_a_past_that_was_left_is_dropped(monkeypatch):
    """Dora is cut off and trains on, the others go back to before that; she comes back by the blob, far behind."""
    monkeypatch.setattr("atoll.peer.sync.state_sync.FOLLOWED_MAX", 3)
    swarm = swarm_of(apart=PartitionPolicy("merge", 3))
    for node in swarm.world.nodes.values():
        node.island.knobs.states_kept = 1000
    reach(swarm, 5)
    alone, rest = swarm.world.nodes[DORA].island.alone, [CREATOR, BOB, CARL]
    swarm.world.split({DORA})
    swarm.world.run(swarm.world.now + 200.0, stop=lambda: alone.out > 0)
    go_back(swarm, 2)
    reach(swarm, max(swarm.heads()) + 10, rest)
    assert alone.out and returns(swarm)
    swarm.world.network.heal()
    reach(swarm, max(swarm.heads()) + 8)
    assert (alone.held, alone.out, alone.dropped) == (0, 0, alone.taken) and not swarm.checkers.late[DORA]


def test_all_go_on_from_the_earlier_state_also_who_was_away_who_crashes_and_who_comes():
    """Dora is down while it happens, Carl dies right after it, Eve comes later: one state for all.

    It has the counts of round 4 and what was trained since; work in between counts for no member.
    """
    swarm = swarm_of()
    for node in swarm.world.nodes.values():
        node.island.knobs.states_kept = 1000
    reach(swarm, 9)
    swarm.world.crash(DORA)
    reach(swarm, 11)
    old = goal(swarm, 4)
    counted_then = state_of(swarm, old.state).counted
    go_back(swarm, 4)
    body = until_returned(swarm)
    swarm.world.crash(CARL)
    assert body.round <= 14 and body.trained == old.trained and body.state != old.state
    assert state_of(swarm, body.state).counted == counted_then
    assert state_of(swarm, body.state).steps == state_of(swarm, old.state).steps
    swarm.world.run(swarm.world.now + 5)
    swarm.world.start(CARL)
    swarm.world.start(DORA)
    swarm.join(4, via=BOB)
    reach(swarm, body.round + 6)
    swarm.world.run(swarm.world.now + 30)
    everybody = (CREATOR, BOB, CARL, DORA, EVE)
    assert {tuple(returns(swarm, name)) for name in everybody} == {((body.round, 4),)}
    head = min(swarm.heads())
    agreed = history_of(swarm).bodies[head].state
    assert {history_of(swarm, name).bodies[head].state for name in everybody} == {agreed}
    assert {m.peer for m in history_of(swarm).head_body.members if m.votes} == set(everybody)
    after = history_of(swarm).bodies[body.round + 5]
    assert after.trained == old.trained + 5
    since = sum(len(history_of(swarm).bodies[body.round + k].parts) for k in range(1, 6))
    assert state_of(swarm, after.state).counted[CREATOR] == counted_then[CREATOR] + since


def test_the_word_is_good_once():
    """A member repeats the order and puts it into a body: no pool takes it, and no voter accepts the body."""
    swarm = swarm_of()
    reach(swarm, 6)
    go_back(swarm, 2)
    body = until_returned(swarm)
    ((signed, _),) = amends_in(body.reports)
    reach(swarm, body.round + 1)  # the head that it was said after is still a recent one
    for name in swarm.founders:
        peer = swarm.world.nodes[name].machine
        assert peer.pool.judge(
            peer.pool.add(signed, swarm.world.now).reported, peer.history.head_body, peer.pool.recent(), None
        ).startswith("is out of date")
        assert not amends_in(peer.pool.chosen())
    reach(swarm, body.round + 4)
    assert len(returns(swarm)) == 1
    # after the return, a new word may go to the same place, and even forward again
    go_back(swarm, body.round - 1)
    reach(swarm, history_of(swarm).head + 4)
    assert [back for _, back in returns(swarm)] == [2, body.round - 1]


def test_the_word_sends_a_member_away_with_it_and_not_more_than_quorums_bear():
    """Back to round 2 without Dora: she is out for good, the others go on, and every reader of the history
    agrees.
    """
    swarm = swarm_of()
    reach(swarm, 6)
    node = swarm.world.nodes[CREATOR]
    say = partial(
        operator_commands.go_back, node.machine, goal(swarm, 2), as_creator, node.clock.local(swarm.world.now)
    )
    for names, why in (((CARL, DORA), "2 of 4 voters; 1 may go"), ((PeerId("nobody"),), "who is no member")):
        with pytest.raises(ValueError, match=why):
            say(names)
    swarm.world.carry_out(node, say((DORA,)))
    body, rest = until_returned(swarm), [CREATOR, BOB, CARL]
    assert [m.peer for m in body.members if m.standing == "member"] == rest
    reach(swarm, body.round + 6, rest)
    assert next(m for m in history_of(swarm).head_body.members if m.peer == DORA).standing == "expelled"
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}
    audit = verify_history(
        StoredHistory(swarm.run_id, node.kept["genesis"], sorted(rows), rows.get),
        VirtualSignatureVerifier(),
        CAPABILITIES.verifiers,
    )
    assert audit.intact and [r.round for r in audit.returns] == [body.round]


def test_a_word_that_the_recovery_identity_did_not_say_is_its_bringers_fault():
    swarm = swarm_of()
    reach(swarm, 6)
    old = goal(swarm, 2)
    plain = RollbackOrder(history_of(swarm).head_id, old.round, old.id, old.state, old.trained, b"")
    signature = sign_as_identity(BOB.encode(), word_bytes(swarm.run_id, plain))
    bob = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier())
    forged = bob.sign(replace(plain, signature=signature))
    peer = swarm.world.nodes[CREATOR].machine
    effects = peer.handle(Received(BOB, ReportMessage(forged)), swarm.world.now)
    (fault,) = [e.fact for e in effects if hasattr(e, "fact") and isinstance(e.fact, ProtocolFault)]
    assert fault.peer == BOB and "in a name that is not its own" in fault.what
    assert not amends_in(peer.pool.chosen())
    reach(swarm, 9)
    assert returns(swarm) == []


def test_a_genuine_word_in_other_bytes_is_its_bringers_fault_and_makes_nobody_read():
    """The inner signature does not cover unknown keys: each copy would make all members read a state."""
    swarm = swarm_of()
    reach(swarm, 6)
    go_back(swarm, 2)
    ((signed, _),) = amends_in(swarm.world.nodes[CREATOR].machine.pool.pool.values())
    carl = swarm.world.nodes[CARL].machine
    notary = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier())
    reads: list[CheckStateStored] = []
    for k in range(20):
        padded = msgspec.msgpack.encode({**msgspec.msgpack.decode(signed.body), "pad": k})
        copy = SignedStatement(BOB, padded, notary.signer.sign(signed_bytes(swarm.run_id, padded)))
        effects = carl.handle(Received(BOB, ReportMessage(copy)), swarm.world.now)
        assert any(isinstance(getattr(e, "fact", None), ProtocolFault) and e.fact.peer == BOB for e in effects)
        assert _judge_reports(carl.round.ground, notary, [signed, copy], 0.0)[0] == [signed]
        reads += [e.work for e in effects if isinstance(e, RunTask) and isinstance(e.work, CheckStateStored)]
    assert reads == []


def test_the_same_word_through_every_member_is_looked_for_once():
    swarm = swarm_of()
    reach(swarm, 6)
    old = goal(swarm, 2)
    plain = RollbackOrder(history_of(swarm).head_id, old.round, old.id, old.state, old.trained, b"")
    amend = replace(plain, signature=as_creator(word_bytes(swarm.run_id, plain)))
    reads: list[CheckStateStored] = []
    for name in swarm.founders[1:]:
        signed = StatementSigner(swarm.run_id, VirtualSigner(name), VirtualSignatureVerifier()).sign(amend)
        peer = swarm.world.nodes[CREATOR].machine
        effects = peer.handle(Received(name, ReportMessage(signed)), swarm.world.now)
        reads += [e.work for e in effects if isinstance(e, RunTask) and isinstance(e.work, CheckStateStored)]
    assert reads == [CheckStateStored(old.state)]


def test_members_that_are_a_vertex_behind_hear_the_word_again(monkeypatch: pytest.MonkeyPatch):
    """The creator says it the moment that it has closed a round; to the others its `after` is unknown then.

    Its own bodies leave the word out here, as those of a member that never proposes in time.
    """
    wanted = ProposalBuilder.back
    monkeypatch.setattr(
        ProposalBuilder, "back", lambda self, s: None if self.notary.me == CREATOR else wanted(self, s)
    )
    swarm = swarm_of()
    for name in (BOB, CARL, DORA):
        island = swarm.world.nodes[name].island
        island.takes_s = lambda work, takes=island.takes_s: (
            takes(work) + (1.0 if isinstance(work, AdoptState) else 0.0)
        )
    reach(swarm, 6, [CREATOR])
    assert {swarm.head(name) for name in (BOB, CARL, DORA)} == {5}
    go_back(swarm, 2)
    swarm.world.run(swarm.world.now + 0.5)
    pools = [swarm.world.nodes[name].machine.pool for name in (BOB, CARL, DORA)]
    assert not any(amends_in(pool.chosen()) for pool in pools)
    body = until_returned(swarm)
    assert body.round <= 12 and body.proposer != CREATOR
    reach(swarm, body.round + 1)
    swarm.world.run(swarm.world.now + 10)
    assert len(returns(swarm)) == 1 and not any(amends_in(pool.pool.values()) for pool in pools)


def test_a_flood_of_padded_reports_does_not_keep_the_word_out(monkeypatch: pytest.MonkeyPatch):
    """Bob's invitations are each a little shorter than the word, and fill every body that a proposer may write."""
    swarm = swarm_of()
    reach(swarm, 6)
    go_back(swarm, 2)
    pool = swarm.world.nodes[CREATOR].machine.pool
    ((signed, amend),) = amends_in(pool.pool.values())
    monkeypatch.setattr("atoll.peer.membership.report_pool.REPORTS_BYTES_MAX", 16 * 1024)
    notary = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier())
    for k in range(200):
        invite = TicketInvite(b"%08d" % k, b"k" * 16, "trainer", 1, 1e6)
        pad = bytes(len(signed.body) - len(encode(invite)) - 12)
        padded = msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(invite)), "pad": pad})
        assert len(padded) < len(signed.body)
        copy = SignedStatement(BOB, padded, notary.signer.sign(signed_bytes(swarm.run_id, padded)))
        assert pool.add(copy, swarm.world.now).fresh
    assert len(pool.chosen()) < 100 and pool.chosen()[0] == signed
    for k, round in enumerate((5, 3, 4)):  # of many words, the two that go farthest back
        other = notary.sign(replace(amend, round=round))
        pool.pool["RollbackOrder", BOB, str(k)] = other
    assert [found.round for _, found in amends_in(pool.chosen())] == [2, 3]


@pytest.mark.parametrize(
    "lie",
    [
        lambda goal: dataclasses.replace(goal, trained=goal.trained + 1),
        lambda goal: dataclasses.replace(goal, state=Digest(bytes(32))),
        lambda goal: dataclasses.replace(goal, id=Digest(bytes(32))),
        lambda goal: dataclasses.replace(goal, round=goal.round + 1),
    ],
)
def test_even_the_recovery_identity_goes_back_only_to_what_was_agreed(lie):
    """It cannot slip in a state, nor a count: no voter's chain has such a vertex."""
    swarm = swarm_of()
    reach(swarm, 6)
    go_back(swarm, 2, to=lie(goal(swarm, 2)))
    reach(swarm, 10)
    assert returns(swarm) == []


def test_of_two_words_at_once_the_farther_one_back_wins_and_the_other_is_void():
    """Said by the same identity through two members in one moment: every proposer takes the same one."""
    swarm = swarm_of()
    reach(swarm, 8)
    go_back(swarm, 6)
    go_back(swarm, 3, by=BOB)
    until_returned(swarm)
    reach(swarm, history_of(swarm).head + 5)
    assert [back for _, back in returns(swarm)] == [3]


def test_a_state_that_is_gone_everywhere_stops_nobody_and_the_word_expires():
    """The creator's disk breaks the moment it has said so, and it was the last to hold it."""
    swarm = swarm_of()
    reach(swarm, 6)
    old = goal(swarm, 2)
    go_back(swarm, 2)
    for name in swarm.founders:
        swarm.world.nodes[name].island.blobs.pop(old.state)
    reach(swarm, history_of(swarm).head + 20)
    assert returns(swarm) == []
    assert not any(amends_in(n.machine.pool.chosen()) or n.machine.downloads.wanted for n in swarm.honest)


def test_a_state_that_one_member_holds_and_gives_nobody_costs_some_views_and_no_round():
    """Whenever the creator proposes, the others cannot follow: the next proposer ends the round without it."""
    swarm = swarm_of()
    reach(swarm, 6)
    old = goal(swarm, 2)
    for name in (BOB, CARL, DORA):
        swarm.world.nodes[name].island.blobs.pop(old.state)
    island = swarm.world.nodes[CREATOR].island
    does = island.run
    island.run = lambda work: None if work == ReadManifest(old.state, partly=True) else does(work)
    lacked = facts_of(swarm, RollbackStateUnavailable)
    began = swarm.world.now
    go_back(swarm, 2)
    reach(swarm, history_of(swarm).head + 20)
    assert lacked and returns(swarm) == [] and swarm.checkers.repairs == 0
    assert swarm.world.now - began < 20 * 10  # a round without it takes 1.3 s
    assert not any(amends_in(n.machine.pool.chosen()) or n.machine.downloads.wanted for n in swarm.honest)


def test_however_many_hold_what_the_others_cannot_get_a_round_fails_once_at_most():
    """Four of seven hold it and send it to no other, five would have to vote: second attempts close without it."""
    round = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds", agree_s=2.0, owner_s=2.0)
    swarm = swarm_of(peers=7, round=round)
    reach(swarm, 6)
    old = goal(swarm, 2)
    circle = on_circle(swarm.run_id, 6, swarm.founders)
    first = circle.index(peer_name(0))
    for name in swarm.founders:
        island = swarm.world.nodes[name].island
        if (circle.index(name) - first) % 7 >= 4:  # those who hold it propose one after the other
            island.blobs.pop(old.state)
        island.run = lambda work, does=island.run: (
            None if work == ReadManifest(old.state, partly=True) else does(work)
        )
    failed = facts_of(swarm, RoundAttemptFailed)
    go_back(swarm, 2)
    reach(swarm, history_of(swarm).head + 20)
    assert returns(swarm) == [] and failed and max(fact.attempt for fact in failed) == 0
    assert swarm.checkers.repairs == 0


def test_who_lacks_the_state_fetches_it_before_it_votes():
    """The disk of all but two has lost it: within a few rounds all members hold it and the run goes back."""
    swarm = swarm_of()
    reach(swarm, 6)
    old = goal(swarm, 2)
    for name in (BOB, CARL):
        swarm.world.nodes[name].island.blobs.pop(old.state)
    told = facts_of(swarm, RoundAttemptFailed, RollbackStateUnavailable)
    go_back(swarm, 2)
    body = until_returned(swarm)
    reach(swarm, body.round + 3)
    assert body.round <= 9 and not told  # no voter was asked before it had looked
    assert all(returns(swarm, name) == [(body.round, 2)] for name in swarm.founders)


@pytest.mark.parametrize("names", [[DORA], [CREATOR, BOB, CARL, DORA]], ids=["one", "all"])
def test_a_full_disk_is_not_asked_for_ever(names: list[PeerId]):
    """The earlier state is there, and what it becomes cannot be written."""
    swarm = swarm_of()
    reach(swarm, 6)
    tries: list[int] = []

    def full(work: object, does: Callable[[object], object]) -> object:
        if not isinstance(work, RestoreEarlierState):
            return does(work)
        tries.append(work.round)
        raise RuntimeError("the disk is full")

    for name in names:
        island = swarm.world.nodes[name].island
        island.run = partial(full, does=island.run)
    go_back(swarm, 2)
    reach(swarm, history_of(swarm).head + 18)
    assert max(tries.count(round) for round in tries) <= 2 * len(names)
    assert len(returns(swarm)) == (1 if names == [DORA] else 0)


def deaf_to_reports(event: Event, now: Seconds, does: Callable[[Event, Seconds], list[Effect]]) -> list[Effect]:
    deaf = isinstance(event, Received) and isinstance(event.message, ReportMessage)
    return [] if deaf else does(event, now)


def test_who_hears_of_it_only_in_a_proposal_still_votes_in_that_round():
    """Bob and Carl lack the state and did not hear the word: they fetch it while the proposal waits."""
    swarm = swarm_of()
    reach(swarm, 6)
    old = goal(swarm, 2)
    for name in (BOB, CARL):
        node = swarm.world.nodes[name]
        node.island.blobs.pop(old.state)
        node.machine.handle = partial(deaf_to_reports, does=node.machine.handle)
    lacked = facts_of(swarm, RollbackStateUnavailable)
    failed = facts_of(swarm, RoundAttemptFailed)
    go_back(swarm, 2)
    body = until_returned(swarm)
    assert {fact.round for fact in lacked} == {body.round} and not failed


def test_all_make_a_large_state_at_the_same_time():
    """It takes most of an attempt, but not twice: voters begin before they are asked to vote."""
    swarm = swarm_of()
    reach(swarm, 6)
    for name in swarm.founders:
        island = swarm.world.nodes[name].island
        island.takes_s = lambda work, takes=island.takes_s: (
            18.0 if isinstance(work, RestoreEarlierState) else takes(work)
        )
    failed = facts_of(swarm, RoundAttemptFailed)
    go_back(swarm, 2)
    body = until_returned(swarm)
    reach(swarm, body.round + 1)
    assert body.round <= 8 and not failed


def test_a_vertex_older_than_memory_is_looked_up_on_every_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.protocol.history.chain.WINDOW", 40)
    swarm = swarm_of()
    for node in swarm.world.nodes.values():
        node.island.knobs.states_kept = 1000
    reach(swarm, 2)
    old = goal(swarm, 1)
    reach(swarm, 60)
    assert all(1 not in history_of(swarm, name).bodies for name in swarm.founders)
    go_back(swarm, 1, to=old)
    body = until_returned(swarm)
    reach(swarm, body.round + 2)
    assert body.trained == old.trained and returns(swarm, DORA) == [(body.round, 1)]


def test_a_word_that_names_an_old_vertex_wrongly_is_looked_up_only_when_it_is_said(monkeypatch: pytest.MonkeyPatch):
    """Its id is of no vertex: the disk's answer settles that."""
    monkeypatch.setattr("atoll.protocol.history.chain.WINDOW", 40)
    swarm = swarm_of()
    reach(swarm, 2)
    old = goal(swarm, 1)
    reach(swarm, 60)
    reads: list[ReadVertices] = []
    island = swarm.world.nodes[BOB].island
    does = island.run
    island.run = lambda w: (reads.append(w) if isinstance(w, ReadVertices) else None, does(w))[1]
    go_back(swarm, 1, to=dataclasses.replace(old, id=Digest(bytes(32))))
    swarm.world.run(swarm.world.now + 10)
    assert 1 <= len(reads) <= 5 and returns(swarm) == []  # its bringer says it again every three seconds


def test_a_run_that_only_assembles_goes_back_too():
    """Two of three are there, three are needed to train: the word is news enough for a round."""
    swarm = swarm_of(peers=3, min_peers=3, start_peers=1)
    reach(swarm, 6)
    old = goal(swarm, 2)
    swarm.world.leave(CARL)
    swarm.world.run(swarm.world.now + 20)
    assert sum(m.votes for m in history_of(swarm).head_body.members) == 2
    go_back(swarm, 2)
    body = until_returned(swarm)
    swarm.world.run(swarm.world.now + 1)  # another peer may have closed it first
    assert body.parts == () and body.trained == old.trained and returns(swarm) == [(body.round, 2)]


def test_a_run_that_has_waited_long_for_members_goes_back_too():
    """Attempts have gone by without news when the word is said."""
    swarm = swarm_of(peers=3, min_peers=3, start_peers=1)
    reach(swarm, 6)
    swarm.world.leave(CARL)
    swarm.world.run(swarm.world.now + 400)
    assert swarm.world.nodes[CREATOR].machine.round.attempt > 0
    go_back(swarm, 2)
    body = until_returned(swarm, within_s=300)
    swarm.world.run(swarm.world.now + 5)
    assert body.parts == () and returns(swarm) == [(body.round, 2)]


@pytest.mark.parametrize("trust", ["community", "open"])
def test_it_works_where_members_may_lie(trust: str):
    """Two thirds must vote for it; where owners check each other, they do so in its round as in any other."""
    round = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds")
    swarm = swarm_of(round=round, tolerance=0.33, witnessed=trust == "open")
    reach(swarm, 6)
    go_back(swarm, 2)
    body = until_returned(swarm)
    reach(swarm, body.round + 3)
    assert all(returns(swarm, name) == [(body.round, 2)] for name in swarm.founders)


def test_with_overlap_steps_under_way_are_dropped():
    """Every island is told to begin afresh in that round, and in no other."""
    swarm = swarm_of()
    adopted: list[AdoptState] = []
    swarm.world.run(0.1)
    for node in swarm.world.nodes.values():
        node.island.knobs.overlap = 8
        does = node.island.run
        node.island.run = lambda w, does=does: (adopted.append(w) if isinstance(w, AdoptState) else None, does(w))[
            1
        ]
    reach(swarm, 6)
    go_back(swarm, 2)
    body = until_returned(swarm)
    reach(swarm, body.round + 3)
    assert [w.round for w in adopted if w.afresh] == [body.round] * 4


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.long)], ids=str)
def test_crashes_all_around_the_return_end_in_one_state(seeds: range):
    """All members are killed around some durable write of the rounds near it, and start again.

    Reports that wait for their vertex live in memory: some are lost with all members that received them.
    """
    ways = 0
    for seed in seeds:
        swarm = swarm_of(seed=seed)
        reach(swarm, 5)
        go_back(swarm, 2)
        for k, name in enumerate(swarm.founders):
            swarm.world.doom(name, keeps=1 + (seed + 3 * k) % 12)
        for _ in range(8):
            swarm.world.run(swarm.world.now + 4)
            for name in swarm.founders:
                swarm.world.start(name)
        reach(swarm, max(swarm.heads()) + 4)
        (told,) = {tuple(returns(swarm, name)) for name in swarm.founders}
        assert len(told) <= 1, seed
        ways += len(told)
    assert ways > len(seeds) // 2


def kept_with(swarm: VirtualSwarm, rows: dict[int, bytes]) -> StoredHistory:
    return StoredHistory(swarm.run_id, swarm.world.nodes[BOB].kept["genesis"], sorted(rows), rows.get)


def forge(swarm: VirtualSwarm, signed: SignedStatement) -> SignedStatement:
    """The same order, signed by another identity than the recovery identity; other reports as they are."""
    for _, amend in amends_in([signed]):
        notary = StatementSigner(swarm.run_id, VirtualSigner(signed.signer), VirtualSignatureVerifier())
        return notary.sign(
            replace(amend, signature=sign_as_identity(BOB.encode(), word_bytes(swarm.run_id, amend)))
        )
    return signed


def certified(swarm: VirtualSwarm, body: VertexBody) -> bytes:
    """With the votes of all voters, which lie together."""
    raw = encode(body)
    vote = Vote(body.round, 0, "commit", vertex_id(raw))
    notaries = [StatementSigner(swarm.run_id, VirtualSigner(p), VirtualSignatureVerifier()) for p in swarm.founders]
    votes = tuple((n.me, n.sign(vote).signature) for n in notaries)
    return encode(Vertex(raw, QuorumCertificate(body.round, 0, "commit", vote.digest, votes)))


def test_verify_believes_the_return_and_names_it():
    """A forged word is found though all voters signed it; a lost vertex that was gone back to is named once."""
    swarm = swarm_of(era_rounds=10)
    reach(swarm, 8)
    go_back(swarm, 3)
    body = until_returned(swarm)
    reach(swarm, body.round + 14)
    kept = swarm.world.nodes[BOB].kept
    rows = {int(k[7:]): v for k, v in kept.items() if k.startswith("vertex/")}
    audit = verify_history(kept_with(swarm, rows), VirtualSignatureVerifier(), CAPABILITIES.verifiers)
    old = decode_body(decode_vertex(rows[3]).body)
    assert [p for p in audit.problems if p.kind != "era"] == []
    assert audit.returns == [RollbackRecord(body.round, 3, old.state.hex(), old.trained)]
    forged = replace(body, reports=tuple(forge(swarm, signed) for signed in body.reports))
    audit = verify_history(
        kept_with(swarm, rows | {body.round: certified(swarm, forged)}),
        VirtualSignatureVerifier(),
        CAPABILITIES.verifiers,
    )
    (problem,) = [p for p in audit.problems if p.round == body.round]
    assert problem.kind == "content" and "a report that may not stand" in problem.what
    del rows[3]
    audit = verify_history(kept_with(swarm, rows), VirtualSignatureVerifier(), CAPABILITIES.verifiers)
    assert [(p.round, p.kind) for p in audit.problems if p.kind != "era"] == [(3, "missing")]


def test_a_run_may_begin_anew_from_genesis():
    swarm = swarm_of()
    reach(swarm, 6)
    go_back(swarm, -1)
    body = until_returned(swarm)
    reach(swarm, body.round + 3)
    assert body.trained == 0 and returns(swarm) == [(body.round, -1)]


def test_after_the_end_there_is_no_way_back():
    swarm = swarm_of(rounds=5)
    swarm.world.run(200, stop=lambda: all(n.machine.over for n in swarm.honest))
    with pytest.raises(ValueError, match="the run is over"):
        go_back(swarm, 2)
