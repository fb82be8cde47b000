"""Audits: draws, auditors' turns and the meaning of findings, from vertices alone."""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import AUDIT_ROUNDS, AUDIT_TURN
from atoll.crypto.digest import digest
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.membership_change import next_members
from atoll.verification.replay_audit.policy import AuditCase, AuditLedger, drawn_segment, voices_needed
from atoll.wire.codec import encode
from atoll.wire.messages.statements import (
    AuditReport,
    ChangeableSettings,
    ChangedSettings,
    Commitment,
    Finding,
    SignedStatement,
)
from atoll.wire.messages.vertex import Member, Standing, SwarmRoundMetrics, VertexBody

ADA, BOB, CID, DAN, EVE = (PeerId(name) for name in ("ada", "bob", "cid", "dan", "eve"))
EVERYBODY = (ADA, BOB, CID, DAN, EVE)
RUN = digest(b"run")


def commit_of(claim: bytes | None) -> Commitment:
    said = UNSET if claim is None else Digest(claim)
    return Commitment(7, 0, ZERO_DIGEST, 2, 35, 70, 1.0, 0.1, 70, claim=said)


def body_of(
    round: int, claims: dict[PeerId, bytes | None], reports: tuple[SignedStatement, ...] = ()
) -> VertexBody:
    members = tuple(Member(p, b"key " + p.encode(), (), "trainer", "member", 0, 0.1, p) for p in EVERYBODY)
    commits = tuple(SignedStatement(p, encode(commit_of(claim)), b"") for p, claim in sorted(claims.items()))
    numbers = SwarmRoundMetrics(1.0, 1, 1)
    return VertexBody(
        RUN, round, 0, ZERO_DIGEST, 1.0, ADA, (), ZERO_DIGEST, commits, members, (), reports, numbers, trained=1
    )


def weightless(peer: PeerId, body: VertexBody) -> VertexBody:
    """The same round, in which this member's update moves nothing."""
    nothing = SignedStatement(peer, encode(replace(commit_of(bytes(32)), weight=0)), b"")
    return replace(body, commits=tuple(nothing if s.signer == peer else s for s in body.commits))


def found(by: PeerId, finding: Finding, round: int = 7, peer: PeerId = EVE) -> SignedStatement:
    return SignedStatement(by, encode(AuditReport(round, peer, finding)), b"")


def docket_of(*reports: tuple[SignedStatement, ...], share: float = 1.0) -> AuditLedger:
    """Round 7 was trained and claimed by all; each later vertex carries these reports."""
    docket = AuditLedger(share, "two-thirds")
    bodies = {7: body_of(7, dict.fromkeys(EVERYBODY, bytes(32)))}
    bodies |= {8 + k: body_of(8 + k, {}, said) for k, said in enumerate(reports)}
    docket.follow(max(bodies), {round: digest(b"%d" % round) for round in bodies}, bodies)
    return docket


# ---- draws ---------------------------------------------------------------------------------------------------


def test_nobody_replays_what_a_member_says_that_cannot_be():
    """Its updates move nothing: an audit of them would find an honest GPU, and harm it."""
    docket, body = AuditLedger(1.0, "two-thirds"), weightless(EVE, body_of(7, dict.fromkeys(EVERYBODY, bytes(32))))
    lines = tuple(replace(m, standing="unaudited") if m.peer == EVE else m for m in body.members)
    docket.follow(7, {7: digest(b"7")}, {7: replace(body, members=lines)})
    assert {peer for _, peer in docket.cases} == {ADA, BOB, CID, DAN}
    assert all(EVE not in case.order for case in docket.cases.values())


