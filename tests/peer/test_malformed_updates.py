"""Malformed rows: which reports are accepted, which rows are examined, and what is repeated.

One honest peer of four; the test plays the decoder.
"""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Emit, Fact, Received, RunTask, Send, TaskDone, expand_broadcasts
from atoll.crypto.digest import digest, merkle_path, merkle_root
from atoll.peer.events import MemberAccused, ProtocolFault
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import JudgeMalformedRow, MalformedRowJudged
from atoll.policy.ledger import LedgerSet
from atoll.policy.plan import RoundSettings
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.verification.malformed_updates import machine
from atoll.verification.malformed_updates.machine import TOLD_MAX, MalformedUpdates
from atoll.verification.malformed_updates.messages import MalformedRowEvidence, malformed_row_bytes
from atoll.verification.offline import DisputeHistory
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.audits import MalformedRowShown
from atoll.wire.messages.statements import Accusation, Commitment, SignedStatement

ME, EVE, BOB, CID = map(peer_name, range(4))
BLOB = Digest(digest(b"what shows it"))


class Stand:
    def __init__(self) -> None:
        settings = RunSettings(round=RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds"))
        self.swarm = VirtualSwarm(1, SwarmKnobs(4, run=settings))
        self.swarm.world.run(60.0, stop=lambda: min(self.swarm.heads()) >= 2)
        peer = self.swarm.world.nodes[ME].machine
        assert peer is not None
        self.room = peer.verifiers.find(MalformedUpdates)
        self.peer, self.history = peer, peer.known.history

    def row(self, of: PeerId = EVE, round: int | None = None, by: PeerId | None = None) -> MalformedRowEvidence:
        """Of the round under way. `by`: who signed it in its name."""
        names = tuple(digest(b"%d" % part) for part in range(4))
        at = self.history.head + 1 if round is None else round
        commit = Commitment(at, 0, merkle_root(names), 4, 5, 80, 1.0, 0.1, 80)
        signed = StatementSigner(self.swarm.run_id, VirtualSigner(by or of), VirtualSignatureVerifier()).sign(
            commit
        )
        return MalformedRowEvidence(
            replace(signed, signer=of), 1, merkle_path(names, 1), 1, 0, digest(b""), (), b""
        )

    def hears(self, row: MalformedRowEvidence, sender: PeerId = BOB) -> list[Effect]:
        return self.peer.handle(Received(sender, MalformedRowShown(malformed_row_bytes(row))), 60.0)

    def said(self, by: PeerId, round: int) -> SignedStatement:
        """A word that Eve's row of this round cannot be read."""
        notary = StatementSigner(self.swarm.run_id, VirtualSigner(by), VirtualSignatureVerifier())
        return notary.sign(Accusation(self.row(round=round).statement))

    def asked(self, row: MalformedRowEvidence, sender: PeerId = BOB) -> list[str]:
        """Names of jobs."""
        return [
            e.job
            for e in self.hears(row, sender)
            if isinstance(e, RunTask) and isinstance(e.work, JudgeMalformedRow)
        ]

    def finds(self, job: str, looked: MalformedRowJudged) -> list[Effect]:
        return self.peer.handle(TaskDone(job, looked), 60.0)


def told(effects: list[Effect], kind: type[Fact]) -> list:
    return [e.fact for e in effects if isinstance(e, Emit) and isinstance(e.fact, kind)]


def shown_to(effects: list[Effect]) -> list[PeerId]:
    return [
        e.to for e in expand_broadcasts(effects) if isinstance(e, Send) and isinstance(e.message, MalformedRowShown)
    ]


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_what_i_cannot_read_either_i_say_once_and_keep(stand: Stand):
    row = stand.row()
    (job,) = stand.asked(row)
    assert stand.asked(row) == []  # it is being looked at
    found = stand.finds(job, MalformedRowJudged("NaN", blob=BLOB))
    (accused,) = told(found, MemberAccused)
    assert accused.statement == Accusation(row.statement, None, BLOB) and shown_to(found) == []
    assert [kept.exhibit for kept in stand.peer.verifiers.evidence.kept] == [BLOB]
    # the peer that showed it notifies the others
    assert stand.asked(row, CID) == [] == stand.room.on_vertex(stand.history.head_body, 60.0)


def test_who_shows_what_can_be_read_is_blamed_and_not_listened_to_again(stand: Stand):
    row, other = stand.row(), stand.row(of=CID)
    (job,) = stand.asked(row)
    found = stand.finds(job, MalformedRowJudged(fault="it can be read"))
    assert [fault.peer for fault in told(found, ProtocolFault)] == [BOB] and not told(found, MemberAccused)
    assert stand.asked(other) == [] and stand.asked(row, CID) != []


def test_what_its_author_did_not_sign_is_the_fault_of_who_shows_it(stand: Stand):
    for row in (stand.row(by=BOB), replace(stand.row(), leaf=b"another leaf")):
        effects = stand.hears(row)
        assert [fault.peer for fault in told(effects, ProtocolFault)] == [BOB]
        assert not any(isinstance(e, RunTask) and isinstance(e.work, JudgeMalformedRow) for e in effects)


def test_what_nobody_signed_costs_no_plan_of_its_round(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    planned: list[object] = []
    monkeypatch.setattr(machine, "row_work", lambda *which: planned.append(which))
    assert [len(told(stand.hears(stand.row(by=BOB)), ProtocolFault)) for _ in range(3)] == [1] * 3 and not planned
    assert stand.asked(stand.row()) == [] and len(planned) == 1


def test_who_names_everybody_at_once_is_looked_at_for_a_few(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    """Otherwise each of f liars would leave 128 KiB per member in memory."""
    monkeypatch.setattr(machine, "AT_ONCE", 1)
    (job,) = stand.asked(stand.row())
    assert stand.asked(stand.row(of=CID)) == [] and stand.asked(stand.row(of=CID), CID) != []
    stand.finds(job, MalformedRowJudged("NaN", blob=BLOB))
    assert stand.asked(stand.row(of=CID)) != []


def test_nothing_is_looked_at_that_vertices_here_do_not_say_enough_of(stand: Stand):
    """Rounds ahead or long over, rows of unknown authors, known own rows; reports of members without a vote."""
    head = stand.history.head
    for row in (stand.row(round=head + 2), stand.row(round=head - 40), stand.row(of=PeerId("nobody"))):
        assert stand.asked(row) == []
    assert stand.asked(stand.row(), PeerId("stranger")) == []
    assert stand.asked(stand.row(round=head)) != []  # of the round before it is in time


def test_nothing_signed_near_the_beginning_of_an_epoch_is_held_against_anybody(stand: Stand):
    """A recovery may have counted in a member that was on the other branch still: its parts were cut otherwise."""
    bodies, head = stand.history.bodies, stand.history.head
    bodies[head] = replace(bodies[head], epoch=1)
    assert stand.asked(stand.row()) == []
    looked = MalformedRowJudged("NaN", "", stand.row().statement, b"shown", BLOB)
    assert not told(stand.finds(f"malformed/show/{head + 1}/{EVE}", looked), MemberAccused)


def test_nor_where_vertices_are_lacking_that_might_say_that_one_began(stand: Stand):
    """A peer that mends its history holds the newest alone."""
    del stand.history.bodies[stand.history.head - 1]
    assert stand.asked(stand.row()) == []


def test_what_i_found_myself_is_shown_to_all_who_vote_and_again_to_those_who_do_not_say_so(stand: Stand):
    statement: SignedStatement = stand.row().statement
    found = stand.finds(f"malformed/show/3/{EVE}", MalformedRowJudged("NaN", "", statement, b"shown", BLOB))
    assert shown_to(found) == [BOB, CID] and len(told(found, MemberAccused)) == 1
    word = StatementSigner(stand.swarm.run_id, VirtualSigner(BOB), VirtualSignatureVerifier()).sign(
        Accusation(statement)
    )
    assert stand.room.pool.add(word, 60.0) is not None
    assert [shown_to(stand.room.on_vertex(stand.history.head_body, 60.0)) for _ in range(TOLD_MAX + 1)] == [
        [CID]
    ] * TOLD_MAX + [[]]


def test_what_is_too_large_to_be_shown_is_my_word_alone(stand: Stand):
    found = stand.finds(f"malformed/show/3/{EVE}", MalformedRowJudged("NaN", "", stand.row().statement))
    (accused,) = told(found, MemberAccused)
    assert accused.statement.exhibit is UNSET and shown_to(found) == []


def test_a_reader_of_the_history_adds_words_about_several_rounds_up_as_members_did(stand: Stand):
    """Two words of one vertex about two rounds of hers expel Eve; one in each of two vertices do not."""
    head = stand.history.head_body
    gone = tuple(replace(m, standing="expelled") if m.peer == EVE else m for m in head.members)
    first, second = stand.said(BOB, head.round), stand.said(CID, head.round + 1)

    def told(*vertices: tuple[SignedStatement, ...]) -> list[tuple[str, int]]:
        verdicts, before = DisputeHistory(), head
        for words in vertices:
            out = words is vertices[-1]
            body = replace(before, round=before.round + 1, reports=words, members=gone if out else head.members)
            verdicts.follow(body, before, stand.history, LedgerSet(), stand.peer.settings)
            before = body
        return [(doubt.outcome, len(doubt.counted)) for doubt in verdicts.doubts.values()]

    assert told((first, second)) == [("refuted", 1)] * 2
    assert told((first,), (second,)) == [("open", 1)] * 2
    assert told((first,), (first, second)) == [("refuted", 1)] * 2
