"""Settings change by the recovery identity: valid for all from one vertex on, and by no other identity."""

from __future__ import annotations

import pytest
from amendable import BOB, CARL, CREATOR, DORA, EVE, as_creator, history_of, reach, swarm_of
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact, Received
from atoll.base.workload import AdaptiveWorkloadPolicy
from atoll.capabilities import CAPABILITIES
from atoll.peer import operator_commands
from atoll.peer.events import ProtocolFault, RunOver
from atoll.peer.governance.orders import goal_of, tunes_in, word_bytes
from atoll.peer.governance.settings_change import why_not, with_numbers
from atoll.peer.round.vertex_body import check_body, write_body
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import TrainRound
from atoll.peer.verify.chain import HistoryVerificationReport, SettingsRecord, StoredHistory, verify_history
from atoll.policy.plan import RoundSettings, StragglerPolicy
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner, sign_as_identity
from atoll.simulation.swarm import VirtualSwarm
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import (
    ChangeableSettings,
    ChangedSettings,
    ChangeSettings,
    PauseOrder,
    RollbackOrder,
    SignedStatement,
)
from atoll.wire.messages.vertex import VertexBody

PACED = RoundSettings(inner_steps=20, train_max_s=600.0, acceptance=StragglerPolicy(2, 5), window_min_s=1.5)


def head_of(swarm: VirtualSwarm, name: PeerId = CREATOR) -> VertexBody:
    return history_of(swarm, name).head_body


def say(swarm: VirtualSwarm, **numbers: float) -> None:
    node = swarm.world.nodes[CREATOR]
    local = node.clock.local(swarm.world.now)
    swarm.world.carry_out(
        node, operator_commands.tune(node.machine, ChangeableSettings(**numbers), as_creator, local)
    )


def until_all(swarm: VirtualSwarm, **numbers: float) -> VertexBody:
    """The vertex with the order, once every running member follows it."""
    say(swarm, **numbers)
    up = [n.name for n in swarm.honest if n.machine is not None]

    def held(body: VertexBody) -> bool:
        return body.tuned is not UNSET and all(getattr(body.tuned.to, k) == v for k, v in numbers.items())

    swarm.world.run(swarm.world.now + 120.0, stop=lambda: all(held(head_of(swarm, name)) for name in up))
    bodies = swarm.world.nodes[CREATOR].machine.history.bodies
    return bodies[min(round for round, body in bodies.items() if held(body))]


def audited(swarm: VirtualSwarm) -> HistoryVerificationReport:
    node = swarm.world.nodes[CREATOR]
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}
    return verify_history(
        StoredHistory(swarm.run_id, node.kept["genesis"], sorted(rows), rows.get),
        VirtualSignatureVerifier(),
        CAPABILITIES.verifiers,
    )


def signed_by(
    swarm: VirtualSwarm, name: PeerId, word: ChangeSettings | RollbackOrder | PauseOrder, identity: PeerId = CREATOR
) -> SignedStatement:
    made = replace(word, signature=sign_as_identity(identity.encode(), word_bytes(swarm.run_id, word)))
    return StatementSigner(swarm.run_id, VirtualSigner(name), VirtualSignatureVerifier()).sign(made)


def steps_asked(swarm: VirtualSwarm) -> list[TrainRound]:
    """What trainers are asked for from now on, also those of members that come later."""
    asked: list[TrainRound] = []
    for node in swarm.world.nodes.values():
        node.island.takes_s = lambda work, takes=node.island.takes_s: (
            (asked.append(work) if isinstance(work, TrainRound) else None) or takes(work)
        )
    return asked


def test_new_numbers_hold_for_all_from_one_vertex_on():
    """Dora misses the vertex, Bob restarts, Eve joins later; rounds have the new length and the run its new end."""
    swarm = swarm_of(rounds=40)
    reach(swarm, 3)
    swarm.world.crash(DORA)
    held = until_all(swarm, inner_steps=5, rounds=12)
    assert held.tuned == ChangedSettings(
        ChangeableSettings(rounds=12, inner_steps=5), held.trained, 20 * held.trained
    )
    asked = steps_asked(swarm)
    swarm.join(4, via=CARL)
    swarm.world.start(DORA)
    swarm.world.crash(BOB)
    swarm.world.start(BOB)
    over: list[PeerId] = []

    def watch(now: Seconds, node: object, fact: Fact) -> None:
        over.append(node.name) if isinstance(fact, RunOver) else None

    swarm.world.watchers.append(watch)
    swarm.world.run(swarm.world.now + 300, stop=lambda: set(over) == {CREATOR, BOB, CARL, DORA, EVE})
    assert set(over) == {CREATOR, BOB, CARL, DORA, EVE}
    assert head_of(swarm).trained == 12 and {m.standing for m in head_of(swarm).members} == {"member"}
    later = [work.steps for work in asked if work.round > held.round]
    assert later and set(later) == {5}
    audit = audited(swarm)
    assert audit.intact and audit.tunes == [SettingsRecord(held.round, {"rounds": 12, "inner_steps": 5})]


