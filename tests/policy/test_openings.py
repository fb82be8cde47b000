"""Openings: which blocks are opened, to which checkers, and what expels an owner, from vertices alone."""

from __future__ import annotations

from itertools import product

import pytest

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.limits import AUDIT_ROUNDS, AUDIT_TURN
from atoll.crypto.digest import digest
from atoll.policy.capability_terms import SumCheckTerms
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.membership_change import next_members
from atoll.verification.replay_audit.policy import AuditLedger
from atoll.verification.sum_check.policy import SumSpotCheck, drawn_blocks, openings_of
from atoll.wire.codec import encode
from atoll.wire.messages.statements import AuditReport, Finding, OwnerResult, SignedStatement
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

NAMES = tuple(PeerId(name) for name in ("ada", "bob", "cid", "dan", "eve", "fay", "gus"))
TERMS = SumCheckTerms(0.1, 1000)
RUN = digest(b"run")


def body_of(
    round: int, reports: tuple[SignedStatement, ...] = (), size: int = 100_000, parts: int = 7
) -> VertexBody:
    """Part k is answered by member k; parts of 100 blocks, so that ten of each are drawn."""
    members = tuple(Member(p, b"key " + p.encode(), (), "trainer", "member", 0, 0.1, p) for p in NAMES)
    answers = tuple(
        SignedStatement(
            NAMES[k], encode(OwnerResult(round, 0, k, 0, ZERO_DIGEST, size, NAMES, made_of=ZERO_DIGEST)), b""
        )
        for k in range(parts)
    )
    numbers = SwarmRoundMetrics(1.0, 1, 1)
    return VertexBody(
        RUN, round, 0, ZERO_DIGEST, 1.0, NAMES[0], answers, ZERO_DIGEST, (), members, (), reports, numbers
    )


def docket_of(*reports: tuple[SignedStatement, ...]) -> AuditLedger:
    """Round 7 was answered; each later vertex carries these reports and no answers."""
    docket = AuditLedger(0.0, "two-thirds", TERMS)
    bodies = {7: body_of(7)} | {8 + k: body_of(8 + k, said, parts=0) for k, said in enumerate(reports)}
    docket.follow(max(bodies), {round: digest(b"%d" % round) for round in bodies}, bodies)
    return docket


def first_of(docket: AuditLedger) -> SumSpotCheck:
    opening = min(docket.cases.values(), key=lambda case: case.key)
    assert isinstance(opening, SumSpotCheck)
    return opening


def found(opening: SumSpotCheck, by: PeerId, finding: Finding) -> SignedStatement:
    return SignedStatement(by, encode(AuditReport(opening.round, opening.peer, finding, opening.number)), b"")


# ---- what is drawn -----------------------------------------------------------------------------------------


def test_a_share_of_all_blocks_is_drawn_and_each_as_often_as_another():
    """Also where the share is less than a block: then one is drawn in some rounds."""
    for blocks, share in ((200, 0.03), (7, 0.03), (1, 0.03), (50, 0.5)):
        seen, total = dict.fromkeys(range(blocks), 0), 0
        for k in range(1500):
            drawn = drawn_blocks(digest(b"%d" % k), 2, blocks, share)
            assert len(set(drawn)) == len(drawn)
            total += len(drawn)
            for block in drawn:
                seen[block] += 1
        assert total / 1500 == pytest.approx(share * blocks, rel=0.15)
        assert max(seen.values()) < 3 * 1500 * share + 30
    assert drawn_blocks(digest(b"x"), 0, 5, 1.0) and len(drawn_blocks(digest(b"x"), 0, 5, 1.0)) == 5


def test_blocks_of_a_part_are_dealt_to_more_checkers_than_may_lie_and_never_to_its_owner():
    """Seven voters, two of which may lie: three checkers each, each with blocks of its own."""
    openings = list(openings_of(digest(b"7"), body_of(7), TERMS, "two-thirds"))
    assert len({opening.key for opening in openings}) == len(openings) == 7 * 3
    for part in range(7):
        mine = [opening for opening in openings if opening.answered.part == part]
        assert len({opening.order[0] for opening in mine}) == 3
        assert all(opening.peer == NAMES[part] not in opening.order for opening in mine)
        assert all(len(set(opening.order)) == len(opening.order) == 5 for opening in mine)
        blocks = [block for opening in mine for block in opening.blocks]
        assert len(blocks) == len(set(blocks)) == 10 and all(0 <= block < 100 for block in blocks)


