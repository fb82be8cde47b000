"""Next membership: tickets, thirds, returning members, and a last voter that cannot be voted out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.policy.membership import (
    RECENT,
    RecentVertices,
    VerifiedReport,
    admissible,
    changes_max,
    suspicions_needed,
)
from atoll.policy.membership_change import next_members
from atoll.wire.codec import encode
from atoll.wire.messages.statements import (
    Accusation,
    BaseStatement,
    JoinRequest,
    LeaveReport,
    OwnerComplaint,
    OwnerResult,
    ReadyReport,
    SignedStatement,
    SuspicionReport,
    TicketInvite,
)
from atoll.wire.messages.vertex import IssuedTicketRecord, Member, SwarmRoundMetrics, VertexBody

RUN, HEAD, STATE = Digest(bytes(32)), Digest(b"h" * 32), Digest(b"s" * 32)
RECENTLY = RecentVertices({HEAD: STATE})


def member(name: str, standing: str = "member", role: str = "trainer") -> Member:
    return Member(PeerId(name), name.encode(), (), role, standing, 0, 0.1, name)  # type: ignore[arg-type]


def body(*members: Member, tickets: tuple[IssuedTicketRecord, ...] = ()) -> VertexBody:
    return VertexBody(
        RUN, 5, 0, HEAD, 0.0, PeerId("a"), (), STATE, (), tuple(members), tickets, (), SwarmRoundMetrics(0.0, 0, 0)
    )


def after(parent: VertexBody, *reports: VerifiedReport, rule: str = "majority", counted: str = ""):
    members, tickets, _ = next_members(parent, {}, {PeerId(p) for p in counted}, reports, rule, True)  # type: ignore[arg-type]
    return {m.peer: m for m in members}, tickets


def suspects(target: str, *by: str) -> list[VerifiedReport]:
    return [VerifiedReport(PeerId(p), SuspicionReport(6, PeerId(target), "silent")) for p in by]


def join(name: str, admission: bytes = b"", after: Digest = HEAD) -> VerifiedReport:
    return VerifiedReport(
        PeerId(name), JoinRequest(PeerId(name), name.encode(), b"", (), "trainer", name, after, admission)
    )


def voters(members: dict[PeerId, Member]) -> str:
    return "".join(p for p, m in members.items() if m.votes)


def test_at_most_a_third_of_the_voters_go_per_vertex():
    """Ten members, five of them leave at once: three go now, the others with the next vertex."""
    parent = body(*(member(p) for p in "abcdefghij"))
    leaving = [VerifiedReport(PeerId(p), LeaveReport(6, "")) for p in "abcde"]
    members, _ = after(parent, *leaving)
    assert voters(members) == "defghij"
    members, _ = after(replace(parent, members=tuple(members.values())), *leaving)
    assert voters(members) == "fghij"
    assert [changes_max(n) for n in (1, 2, 4, 7, 10, 31)] == [1, 1, 1, 2, 3, 10]


def test_the_order_in_which_reports_were_heard_changes_nothing():
    """The proposer and every voter must come to the same list."""
    parent = body(*(member(p) for p in "abcdefg"), member("x", "observer"))
    reports = [*suspects("g", "a", "b", "c"), VerifiedReport(PeerId("b"), LeaveReport(6, "")), join("n"), join("m")]
    reports.append(VerifiedReport(PeerId("x"), ReadyReport(HEAD, STATE)))
    assert after(parent, *reports) == after(parent, *reversed(reports))


def test_the_last_voter_cannot_be_voted_out_and_cannot_leave():
    """A run without voters could never go on."""
    parent = body(member("a"), member("b", "observer"))
    assert voters(after(parent, VerifiedReport(PeerId("a"), LeaveReport(6, "")))[0]) == "a"
    both = body(member("a"), member("b"))
    left = after(
        both, VerifiedReport(PeerId("a"), LeaveReport(6, "")), VerifiedReport(PeerId("b"), LeaveReport(6, ""))
    )[0]
    assert len(voters(left)) == 1


def test_a_suspicion_counts_once_per_accuser_and_not_against_who_contributed():
    """One member alone cannot remove another from five; two can, unless the update of the accused counts."""
    parent = body(*(member(p) for p in "abcde"))
    assert voters(after(parent, *suspects("e", "a", "a", "a"))[0]) == "abcde"
    assert voters(after(parent, *suspects("e", "a", "b"))[0]) == "abcd"
    assert voters(after(parent, *suspects("e", "a", "b"), counted="abcde")[0]) == "abcde"
    assert [suspicions_needed(n, "two-thirds") for n in (3, 4, 7, 10, 31)] == [1, 2, 3, 4, 11]


def test_a_newcomer_observes_then_votes_with_weight_zero_then_is_a_member():
    """Three vertices: the join, the readiness, one round later."""
    members, _ = after(body(member("a"), member("b")), join("n"))
    assert members[PeerId("n")].standing == "observer" and not members[PeerId("n")].votes
    parent = body(*members.values())
    members, _ = after(parent, VerifiedReport(PeerId("n"), ReadyReport(HEAD, STATE)))
    assert members[PeerId("n")].standing == "new" and members[PeerId("n")].votes
    assert after(body(*members.values()))[0][PeerId("n")].standing == "member"


def test_a_member_whose_work_cannot_be_replayed_has_no_vote_until_it_can():
    """It trains as `unaudited` for good. On a CPU it becomes ready again; a voter's change takes a place of those
    that may change, and the last voter cannot change."""
    gpu, cpu = ReadyReport(HEAD, STATE, True), ReadyReport(HEAD, STATE)
    parent = body(*(member(p) for p in "abcd"), member("n", "observer"), member("m", "observer"))
    ready = [VerifiedReport(PeerId(p), gpu) for p in "nm"]
    members, _ = after(parent, *ready)
    assert {members[PeerId(p)].standing for p in "nm"} == {"unaudited"} and voters(members) == "abcd"
    for _ in range(3):
        parent = body(*members.values())
        members, _ = after(parent, counted="abcdnm")
    assert members[PeerId("n")].standing == "unaudited" and members[PeerId("n")].may_train

    def judge(parent: VertexBody, by: str, word: ReadyReport, said_in: int = 5) -> str | None:
        recent = RecentVertices({HEAD: STATE}, rounds={HEAD: said_in}, audited=True)
        later = replace(parent, round=6 + RECENT)
        return admissible(VerifiedReport(PeerId(by), word), later, recent, RUN, open_to_all=True, wall_s=None)

    assert judge(parent, "n", cpu) is None and "device" in (judge(parent, "n", gpu) or "")
    members, _ = after(parent, VerifiedReport(PeerId("n"), cpu))
    assert members[PeerId("n")].standing == "new" and voters(members) == "abcdn"
    assert members[PeerId("n")].since == 6 and "before" in (judge(body(*members.values()), "n", gpu) or "")
    assert judge(body(*members.values()), "n", gpu, 6) is None
    members, _ = after(parent, *(VerifiedReport(PeerId(p), gpu) for p in "ab"))
    assert voters(members) == "bcd" and members[PeerId("b")].standing == "member"
    alone = body(member("a"), member("n", "observer"))
    assert voters(after(alone, VerifiedReport(PeerId("a"), gpu))[0]) == "a"


def test_a_change_of_device_counts_once_in_many_rounds_and_only_where_work_is_audited():
    """Reported in every vertex it took the place of all other changes of voters, and voided verdicts."""
    gpu, parent = VerifiedReport(PeerId("b"), ReadyReport(HEAD, STATE, True)), body(*(member(p) for p in "abcd"))

    def judge(round: int, share: float) -> str | None:
        recent = RecentVertices({HEAD: STATE}, audited=bool(share))
        return admissible(gpu, replace(parent, round=round), recent, RUN, False, None)

    assert judge(RECENT, 0.1) is None
    assert "no work is audited" in (judge(RECENT, 0.0) or "")
    assert "rounds ago" in (judge(RECENT - 1, 0.1) or "")


def test_no_change_of_a_device_keeps_the_vote_of_a_member_that_is_gone():
    """One voter of four may go or come per vertex: a line before the silent one's had the place."""
    parent, gpu = body(*(member(p) for p in "abcd")), VerifiedReport(PeerId("a"), ReadyReport(HEAD, STATE, True))
    members, _ = after(parent, gpu, *suspects("d", "b", "c"), rule="two-thirds")
    assert voters(members) == "abc" and members[PeerId("d")].standing == "away"


