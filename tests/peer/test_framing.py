"""Framing: no honest peer can be blamed for a forged or borrowed message; its bringer is blamed.

One honest peer of four receives messages from a villain that knows everything except the others' keys.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Broadcast, Emit, Payload, Received, Send, TimerFired
from atoll.crypto.digest import digest, merkle_path, merkle_root
from atoll.peer.events import ProtocolFault
from atoll.peer.round.machine import RoundMachine
from atoll.peer.round.vertex_body import open_report
from atoll.policy.membership import only_counts
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import encode, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.round import (
    PartialSum,
    ProposalMessage,
    RowContribution,
    TimeoutMessage,
    UpdateCommitmentMessage,
    VoteMessage,
)
from atoll.wire.messages.statements import (
    Accusation,
    Commitment,
    OwnerResult,
    Proposal,
    QuorumCertificate,
    SignedStatement,
    ViewTimeout,
    Vote,
)

ME, HONEST, VILLAIN = peer_name(0), peer_name(1), peer_name(2)


class Stand:
    """The peer under test, in the first round of a swarm of four."""

    def __init__(self) -> None:
        self.swarm = VirtualSwarm(1, SwarmKnobs(4))
        self.swarm.world.run(0.5)
        peer = self.swarm.world.nodes[ME].machine
        assert peer is not None and peer.round is not None
        self.peer, self.round = peer, peer.round
        self.trace = self.round.plan.trace

    def sign(self, statement, by: PeerId) -> SignedStatement:
        return StatementSigner(self.swarm.run_id, VirtualSigner(by), VirtualSignatureVerifier()).sign(statement)

    def hears(self, message, payload: Payload | None = None) -> list[PeerId]:
        """The peers it blames after this message of the villain."""
        effects = self.peer.handle(Received(VILLAIN, message, payload), 0.5)
        return [e.fact.peer for e in effects if isinstance(e, Emit) and isinstance(e.fact, ProtocolFault)]


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_a_forged_signature_is_the_fault_of_who_brings_it(stand: Stand):
    """Anyone can write an honest name under anything."""
    vote = Vote(0, 0, "commit", ZERO_DIGEST)
    assert stand.hears(VoteMessage(0, 0, stand.trace, SignedStatement(HONEST, encode(vote), b"forged"))) == [
        VILLAIN
    ]
    assert stand.hears(VoteMessage(0, 0, stand.trace, SignedStatement(HONEST, b"\xc1", b""))) == [VILLAIN]
    assert stand.hears(VoteMessage(0, 0, stand.trace, SignedStatement(PeerId("nobody"), encode(vote), b""))) == [
        VILLAIN
    ]


def test_an_honest_proposal_with_other_bytes_is_the_fault_of_who_brings_it(stand: Stand):
    """The signature covers the digest; body, timeouts and certificate are the carrier's claim."""
    agreement = stand.round.agreement
    proposer = agreement.proposer(0)
    if proposer in (ME, VILLAIN):
        proposer = HONEST
        agreement.proposers = (HONEST,) * 4
    signed = stand.sign(Proposal(0, 0, vertex_id(b"the real one")), proposer)
    assert stand.hears(ProposalMessage(0, 0, stand.trace, signed, b"another", (), None)) == [VILLAIN]
    later = stand.sign(Proposal(0, 1, vertex_id(b"x")), agreement.proposer(1))
    assert stand.hears(ProposalMessage(0, 0, stand.trace, later, b"x", (), None)) == [VILLAIN]
    claim = stand.sign(ViewTimeout(0, 1, 0, digest(b"y")), HONEST)
    assert stand.hears(TimeoutMessage(0, 0, stand.trace, claim, None)) == [VILLAIN]


def test_a_certificate_beside_a_known_claim_is_not_believed_unseen(stand: Stand):
    """The claim is known and true; the certificate shown with it is invented, and must not become the highest."""
    agreement = stand.round.agreement
    real = digest(b"certified")
    votes = tuple(
        (p, stand.sign(Vote(0, 0, "prepare", real), p).signature) for p in sorted((ME, HONEST, peer_name(3)))
    )
    known = QuorumCertificate(0, 0, "prepare", real, votes)
    first = stand.sign(ViewTimeout(0, 0, 0, real), HONEST)
    agreement.add_body(b"certified")  # a certificate does not bind a peer that lacks it
    assert stand.hears(TimeoutMessage(0, 0, stand.trace, first, known)) == []
    invented = QuorumCertificate(0, 90, "prepare", digest(b"never"), ())
    again = stand.sign(ViewTimeout(0, 1, 0, real), VILLAIN)
    stand.hears(TimeoutMessage(0, 0, stand.trace, again, invented))
    assert agreement.state.high == known
    assert (
        stand.hears(TimeoutMessage(0, 0, stand.trace, stand.sign(ViewTimeout(0, 2, 0, real), VILLAIN), None)) == []
    )