@pytest.mark.parametrize("standing", ["unaudited", "new", "away", "observer"])
@pytest.mark.parametrize("moved_it", [True, False])
def test_a_round_is_audited_by_the_standing_that_it_began_with(standing: Standing, moved_it: bool):
    """Its weight shows it. A liar that leaves, or says that it is on a GPU now, in the vertex of its poisoned round
    is audited for that round. A member that was on a GPU in it, and leaves or is on a CPU now, is not."""
    docket, body = AuditLedger(1.0, "two-thirds"), body_of(7, dict.fromkeys(EVERYBODY, bytes(32)))
    body = body if moved_it else weightless(EVE, body)
    lines = tuple(replace(m, standing=standing, since=7) if m.peer == EVE else m for m in body.members)
    docket.follow(7, {7: digest(b"7")}, {7: replace(body, members=lines)})
    assert (EVE in {peer for _, peer in docket.cases}) == moved_it


def test_of_two_commitments_to_one_update_both_are_audited():
    """Of thirty rounds at a rate of a thousandth: a member that copied another's root before it was revealed is
    audited in every one of them, and so is its victim; of the others hardly any.
    """
    docket = AuditLedger(0.001, "two-thirds")
    roots = dict(zip(EVERYBODY, (b"a", b"b", b"same", b"same", b"c"), strict=True))
    bodies = {}
    for round in range(7, 7 + AUDIT_ROUNDS):
        commits = {p: replace(commit_of(bytes(32)), root=digest(root)) for p, root in roots.items()}
        signed = tuple(SignedStatement(p, encode(commit), b"") for p, commit in sorted(commits.items()))
        bodies[round] = replace(body_of(round, {}), commits=signed)
    docket.follow(max(bodies), {round: digest(b"%d" % round) for round in bodies}, bodies)
    drawn = [peer for _, peer in docket.cases]
    assert drawn.count(CID) == drawn.count(DAN) == AUDIT_ROUNDS
    assert len(drawn) < 2 * AUDIT_ROUNDS + 4


def test_who_may_try_bodies_gets_its_friends_past_the_draw_in_the_tries_that_the_spec_says():
    """Ten friends at a rate of 0.2: 9.3 tries on average, by the very draw. A rate of 1 lets none pass."""
    friends = [PeerId(f"friend {k}") for k in range(10)]
    passed = total = 0
    while passed < 200:
        total += 1
        vertex = digest(b"body %d" % total)
        passed += all(drawn_segment(vertex, friend, 50, 0.2) is None for friend in friends)
    assert 7.5 < total / passed < 11.5
    assert all(drawn_segment(digest(b"body %d" % k), friends[0], 50, 1.0) is not None for k in range(100))


def test_a_vertex_draws_at_the_rate_that_it_says_itself():
    """Hardly any member is audited under genesis; from the vertex that changes the rate on all are."""
    docket = AuditLedger(0.0001, "two-thirds")
    own = [replace(commit_of(bytes(32)), root=digest(peer.encode())) for peer in EVERYBODY]
    signed = tuple(SignedStatement(peer, encode(commit), b"") for peer, commit in zip(EVERYBODY, own, strict=True))
    bodies = {round: replace(body_of(round, {}), commits=signed) for round in (7, 8)}
    bodies[8] = replace(bodies[8], tuned=ChangedSettings(ChangeableSettings(audit_rate=1.0), 2, 9))
    docket.follow(8, {round: digest(b"%d" % round) for round in bodies}, bodies)
    assert set(docket.cases) == {(8, peer) for peer in EVERYBODY}


def test_nobody_is_drawn_before_the_vertex_and_then_every_segment_alike():
    """Two thousand vertices at a rate of a tenth: about two hundred audits, spread over five segments."""
    vertices = [digest(b"%d" % i) for i in range(2000)]
    drawn = [drawn_segment(vertex, ADA, 50, 0.1) for vertex in vertices]
    chosen = [segment for segment in drawn if segment is not None]
    assert 150 < len(chosen) < 250
    assert all(20 < chosen.count(segment) < 60 for segment in range(5))
    others = [drawn_segment(vertex, BOB, 50, 0.1) for vertex in vertices]
    assert [one is None for one in drawn] != [other is None for other in others]
    assert drawn_segment(vertices[0], ADA, 0, 1.0) is None and drawn_segment(vertices[0], ADA, 41, 1.0) is not None