def test_who_is_ready_beyond_the_trainers_that_a_rule_takes_goes_on_observing():
    """Distances are taken of a bounded number of rows: one trainer too many would end the learning of all."""
    parent = body(*(member(p) for p in "abcdefg"), *(member(p, "observer") for p in "xyz"))
    parent = replace(parent, members=(*parent.members, member("c0", "observer", "client")))
    ready = [VerifiedReport(PeerId(p), ReadyReport(HEAD, STATE)) for p in ("x", "y", "z", "c0")]
    for most, new in ((7, 0), (8, 1), (9, 2), (4096, 3)):  # two voters may come per vertex, and a client
        members, *_ = next_members(parent, {}, set(), ready, "majority", True, trainers_most=most)
        assert sum(m.standing == "new" for m in members) == new
        assert sum(m.standing == "observer" for m in members) == 4 - new
    gone = replace(parent, members=(member("a", "away"), *parent.members[1:]))
    members, *_ = next_members(gone, {}, set(), ready, "majority", True, trainers_most=7)
    assert sum(m.may_train for m in members) == 7


def test_a_returning_member_needs_no_ticket_but_the_keys_it_joined_with():
    """`away` is not a stranger; an identity with other long-lived keys is."""
    parent = body(member("a"), member("b", "away"))

    def judge(reported: VerifiedReport) -> str | None:
        return admissible(reported, parent, RECENTLY, RUN, open_to_all=False, wall_s=0.0)

    assert judge(join("b")) is None
    assert "keys" in (judge(replace_identity(join("b"), Digest(b"i" * 32))) or "")
    here, other = join("a").statement, Digest(b"i" * 32)
    assert isinstance(here, JoinRequest)
    moved = VerifiedReport(PeerId("a"), replace(here, addresses=("elsewhere",)))  # by its session key
    assert judge(moved) is None and "keys" in (judge(replace_identity(moved, other)) or "")
    assert "ticket" in (judge(join("stranger")) or "")
    assert "too long ago" in (judge(join("b", after=STATE)) or "")
    members, _ = after(parent, join("b"))
    assert members[PeerId("b")].standing == "observer"