@pytest.mark.parametrize("claimed", [(1, digest(b"certified")), (0, digest(b"another"))])
def test_a_certificate_of_another_view_or_body_proves_no_claim(stand: Stand, claimed: tuple[int, Digest]):
    """It is valid but shown under a claim that it does not support: it would bind voters to a body without a
    certificate.
    """
    real = digest(b"certified")
    votes = tuple(
        (p, stand.sign(Vote(0, 0, "prepare", real), p).signature) for p in sorted((ME, HONEST, peer_name(3)))
    )
    shown = QuorumCertificate(0, 0, "prepare", real, votes)
    assert stand.hears(
        TimeoutMessage(0, 0, stand.trace, stand.sign(ViewTimeout(0, 1, *claimed), VILLAIN), shown)
    ) == [VILLAIN]
    assert stand.round.agreement.state.high is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"step_s": float("nan")},
        {"samples": 2**63, "weight": 2**63},
        {"samples": -1, "weight": -1},
        {"steps": 2**62},
        {"why": "x" * 10_000},
        {"weight": 5},
        {"parts": 3},
        {"values": -1},
    ],
)
def test_a_commitment_that_would_break_everybodys_sums_is_refused(stand: Stand, wrong: dict):
    """One NaN among the losses, and no two voters would ever agree on the metrics again."""
    fields = {"parts": 4, "steps": 20, "samples": 320, "loss": 1.0, "step_s": 0.1, "weight": 320} | wrong
    signed = stand.sign(Commitment(0, 0, digest(b"root"), **fields), VILLAIN)
    assert stand.hears(UpdateCommitmentMessage(0, 0, stand.trace, signed)) == [VILLAIN]
    assert VILLAIN not in stand.round.commits.get(0).of


def test_a_body_that_is_no_body_does_not_stop_the_clock(stand: Stand):
    """The villain proposes noise for the next view early; when this view ends, its timeout must still be said."""
    agreement = stand.round.agreement
    agreement.proposers = (ME, VILLAIN, ME, ME)
    noise = b"\xc1 no body"
    timeouts = tuple(stand.sign(ViewTimeout(0, 0, -1, ZERO_DIGEST), p) for p in (HONEST, VILLAIN, peer_name(3)))
    signed = stand.sign(Proposal(0, 1, vertex_id(noise)), VILLAIN)
    assert stand.hears(ProposalMessage(0, 0, stand.trace, signed, noise, timeouts, None)) == []
    effects = stand.round.handle(_agree_timer(stand.round), stand.round.plan.times(0).agree_until)
    assert any(isinstance(e, Send | Broadcast) and isinstance(e.message, TimeoutMessage) for e in effects)


def test_a_wrong_part_does_not_undo_what_its_true_commitment_began(stand: Stand):
    """The last commitment arrives with a lying part: sharing begins all the same, and what is sent leaves."""
    fields = {"parts": 4, "steps": 20, "samples": 320, "loss": 1.0, "step_s": 0.1, "weight": 320}
    commit = stand.sign(Commitment(0, 0, digest(b"root"), **fields), VILLAIN)
    part = next(j for j, owners in enumerate(stand.round.ground.owners) if ME in owners)
    index = stand.round.ground.owners[part].index(ME)
    lie = RowContribution(0, 0, stand.trace, part, index, (), commit)
    heard = stand.round.commits.get(0)
    assert heard is None or VILLAIN not in heard.of
    blamed = stand.hears(lie, Payload(digest(b"other bytes"), 8, b""))
    assert blamed == [VILLAIN]
    assert VILLAIN in stand.round.commits[0].of


