"""Rollback demanded by validators: an invented one is rejected, absent members follow, verify reports it."""

from __future__ import annotations

import dataclasses
from functools import cache

import msgspec
import pytest
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Received, RunTask, Send, TaskDone, TimerFired, expand_broadcasts
from atoll.capabilities import CAPABILITIES
from atoll.peer.events import BadStateRolledBack, ProposalRejected, ProtocolFault, RoundAttemptFailed
from atoll.peer.governance.orders import amend_of, amends_in, goal_of
from atoll.peer.operator_commands import go_back
from atoll.peer.round.vertex_body import amend_among, check_body, write_body
from atoll.peer.tasks import CheckStateStored, MeasureValidationLoss, PinBlobs, ValidationLosses
from atoll.peer.verify.chain import RollbackRecord, StoredHistory, verify_history
from atoll.policy.capability_terms import ErasureParams, StateValidationTerms
from atoll.policy.plan import RoundSettings
from atoll.protocol.transfer.tasks import ReadManifest
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.replay_audits import islands as audited_islands
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner, sign_as_identity
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import VirtualState
from atoll.verification.state_validation.machine import StateValidationMachine
from atoll.verification.state_validation.policy import ValidationLedger
from atoll.verification.state_validation.statistics import blame_by_validation, refusals
from atoll.wire.codec import decode_body, decode_statement, decode_vertex, encode, vertex_id
from atoll.wire.envelope import StatementSigner, signed_bytes
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.round import ProposalMessage
from atoll.wire.messages.statements import (
    HeldOutLossReport,
    QuorumCertificate,
    RollbackOrder,
    SignedStatement,
    Vote,
)
from atoll.wire.messages.vertex import Vertex, VertexBody

ADA, BOB, CARL, DORA, EVE = (peer_name(i) for i in range(5))
BAD = range(6, 8)  # rounds with states that every honest validator finds bad


def swarm_of(
    peers: int = 4, bad=BAD, seed: int = 3, recovery: bytes = b"", quorum: str = "two-thirds", villains=None
) -> VirtualSwarm:
    """Symbolic states: the test sets the loss of each."""
    knobs = SwarmKnobs(peers=peers)
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum=quorum)
    knobs.run = replace(knobs.run, round=plan, validation=StateValidationTerms(), recovery=recovery)
    swarm = VirtualSwarm(seed, knobs, villains)
    for node in swarm.world.nodes.values():
        node.island.losses = lambda state: (
            9.0 if msgspec.msgpack.decode(state, type=VirtualState).round in bad else 1.0,
        )
    return swarm


def history_of(swarm: VirtualSwarm, name: PeerId = ADA):
    return swarm.world.nodes[name].machine.history


def reach(swarm: VirtualSwarm, round: int, within_s: float = 300.0) -> None:
    swarm.world.run(swarm.world.now + within_s, stop=lambda: min(swarm.heads()) >= round)
    assert min(swarm.heads()) >= round, swarm.heads()


def returns(swarm: VirtualSwarm, name: PeerId = ADA) -> list[tuple[int, int]]:
    bodies = history_of(swarm, name).bodies.values()
    return [(b.round, back.round) for b in bodies if (back := amend_of(b)) is not None]