def test_a_run_that_is_over_goes_on_when_it_has_more_rounds():
    """Four members stay when their five rounds are over; one of them is down when the word is said. Eras end with
    the run each time, and start anew."""
    swarm = swarm_of(rounds=5, era_rounds=3)
    swarm.world.run(swarm.world.now + 300, stop=lambda: all(n.machine.over for n in swarm.honest))
    end = head_of(swarm)
    swarm.world.run(swarm.world.now + 60)
    assert (end.trained, head_of(swarm).round) == (5, end.round)  # nothing happens by itself
    with pytest.raises(ValueError, match="asks for 5 rounds, but 5 will have trained"):
        say(swarm, rounds=5)
    swarm.world.crash(CARL)
    held = until_all(swarm, rounds=7)
    assert (held.round, held.trained, held.state) == (end.round + 1, 5, end.state)
    swarm.world.start(CARL)
    swarm.world.run(swarm.world.now + 200, stop=lambda: all(n.machine.over for n in swarm.honest if n.machine))
    assert [head_of(swarm, p).trained for p in (CREATOR, BOB, CARL, DORA)] == [7] * 4
    assert swarm.world.nodes[CARL].machine.over and audited(swarm).intact


def test_going_back_has_the_old_numbers_again_and_starting_over_keeps_them():
    """First 10 steps, then 5; back to between the two, then to before both; an epoch changes nothing."""
    swarm = swarm_of()
    reach(swarm, 2)
    node = swarm.world.nodes[CREATOR]
    first = until_all(swarm, inner_steps=10)
    reach(swarm, first.round + 2)
    second = until_all(swarm, inner_steps=5)
    assert second.tuned.steps == first.tuned.steps + 10 * (second.trained - first.trained)
    history = node.machine.history
    for round, tuned in ((first.round, first.tuned), (1, UNSET)):
        goal = goal_of(history.bodies[round], history.ids[round])
        local = node.clock.local(swarm.world.now)
        swarm.world.carry_out(node, operator_commands.go_back(node.machine, goal, as_creator, local))
        swarm.world.run(swarm.world.now + 60, stop=lambda tuned=tuned: head_of(swarm).tuned == tuned)
        assert head_of(swarm).tuned == tuned and head_of(swarm).trained == goal.trained
    third = until_all(swarm, inner_steps=7)
    assert third.tuned.steps == 20 * third.trained
    for name in (BOB, CARL, DORA):
        swarm.world.crash(name)
    swarm.world.run(swarm.world.now + 60)
    swarm.world.carry_out(
        node, operator_commands.recover(node.machine, as_creator, node.clock.local(swarm.world.now))
    )
    swarm.world.run(swarm.world.now + 60)
    assert head_of(swarm).epoch == 1 and head_of(swarm).tuned == third.tuned
    assert audited(swarm).intact


def test_numbers_asked_for_while_others_wait_for_their_vertex_come_with_them():
    """Ordered twice in one round: a member keeps one such order per signer, and a vertex with one voids others."""
    swarm = swarm_of()
    reach(swarm, 2)
    say(swarm, lr=0.5, rounds=60)
    assert until_all(swarm, rounds=50).tuned.to == ChangeableSettings(lr=0.5, rounds=50)
    assert until_all(swarm, lr=0.25).tuned.to == ChangeableSettings(lr=0.25, rounds=50)