def test_a_row_dressed_up_as_a_sum_is_refused(stand: Stand):
    """Sums cannot be checked against a commitment: a peer with no children in the tree may not send one."""
    fields = {"parts": 4, "steps": 20, "samples": 320, "loss": 1.0, "step_s": 0.1, "weight": 320}
    stand.hears(
        UpdateCommitmentMessage(0, 0, stand.trace, stand.sign(Commitment(0, 0, digest(b"root"), **fields), VILLAIN))
    )
    part = next(j for j, owners in enumerate(stand.round.ground.owners) if ME in owners)
    index = stand.round.ground.owners[part].index(ME)
    other_bytes = Payload(digest(b"seen after the others' reveal"), 8, (VILLAIN,))
    for names, weight in (((VILLAIN,), 320), ((), 0)):
        sum_of_one = PartialSum(0, 0, stand.trace, part, index, weight, names)
        assert stand.hears(sum_of_one, other_bytes) == [VILLAIN]
    assert VILLAIN not in stand.round.reduce.accumulators[part].rows


def _agree_timer(round: RoundMachine):
    return TimerFired(f"round/{round.plan.round}/agree/{round.attempt}")


def test_a_lie_that_its_owner_did_not_sign_is_no_report(stand: Stand):
    """Anyone can write an answer under an honest name; only what the owner signed may stand in a vertex."""
    said = OwnerResult(0, 0, 0, 0, digest(b"x"), 8, (HONEST,))
    real, keys = stand.sign(said, HONEST), stand.round.ground.vote_key_of
    forged = SignedStatement(HONEST, encode(replace(said, digest=digest(b"y"))), b"forged")
    notary = StatementSigner(stand.swarm.run_id, VirtualSigner(ME), VirtualSignatureVerifier())
    assert open_report(notary, stand.sign(Accusation(real), VILLAIN), keys) is not None
    assert open_report(notary, stand.sign(Accusation(forged), VILLAIN), keys) is None
    assert open_report(notary, stand.sign(Accusation(real, forged), VILLAIN), keys) is None
    vote = stand.sign(Vote(0, 0, "commit", ZERO_DIGEST), HONEST)
    assert open_report(notary, stand.sign(Accusation(vote), VILLAIN), keys) is None


def test_two_commitments_of_one_peer_are_a_proof_and_one_is_a_voice(stand: Stand):
    """One alone claims that a row cannot be decoded: it only counts, and the row is still awaited."""
    fields = {"parts": 4, "steps": 20, "samples": 320, "loss": 1.0, "step_s": 0.1, "weight": 320}
    one = stand.sign(Commitment(0, 0, digest(b"root"), **fields), HONEST)
    other = stand.sign(Commitment(0, 0, digest(b"another"), **fields), HONEST)
    keys = stand.round.ground.vote_key_of
    notary = StatementSigner(stand.swarm.run_id, VirtualSigner(ME), VirtualSignatureVerifier())
    assert open_report(notary, stand.sign(Accusation(one, other), VILLAIN), keys) is not None
    assert open_report(notary, stand.sign(Accusation(one), VILLAIN), keys) is not None and only_counts(
        Accusation(one)
    )
    forged = replace(one, body=other.body)
    assert open_report(notary, stand.sign(Accusation(forged), VILLAIN), keys) is None
    awaited = set(stand.round.committed.awaited)
    assert HONEST in awaited and not stand.hears(ReportMessage(stand.sign(Accusation(one), VILLAIN)))
    assert stand.round.committed.awaited == awaited and not stand.round.committed.two_faced
    assert not stand.hears(ReportMessage(stand.sign(Accusation(one, other), VILLAIN)))
    assert HONEST in stand.round.committed.two_faced


@pytest.mark.parametrize("whose", ["another's", "an older one"])
def test_a_row_that_brings_another_commitment_is_refused(stand: Stand, whose: str):
    """Its owner would send that commitment to voters that dispute the sum, and seem to hide the row."""
    fields = {"parts": 4, "steps": 20, "samples": 320, "loss": 1.0, "step_s": 0.1, "weight": 320}
    rows = tuple(digest(f"row {j}".encode()) for j in range(4))
    root = merkle_root(rows)
    stand.hears(UpdateCommitmentMessage(0, 0, stand.trace, stand.sign(Commitment(0, 0, root, **fields), VILLAIN)))
    part = next(j for j, owners in enumerate(stand.round.ground.owners) if ME in owners)
    index = stand.round.ground.owners[part].index(ME)
    if whose == "another's":
        word = stand.sign(Commitment(0, 0, root, **fields), HONEST)
    else:
        word = stand.sign(Commitment(-1, 0, digest(b"root of a past round"), **fields), VILLAIN)
    message = RowContribution(0, 0, stand.trace, part, index, merkle_path(rows, part), word)
    assert stand.hears(message, Payload(rows[part], 8, (VILLAIN,))) == [VILLAIN]
    assert VILLAIN not in stand.round.reduce.accumulators[part].rows