def test_auditors_are_drawn_by_the_vertex_and_never_the_audited():
    docket = docket_of()
    assert {key for key in docket.cases} == {(7, p) for p in EVERYBODY}
    for case in docket.cases.values():
        assert case.peer not in case.order and len(case.order) == len(set(case.order)) == 3
        assert 0 <= case.segment <= 3
    assert len({case.order for case in docket.cases.values()}) > 1
    assert docket_of(share=0.0).cases == {}


def test_a_round_without_a_claim_is_not_audited_and_old_audits_are_forgotten():
    docket = AuditLedger(1.0, "two-thirds")
    bodies = {7: body_of(7, {ADA: bytes(32), EVE: None})}
    docket.follow(7, {7: digest(b"7")}, bodies)
    assert set(docket.cases) == {(7, ADA)}
    later = 7 + AUDIT_ROUNDS
    docket.follow(later, {later: digest(b"x")}, {later: body_of(later, {})})
    assert docket.cases == {}


# ---- turns ---------------------------------------------------------------------------------------------------


def case_of(*said: tuple[int, Finding], needed: int = 2) -> AuditCase:
    order = tuple(PeerId(f"auditor {k}") for k in range(2 * needed - 1))
    voices = {order[k]: voice for k, voice in enumerate(said) if voice[1] != "silent"}
    return AuditCase(7, EVE, 0, commit_of(bytes(32)), order, needed, voices)


@pytest.mark.parametrize(
    ("said", "head", "turn", "outcome"),
    [
        ((), 7, 0, "open"),
        (((8, "accepted"),), 9, None, "accepted"),
        (((8, "mismatch"),), 9, 1, "disputed"),
        (((8, "withheld"),), 9, 1, "disputed"),
        (((8, "unauditable"),), 9, 1, "open"),
        (((8, "mismatch"), (9, "accepted")), 10, 2, "disputed"),
        (((8, "mismatch"), (9, "accepted"), (10, "accepted")), 11, None, "accepted"),
        (((8, "mismatch"), (9, "wrong")), 10, None, "refuted"),
        (((8, "mismatch"), (9, "withheld")), 10, None, "withheld"),
        ((), 7 + AUDIT_TURN, 1, "open"),
        ((), 7 + 3 * AUDIT_TURN, None, "open"),
        (((7 + AUDIT_TURN + 1, "mismatch"),), 7 + AUDIT_TURN + 2, 1, "disputed"),
    ],
)
def test_another_auditor_is_asked_only_where_one_was_against_or_silent(said, head, turn, outcome):
    case = case_of(*said)
    assert case.asked(head) == (() if turn is None else (case.order[turn],))
    assert case.outcome == outcome


def test_with_more_possible_liars_more_auditors_are_asked():
    """Seven voters, two of which may lie: three have to be against."""
    assert [voices_needed(n, "two-thirds") for n in (1, 3, 4, 6, 7, 10)] == [2, 2, 2, 2, 3, 4]
    assert voices_needed(30, "majority") == 2
    case = case_of((8, "mismatch"), (9, "accepted"), (10, "mismatch"), needed=3)
    assert case.asked(11) == (case.order[3],)
    assert case_of((8, "mismatch"), (9, "mismatch"), needed=3).asked(10)


def test_in_a_small_swarm_all_that_are_needed_are_asked_when_one_is_against():
    case = case_of((8, "mismatch"), needed=4)
    assert case.asked(9) == case.order[1:4]
    case.said |= {auditor: (9, "mismatch") for auditor in case.order[1:4]}
    assert case.outcome == "refuted"
    many = case_of((8, "mismatch"), needed=5)
    assert many.asked(9) == many.order[1:2]