def test_a_word_that_is_forged_or_old_changes_nothing_and_no_body_may_hold_what_nobody_said():
    """Bob signs with his own identity, says an old word again, and bodies claim numbers that no word gave them."""
    swarm = swarm_of()
    reach(swarm, 3)
    peer = swarm.world.nodes[CREATOR].machine
    held = until_all(swarm, lr=0.5)
    ((old, _),) = tunes_in(held.reports)
    forged = signed_by(swarm, BOB, ChangeSettings(peer.history.head_id, ChangeableSettings(lr=9.0), b""), BOB)
    effects = peer.handle(Received(BOB, ReportMessage(forged)), swarm.world.now)
    (fault,) = [e.fact for e in effects if hasattr(e, "fact") and isinstance(e.fact, ProtocolFault)]
    assert fault.peer == BOB and "wants to change numbers in a name that is not its own" in fault.what
    assert "is out of date" in (peer.pool.add(old, swarm.world.now).wrong or "")
    reach(swarm, held.round + 2)
    say(swarm, lr=0.25)
    rival = signed_by(
        swarm, BOB, ChangeSettings(peer.history.ids[peer.history.head - 1], ChangeableSettings(lr=0.125), b"")
    )
    assert peer.pool.add(rival, swarm.world.now).fresh and len(tunes_in(peer.pool.chosen())) == 1
    ground, now = peer.round.ground, swarm.world.now
    nothing = [None] * len(ground.owners)
    body = write_body(ground, peer.notary, 0, nothing, {}, peer.pool.chosen(), state=ground.parent.state, now=now)
    assert check_body(ground, peer.notary, body, now) is None and body.tuned.to.lr in (0.25, 0.125)
    said = tunes_in(peer.pool.pool.values())
    goal = goal_of(peer.history.bodies[1], peer.history.ids[1])
    goes = RollbackOrder(peer.history.head_id, goal.round, goal.id, goal.state, goal.trained, b"")
    back = signed_by(swarm, BOB, goes)
    lies = {
        "changes numbers twice": replace(body, reports=tuple(signed for signed, _ in said)),
        "do not follow from its reports": replace(body, tuned=held.tuned),
        "of the run do not follow": replace(body, tuned=replace(body.tuned, steps=1)),
        "may not stand": replace(body, reports=(forged,)),
        "as it goes back": replace(body, reports=(back, *body.reports), trained=goal.trained),
    }
    for why, lie in lies.items():
        assert why in (check_body(ground, peer.notary, lie, now) or ""), why


def test_numbers_that_make_no_sense_here_are_refused_by_every_voter():
    """Each against a run that waits for two updates, shortens its windows and audits no member, after five
    rounds.
    """
    swarm = swarm_of(round=PACED)
    reach(swarm, 5)
    settings, parent = swarm.world.nodes[CREATOR].machine.settings, head_of(swarm)
    refused = {
        "already in effect": ChangeableSettings(),
        "not a finite number": ChangeableSettings(lr=float("inf")),
        "does not have: audits": ChangeableSettings(audit_rate=0.1),
        "rounds in minutes": ChangeableSettings(round_time_s=60.0),
        "run.min_peers (9) above run.start_peers": ChangeableSettings(min_peers=9),
        "run.suspect (6) above a fifth of consensus.timeout (2)": ChangeableSettings(owner_s=2.0),
        "a fifth of consensus.timeout_min (7)": ChangeableSettings(window_min_s=7.0),
        "run.first_train (180) above run.train_max (60)": ChangeableSettings(train_max_s=60.0),
        f"asks for {parent.trained + 1} rounds": ChangeableSettings(rounds=parent.trained + 1),
    }
    assert [why for why, numbers in refused.items() if why not in why_not(settings, parent, numbers)] == []
    assert (
        why_not(settings, parent, ChangeableSettings(rounds=parent.trained + 2, updates=3, grace=1, owner_s=9.0))
        == ""
    )


def test_what_a_round_goes_by_is_genesis_and_the_numbers_of_its_vertex():
    to = ChangeableSettings(
        rounds=9, owner_s=10.0, updates=3, grace=1, train_max_s=700.0, start_peers=3, round_time_s=90.0
    )
    genesis = RunSettings(round=replace(PACED, effort=AdaptiveWorkloadPolicy(4, train_s=60.0)))
    after = with_numbers(genesis, to)
    assert (after.rounds, after.start_peers, after.min_peers) == (9, 3, 1)
    assert (after.round.owner_s, after.round.agree_s, after.round.train_max_s) == (10.0, 20.0, 700.0)
    assert (after.round.acceptance, after.round.effort) == (
        StragglerPolicy(3, 1),
        AdaptiveWorkloadPolicy(4, train_s=90.0),
    )
    assert replace(after, rounds=0, start_peers=1, round=genesis.round) == genesis
