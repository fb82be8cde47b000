"""Raft for one round, rule by rule: real machines, and a postman that the test tells what to deliver.

Storms, crashes and lost writes are in `conformance/`; here is what no storm of honest voters can show.
"""

from __future__ import annotations

from typing import Any

import pytest
from table import ROUND, RUN, Table, names_of

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect
from atoll.protocol.agreement.events import (
    BodyDecided,
    Equivocation,
    LocalProposerTurnBegan,
    ProposalReceived,
    VertexBodyMissing,
)
from atoll.protocol.agreement.one_phase import OnePhaseAgreement
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, ViewChangePreVote, VoteMessage
from atoll.wire.messages.statements import Proposal, ViewTimeout, Vote

P0, P1, P2, P3, P4 = names_of(5)


@pytest.mark.parametrize(("machine", "hops"), [(OnePhaseAgreement, 2), (TwoPhaseAgreement, 3)])
def test_raft_is_one_hop_faster_for_everybody(machine: type[Any], hops: int):
    """Proposal, votes; where some may lie, votes on the votes. The certificate is of the same kind."""
    table = Table(5, machine)
    assert table.told(LocalProposerTurnBegan, P0)
    table.do(P0, table.at[P0].propose(0, b"body"))
    for hop in range(hops):
        assert len(table.decided()) < 5, f"all know after {hop} hops"
        table.deliver()
    assert table.decided() == dict.fromkeys(table.names, b"body")
    certificate = table.told(BodyDecided)[0].certificate
    assert (certificate.stage, certificate.view, len(certificate.votes)) == ("commit", 0, 3)
    reader = StatementSigner(RUN, VirtualSigner(PeerId("stranger")), VirtualSignatureVerifier())
    assert reader.certificate_holds(certificate, table.keys, 3)


# "In the Pre-Vote algorithm, a candidate only increments its term if it first learns from a majority of the cluster
# that they would be willing to grant the candidate their votes" (Ongaro 2014, 9.6; here a term is a view)
def test_who_is_cut_off_changes_nothing_and_votes_when_it_is_back():
    """p2 gives its leader up alone; nobody follows, its view stands, and its vote is the one that was needed."""
    table = Table(3, deaf={P1})
    table.do(P2, table.at[P2].close_view(0))
    assert table.at[P2].close_view(0) == [] and table.at[P2].view == 0
    assert {type(message) for _, _, message in table.mail} == {ViewChangePreVote}
    table.settle()
    assert table.at[P0].view == 0 and table.at[P0].is_open
    table.do(P0, table.at[P0].propose(0, b"body"))
    table.settle()
    assert table.decided() == {P0: b"body", P2: b"body"}


# "Leader Completeness: if a log entry is committed in a given term, then that entry will be present in the logs of
# the leaders for all higher-numbered terms." (figure 3.2; p0's entry may have been committed for all that p1 can
# know)
def test_a_dead_leader_is_followed_by_the_next_who_takes_its_entry_over():
    """p0's body reached p3 alone, then p0 died: p1 leads, is bound to that body, and it is not judged again."""
    table = Table(4)
    table.do(P0, table.at[P0].propose(0, b"first"))
    table.mail = [route for route in table.mail if route[1] == P3]
    table.deliver()
    table.mail.clear()
    table.deaf.add(P0)
    for name in (P1, P2, P3):
        table.do(name, table.at[name].close_view(0))
    table.deliver()
    assert table.at[P1].view == 1, "a quorum would leave the view, so all did"
    table.settle()
    (lacking,) = table.told(VertexBodyMissing, P1)
    assert table.at[P1].missing_bodies == {lacking.digest} == {vertex_id(b"first")}
    assert table.at[P1].holders(lacking.digest) == [P3]
    table.do(P1, table.at[P1].add_body(b"first"))
    table.settle()
    assert table.decided() == {P1: b"first", P2: b"first", P3: b"first"}
    assert not table.told(ProposalReceived, P2) and len(table.told(ProposalReceived, P3)) == 1


def test_bodies_are_judged_before_they_are_accepted():
    table = Table(3, judges=False)
    table.do(P0, table.at[P0].propose(0, b"wrong"))
    table.settle()
    assert len(table.told(ProposalReceived)) == 2 and not table.decided() and not table.at[P1].has_voted