def test_no_word_from_before_a_member_came_back_moves_it():
    """It came back in round 4 with another key; repeating older reports by or about it is refused."""
    earlier, then = Digest(b"3" * 32), Digest(b"4" * 32)
    recent = RecentVertices(dict.fromkeys((earlier, then, HEAD), STATE), rounds={earlier: 3, then: 4, HEAD: 5})
    back = replace(member("b", "observer"), vote_key=b"second key", since=4)
    parent = body(member("a"), back, member("c"))

    def judge(by: str, statement: BaseStatement) -> str | None:
        return admissible(VerifiedReport(PeerId(by), statement), parent, recent, RUN, open_to_all=True, wall_s=None)

    first = join("b").statement
    assert isinstance(first, JoinRequest) and judge("b", replace(first, after=then)) is None
    assert "too long ago" in (judge("b", replace(first, after=earlier)) or "")
    moved = replace(first, vote_key=b"second key", addresses=("elsewhere",), after=earlier)
    assert "too long ago" in (judge("b", moved) or "")
    assert (
        "before it came back" in (judge("b", LeaveReport(3, "")) or "") and judge("b", LeaveReport(4, "")) is None
    )
    assert "out of date" in (judge("a", SuspicionReport(3, PeerId("b"), "silent")) or "")
    assert judge("a", SuspicionReport(5, PeerId("b"), "silent")) is None
    parent = replace(parent, round=100)  # it may have come back without a vertex that says so
    assert "out of date" in (judge("c", LeaveReport(99 - RECENT, "")) or "")
    assert judge("c", LeaveReport(100 - RECENT, "")) is None