def test_all_leave_a_bad_state_also_who_was_away_who_crashes_and_who_comes():
    """Dora is down while it happens, Carl dies right after it, Eve comes later: one history for all."""
    swarm = swarm_of()
    told: list[BadStateRolledBack] = []
    swarm.world.watchers.append(
        lambda now, node, fact: told.append(fact) if isinstance(fact, BadStateRolledBack) else None
    )
    reach(swarm, 4)
    swarm.world.crash(DORA)
    swarm.world.run(swarm.world.now + 300, stop=lambda: bool(told))
    swarm.world.crash(CARL)
    swarm.world.run(swarm.world.now + 5)
    swarm.world.start(CARL)
    swarm.world.start(DORA)
    swarm.join(4, via=BOB)
    reach(swarm, history_of(swarm).head + 10)
    swarm.world.run(swarm.world.now + 30)
    (round,) = {fact.round for fact in told}
    everybody = (ADA, BOB, CARL, DORA, EVE)
    assert {tuple(returns(swarm, name)) for name in everybody} == {((round, 5),)}
    body = history_of(swarm).bodies[round]
    assert body.trained == 6 and all(signed.signature for signed in body.reports)
    assert {m.peer for m in history_of(swarm).head_body.members if m.votes} == set(everybody)
    ((refusal,),) = {tuple(refusals(history_of(swarm, name).bodies.values())) for name in everybody}
    assert (refusal.round, refusal.refused) == (round, tuple(range(6, round))) == (told[0].round, told[0].refused)


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_where_members_trust_each_other_two_voices_decide_and_one_alone_decides_for_itself(peers: int):
    swarm = swarm_of(peers, quorum="majority")
    reach(swarm, 14)
    ((round, back),) = returns(swarm)
    assert back == 5 and round <= 9


def test_what_a_validator_saw_is_said_again_until_a_vertex_holds_it():
    """It was sent once, and a member that was a vertex behind dropped it; later heartbeats repeat it."""
    swarm = swarm_of(3, bad=(), quorum="majority")
    reach(swarm, 0)
    carl = swarm.world.nodes[CARL].machine
    said = lambda: carl.pool.said_by(CARL, "HeldOutLossReport")  # noqa: E731  # asked twice
    swarm.world.run(swarm.world.now + 300, stop=lambda: bool(said()))
    (word,) = said()
    effects = carl.handle(TimerFired("beat"), swarm.world.now + 4.0)
    again = {e.to for e in expand_broadcasts(effects) if isinstance(e, Send) and e.message == ReportMessage(word)}
    assert again == {ADA, BOB}
    reach(swarm, history_of(swarm).head + 3)
    assert word not in said()


def test_one_broken_machine_among_those_who_trust_each_other_sends_nobody_back():
    """It finds everything infinitely bad; three are drawn, two voices are needed."""
    swarm = swarm_of(3, bad=(), quorum="majority")
    swarm.world.nodes[CARL].island.losses = lambda state: (float("inf"),)
    reach(swarm, 14)
    candidates = swarm.world.nodes[BOB].machine.pool.recent().ledgers.get(ValidationLedger).candidates.values()
    assert returns(swarm) == [] and sum(c.opinion == "good" for c in candidates) > 8


def test_a_return_that_nobody_demands_is_not_voted_for_and_its_bringer_is_at_fault():
    """Without an inner signature, or to another target than all members' vertices demand, or in other bytes."""
    swarm = swarm_of()
    reach(swarm, 6)
    carl = swarm.world.nodes[CARL].machine
    swarm.world.run(swarm.world.now + 60, stop=lambda: bool(carl.round and carl.round.ground.demanded))
    ground = carl.round.ground
    assert ground.demanded is not None
    demanded, bob = ground.demanded, StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier())
    now = swarm.world.now
    words = [replace(demanded, round=4), replace(demanded, state=demanded.back_to), replace(demanded, trained=1)]
    words += [replace(demanded, signature=b"x"), replace(demanded, after=demanded.back_to)]
    for word in words:
        reports = [bob.sign(word)]
        assert amend_among(dataclasses.replace(ground, demanded=None), carl.notary, reports) is None
        found = amend_among(ground, carl.notary, reports)
        assert found is not None and found[1] == demanded
    padded = msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(demanded)), "pad": 1})
    copy = SignedStatement(BOB, padded, bob.signer.sign(signed_bytes(swarm.run_id, padded)))
    for signed in (bob.sign(demanded), copy):
        effects = carl.handle(Received(BOB, ReportMessage(signed)), now)
        assert any(isinstance(getattr(e, "fact", None), ProtocolFault) and e.fact.peer == BOB for e in effects)
    assert not amends_in(carl.pool.chosen())
    parent = history_of(swarm, CARL).head_body
    for word, wrong in ((demanded, None), (words[0], "report that may not stand"), (None, None)):
        reports = () if word is None else (bob.sign(word),)
        body = assembled(carl, parent, reports, demanded.trained if word == demanded else parent.trained)
        told = check_body(without_parts(ground), carl.notary, body, now)
        assert told is None if wrong is None else told is not None, (word, told)