def test_too_few_left_in_a_view_leave_it():
    """n = 4: one may be gone, so one ballot moves nobody, the second moves all, though no quorum asked."""
    table = Table(4)
    for count, name in enumerate((P1, P2), 1):
        ballot = TimeoutMessage(ROUND, 0, "t", table.sign(name, ViewTimeout(ROUND, 0, -1, ZERO_DIGEST)), None)
        table.do(P3, table.at[P3].receive(name, ballot))
        assert table.at[P3].view == (1 if count == 2 else 0)
    assert any(isinstance(message, TimeoutMessage) for sender, _, message in table.mail if sender == P3)


def test_the_end_of_an_attempt_closes_all_its_views_without_asking():
    """p1 is in its first view; p2, which a quorum of ballots brought there, in the last."""
    table = Table(3)
    table.do(P1, table.at[P1].close_view(2))
    for name in (P0, P1):
        ballot = TimeoutMessage(ROUND, 0, "t", table.sign(name, ViewTimeout(ROUND, 1, -1, ZERO_DIGEST)), None)
        table.do(P2, table.at[P2].receive(name, ballot))
    assert table.at[P2].view == 2
    table.do(P2, table.at[P2].close_view(2))
    assert table.at[P1].view == table.at[P2].view == 3
    assert {type(message) for _, _, message in table.mail} == {TimeoutMessage}


def test_a_body_that_ballots_do_not_allow_is_refused():
    """p2 leads view 2 and shows ballots: with an older body or another one, of too few, or of another view."""
    table = Table(4)
    older, newer = vertex_id(b"older"), vertex_id(b"newer")
    hearer = table.at[P3]

    def ballot(name: PeerId, high: int, digest: Digest, view: int = 1) -> Any:
        return table.sign(name, ViewTimeout(ROUND, view, high, digest))

    def hears(body: bytes, *ballots: Any) -> list[Effect]:
        statement = table.sign(P2, Proposal(ROUND, 2, vertex_id(body)))
        return hearer.receive(P2, ProposalMessage(ROUND, 0, "t", statement, body, ballots, None))

    first, second, third = ballot(P0, 0, older), ballot(P1, 1, newer), ballot(P2, -1, ZERO_DIGEST)
    for body, ballots, says in [
        (b"older", (first, second, third), "newest"),
        (b"other", (first, second, third), "newest"),
        (b"newer", (first, second), "quorum"),
        (b"newer", (first, second, second), "quorum"),
        (b"newer", (first, second, ballot(P2, -1, ZERO_DIGEST, 0)), "another view"),
    ]:
        with pytest.raises(PeerFault, match=says):
            hears(body, *ballots)
        assert hearer.view == 0 and not hearer.has_voted
    table.do(P3, hears(b"newer", first, second, third))
    assert hearer.view == 2 and hearer.has_voted


# "Persistent state on all servers: (Updated on stable storage before responding to RPCs)" (figure 3.1)
def test_a_leader_that_is_run_twice_gets_one_entry_accepted():
    """A copied folder leads as well: whoever accepted the first body accepts no other, also after a restart, and
    whoever hears both has evidence."""
    table = Table(3)

    def says(body: bytes) -> ProposalMessage:
        return ProposalMessage(ROUND, 0, "t", table.sign(P0, Proposal(ROUND, 0, vertex_id(body))), body, (), None)

    table.do(P1, table.at[P1].receive(P0, says(b"one")))
    assert table.at[P1].has_voted
    table.do(P1, table.at[P1].receive(P0, says(b"two")))
    assert [fact.peer for fact in table.told(Equivocation)] == [P0]
    table.mail.clear()
    again = table.start(P1)
    table.do(P1, [*again.start(), *again.receive(P0, says(b"two"))])
    votes = [message for _, _, message in table.mail if isinstance(message, VoteMessage)]
    assert not votes and again.view == 0