def replace_identity(reported: VerifiedReport, identity: Digest) -> VerifiedReport:
    return VerifiedReport(reported.by, reported.statement, identity)


def test_each_use_of_a_ticket_is_counted_in_the_vertex():
    """Two uses, two strangers: then none is left. A revocation (`uses=0`) takes all at once."""
    ticket = IssuedTicketRecord(b"t" * 16, b"key", "trainer", 2, 100.0)
    none, parent = (replace(ticket, uses_left=0),), body(member("a"), tickets=(ticket,))
    proof = ticket.ticket + b"signature"
    _, left = after(parent, join("n", proof))
    assert [t.uses_left for t in left] == [1]
    assert after(parent, join("n", proof), join("m", proof))[1] == none
    assert (
        after(parent, VerifiedReport(PeerId("a"), TicketInvite(ticket.ticket, b"key", "trainer", 0, 0.0)))[1]
        == none
    )


def test_a_ticket_with_one_use_admits_one_of_two_who_redeem_it_in_one_vertex():
    """Both joins are good by the vertex before. An observer who becomes a trainer by a ticket uses it, too."""
    ticket = IssuedTicketRecord(b"t" * 16, b"key", "trainer", 1, 100.0)
    parent, proof = body(member("a"), tickets=(ticket,)), ticket.ticket + b"signature"
    none = (replace(ticket, uses_left=0),)
    members, left = after(parent, join("n", proof), join("m", proof))
    assert sorted(members) == ["a", "m"] and left == none
    watching = replace(member("o", "observer", "observer"), vote_key=b"another session")
    members, left = after(replace(parent, members=(*parent.members, watching)), join("o", proof))
    assert members[PeerId("o")].role == "trainer" and left == none


def invitation(uses: int = 1, expires_s: float = 1000.0, name: bytes = b"t") -> VerifiedReport:
    return VerifiedReport(PeerId("a"), TicketInvite(name * 16, b"key", "trainer", uses, expires_s))


def why_not(reported: VerifiedReport, parent: VertexBody) -> str | None:
    return admissible(reported, parent, RECENTLY, RUN, False, parent.time_s)


def test_a_signed_invitation_counts_once():
    """It stays readable in the history. Used up or revoked, its line stays until the ticket expires."""
    parent, proof = body(member("a"), member("b")), b"t" * 16 + b"signature"
    for ends in (join("n", proof), invitation(uses=0), invitation(uses=0, expires_s=0.0)):
        assert why_not(invitation(), parent) is None and why_not(invitation(uses=0), parent) is not None
        made = replace(parent, tickets=after(parent, invitation())[1])
        over = replace(made, tickets=after(made, ends)[1])
        assert [t.uses_left for t in over.tickets] == [0]
        assert "known already" in (why_not(invitation(), over) or "")
        assert [t.uses_left for t in after(over, invitation())[1]] == [0]
        assert why_not(invitation(uses=0), over) is not None  # nor does a revocation fill vertex after vertex
        late = replace(over, time_s=1000.5)
        assert after(late)[1] == () and "expired" in (why_not(invitation(), replace(late, tickets=())) or "")


def test_no_voter_fills_the_places_of_tickets_for_good():
    parent, year = body(member("a")), 366 * 86400.0
    assert why_not(invitation(expires_s=year), parent) is None
    assert "longer than a year" in (why_not(invitation(expires_s=year + 1), parent) or "")


def test_of_two_invitations_by_one_ticket_in_one_vertex_the_first_in_order_counts():
    other = VerifiedReport(PeerId("b"), TicketInvite(b"t" * 16, b"other", "observer", 9, 500.0))
    for reports in ([invitation(), other], [other, invitation()]):
        assert [t.key for t in after(body(member("a"), member("b")), *reports)[1]] == [b"key"]