def test_words_on_their_way_into_a_vertex_are_counted_ahead_and_those_in_it_come_first():
    """The next ones look before the vertex holds what the first one found; a vertex may hold another word of it."""
    case = case_of(needed=3)
    first, *others = case.order
    assert case.asked(7) == (first,)
    assert case.asked(7, {first: "mismatch"}) == tuple(others[:2])
    assert case.asked(7, {others[0]: "mismatch"}) == (first,)
    assert case.asked(7, {name: "mismatch" for name in case.order[:3]}) == ()
    case.said[first] = (8, "accepted")
    assert case.asked(8, {first: "mismatch"}) == ()


# ---- what may stand in a vertex, and what it does ----------------------------------------------------------


def test_a_word_is_about_one_exhibit_and_stays_so():
    """Repeated, it names the same; an invalid digest is rejected.

    Auditors that saw other blobs are distinguishable.
    """
    order, here, there = docket_of().cases[7, EVE].order, digest(b"shown here"), digest(b"shown there")
    words = [AuditReport(7, EVE, "mismatch", exhibit=blob) for blob in (here, there)]
    said = tuple(SignedStatement(by, encode(word), b"") for by, word in zip(order[:2], words, strict=True))
    docket = docket_of(said)
    assert docket.cases[7, EVE].judged == dict(zip(order[:2], (here, there), strict=True))
    assert judged(docket_of(said[:1]), order[0], words[0]) is None
    assert judged(docket_of(said[:1]), order[0], words[1]) == "was said already"
    assert judged(docket_of(said[:1]), order[0], AuditReport(7, EVE, "mismatch")) == "was said already"
    assert (
        judged(docket_of(), order[0], AuditReport(7, EVE, "mismatch", exhibit=Digest(b"short"))) == "names no blob"
    )


def judged(docket: AuditLedger, by: PeerId, report: AuditReport) -> str | None:
    body = body_of(9, {})
    return admissible(
        VerifiedReport(by, report), body, RecentVertices({}, ledgers=LedgerSet([docket])), RUN, False, None
    )


@pytest.mark.parametrize("answers_after", [1, 3])
def test_among_a_hundred_voters_a_cheat_is_refuted_before_its_audit_ends(answers_after: int):
    """34 voices are needed. With one auditor after the other, each a round or more, there would never be enough."""
    order = tuple(PeerId(f"p{k:03}") for k in range(67))
    case = AuditCase(7, EVE, 0, commit_of(bytes(32)), order, voices_needed(100, "two-thirds"))
    due: dict[PeerId, int] = {}
    for head in range(7, 7 + AUDIT_ROUNDS):
        for auditor in case.asked(head):
            due.setdefault(auditor, head + answers_after)
        case.said |= {auditor: (head + 1, "mismatch") for auditor, at in due.items() if at == head + 1}
    assert case.outcome == "refuted" and case.needed == 34
    assert len(case.said) == 34


def test_one_false_accuser_in_three_costs_few_more_replays():
    """The first four of a hundred accuse: four are asked at once, and as many as they accept."""
    order = tuple(PeerId(f"p{k:03}") for k in range(67))
    case = AuditCase(7, EVE, 0, commit_of(bytes(32)), order, needed=34)
    case.said = {auditor: (8, "mismatch") for auditor in order[:4]}
    assert case.asked(9) == order[4:8]
    case.said |= {auditor: (9, "accepted") for auditor in order[4:8]}
    assert case.asked(10) == order[8:12]
    case.said |= {auditor: (10, "accepted") for auditor in order[8:11]}  # the last one of four is not waited for
    assert case.asked(11) == () and case.outcome == "accepted"


