"""The rules of two-phase agreement as their authors give them, and where ours is the elder or the younger rule.

In quotation marks are sentences of the authors of HotStuff-2 (ePrint 2023/397) in their own account of it, "What is
the difference between PBFT, Tendermint, HotStuff, and HotStuff-2?" (Nayak & Malkhi 2023, on decentralizedthoughts).
Rules of Jolteon (arXiv 2106.10362; DiemBFT v4 has its pseudocode) are in our words.
Their t, our f: how many may lie. Their lock, our highest prepare certificate.
"""

from __future__ import annotations

import pytest
from table import ROUND, Table, names_of

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.protocol.agreement.events import BodyDecided, LocalProposerTurnBegan, VertexBodyMissing
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.protocol.agreement.voter_state import VoterState
from atoll.wire.codec import vertex_id
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, VoteMessage
from atoll.wire.messages.statements import Proposal, QuorumCertificate, ViewTimeout, Vote

P0, P1, P2, P3 = names_of(4)
FIRST, SECOND = b"first body", b"second body"


def proposed() -> Table:
    """Four voters of which one may lie; p0 has proposed, its word is on its way."""
    table = Table(4, TwoPhaseAgreement)
    table.do(P0, table.at[P0].propose(0, FIRST))
    return table


def prepare_votes_reach(table: Table, *who: PeerId) -> None:
    """Everybody has voted for the first body; only these hear of a quorum of it, and nobody of theirs."""
    table.deliver()
    table.mail = [route for route in table.mail if route[1] in who and isinstance(route[2], VoteMessage)]
    table.deliver()
    table.mail.clear()


def time_out(table: Table, *who: PeerId) -> None:
    """These close view 0; p1, who leads view 1, hears of it before anybody else does."""
    for name in who:
        table.do(name, table.at[name].close_view(0))
    theirs = [route for route in table.mail if route[1] == P1]
    table.mail = [route for route in table.mail if route[1] != P1]
    for sender, to, message in theirs:
        table.do(to, table.at[to].receive(sender, message))


# "They then engage in another phase that allows parties to commit the value. [...] When a party commits a value v
# after the second phase, a principal invariant that is ensured is that >= 2t+1 parties (and thus >= t+1 honest
# parties) are locked on v from the first phase."
def test_when_the_first_voter_decides_a_quorum_is_locked_on_disk():
    """The votes to commit are delivered one by one until somebody decides."""
    table = proposed()
    table.deliver()
    table.deliver()
    assert not table.told(BodyDecided)
    while not table.told(BodyDecided):
        sender, to, message = table.mail.pop(0)
        table.do(to, table.at[to].receive(sender, message))
    locks = [VoterState.decode(table.kept[name]).high for name in table.names]
    assert sum(lock is not None and lock.digest == vertex_id(FIRST) for lock in locks) >= 3


# "If the leader obtains a lock (a quorum certificate) from the preceding view, it knows that it has obtained the
# maximal locked value that possibly exists in the system. In this case, it proceeds with a proposal in a responsive
# manner."
def test_a_leader_that_is_shown_a_lock_of_the_view_before_goes_on_with_it_at_once():
    """p2 is locked and p0 is gone: no clock is asked before p1 proposes the same body and all decide it."""
    table = proposed()
    prepare_votes_reach(table, P2)
    table.deaf = {P0}
    time_out(table, P1, P2, P3)
    assert not table.told(LocalProposerTurnBegan, P1)
    table.settle()
    assert table.decided() == dict.fromkeys((P1, P2, P3), FIRST)


# "Otherwise, the leader knows that a timer delay of Omega(Delta) must have expired in the preceding view. In that
# case, there is no responsiveness anyway, hence it waits an extra O(Delta) delay after all parties are guaranteed
# to enter the view to obtain the maximal locked value in the system."
# This is not our rule. Timeouts are shown with the proposal, as in Jolteon and in PBFT, of which they say: "In
# particular, this holds even in situations when a party is locked on a value and the leader proposes a different
# value that is justified by the status certificate."
def test_where_no_lock_is_shown_the_leader_does_not_wait_and_who_is_locked_alone_follows():
    """p3 is locked; the timeouts of the others say nothing of it, so nobody can have decided, and p3 sees that."""
    table = proposed()
    prepare_votes_reach(table, P3)
    time_out(table, P0, P1, P2)
    (free,) = table.told(LocalProposerTurnBegan, P1)
    assert free.view == 1
    table.do(P1, table.at[P1].propose(1, SECOND))
    table.settle()
    assert table.decided() == dict.fromkeys(table.names, SECOND)