@pytest.mark.parametrize(
    ("by", "statement", "why"),
    [
        ("x", SuspicionReport(6, PeerId("a"), "silent"), "only voting members"),
        ("a", SuspicionReport(900, PeerId("b"), "silent"), "out of date"),
        ("a", SuspicionReport(6, PeerId("nobody"), "silent"), "only voting members"),
        ("a", LeaveReport(6, "x" * 1000), "too long"),
        ("nobody", LeaveReport(6, ""), "not a member"),
        ("x", ReadyReport(HEAD, HEAD), "not the one agreed"),
        ("a", ReadyReport(HEAD, STATE), "only an observing trainer"),
        ("x", TicketInvite(b"", b"", "trainer", 1, 0.0), "only voting members"),
    ],
)
def test_what_may_not_stand_in_a_vertex(by: str, statement, why: str):
    parent = body(member("a"), member("b"), member("x", "observer"))
    told = admissible(VerifiedReport(PeerId(by), statement), parent, RECENTLY, RUN, open_to_all=True, wall_s=0.0)
    assert told is not None and why in told


def test_a_voter_that_moved_house_stays_a_voter():
    """The same session key at another address: only the address changes, no member votes less."""
    parent = body(*(member(p) for p in "abcd"))
    moved = JoinRequest(PeerId("b"), b"b", b"", ("/ip4/10.0.0.9/tcp/1",), "trainer", "b", HEAD, b"")
    assert admissible(VerifiedReport(PeerId("b"), moved), parent, RECENTLY, RUN, False, 0.0) is None
    members, _ = after(parent, VerifiedReport(PeerId("b"), moved))
    assert members[PeerId("b")].addresses == ("/ip4/10.0.0.9/tcp/1",)
    assert voters(members) == "abcd"


def test_the_last_voter_with_a_new_session_key_stays_a_voter():
    """Were it made an observer, no voter could ever admit it, or another, again."""
    parent = body(member("a"), member("b", "observer"))
    renewed = JoinRequest(PeerId("a"), b"another key", b"", (), "trainer", "a", HEAD, b"")
    members, _ = after(parent, VerifiedReport(PeerId("a"), renewed))
    assert voters(members) == "a" and members[PeerId("a")].vote_key == b"another key"


# ---- liars -------------------------------------------------------------------------------------------------


def answer(owner: str, part: int = 0, made: bytes = b"x", attempt: int = 0, index: int = 0) -> SignedStatement:
    said = OwnerResult(5, attempt, part, index, Digest(made * 32), 8, (PeerId("a"), PeerId("b")))
    return SignedStatement(PeerId(owner), encode(said), b"")


def catches(by: str, first: SignedStatement, other: SignedStatement | None = None) -> VerifiedReport:
    return VerifiedReport(PeerId(by), Accusation(first, other))


SEVEN = body(*(member(p) for p in "abcdefg"))


def test_two_answers_in_one_slot_expel_their_owner_on_one_word():
    """It does not help that the liar's own update counted in this round.

    Under a majority rule no member is judged.
    """
    proof = catches("a", answer("g"), answer("g", made=b"y"))
    assert admissible(proof, SEVEN, RECENTLY, RUN, False, None) is None
    members, _ = after(SEVEN, proof, rule="two-thirds", counted="abcdefg")
    assert members[PeerId("g")].standing == "expelled" and voters(members) == "abcdef"
    members, _ = after(SEVEN, proof, rule="majority")
    assert voters(members) == "abcdefg"


@pytest.mark.parametrize(
    "other",
    [answer("g"), answer("g", 1, b"y"), answer("g", 0, b"y", attempt=1), answer("g", made=b"y", index=1)],
    ids=["the same", "another part", "another attempt", "another turn"],
)
def test_what_an_honest_owner_may_sign_twice_proves_nothing(other: SignedStatement):
    assert admissible(catches("a", answer("g"), other), SEVEN, RECENTLY, RUN, False, None) is not None
    assert admissible(catches("a", answer("g"), answer("f", made=b"y")), SEVEN, RECENTLY, RUN, False, None)


