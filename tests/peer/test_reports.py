"""Reports on their way into a vertex: a flooding sender keeps no other member out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.limits import REPORT_BYTES_MAX, REPORTS_BYTES_MAX, REPORTS_PER_VERTEX_MAX
from atoll.base.machine import Emit, Send, expand_broadcasts
from atoll.crypto.digest import digest
from atoll.peer.membership.report_broadcaster import WRITERS_TOLD
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.round.candidate import named_in
from atoll.peer.round.vertex_body import open_report
from atoll.protocol.membership.failure_detector import PeerSuspected
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import (
    Accusation,
    JoinRequest,
    LeaveReport,
    OwnerResult,
    RoundOptOutNotice,
    SignedStatement,
    SuspicionReport,
    TicketInvite,
)

ME, HONEST, VILLAIN = peer_name(0), peer_name(1), peer_name(2)


class Stand:
    """The pool of one peer of four."""

    def __init__(self) -> None:
        self.swarm = VirtualSwarm(1, SwarmKnobs(4))
        self.swarm.world.run(0.5)
        self.pool: ReportPool = self.swarm.world.nodes[ME].machine.pool
        self.head = self.pool.history.head_id

    def sign(self, statement, by: PeerId) -> SignedStatement:
        return StatementSigner(self.swarm.run_id, VirtualSigner(by), VirtualSignatureVerifier()).sign(statement)

    def adds(self, statement, by: PeerId) -> bool:
        pooled = self.pool.add(self.sign(statement, by), 0.5)
        return pooled is not None and pooled.fresh

    def join(self, name: str) -> bool:
        signer = VirtualSigner(PeerId(name))
        join = JoinRequest(signer.peer, signer.vote_key, signer.certificate, (), "trainer", name, self.head, b"")
        return self.adds(join, signer.peer)

    def invite(self, k: int, by: PeerId = VILLAIN) -> bool:
        return self.adds(TicketInvite(k.to_bytes(16, "big"), bytes(32), "trainer", 1, 1e6), by)

    def caught(self, names: int, by: PeerId = VILLAIN) -> SignedStatement:
        """Of itself: a liar may sign an answer of any length."""
        crowd = tuple(PeerId(f"{k:052}") for k in range(names))
        answer = self.sign(OwnerResult(0, 0, 0, 0, digest(b"x"), 8, crowd), by)
        return self.sign(Accusation(answer), by)

    def crowd(self, voters: int) -> list[PeerId]:
        """This many members vote now; two suspicions put one of them away."""
        history = self.pool.history
        body = history.head_body
        names = [peer_name(k) for k in range(voters)]
        members = [replace(body.members[0], peer=p, vote_key=VirtualSigner(p).vote_key) for p in names]
        history.bodies[history.head] = replace(body, members=tuple(members))
        return names

    def chosen(self) -> set[PeerId]:
        return {signed.signer for signed in self.pool.chosen()}


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_a_report_that_would_fill_the_vertex_is_none(stand: Stand):
    """One accusation of 300 kB, and no join or farewell would ever have been carried again."""
    long = stand.caught(REPORT_BYTES_MAX // 50)
    assert open_report(stand.pool.notary, long, {VILLAIN: VirtualSigner(VILLAIN).vote_key}) is None
    assert stand.pool.add(long, 0.5) is None


def test_short_reports_are_carried_before_long_ones(stand: Stand):
    """Three accusations as long as they may be come first; the farewell behind them is carried all the same."""
    for villain in (VILLAIN, peer_name(3), HONEST):
        assert stand.pool.add(stand.caught(REPORT_BYTES_MAX // 60, villain), 0.5) is not None
    assert sum(len(s.body) for s in stand.pool.pool.values()) > REPORTS_BYTES_MAX
    assert stand.adds(LeaveReport(0, "bye"), ME)
    assert ME in stand.chosen()


def test_a_flood_displaces_only_its_own_words(stand: Stand):
    """The villain fills the pool; a member with fewer reports still finds a place, and the villain no other."""
    for k in range(REPORTS_PER_VERTEX_MAX):
        assert stand.invite(k)
    assert not stand.invite(REPORTS_PER_VERTEX_MAX)
    assert stand.join("newcomer") and stand.adds(LeaveReport(0, "bye"), HONEST)
    assert len(stand.pool) == REPORTS_PER_VERTEX_MAX and {PeerId("newcomer"), HONEST} <= stand.chosen()


def test_strangers_together_are_one_voice(stand: Stand):
    """New identities are free: a pool full of joins still takes a member's word."""
    for k in range(REPORTS_PER_VERTEX_MAX):
        assert stand.join(f"stranger {k}")
    assert not stand.join("one more")
    assert stand.adds(LeaveReport(0, "bye"), HONEST)