def test_a_leader_without_a_quorum_of_timeouts_waits():
    """The only wait there is: for words, not for time."""
    table = proposed()
    prepare_votes_reach(table, P3)
    time_out(table, P0, P1)
    assert not table.told(LocalProposerTurnBegan, P1) and not table.at[P1].propose(1, SECOND)


# Jolteon: after a timeout certificate, vote only for a block of the round just after it, whose certificate is at
# least as high as the highest that the timeouts name (in our words).
@pytest.mark.parametrize(("view", "body", "why"), [(1, SECOND, "highest certified"), (2, FIRST, "another view")])
def test_a_proposal_after_a_timeout_extends_the_highest_certificate_of_the_view_just_before(
    view: int, body: bytes, why: str
):
    """A liar shows timeouts of which one claims a lock, and proposes something else, or two views later."""
    table = Table(4, TwoPhaseAgreement)
    prepare = Vote(ROUND, 0, "prepare", vertex_id(FIRST))
    votes = tuple((p, table.sign(p, prepare).signature) for p in (P0, P1, P2))
    lock = QuorumCertificate(ROUND, 0, "prepare", vertex_id(FIRST), votes)
    claims = [(-1, ZERO_DIGEST), (0, vertex_id(FIRST)), (-1, ZERO_DIGEST)]
    timeouts = tuple(
        table.sign(p, ViewTimeout(ROUND, 0, *claim)) for p, claim in zip((P0, P1, P2), claims, strict=True)
    )

    def says(view: int, body: bytes) -> ProposalMessage:
        leader = table.at[P3].proposer(view)
        return ProposalMessage(
            ROUND, 0, "t", table.sign(leader, Proposal(ROUND, view, vertex_id(body))), body, timeouts, lock
        )

    with pytest.raises(PeerFault, match=why):
        table.at[P3].receive(P2, says(view, body))
    assert not table.at[P3].has_voted
    table.do(P3, table.at[P3].receive(P2, says(1, FIRST)))  # what the same timeouts do allow
    assert table.at[P3].has_voted


# Jolteon: a vote's round is above every round that one has voted in or given up (in our words).
def test_who_went_on_votes_in_no_view_before():
    table = proposed()
    (proposal,) = {id(m): m for _, to, m in table.mail if isinstance(m, ProposalMessage)}.values()
    table.do(P3, table.at[P3].close_view(0))
    table.do(P3, table.at[P3].receive(P0, proposal))
    assert not table.at[P3].has_voted and not table.at[P3].approve(vertex_id(FIRST))


# The same across a restart: what was voted for is durable, so the view it was voted for in is known.
def test_who_restarts_votes_in_no_view_before_the_one_it_voted_in():
    """p3 comes from view 0 straight to view 2, votes there and dies: a proposal of view 1 is too late for it."""
    table = Table(4, TwoPhaseAgreement)

    def says(view: int, body: bytes) -> ProposalMessage:
        timeouts = tuple(table.sign(p, ViewTimeout(ROUND, view - 1, -1, ZERO_DIGEST)) for p in (P0, P1, P2))
        leader = table.at[P3].proposer(view)
        return ProposalMessage(
            ROUND, 0, "t", table.sign(leader, Proposal(ROUND, view, vertex_id(body))), body, timeouts, None
        )

    table.do(P3, table.at[P3].receive(P2, says(2, SECOND)))
    assert table.at[P3].has_voted and table.at[P3].view == 2
    again = table.start(P3)
    table.mail.clear()
    table.do(P3, again.receive(P1, says(1, FIRST)))
    assert again.view == 2 and not [m for _, _, m in table.mail if isinstance(m, VoteMessage)]


# "parties are locked on v": they must have the value then, or nobody could go on with it. This is our rule.
def hidden_lock(table: Table) -> TimeoutMessage:
    """What p3, which alone saw the first body prepared, says of view 1 after all others have given that body up."""
    table.deaf = {P3}
    table.deliver()
    table.mail.clear()  # the votes: lost, all of them
    prepare = Vote(ROUND, 0, "prepare", vertex_id(FIRST))
    votes = tuple((p, table.sign(p, prepare).signature) for p in (P0, P1, P3))
    hidden = QuorumCertificate(ROUND, 0, "prepare", prepare.digest, votes)
    time_out(table, P0, P1, P2)
    table.deliver()
    table.do(P1, table.at[P1].propose(1, SECOND))
    table.mail = [route for route in table.mail if isinstance(route[2], ProposalMessage)]
    table.deliver()
    table.mail.clear()
    timeout = ViewTimeout(ROUND, 1, 0, prepare.digest)
    return TimeoutMessage(ROUND, 0, "t", table.sign(P3, timeout), hidden)