def test_words_that_do_not_belong_here():
    table = Table(3)
    machine, digest = table.at[P2], vertex_id(b"body")

    def voted(name: str, *vote: Any) -> VoteMessage:
        return VoteMessage(ROUND, 0, "t", table.sign(name, Vote(*vote)))

    with pytest.raises(PeerFault, match="agrees by Raft"):
        machine.receive(P1, voted("p1", ROUND, 0, "prepare", digest))
    for leader, body, says in ((P1, b"body", "out of turn"), (P0, b"other", "differs from the digest")):
        said = table.sign(leader, Proposal(ROUND, 0, digest))
        with pytest.raises(PeerFault, match=says):
            machine.receive(leader, ProposalMessage(ROUND, 0, "t", said, body, (), None))
    with pytest.raises(PeerFault, match="without a vote"):
        machine.receive(PeerId("p9"), ViewChangePreVote(ROUND, 0, "t", 0))
    with pytest.raises(PeerFault, match="later view than it closes"):
        machine.receive(P1, TimeoutMessage(ROUND, 0, "t", table.sign("p1", ViewTimeout(ROUND, 0, 3, digest)), None))
    for round, view in ((ROUND - 1, 0), (ROUND, 99)):
        for name in ("p0", "p1"):
            assert machine.receive(PeerId(name), voted(name, round, view, "commit", digest)) == []
    assert machine.receive(P1, ViewChangePreVote(ROUND, 33, "t", 99)) == [] and not machine.is_open
    assert not table.decided() and len(machine.tallies) <= 2
    assert Table(3, TwoPhaseAgreement).at[P2].receive(P1, ViewChangePreVote(ROUND, 0, "t", 0)) == []


def test_a_restarted_voter_returns_to_the_view_in_which_it_accepted():
    """It closed view 4, accepted in view 7, and dies: it is back in view 7, and its ballot names that body."""
    table = Table(5)
    table.do(P4, table.at[P4].close_view(4))  # the attempt is over
    table.mail.clear()
    ballots = tuple(table.sign(p, ViewTimeout(ROUND, 6, -1, ZERO_DIGEST)) for p in (P0, P1, P2))
    leader = table.at[P4].proposer(7)
    said = table.sign(leader, Proposal(ROUND, 7, vertex_id(b"body")))
    proposal = ProposalMessage(ROUND, 1, "t", said, b"body", ballots, None)
    table.do(P4, table.at[P4].receive(leader, proposal))
    again = table.start(P4)
    assert again.view == 7 and again.bodies == {vertex_id(b"body"): b"body"}
    table.mail.clear()
    table.do(P4, again.receive(leader, proposal))
    assert len(table.mail) == 4 and len(table.told(ProposalReceived, P4)) == 1, "its vote again, and no second look"
    table.do(P4, again.close_view(9))
    ballot = next(message for _, _, message in table.mail if isinstance(message, TimeoutMessage))
    claim = StatementSigner(RUN, VirtualSigner(P0), VirtualSignatureVerifier()).open(
        ballot.statement, ViewTimeout, table.keys[P4]
    )
    assert (claim.view, claim.high_view, claim.high_digest) == (9, 7, vertex_id(b"body"))


def test_a_restarted_leader_repeats_its_proposal():
    """It died before anybody heard it; the round would write another body now, and is not asked."""
    table = Table(3)
    table.do(P0, table.at[P0].propose(0, b"body"))
    table.mail.clear()
    again = table.start(P0)
    assert again.has_proposed(0) and again.propose(0, b"another") == []
    table.do(P0, again.start())
    table.settle()
    assert set(table.decided().values()) == {b"body"} and len(table.told(LocalProposerTurnBegan, P0)) == 1


def test_ten_thousand_views_leave_nothing_behind():
    table = Table(4)
    machine = table.at[P3]
    for view in range(3, 40_000, 4):
        machine.close_view(view)
    assert len(machine.tallies) <= 4 and len(machine.bodies) <= 2


# In our words, of both: who forgot what it said is not believed to be who said it, until its new key is agreed.
@pytest.mark.parametrize("machine", [OnePhaseAgreement, TwoPhaseAgreement])
def test_a_voter_that_lost_its_disk_is_silent_until_its_new_key_is_agreed(machine: type[Any]):
    """It has voted and forgets, and the same words come again: it listens, says nothing, and learns the end."""
    table = Table(4, machine)
    table.do(P0, table.at[P0].propose(0, b"body"))
    words = [message for _, to, message in table.mail if to == P3]
    table.deliver()
    assert table.at[P3].has_voted
    del table.kept[P3]
    listener = table.start(P3, session=1)
    before = len(table.mail)
    for effects in (listener.start(), *(listener.receive(P0, word) for word in words), listener.retransmit()):
        table.do(P3, effects)
    assert not table.start(P3, session=1).close_view(0)
    assert len(table.mail) == before and P3 not in table.kept
    table.at[P3] = listener
    table.settle()
    assert table.decided() == dict.fromkeys(table.names, b"body")
    voter = table.start(P3, session=1)
    voter.votes = True  # mutant: whoever has the name has the vote
    table.do(P3, voter.receive(P0, words[0]))
    assert any(sender == P3 and isinstance(message, VoteMessage) for sender, _, message in table.mail)