def test_a_crowd_that_rests_keeps_nobody_from_coming_or_going(stand: Stand):
    """More members rest than a vertex carries reports, each with one report; only they give way."""
    history = stand.pool.history
    body, ahead = history.head_body, history.head + 1
    crowd = [replace(body.members[0], peer=PeerId(f"m{k}")) for k in range(REPORTS_PER_VERTEX_MAX)]
    history.bodies[history.head] = replace(body, members=(*body.members, *crowd))
    for member in crowd:
        stand.pool.pool["RoundOptOutNotice", member.peer, ""] = stand.sign(RoundOptOutNotice(ahead), member.peer)
    assert not stand.adds(RoundOptOutNotice(ahead), HONEST)
    assert stand.join("newcomer") and stand.adds(LeaveReport(0, "bye"), HONEST)
    assert len(stand.pool) == REPORTS_PER_VERTEX_MAX and {PeerId("newcomer"), HONEST} <= stand.chosen()


@pytest.mark.parametrize("wrong", [{"ticket": b"t" * 1000}, {"key": b"k" * 1000}])
def test_an_invitation_that_would_make_every_vertex_longer_is_refused(stand: Stand, wrong: dict):
    """Tickets travel in every body until they expire."""
    fields = {"ticket": b"t" * 16, "key": bytes(32), "role": "trainer", "uses": 1, "expires_s": 1e6} | wrong
    assert stand.pool.add(stand.sign(TicketInvite(**fields), VILLAIN), 0.5) is None


def test_words_of_one_that_said_farewell_still_prove_its_lie(stand: Stand):
    """Its key stays in the membership: a member that leaves before it is caught is caught all the same."""
    history = stand.pool.history
    gone = tuple(replace(m, standing="away") if m.peer == VILLAIN else m for m in history.head_body.members)
    history.bodies[history.head] = replace(history.head_body, members=gone)
    words = [stand.sign(OwnerResult(0, 0, 0, 0, digest(made), 8, (ME,)), VILLAIN) for made in (b"x", b"y")]
    assert stand.adds(Accusation(*words), HONEST)
    stand.pool.settle(history.head_body)
    assert HONEST in stand.chosen()
    assert not stand.adds(Accusation(words[0], words[1]), VILLAIN)  # it has no voice itself


def test_one_proof_against_a_liar_is_enough(stand: Stand):
    """Two statements for one slot prove themselves: another pair, and voices, are dropped."""
    words = [stand.sign(OwnerResult(0, 0, 0, 0, digest(made), 8, (ME,)), VILLAIN) for made in (b"x", b"y", b"z")]
    assert stand.adds(Accusation(words[0], words[1]), HONEST)
    assert stand.pool.proves(Accusation(words[0]))
    for more in (Accusation(words[0], words[2]), Accusation(words[2])):
        assert not stand.adds(more, peer_name(3))
    assert len(stand.pool) == 1