def test_a_recomputed_lie_takes_more_voices_than_may_lie():
    """Two of seven may lie: their reports alone, even repeated, expel no member; a third voice does."""
    lies = [catches(p, answer("g", part)) for p in "ab" for part in (0, 1)]
    members, _ = after(SEVEN, *lies, rule="two-thirds")
    assert voters(members) == "abcdefg"
    members, _ = after(SEVEN, *lies, catches("c", answer("g", 4)), rule="two-thirds")
    assert members[PeerId("g")].standing == "expelled"


def test_who_is_complained_of_steps_back_and_who_is_expelled_never_returns():
    complaints = [VerifiedReport(PeerId(p), OwnerComplaint(5, PeerId("f"), "withheld")) for p in "abc"]
    proof = catches("a", answer("g"), answer("g", made=b"y"))
    members, _ = after(SEVEN, *complaints, proof, rule="two-thirds", counted="abcdefg")
    assert (members[PeerId("f")].standing, members[PeerId("g")].standing) == ("away", "expelled")
    later = replace(SEVEN, members=tuple(members.values()))
    assert admissible(join("f"), later, RECENTLY, RUN, False, None) is None
    assert "expelled" in (admissible(join("g"), later, RECENTLY, RUN, True, None) or "")


def test_complaints_are_about_now_and_from_voters():
    old = VerifiedReport(PeerId("a"), OwnerComplaint(3, PeerId("f"), "censored"))
    assert admissible(old, SEVEN, RECENTLY, RUN, False, None) == "is out of date"
    stranger = VerifiedReport(PeerId("z"), OwnerComplaint(5, PeerId("f"), "censored"))
    assert admissible(stranger, SEVEN, RECENTLY, RUN, False, None) is not None
    assert admissible(catches("z", answer("g")), SEVEN, RECENTLY, RUN, False, None) is not None


def test_a_farewell_before_the_proof_does_not_help():
    """It leaves in one vertex and is caught in the next; then it may not come back, not even in the same vertex."""
    members, _ = after(SEVEN, VerifiedReport(PeerId("g"), LeaveReport(6, "")), rule="two-thirds")
    assert members[PeerId("g")].standing == "away"
    later = replace(SEVEN, members=tuple(members.values()))
    proof = catches("a", answer("g"), answer("g", made=b"y"))
    assert admissible(proof, later, RECENTLY, RUN, False, None) is None
    assert after(later, proof, rule="two-thirds")[0][PeerId("g")].standing == "expelled"
    assert after(later, proof, join("g"), rule="two-thirds")[0][PeerId("g")].standing == "expelled"
    expelled = replace(SEVEN, members=tuple(after(later, proof, rule="two-thirds")[0].values()))
    assert admissible(proof, expelled, RECENTLY, RUN, False, None) is not None  # it says nothing new


def test_a_liar_that_restarts_with_another_key_in_the_vertex_that_expels_it_stays_expelled():
    """A new session key makes a member an observer, and made one out of a proven liar too."""
    renewed = VerifiedReport(
        PeerId("g"), JoinRequest(PeerId("g"), b"another key", b"", (), "trainer", "g", HEAD, b"")
    )
    proof = catches("a", answer("g"), answer("g", made=b"y"))
    members, _ = after(SEVEN, proof, renewed, rule="two-thirds")
    assert members[PeerId("g")].standing == "expelled"


def test_a_liar_that_must_wait_for_its_turn_does_not_change_its_key_meanwhile():
    """Four voters change by one per vertex: f leaves first, and g's words still open under its key."""
    four = body(*(member(p) for p in "defg"))
    renewed = VerifiedReport(
        PeerId("g"), JoinRequest(PeerId("g"), b"another key", b"", (), "trainer", "g", HEAD, b"")
    )
    proof = catches("d", answer("g"), answer("g", made=b"y"))
    members, _ = after(four, VerifiedReport(PeerId("f"), LeaveReport(6, "")), proof, renewed, rule="two-thirds")
    assert members[PeerId("f")].standing == "away" and members[PeerId("g")].vote_key == b"g"