def without_parts(ground):
    """The same round, if it only assembled members: no answers to forge."""
    return dataclasses.replace(ground, topology=None)


def assembled(peer, parent: VertexBody, reports: tuple[SignedStatement, ...], trained: int) -> VertexBody:
    ground = without_parts(peer.round.ground)
    body = write_body(ground, peer.notary, 0, (), {}, (), state=parent.state, now=parent.time_s)
    return replace(body, reports=reports, trained=trained)


def test_a_proposer_that_makes_up_a_return_is_passed_over_and_nobody_goes_there():
    """Bob's every proposal goes back to round 1, as if validators had demanded it; the others close his rounds."""

    def made_up(villain: ByzantineMember, send: Send) -> list[Effect]:
        history = villain.peer.history
        if not isinstance(send.message, ProposalMessage) or history is None or history.head < 3:
            return [send]
        body, old = decode_body(send.message.body), history.bodies[1]
        word = RollbackOrder(body.parent, 1, history.ids[1], old.state, old.trained, b"")
        raw = encode(replace(body, reports=(villain.notary.sign(word),), trained=old.trained))
        said = decode_statement(send.message.statement.body, villain.peer.me)
        signed = villain.notary.sign(replace(said, digest=vertex_id(raw)))
        return [replace(send, message=replace(send.message, body=raw, statement=signed))]

    swarm = swarm_of(bad=(), villains={1: villain(made_up)})
    told: list[str] = []
    swarm.world.watchers.append(lambda now, n, f: told.append(f.why) if isinstance(f, ProposalRejected) else None)
    reach(swarm, 14, within_s=1200)
    assert returns(swarm) == [] and any("may not stand in a vertex" in why for why in told)


def test_the_founders_word_and_the_validators_go_to_the_farther_one():
    """Both want to go back in the same vertex."""
    swarm = swarm_of(recovery=ADA.encode())
    reach(swarm, 6)
    node = swarm.world.nodes[ADA]
    history = history_of(swarm)
    goal = goal_of(history.bodies[2], history.ids[2])

    def sign(data: bytes) -> bytes:
        return sign_as_identity(ADA.encode(), data)

    swarm.world.run(swarm.world.now + 60, stop=lambda: node.machine.round.ground.demanded is not None)
    swarm.world.carry_out(node, go_back(node.machine, goal, sign, node.clock.local(swarm.world.now)))
    reach(swarm, history.head + 6)
    assert returns(swarm)[0][1] in (2, 5) and len(returns(swarm)) <= 2
    assert returns(swarm)[-1][1] == 2


def test_a_good_state_that_is_gone_everywhere_stops_nobody_and_the_demand_ends():
    swarm = swarm_of(bad=range(6, 1000))
    reach(swarm, 6)
    old = history_of(swarm).bodies[5].state
    for name in swarm.founders:
        island = swarm.world.nodes[name].island
        island.blobs.pop(old)
        does = island.run
        island.run = lambda work, does=does: None if work == ReadManifest(old, partly=True) else does(work)
    reach(swarm, 30, within_s=1200)
    assert returns(swarm) == [] and swarm.checkers.repairs == 0
    assert all(n.machine.round.ground.demanded is None and not n.machine.downloads.wanted for n in swarm.honest)


def test_who_lacks_the_good_state_fetches_it_and_no_attempt_fails():
    swarm = swarm_of()
    failed: list[RoundAttemptFailed] = []
    swarm.world.watchers.append(lambda now, n, f: failed.append(f) if isinstance(f, RoundAttemptFailed) else None)
    reach(swarm, 6)
    old = history_of(swarm).bodies[5].state
    for name in (BOB, CARL):
        swarm.world.nodes[name].island.blobs.pop(old)
    reach(swarm, 14)
    assert [back for _, back in returns(swarm)] == [5] and not failed