def test_a_lock_that_a_liar_kept_to_itself_binds_nobody_to_a_body_that_is_gone():
    """It shows the certificate, not the body: whoever proposes next does without it, and nobody claims it."""
    table, honest = proposed(), (P0, P1, P2)
    shown = hidden_lock(table)
    for name in honest:
        table.do(name, table.at[name].close_view(1))
    assert vertex_id(FIRST) not in table.at[P2].bodies, "that it is gone is what this story is about"
    table.do(P2, table.at[P2].receive(P3, shown))
    sent = [route for route in table.mail if route[1] == P2]
    table.mail = []
    for sender, to, message in sent[:1]:
        table.do(to, table.at[to].receive(sender, message))
    assert (
        not table.told(LocalProposerTurnBegan, P2)
        and table.at[P2].missing_bodies == {vertex_id(FIRST)}
        and table.told(VertexBodyMissing, P2)
    )
    for sender, to, message in sent[1:]:
        table.do(to, table.at[to].receive(sender, message))
    (free,) = table.told(LocalProposerTurnBegan, P2)
    table.do(P2, table.at[P2].propose(free.view, b"third body"))
    table.settle()
    assert table.decided() == dict.fromkeys(honest, b"third body")


def test_such_a_lock_binds_as_soon_as_its_body_is_here():
    """Now the liar gives it: p2 is locked, and proposes that body without being asked."""
    table = proposed()
    shown = hidden_lock(table)
    for name in (P0, P2):
        table.do(name, table.at[name].close_view(1))
    sent, table.mail = [route for route in table.mail if route[:2] == (P0, P2)], []
    for sender, to, message in [*sent, (P3, P2, shown)]:
        table.do(to, table.at[to].receive(sender, message))
    assert VoterState.decode(table.kept[P2]).high is None and table.at[P2].holders(vertex_id(FIRST)) == [P3]
    table.do(P2, table.at[P2].add_body(FIRST))
    assert VoterState.decode(table.kept[P2]).high is not None and not table.told(LocalProposerTurnBegan, P2)
    table.settle()
    assert table.decided() == dict.fromkeys((P0, P1, P2), FIRST)


def test_who_lacks_the_body_of_a_certificate_votes_to_commit_once_it_is_here():
    """The proposal does not reach p3, the votes do."""
    table = proposed()
    table.mail = [route for route in table.mail if route[1] != P3 or isinstance(route[2], VoteMessage)]
    table.deliver()
    table.deliver()
    assert table.at[P3].missing_bodies == {vertex_id(FIRST)} and P3 not in table.kept
    table.do(P3, table.at[P3].add_body(FIRST))
    assert set(VoterState.decode(table.kept[P3]).commit) == {0}
    table.settle()
    assert table.decided() == dict.fromkeys(table.names, FIRST)


def test_two_locks_of_one_view_are_more_lies_than_are_tolerated_and_stop_nobody():
    """Who proposes next holds the body of one of them: it goes on with that one, and needs nothing of the other."""
    table = proposed()
    prepare_votes_reach(table, P1)

    def lock(body: bytes, *by: PeerId) -> QuorumCertificate:
        vote = Vote(ROUND, 0, "prepare", vertex_id(body))
        return QuorumCertificate(
            ROUND, 0, "prepare", vote.digest, tuple((p, table.sign(p, vote).signature) for p in by)
        )

    for name, high in ((P0, lock(SECOND, P0, P2, P3)), (P2, lock(FIRST, P0, P1, P2))):
        said = table.sign(name, ViewTimeout(ROUND, 0, 0, high.digest))
        table.do(P1, table.at[P1].receive(name, TimeoutMessage(ROUND, 0, "t", said, high)))
    nothing = table.sign(P3, ViewTimeout(ROUND, 0, -1, ZERO_DIGEST))
    table.do(P1, table.at[P1].receive(P3, TimeoutMessage(ROUND, 0, "t", nothing, None)))
    (sent,) = {message.body for _, _, message in table.mail if isinstance(message, ProposalMessage)}
    assert sent == FIRST
