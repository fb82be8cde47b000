"""Earned votes: who comes late waits, and who came by one person never holds more than agreement withstands."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.peer.settings import RunSettings, encode_settings
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.membership_change import next_members
from atoll.policy.votes import VoteEligibilityTerms, next_votes
from atoll.wire.messages.statements import JoinRequest, LeaveReport, ReadyReport, TicketInvite
from atoll.wire.messages.vertex import IssuedTicketRecord, Member, SwarmRoundMetrics, VertexBody

RUN, HEAD, STATE = Digest(bytes(32)), Digest(b"h" * 32), Digest(b"s" * 32)
TERMS = VoteEligibilityTerms(10, 50)


def member(name: str, standing: str = "member", role: str = "trainer") -> Member:
    return Member(PeerId(name), name.encode(), (), role, standing, -1, 0.1, name)  # type: ignore[arg-type]


def ticket(name: str, uses: int = 1) -> IssuedTicketRecord:
    return IssuedTicketRecord(name.encode().ljust(16), b"key", "trainer", uses, 1e9)


class Run:
    """A run in which every member that trains counts in every round, unless it is told otherwise."""

    def __init__(
        self, *members: Member, tickets: tuple[IssuedTicketRecord, ...] = (), terms: VoteEligibilityTerms = TERMS
    ) -> None:
        metrics = SwarmRoundMetrics(0.0, 0, 0)
        self.body = VertexBody(RUN, -1, 0, HEAD, 0.0, PeerId("a"), (), STATE, (), members, tickets, (), metrics)
        self.terms = terms

    def round(self, *reports: VerifiedReport, trains: bool = True, missing: Iterable[str] = ()) -> None:
        counted = {m.peer for m in self.body.members if m.may_train and m.peer not in missing} if trains else set()
        members, tickets, _ = next_members(self.body, {}, counted, reports, "two-thirds", trains)
        members, invited = next_votes(self.body, members, tickets, counted, reports, self.terms)
        trained, round = self.body.trained + trains, self.body.round + 1
        self.body = replace(
            self.body, round=round, trained=trained, members=members, tickets=tickets, invited=invited
        )

    def join(self, name: str, by: str, role: str = "trainer") -> None:
        """With a ticket that this voter made, and ready with the next vertex."""
        made = ticket(name)
        self.round(
            VerifiedReport(PeerId(by), TicketInvite(made.ticket, made.key, "trainer", 1, 1e9)), trains=self.started
        )
        proof = made.ticket + b"signature"
        join = JoinRequest(PeerId(name), name.encode(), b"", (), role, name, HEAD, proof)  # type: ignore[arg-type]
        self.round(VerifiedReport(PeerId(name), join), trains=self.started)
        self.round(VerifiedReport(PeerId(name), ReadyReport(HEAD, STATE)), trains=self.started)

    @property
    def started(self) -> bool:
        return self.body.trained > 0

    @property
    def voters(self) -> str:
        return "".join(sorted(m.peer for m in self.body.members if m.votes))

    def counted(self, name: str) -> int:
        invited = self.body.invited
        assert invited is not UNSET
        return dict(zip((m.peer for m in self.body.members), invited.counted, strict=True))[PeerId(name)]

    def line(self, name: str) -> Member:
        return next(m for m in self.body.members if m.peer == name)


def founded(*names: str) -> Run:
    """The founder a, and these by its tickets, before the first training round."""
    run = Run(member("a"))
    for name in names:
        run.join(name, by="a")
    run.round()
    return run


def test_who_comes_by_a_founders_ticket_before_training_begins_votes_at_once():
    """A run of four must be able to begin, and to lose its founder the next minute."""
    assert founded("b", "c", "d").voters == "abcd"


def test_who_comes_later_votes_after_ten_counted_rounds():
    """Its first round has no weight and does not count, nor does a round that it misses. It trains meanwhile."""
    run = founded("b", "c", "d")
    run.join("n", by="a")
    assert run.line("n").role == "apprentice" and run.line("n").may_train and not run.line("n").votes
    run.round()
    for _ in range(9):
        run.round()
        run.round(missing="n")
    assert run.voters == "abcd"
    run.round()
    assert run.voters == "abcdn" and run.line("n").role == "trainer"


def test_one_invited_person_never_holds_more_than_a_third_however_often_it_invites_itself():
    """The fourth member makes twelve more: before it was 12 of 16 votes in seven rounds, now it is one of four."""
    run = founded("b", "c", "d")
    for k in range(12):
        run.join(f"d{k}", by="d" if k < 6 else f"d{k - 6}" if run.line(f"d{k - 6}").votes else "d")
    for _ in range(40):
        run.round()
        of_one = [p for p in run.body.members if p.votes and p.peer.startswith("d")]
        assert len(of_one) <= max(1, (len(run.voters) - 1) // 3) or run.counted("d") >= 50
    assert "d0" not in run.voters or run.counted("d") >= 50


def test_a_root_is_the_invitation_of_a_founder_whoever_hands_it_on():
    """Twice removed, and by tickets of a member that has left: all are the same one's."""
    run = founded("b", "c", "d")
    run.terms = VoteEligibilityTerms(1, 1000)
    run.join("x", by="d")
    for _ in range(20):
        run.round()
    assert "x" not in run.voters  # d has the vote of this root
    run.round(VerifiedReport(PeerId("d"), LeaveReport(run.body.round, "")))
    for _ in range(3):
        run.round()
    assert "x" in run.voters
    run.join("y", by="x")
    run.join("z", by="b")
    for _ in range(20):
        run.round()
    assert not {"y", "z"} & set(run.voters)
    run.join("n", by="a")
    for _ in range(20):
        run.round()
    assert "n" in run.voters