def test_a_visitor_fetches_no_state_that_others_go_back_to():
    """It reads along while a return is demanded. What stands behind it looks for nothing:
    runtime/readonly_client.py."""
    swarm = swarm_of()
    reach(swarm, 4)
    swarm.join(4, via=BOB, role="visitor")
    sought: list[object] = []
    island = swarm.world.nodes[EVE].island
    island.run = lambda work, does=island.run: (
        sought.append(work) if isinstance(work, CheckStateStored) else does(work)
    )
    reach(swarm, 14)
    swarm.world.run(swarm.world.now + 5)
    assert returns(swarm) == returns(swarm, EVE) and len(returns(swarm)) == 1 and not sought


def test_a_validator_looks_at_one_state_at_a_time_and_then_at_the_newest():
    """Looking takes ten rounds: some states are passed over, and no job is asked for beside another."""
    swarm = swarm_of(bad=())
    asked: list[int] = []
    under_way = [0]
    island = swarm.world.nodes[ADA].island
    takes, does = island.takes_s, island.run

    def do(work: object) -> object:
        under_way[0] -= isinstance(work, MeasureValidationLoss)
        return does(work)

    def takes_s(work: object) -> float:
        if not isinstance(work, MeasureValidationLoss):
            return takes(work)
        asked.append(work.round)
        under_way[0] += 1
        assert under_way[0] == 1
        return 15.0

    island.takes_s, island.run = takes_s, do
    reach(swarm, 40)
    assert asked == sorted(set(asked)) and 3 <= len(asked) <= 6


def test_a_validator_that_cannot_look_says_nothing_and_goes_on():
    swarm = swarm_of(bad=())
    island = swarm.world.nodes[ADA].island

    def fails(state: bytes) -> tuple[float, ...]:
        raise RuntimeError("out of memory")

    island.losses = fails
    reach(swarm, 12)
    candidates = swarm.world.nodes[BOB].machine.pool.recent().ledgers.get(ValidationLedger).candidates.values()
    assert all(ADA not in c.said for c in candidates) and sum(c.opinion == "good" for c in candidates) > 6


def test_no_job_and_no_word_where_the_run_does_not_ask_for_it():
    knobs = SwarmKnobs(peers=4)
    swarm = VirtualSwarm(3, knobs)
    seen: list[object] = []
    swarm.world.run(0.1)
    for node in swarm.world.nodes.values():
        does = node.island.run
        node.island.run = lambda w, does=does: (seen.append(w), does(w))[1]
    reach(swarm, 6)
    assert not any(isinstance(w, MeasureValidationLoss | PinBlobs) for w in seen)
    assert swarm.world.nodes[ADA].machine.verifiers.find(StateValidationMachine) is None


# ---- offline -----------------------------------------------------------------------------------------------


def rows_of(swarm: VirtualSwarm) -> dict[int, bytes]:
    kept = swarm.world.nodes[BOB].kept
    return {int(k.split("/")[1]): v for k, v in kept.items() if k.startswith("vertex/")}


def verified(swarm: VirtualSwarm, rows: dict[int, bytes]):
    kept = StoredHistory(swarm.run_id, swarm.world.nodes[BOB].kept["genesis"], sorted(rows), rows.get)
    return verify_history(kept, VirtualSignatureVerifier(), CAPABILITIES.verifiers)


def agreed_by_all(swarm: VirtualSwarm, body: VertexBody) -> bytes:
    """A vertex that every voter signed, whatever is in it: voters that lie together."""
    raw = encode(body)
    vote = Vote(body.round, 0, "commit", vertex_id(raw))
    signed = [(name, VirtualSigner(name).sign(signed_bytes(swarm.run_id, encode(vote)))) for name in swarm.founders]
    return encode(Vertex(raw, QuorumCertificate(body.round, 0, "commit", vertex_id(raw), tuple(sorted(signed)))))