def test_what_gives_way_first_is_what_fewest_say(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    """The loudest reporter keeps what others report, too: an accusation shared by many soon has enough."""
    monkeypatch.setattr("atoll.peer.membership.report_pool.VOICES_MAX", 8)
    names = stand.crowd(40)
    loud, shared = names[1], names[-1]
    for accused, by in (
        (shared, names[2]),
        (shared, loud),
        *((p, loud) for p in names[5:10]),
        (names[20], names[4]),
    ):
        assert stand.adds(SuspicionReport(0, accused, "silent"), by)
    assert not stand.adds(SuspicionReport(0, names[10], "silent"), loud)
    assert stand.adds(SuspicionReport(0, names[21], "silent"), names[3])
    kept = {target for _, by, target in stand.pool.pool if by == loud}
    assert len(stand.pool) == 8 and len(kept) == 5 and shared in kept


def test_among_many_voices_have_a_room_of_their_own(stand: Stand):
    """A member that fills the pool with invitations keeps no suspicion out, and the other way round."""
    stand.crowd(40)
    for k in range(REPORTS_PER_VERTEX_MAX):
        assert stand.invite(k)
    assert stand.adds(SuspicionReport(0, VILLAIN, "silent"), HONEST)
    assert len(stand.pool) == REPORTS_PER_VERTEX_MAX + 1


def test_among_many_a_suspicion_is_of_its_round(stand: Stand):
    """Silent for a moment now and for another one in twenty rounds: that is no reason to go."""
    stand.crowd(40)
    assert stand.adds(SuspicionReport(0, VILLAIN, "silent"), HONEST)
    stand.pool.settle(replace(stand.pool.history.head_body, round=0))
    assert len(stand.pool) == 1
    stand.pool.settle(replace(stand.pool.history.head_body, round=1))
    assert len(stand.pool) == 0


def test_among_many_a_vertex_carries_as_many_voices_as_count_or_none(stand: Stand):
    """Of forty voters two suspicions are enough: a third is not remembered, a lonely one stays behind. Of four all
    are carried."""
    assert stand.adds(SuspicionReport(0, VILLAIN, "silent"), HONEST)
    assert HONEST in stand.chosen()
    names = stand.crowd(40)
    assert stand.chosen() == set()
    assert stand.adds(SuspicionReport(0, VILLAIN, "silent"), names[7])
    assert not stand.adds(SuspicionReport(0, VILLAIN, "silent"), names[8])
    assert stand.adds(SuspicionReport(0, names[3], "silent"), names[9])
    assert stand.chosen() == {HONEST, names[7]}
    stand.pool.withdraw_suspicion(names[7], VILLAIN)
    assert stand.chosen() == set()


@pytest.mark.parametrize("voters", [4, 40])
def test_no_suspicion_of_whom_the_writer_hears_goes_into_its_vertex(stand: Stand, voters: int):
    """It waits in the pool, and goes along once the writer misses the same peer."""
    names = stand.crowd(voters)
    for by in (HONEST, names[3]):
        assert stand.adds(SuspicionReport(0, VILLAIN, "silent"), by)
    assert stand.pool.chosen(lambda peer: peer != VILLAIN) == []
    assert {s.signer for s in stand.pool.chosen(lambda peer: peer == VILLAIN)} == {HONEST, names[3]}


def test_who_was_silent_for_a_moment_and_gives_nothing_keeps_its_vote():
    """Five members; all suspect the fifth, which slept for eight seconds of a round and then failed to train."""
    run = SwarmKnobs().run
    run = replace(run, round=replace(run.round, first_train_s=30.0))
    swarm = VirtualSwarm(1, SwarmKnobs(5, island=WorkerKnobs(step_s=1.0), run=run))
    world, name = swarm.world, peer_name(4)
    world.nodes[name].island.knobs = WorkerKnobs(step_s=1.0, train_failure_rate=1.0)
    world.at(1.0, lambda: world.sleep(name))
    world.at(9.0, lambda: world.wake(name))
    world.run(9.0)
    assert len(world.nodes[ME].machine.pool.of_kind("SuspicionReport")) == 4
    world.run(60.0, stop=lambda: min(swarm.heads()) >= 0)
    body = world.nodes[ME].machine.history.head_body
    assert body.round == 0 and name not in named_in(body.parts)
    assert [m.votes for m in body.members] == [True] * 5


def test_among_many_only_who_watches_tells_everybody_of_a_silence(stand: Stand):
    """All others begin to watch after that report; their findings go only to the next proposers."""
    machine = stand.swarm.world.nodes[ME].machine
    names = stand.crowd(40)
    machine.heartbeat.set_members(tuple(names), 0.5)
    watched = sorted(machine.heartbeat.chosen)[0]
    other = next(p for p in names[1:] if p not in machine.heartbeat.chosen)

    def told(peer: PeerId) -> int:
        seen = [Emit(PeerSuspected(peer=peer, why="silent"))]
        return sum(isinstance(e, Send) for e in expand_broadcasts(machine.participation.from_heartbeat(seen, 0.5)))

    assert told(watched) == len(names) - 1
    assert 0 < told(other) <= WRITERS_TOLD


def test_among_many_a_silence_that_lasts_is_told_to_the_writers_of_the_next_round(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
):
    """Others forget reports of earlier rounds. A peer that is heard again is not reported."""
    machine = stand.swarm.world.nodes[ME].machine
    names = stand.crowd(40)
    machine.heartbeat.set_members(tuple(names), 0.5)
    silent = next(p for p in names[1:] if p not in machine.heartbeat.chosen)
    machine.participation.from_heartbeat([Emit(PeerSuspected(peer=silent, why="silent"))], 0.5)
    for gone in (True, False):
        monkeypatch.setattr(machine.heartbeat, "is_gone", lambda peer, gone=gone: gone and peer == silent)
        told = [e for e in expand_broadcasts(machine.words.round_begins(1.0)) if isinstance(e, Send)]
        assert 0 < len(told) <= WRITERS_TOLD if gone else told == []