def test_after_fifty_counted_rounds_a_vote_is_bound_by_nothing():
    run = founded("b", "c", "d")
    run.join("x", by="d")
    for _ in range(70):
        run.round()
    assert run.counted("d") > 50 < run.counted("x") and run.voters == "abcdx"


def test_votes_come_one_after_the_other_as_quorums_can_take_them():
    """Four invitations by the founder: all have waited enough in the same round, one vote per vertex is given."""
    run = founded("b", "c", "d")
    run.terms = VoteEligibilityTerms(30, 50)
    for name in "wxyz":
        run.join(name, by="a")
    before, voters = set(run.voters), [run.voters]
    while len(run.voters) < 8:
        run.round()
        assert len(set(run.voters) ^ before) <= max(1, (len(before) - 1) // 3)
        before = set(run.voters)
        voters.append(run.voters)
    assert voters[-1] == "abcdwxyz"


@pytest.mark.parametrize("role", ["observer", "client"])
def test_another_role_first_is_no_way_around_the_wait(role: str):
    """A former observer or client that takes a ticket of another member belongs to the root of that member."""
    run = founded("b", "c", "d")
    run.join("o", by="a", role=role)
    made = ticket("o2")
    run.round(VerifiedReport(PeerId("d"), TicketInvite(made.ticket, made.key, "trainer", 1, 1e9)))
    again = JoinRequest(PeerId("o"), b"another session", b"", (), "trainer", "o", HEAD, made.ticket + b"signature")
    run.round(VerifiedReport(PeerId("o"), again))
    invited = run.body.invited
    assert (
        run.line("o").role == "apprentice"
        and invited is not UNSET
        and not any(t.uses_left for t in run.body.tickets)
    )
    roots = dict(zip((m.peer for m in run.body.members), invited.roots, strict=True))
    assert roots["o"] == roots["d"] != roots["b"]


def test_a_member_that_comes_back_waits_no_longer_than_before():
    """A restart is no new member: an apprentice stays one, and its rounds stay counted; it needs no ticket."""
    run = founded("b", "c", "d")
    run.join("n", by="a")
    for _ in range(6):
        run.round()
    before = run.counted("n")
    run.round(VerifiedReport(PeerId("n"), LeaveReport(run.body.round, "")))
    join = JoinRequest(PeerId("n"), b"another session", b"", (), "trainer", "n", HEAD, b"")
    assert (
        admissible(VerifiedReport(PeerId("n"), join), run.body, RecentVertices({HEAD: STATE}), RUN, False, 0.0)
        is None
    )
    run.round(VerifiedReport(PeerId("n"), join))
    assert run.line("n").role == "apprentice" and run.counted("n") == before + 1


def test_where_genesis_says_nothing_votes_are_given_at_once():
    """What stands in genesis of a run without terms is what stood there before there were any."""
    assert RunSettings().vote_terms is None and b"vote_after" not in encode_settings(RunSettings())
    assert RunSettings(vote_after_rounds=10, sponsor_rounds=50).vote_terms == TERMS


def back(run: Run, name: str, key: bytes) -> None:
    """With another session key, ready with the next vertex."""
    join = JoinRequest(PeerId(name), key, b"", (), "trainer", name, HEAD, b"")
    run.round(VerifiedReport(PeerId(name), join))
    run.round(VerifiedReport(PeerId(name), ReadyReport(HEAD, STATE)))


def leaves(run: Run, name: str) -> None:
    run.round(VerifiedReport(PeerId(name), LeaveReport(run.body.round, "")))


def restarts(run: Run, name: str) -> None:
    run.round(VerifiedReport(PeerId(name), JoinRequest(PeerId(name), b"new", b"", (), "trainer", name, HEAD, b"")))


def says_unaudited(run: Run, name: str) -> None:
    run.round(VerifiedReport(PeerId(name), ReadyReport(HEAD, STATE, True)))


@pytest.mark.parametrize("steps_out", [leaves, restarts, says_unaudited])
def test_a_vote_that_comes_back_is_bound_as_a_new_one_is(steps_out: Callable[[Run, str], None]):
    """One after the other steps out, lets the next get its vote, and comes back: it had 4 of 7 votes."""
    run, names = founded("b", "c", "d"), ["d", "d0", "d1", "d2"]
    for name in names[1:]:
        run.join(name, by="d")
    for _ in range(12):
        run.round()
    for name in names[:-1]:
        steps_out(run, name)
        run.round()
        run.round()
    for name in names[:-1]:
        back(run, name, name.encode() + b" again")
        votes = [m.peer for m in run.body.members if m.votes and m.peer.startswith("d")]
        assert len(votes) == 1 and run.line(name).role == "apprentice"
    for _ in range(60):
        run.round()
    assert len(run.voters) > 4 and {"d", "d0"} <= {m.peer for m in run.body.members if m.votes}


def test_founders_and_who_is_alone_of_its_invitation_vote_at_once_when_they_come_back():
    run = founded("b", "c", "d")
    for name in "ad":
        restarts(run, name)
        back(run, name, name.encode() + b" again")
        assert run.voters == "abcd"


def test_two_joins_of_one_peer_in_one_vertex_count_as_one():
    """The ticket that is used, the key and the root are all of the same join."""
    run = founded("b", "c", "d")
    own, other = ticket("own"), ticket("other")
    made = [(PeerId("d"), own), (PeerId("a"), other)]
    run.round(*(VerifiedReport(by, TicketInvite(t.ticket, t.key, "trainer", 1, 1e9)) for by, t in made))
    joins = [JoinRequest(PeerId("s"), b"s", b"", (), "trainer", "s", HEAD, t.ticket + b"sig") for _, t in made]
    run.round(*(VerifiedReport(PeerId("s"), join) for join in joins))
    invited = run.body.invited
    assert invited is not UNSET
    roots = dict(zip((m.peer for m in run.body.members), invited.roots, strict=True))
    assert roots["s"] == roots["d"]
    left = {t.ticket: t.uses_left for t in run.body.tickets}
    assert (left[own.ticket], left[other.ticket]) == (0, 1)