def test_verify_finds_a_return_and_its_reasons_again():
    swarm = swarm_of()
    reach(swarm, 14)
    rows = rows_of(swarm)
    audit = verified(swarm, rows)
    ((round, back),) = returns(swarm)
    state = history_of(swarm).bodies[back].state.hex()
    assert audit.intact, audit.problems
    assert audit.returns == [RollbackRecord(round, back, state, 6, "validators")]


@pytest.mark.parametrize("lack", ["no reason", "elsewhere"])
def test_verify_does_not_believe_a_return_that_reports_do_not_demand(lack: str):
    """All voters lie together in one vertex: no validator found anything bad, or the return goes elsewhere."""
    swarm = swarm_of(bad=BAD if lack == "elsewhere" else ())
    reach(swarm, 14)
    rows = rows_of(swarm)
    bodies = {round: decode_body(decode_vertex(row).body) for round, row in rows.items()}
    round = next((r for r, b in bodies.items() if amend_of(b) is not None), 9)
    parent, goal = bodies[round - 1], bodies[3]
    amend = RollbackOrder(
        vertex_id(decode_vertex(rows[round - 1]).body),
        3,
        vertex_id(decode_vertex(rows[3]).body),
        goal.state,
        goal.trained,
        b"",
    )
    word = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier()).sign(amend)
    others = tuple(s for s in bodies[round].reports if not amends_in([s]))
    forged = replace(bodies[round], reports=(word, *others), trained=goal.trained, state=parent.state)
    rows = {r: row for r, row in rows.items() if r < round} | {round: agreed_by_all(swarm, forged)}
    (problem,) = verified(swarm, rows).problems
    assert (problem.code, problem.round) == ("E-VER-08", round) and "may not stand in a vertex" in problem.what


def test_verify_takes_a_return_at_its_word_where_reasons_are_lost():
    """The vertex with the reports is missing from this folder: that is the only problem."""
    swarm = swarm_of()
    reach(swarm, 14)
    rows = rows_of(swarm)
    ((round, _),) = returns(swarm)
    del rows[round - 1]
    audit = verified(swarm, rows)
    assert [p.code for p in audit.problems] == ["E-VER-03"] and len(audit.returns) == 1


def test_verify_believes_no_such_return_in_a_run_that_nobody_validates_even_beside_a_hole():
    swarm = VirtualSwarm(3, SwarmKnobs(peers=4))
    reach(swarm, 12)
    rows = rows_of(swarm)
    body, goal, last = (decode_body(decode_vertex(rows[round]).body) for round in (10, 3, 9))
    after, to = (vertex_id(decode_vertex(rows[round]).body) for round in (9, 3))
    word = RollbackOrder(after, 3, to, goal.state, goal.trained, b"")
    signed = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier()).sign(word)
    forged = replace(body, reports=(signed,), trained=goal.trained, state=last.state)
    rows = {r: row for r, row in rows.items() if r < 10 and r != 7} | {10: agreed_by_all(swarm, forged)}
    found = [(p.code, p.round) for p in verified(swarm, rows).problems]
    assert found == [("E-VER-03", 7), ("E-VER-08", 10)]


def test_losses_are_answers_to_a_job_and_to_no_other():
    """A job under another name, or an answer that is none, moves nothing."""
    swarm = swarm_of(bad=())
    reach(swarm, 3)
    validators = swarm.world.nodes[ADA].machine.verifiers.find(StateValidationMachine)
    before = validators.looking
    assert validators.on_task_done(TaskDone("validate/hold", None), 0.0) == [] and validators.looking == before
    assert validators.on_task_done(TaskDone("validate/999", ValidationLosses((1.0,))), 0.0) == []
    assert not any(isinstance(e, RunTask) for e in validators.on_task_done(TaskDone("validate/999", None), 0.0))