def test_only_those_who_were_drawn_may_speak_and_agreement_is_said_once():
    docket = docket_of()
    order = docket.cases[7, EVE].order
    (other,) = set(EVERYBODY) - {EVE, *order}
    assert judged(docket, order[0], AuditReport(7, EVE, "mismatch")) is None
    assert judged(docket, other, AuditReport(7, EVE, "mismatch")) == "is not by one who was drawn"
    assert judged(docket, order[0], AuditReport(6, EVE, "mismatch")) == "is of no audit that is open"
    heard = docket_of((found(order[0], "mismatch"), found(order[1], "accepted")))
    assert judged(heard, order[1], AuditReport(7, EVE, "accepted")) == "was said already"
    assert judged(heard, order[1], AuditReport(7, EVE, "mismatch")) == "was said already"
    assert judged(heard, order[0], AuditReport(7, EVE, "mismatch")) is None  # again, until there are enough
    assert judged(heard, order[0], AuditReport(7, EVE, "accepted")) == "was said already"


def test_accusers_cannot_fill_vertices_and_accomplices_cannot_end_an_audit():
    """Once the others have accepted it is over; accepting out of turn does not end it before the first reported."""
    order = docket_of().cases[7, EVE].order
    cleared = docket_of((found(order[0], "mismatch"),), (found(order[1], "accepted"), found(order[2], "accepted")))
    assert judged(cleared, order[0], AuditReport(7, EVE, "mismatch")) == "is of an audit that is over"
    hurried = docket_of((found(order[1], "accepted"), found(order[2], "accepted")))
    assert judged(hurried, order[0], AuditReport(7, EVE, "mismatch")) is None
    refuted = docket_of((found(order[0], "mismatch"), found(order[1], "wrong")))
    assert judged(refuted, order[0], AuditReport(7, EVE, "mismatch")) is None  # until a vertex has room for it


def standing_after(*said: tuple[PeerId, int, Finding], rule: str = "two-thirds") -> str:
    reports = [VerifiedReport(by, AuditReport(round, EVE, finding)) for by, round, finding in said]
    members, *_ = next_members(body_of(9, {}), {}, set(), reports, rule, True)
    return next(m.standing for m in members if m.peer == EVE)


def test_two_auditors_of_one_round_expel_and_nobody_is_refuted_by_fewer():
    """Five voters, one of which may lie: the trainer is a replica, too."""
    assert standing_after((ADA, 7, "mismatch")) == "member"
    assert standing_after((ADA, 7, "mismatch"), (BOB, 7, "wrong")) == "expelled"
    assert standing_after((ADA, 7, "mismatch"), (BOB, 6, "mismatch")) == "member"
    assert standing_after((ADA, 7, "mismatch"), (ADA, 7, "mismatch")) == "member"
    assert standing_after((ADA, 7, "mismatch"), (BOB, 7, "accepted")) == "member"


def test_who_shows_nothing_steps_back_and_may_return():
    assert standing_after((ADA, 7, "withheld"), (BOB, 7, "withheld")) == "away"
    assert standing_after((ADA, 7, "withheld"), (BOB, 7, "mismatch")) == "away"
    assert standing_after((ADA, 7, "unauditable"), (BOB, 7, "unauditable")) == "member"


def test_who_came_back_is_not_sent_away_again_for_what_it_lost_before():
    """Words stay admissible while an audit is open; who refutes speaks against any round."""
    body = body_of(9, {})
    members = tuple(replace(m, since=8) if m.peer == EVE else m for m in body.members)

    def standing(round: int, finding: Finding) -> str:
        reports = [VerifiedReport(by, AuditReport(round, EVE, finding)) for by in (ADA, BOB)]
        after, *_ = next_members(replace(body, members=members), {}, set(), reports, "two-thirds", True)
        return next(m.standing for m in after if m.peer == EVE)

    assert standing(7, "withheld") == "member" and standing(9, "withheld") == "away"
    assert standing(7, "mismatch") == "expelled"


def test_where_members_trust_each_other_findings_are_only_told():
    assert standing_after((ADA, 7, "mismatch"), (BOB, 7, "mismatch"), rule="majority") == "member"
