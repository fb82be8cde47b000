"""Reputation inputs from one body, read from results, commitments and reports written by hand."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.limits import SCORE_ONE
from atoll.peer.round.reputation import conduct_in, next_scores
from atoll.policy.membership import VerifiedReport
from atoll.policy.plan import RoundPlan, RoundSettings
from atoll.policy.reputation import FLOOR
from atoll.wire.messages.statements import (
    Accusation,
    AnyStatement,
    AuditReport,
    Commitment,
    LeaveReport,
    OwnerComplaint,
    OwnerResult,
    SignedStatement,
)
from atoll.wire.messages.vertex import Member

ADA, BOB, CLEO, DAN, EVE = (PeerId(name) for name in ("ada", "bob", "cleo", "dan", "eve"))
ALL = (ADA, BOB, CLEO, DAN)
OWNERS = tuple((p, *(q for q in ALL if q != p)) for p in ALL)  # of four parts, each with all the others as deputies
BEFORE = dict.fromkeys(ALL, 7000)
VOICES = 2  # of four voters one may lie


def member(peer: PeerId, standing: str = "member") -> Member:
    return Member(peer, b"", (), "trainer", standing, 0, 0.0, "")  # pyright: ignore[reportArgumentType]


def plan(*others: Member, rule: str = "two-thirds") -> RoundPlan:
    settings = RoundSettings(inner_steps=20, quorum=rule)  # pyright: ignore[reportArgumentType]
    members = (*(member(p) for p in ALL), *others)
    return RoundPlan(9, ZERO_DIGEST, ZERO_DIGEST, ALL[0], 0.0, members, settings, 10.0, 4, scores=BEFORE)


def answer(part: int, *names: PeerId, index: int = 0) -> OwnerResult:
    return OwnerResult(9, 0, part, index, ZERO_DIGEST, 1, names)


def commit(loss: float = 2.0, steps: int = 20) -> Commitment:
    return Commitment(9, 0, ZERO_DIGEST, 4, steps, 80, loss, 0.1, 80)


def report(by: PeerId, statement: AnyStatement) -> VerifiedReport:
    return VerifiedReport(by, statement)


WHOLE = tuple(answer(part, *ALL) for part in range(4))
COMMITS = {p: commit() for p in ALL}


def scores(
    *reports: VerifiedReport, of: RoundPlan | None = None, audits: bool = False, answers=WHOLE, commits=COMMITS
):
    of = of or plan()
    found = next_scores(of, OWNERS, audits, of.members, answers, commits, reports=reports)
    return {m.peer: score for m, score in zip(of.members, found, strict=True)}


UP = 7000 + -(-3000 // 16)


def test_a_whole_round_lifts_everybody_alike():
    assert scores() == dict.fromkeys(ALL, UP)


def test_whoever_is_left_out_of_parts_was_there_for_the_others():
    """Cleo's row is in three of four parts, Dan's in none.

    A part without a result shows nothing about any member.
    """
    answers = (answer(0, ADA, BOB, CLEO), answer(1, ADA, BOB, CLEO), answer(2, ADA, BOB, CLEO), None)
    shown = conduct_in(plan(), OWNERS, answers, {p: commit() for p in (ADA, BOB, CLEO)}, ())
    assert (shown[CLEO].counted, shown[CLEO].answered) == (3, 3)
    assert (shown[DAN].counted, shown[DAN].steps, shown[DAN].belief, shown[DAN].duties) == (0, 0, 0, 0)
    assert conduct_in(plan(), OWNERS, (None,) * 4, {}, ()) == {}
    assert scores(answers=(None,) * 4, commits={}) == BEFORE


def test_an_owner_for_whom_another_answered_did_not_take_part():
    answers = (answer(0, *ALL), answer(1, *ALL, index=1), *WHOLE[2:])
    shown = conduct_in(plan(), OWNERS, answers, COMMITS, ())
    assert (shown[BOB].duties, shown[BOB].done) == (1, 0)
    assert (shown[ADA].duties, shown[ADA].done) == (1, 1)


def test_newcomers_are_not_judged_and_their_losses_move_no_median():
    eve = member(EVE, "new")
    commits = {**COMMITS, EVE: commit(loss=9e9)}
    answers = tuple(answer(part, *ALL, EVE) for part in range(4))
    found = scores(of=plan(eve), answers=answers, commits=commits)
    assert found == {**dict.fromkeys(ALL, UP), EVE: FLOOR}


def test_a_farewell_is_no_lapse_unless_its_round_was_missed_silently():
    answers = tuple(answer(part, ADA, BOB, CLEO) for part in range(4))
    commits = {p: commit() for p in (ADA, BOB, CLEO)}
    assert scores(report(DAN, LeaveReport(9, "")), answers=answers, commits=commits)[DAN] == 7000
    assert scores(answers=answers, commits=commits)[DAN] == 7000 - 5000 // 4  # it still answered for its part
    assert scores(report(DAN, LeaveReport(9, "")))[DAN] == UP  # it gave its update first


def test_a_conviction_ends_a_record_at_once_and_one_voice_does_nothing():
    """Evidence alone; complaints, withheld audits and refutations by enough voices; not where members trust."""
    said = SignedStatement(BOB, b"", b"")
    for statement, needed in (
        (Accusation(said, said), 1),
        (OwnerComplaint(9, BOB, "withheld"), VOICES),
        (AuditReport(8, BOB, "withheld"), VOICES),
        (AuditReport(8, BOB, "wrong"), VOICES),
    ):
        reports = [report(p, statement) for p in (ADA, CLEO)]
        assert scores(*reports[:needed])[BOB] == FLOOR
        assert scores(*reports[: needed - 1])[BOB] == UP
        assert scores(*reports, of=plan(rule="majority"))[BOB] == UP
    expelled = plan()
    expelled = replace_members(expelled, BOB, "expelled")
    assert scores(of=expelled)[BOB] == FLOOR


def test_an_accepted_audit_lifts_above_what_words_can_and_only_who_is_settled():
    accepted = report(ADA, AuditReport(8, BOB, "accepted"))
    found = scores(accepted, accepted, audits=True)
    assert found[BOB] == 7000 + 3000 // 4 and found[CLEO] == 7000  # claims raise no member above 6 000
    assert scores(accepted)[BOB] == UP + -(-(SCORE_ONE - UP) // 4)
    assert scores(accepted, of=replace_members(plan(), BOB, "away"), audits=True)[BOB] == 7000


def replace_members(of: RoundPlan, peer: PeerId, standing: str) -> RoundPlan:
    lines = tuple(replace(m, standing=standing) if m.peer == peer else m for m in of.members)
    return dataclasses.replace(of, members=lines)