@cache
def mixed() -> tuple[VirtualSwarm, dict[int, bytes]]:
    """Audits, records, pieces, paced windows and validators with reports two rounds late; one return."""
    knobs = SwarmKnobs(peers=5)
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds", window_min_s=1.0)
    mix = {"audit_rate": 0.6, "reputation": True, "coded": ErasureParams(2, 3, 2), "witnessed": True}
    knobs.run = replace(knobs.run, round=plan, validation=StateValidationTerms(), **mix)
    swarm = VirtualSwarm(5, knobs, island=audited_islands({}))
    for node in swarm.world.nodes.values():
        island = node.island
        island.losses = lambda state: (
            9.0 if msgspec.msgpack.decode(state, type=VirtualState).round in range(8, 12) else 1.0,
        )
        island.takes_s = lambda work, takes=island.takes_s: (
            3.0 if isinstance(work, MeasureValidationLoss) else takes(work)
        )
    reach(swarm, 22, within_s=900)
    rows = rows_of(swarm)
    assert len(returns(swarm)) == 1 and verified(swarm, rows).intact
    return swarm, rows


JUNK = SignedStatement(BOB, b"\xc1 Validated Amend", b"")
DAMAGE = {
    "a number": lambda body: replace(body, time_s=body.time_s + 0.001),
    "the state": lambda body: replace(body, state=body.parent),
    "members": lambda body: replace(body, members=body.members[:1]),
    "a report": lambda body: replace(body, reports=(JUNK, *body.reports)),
    "a commitment": lambda body: replace(body, commits=(JUNK, *body.commits)),
}


@pytest.mark.parametrize("what", [*DAMAGE, "all of it"])
def test_one_damaged_vertex_is_one_problem_wherever_it_lies(what: str):
    """Its draws, its reports and the rollback to it count against no later vertex; unreadable bytes end no walk."""
    swarm, rows = mixed()
    for round in range(max(rows)):
        vertex = decode_vertex(rows[round])
        if what == "all of it":
            damaged = {r: row for r, row in rows.items() if r != round}
        else:
            body = DAMAGE[what](decode_body(vertex.body))
            damaged = rows | {round: encode(replace(vertex, body=encode(body)))}
        found = [(p.code, p.round) for p in verified(swarm, damaged).problems]
        assert found == [("E-VER-03" if what == "all of it" else "E-VER-05", round)]


def test_words_after_a_lost_vertex_are_judged_by_those_that_are_here():
    """Only what was drawn up to it is taken at its word."""
    swarm, rows = mixed()
    liar = StatementSigner(swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier())
    here = {r: row for r, row in rows.items() if r < 10 and r != 7}
    body = decode_body(decode_vertex(rows[10]).body)
    for of, codes in ((6, ["E-VER-03"]), (9, ["E-VER-03", "E-VER-08"])):
        word = liar.sign(HeldOutLossReport(of, body.state, (1, 2, 3)))
        forged = agreed_by_all(swarm, replace(body, reports=(word, *body.reports)))
        assert [p.code for p in verified(swarm, here | {10: forged}).problems] == codes


def test_blame_finds_the_round_that_held_out_data_shows_to_have_done_harm():
    """States 6 and 7 are bad, whatever commitments say; the one after the return is compared with that before 6."""
    swarm = swarm_of()
    reach(swarm, 12)
    history = history_of(swarm)
    found = blame_by_validation(history.bodies, history.ids, ValidationLedger(StateValidationTerms(), "two-thirds"))
    peers, judged = found
    risen = [j for j in judged if j.by]
    assert [(j.round, j.opinion, j.by, j.losses) for j in risen] == [(6, "bad", 8.0, (9.0,))]
    assert len(risen[0].counted) == 4 and all(j.opinion == "good" for j in judged if j.round not in BAD)
    assert {p.peer for p in peers} == {ADA, BOB, CARL, DORA}
    assert all((p.worst, p.worst_round) == (8.0, 6) for p in peers)