def test_where_nothing_is_drawn_nobody_is_asked():
    few = [list(openings_of(digest(b"%d" % k), body_of(7, size=900), TERMS, "two-thirds")) for k in range(100)]
    assert 0 < sum(map(len, few)) < 7 * 100 * 0.2  # one block, a tenth of the time, to one checker
    assert not list(openings_of(digest(b"7"), body_of(7, parts=0), TERMS, "two-thirds"))


# ---- checkers and findings -----------------------------------------------------------------------------------


def test_as_long_as_nobody_doubts_one_is_asked_and_nothing_is_said():
    docket = docket_of()
    opening = first_of(docket)
    assert opening.asked(7) == opening.order[:1] and opening.outcome == "open"
    assert opening.asked(7 + AUDIT_TURN) == ()
    said = AuditReport(7, opening.peer, "accepted", opening.number)
    assert "not in doubt" in (docket.problem(opening.order[0], said) or "")


@pytest.mark.parametrize("finding", ["mismatch", "withheld"])
def test_when_one_doubts_all_others_are_asked_for_the_same_blocks(finding: Finding):
    opening = first_of(docket_of())
    ada, bob, cid, *rest = opening.order
    docket = docket_of((found(opening, ada, finding),))
    assert first_of(docket).asked(8) == (bob, cid, *rest)
    assert docket.problem(bob, AuditReport(7, opening.peer, "accepted", opening.number)) is None
    docket = docket_of((found(opening, ada, finding),), (found(opening, bob, "accepted"),))
    assert first_of(docket).asked(9) == (cid, *rest)
    both = found(opening, bob, "accepted"), found(opening, cid, "accepted")
    docket = docket_of((found(opening, ada, finding),), both)
    assert first_of(docket).asked(9) == () and first_of(docket).outcome == "accepted"
    assert "over" in (docket.problem(rest[0], AuditReport(7, opening.peer, "mismatch", opening.number)) or "")


def test_only_who_was_drawn_may_speak_and_only_of_what_was_drawn():
    docket = docket_of()
    opening = first_of(docket)
    outsider = next(p for p in NAMES if p not in opening.order)
    for by, number in ((outsider, opening.number), (opening.peer, opening.number), (opening.order[0], 999)):
        assert docket.problem(by, AuditReport(7, opening.peer, "mismatch", number))
    assert docket.problem(opening.order[0], AuditReport(7, opening.peer, "mismatch"))  # there is no such replay


def test_old_openings_are_forgotten():
    docket = docket_of(*[()] * AUDIT_ROUNDS)
    assert not docket.cases


def standing_after(*findings: tuple[int, Finding]) -> str:
    """Standing of the owner, if these checkers reported this in one vertex."""
    docket = docket_of()
    opening, parent = first_of(docket), body_of(8, parts=0)
    reports = []
    for place, finding in findings:
        report = VerifiedReport(opening.order[place], AuditReport(7, opening.peer, finding, opening.number))
        assert admissible(report, parent, RecentVertices({}, ledgers=LedgerSet([docket])), RUN, True, None) is None
        reports.append(report)
    members, *_ = next_members(parent, {}, set(), reports, "two-thirds", True)
    return next(m.standing for m in members if m.peer == opening.peer)


def test_it_takes_more_voices_than_may_lie_and_silence_expels_nobody():
    """Seven voters: two may lie, three voices count. Any mixture that is not three mismatches only sends away."""
    for findings in product(("mismatch", "withheld"), repeat=3):
        said = tuple(enumerate(findings))
        assert standing_after(*said[:2]) == "member"
        assert standing_after(*said) == ("expelled" if set(findings) == {"mismatch"} else "away")
