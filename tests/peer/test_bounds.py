"""Bounds on what others can make a peer send, store or wait for.

One honest peer of four, in the middle of a round, receives messages from a peer that never stops.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import (
    BODY_BYTES_MAX,
    BULK_FRAME_MAX,
    COMMIT_BYTES_MAX,
    MIB,
    PART_BYTES_MAX,
    PART_GIVEN_MAX,
    PART_GIVEN_S,
    PEERS_MAX,
    WEIGHED_ROWS_MAX,
)
from atoll.base.machine import Broadcast, Emit, Payload, Received, Send
from atoll.peer.events import ProposalRejected, ProtocolFault
from atoll.peer.membership.admission import REFUSALS
from atoll.peer.peer import Peer
from atoll.peer.round.topology_choice import part_bytes_most
from atoll.peer.settings import RunSettings
from atoll.peer.sync import early_messages
from atoll.protocol.agreement.events import ProposalReceived
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.training.codec import SharedKnowledge, codec_named
from atoll.wire.codec import encode
from atoll.wire.envelope import StatementSigner, signed_bytes
from atoll.wire.messages.history import VerticesRequest
from atoll.wire.messages.membership import JoinRefused, Ping, ReportMessage
from atoll.wire.messages.round import (
    PartialSum,
    PartReductionDeclined,
    PartRequest,
    PartResponse,
    PartResult,
    ProposalMessage,
    RoundMessage,
    RowContribution,
    RowResponse,
    UpdateCommitmentMessage,
    VoteMessage,
)
from atoll.wire.messages.statements import (
    AgreedWeights,
    Commitment,
    JoinRequest,
    OwnerResult,
    QuorumCertificate,
    SignedStatement,
)

ME, OTHER, MEMBER = peer_name(0), peer_name(1), peer_name(2)


class Stand:
    """The peer under test, as soon as it holds combined parts."""

    def __init__(self) -> None:
        self.swarm = VirtualSwarm(1, SwarmKnobs(4))
        self.swarm.world.run(0.5)
        while not self.peer.old_parts.held or not any(self.peer.old_parts.held.values()):
            assert self.swarm.world.now < 60
            self.swarm.world.run(self.swarm.world.now + 0.05)

    @property
    def peer(self) -> Peer:
        peer = self.swarm.world.nodes[ME].machine
        assert peer is not None
        return peer

    def part(self) -> tuple[int, Digest]:
        return next((round, digest) for round, parts in self.peer.old_parts.held.items() for digest in parts)

    def hears(self, message, payload: Payload | None = None, by: PeerId = MEMBER, at: float | None = None):
        now = self.swarm.world.now if at is None else at
        return self.peer.handle(Received(by, message, payload), now)

    def given(self, wish: PartRequest, times: int, by: PeerId = MEMBER) -> int:
        """Number of times the bytes are sent to a peer that asks this often."""
        answers = [e for _ in range(times) for e in self.hears(wish, by=by)]
        return sum(isinstance(e, Send) and isinstance(e.message, PartResponse) for e in answers)


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_who_asks_for_a_part_again_and_again_is_given_it_a_few_times(stand: Stand):
    """A request of a few bytes is answered with megabytes: enough for a lost message, not for a flood."""
    round, digest = stand.part()
    assert stand.peer.round is not None and stand.peer.round.plan.round == round
    assert stand.given(PartRequest(round, 0, "", digest), 100) == PART_GIVEN_MAX
    assert stand.given(PartRequest(round, 7, "", digest), 100) == 0  # the attempt that it names is its own claim
    assert stand.given(PartRequest(round, 0, "", digest), 1, by=OTHER) == 1  # others are not made to pay for it


def test_the_next_attempt_is_a_new_beginning(stand: Stand):
    """A pause may outlast many attempts, and a peer that returns must be able to get the parts."""
    round, digest = stand.part()
    wish = PartRequest(round, 0, "", digest)
    stand.given(wish, 100)
    current = stand.peer.round
    assert current is not None
    kept = dict(current.parts.held)
    current.attempt += 1
    current._begin_attempt(stand.swarm.world.now)
    current.parts.held.update(kept)
    assert stand.given(wish, 100) == PART_GIVEN_MAX


def test_an_attempt_that_does_not_end_counts_anew_every_minute(stand: Stand):
    """Groups have attempts of years, and a peer that lost its connection must not wait as long."""
    round, digest = stand.part()
    wish = PartRequest(round, 0, "", digest)
    stand.given(wish, 100)
    current = stand.peer.round
    assert current is not None
    began = current.parts.given_since
    assert not current.handle(Received(MEMBER, wish), began + PART_GIVEN_S - 1)
    later = [e for _ in range(100) for e in current.handle(Received(MEMBER, wish), began + PART_GIVEN_S + 1)]
    assert len(later) == PART_GIVEN_MAX


def test_a_laggard_is_given_a_part_of_an_old_round_a_few_times(stand: Stand):
    """Old rounds have no attempts any more: what was not enough is fetched as a whole state."""
    round, digest = stand.part()
    kept = dict(stand.peer.old_parts.held[round])
    while stand.peer.at < round or stand.peer.round is None:
        stand.swarm.world.run(stand.swarm.world.now + 0.05)
    stand.peer.old_parts.held[round] = kept
    assert stand.given(PartRequest(round, 0, "", digest), 100) == PART_GIVEN_MAX
    assert stand.given(PartRequest(round, 0, "", digest), 1, by=OTHER) == 1


def test_bodies_that_come_too_early_count_as_the_bytes_they_are(monkeypatch: pytest.MonkeyPatch):
    """A proposal carries a whole vertex and no payload: thousands of them would be gigabytes."""
    monkeypatch.setattr(early_messages, "EARLY_BYTES_MAX", 10_000)
    words = early_messages.EarlyMessageBuffer()
    for k in range(30):
        signed = SignedStatement(PeerId("ada"), b"", b"")
        words.remember(Received(PeerId(f"p{k}"), ProposalMessage(9, 0, "", signed, bytes(900), (), None)))
    assert len(words) == 10 and words.unheard(9) == [PeerId(f"p{k}") for k in range(20)]


def test_weights_that_come_too_early_count_as_the_bytes_they_are(monkeypatch: pytest.MonkeyPatch):
    """They are decoded beside any result, also where rows are not weighted."""
    monkeypatch.setattr(early_messages, "EARLY_BYTES_MAX", 10_000)
    words, signed = early_messages.EarlyMessageBuffer(), SignedStatement(PeerId("ada"), b"", b"")
    weighing = AgreedWeights((), (), Digest(bytes(1000)))
    for k in range(30):
        words.remember(Received(PeerId(f"p{k}"), PartResult(9, 0, "", signed, weighing)))
    assert len(words) == 9
    words = early_messages.EarlyMessageBuffer()
    words.remember(Received(PeerId("ada"), PartResult(9, 0, "", signed)))
    assert len(words) == 1 and words.size_bytes < 100


def test_certificates_that_come_too_early_count_as_the_bytes_they_are(monkeypatch: pytest.MonkeyPatch):
    """A repeated vote carries proof with votes of all: 74 kB with ML-DSA-65, or any size from a liar."""
    monkeypatch.setattr(early_messages, "EARLY_BYTES_MAX", 50_000)
    words, signed = early_messages.EarlyMessageBuffer(), SignedStatement(PeerId("ada"), b"", b"")
    proof = QuorumCertificate(9, 0, "prepare", Digest(bytes(32)), ((PeerId("ada"), bytes(4000)),))
    for k in range(30):
        words.remember(Received(PeerId(f"p{k}"), VoteMessage(9, 0, "", signed, proof)))
    assert len(words) == 12


# ---- strangers -----------------------------------------------------------------------------------------------

STRANGER = PeerId("stranger")
NOBODYS = SignedStatement(STRANGER, b"", b"")


@pytest.mark.parametrize("ahead", [-1, 0, 1, 2, 5])
def test_a_stranger_costs_nothing_but_its_connection(stand: Stand, ahead: int):
    """Round messages with 40 MiB each, of the past, the present, early, much too early: none leaves a trace."""
    peer, round = stand.peer, stand.peer.round
    assert round is not None
    number, before = round.plan.round + ahead, dict(round.parts.held)
    payload = Payload(Digest(b"p" * 32), 40 * MIB, b"")
    words: list[RoundMessage] = [
        RowContribution(number, 0, "", 0, 0, (), NOBODYS),
        RowContribution(number, 9, "", 0, 0, (), NOBODYS),
        PartReductionDeclined(number, 0, "", 0),
        PartResponse(number, 0, "", payload.digest),
        PartRequest(number, 0, "", next(iter(before))),
    ]
    effects = [e for word in words for e in stand.hears(word, payload, by=STRANGER)]
    assert not [e for e in effects if isinstance(e, Send | Broadcast)]
    assert (len(peer.early), peer.early.size_bytes, peer.early.count_of[STRANGER]) == (0, 0, 0)
    assert not peer.early.dropped and STRANGER not in peer.news.hinted
    assert STRANGER not in round.repeats.too_early | round.repeats.told and round.parts.held == before
    stand.hears(words[0], payload, by=MEMBER)
    assert ahead not in (1, 2) or peer.early.count_of[MEMBER] == 1  # an early message of a member is stored


def test_strangers_that_say_they_know_more_are_not_remembered_for_ever(stand: Stand):
    """New identities are free, and each claims a later head: each is asked, the book stays small."""
    for k in range(PEERS_MAX + 50):
        effects = stand.hears(Ping(0.0, 900), by=PeerId(f"stranger {k}"))
        assert any(isinstance(e, Send) and isinstance(e.message, VerticesRequest) for e in effects)
    assert len(stand.peer.news.hinted) <= PEERS_MAX


# ---- payloads ------------------------------------------------------------------------------------------------


def bulky(round: int) -> list[RoundMessage]:
    said = SignedStatement(MEMBER, b"", b"")
    return [
        RowContribution(round, 0, "", 0, 0, (), said),
        PartialSum(round, 0, "", 0, 0, 1, (MEMBER,)),
        PartResult(round, 0, "", said),
        RowResponse(round, 0, "", 0, (), said),
        PartResponse(round, 0, "", Digest(b"p" * 32)),
    ]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("update_bytes", [0, 20_000, 400 * MIB])
def test_nobody_pushes_more_than_a_part_can_be(stand: Stand, ahead: int, update_bytes: int):
    """Genesis says how large an update can be, and plans cut it into parts: more is a fault on arrival."""
    peer, round = stand.peer, stand.peer.round
    assert round is not None
    peer.participation.settings = replace(peer.settings, update_bytes=update_bytes)
    most = part_bytes_most(update_bytes)
    assert update_bytes < most < BULK_FRAME_MAX or update_bytes > PART_BYTES_MAX
    for message in bulky(round.plan.round + ahead):
        effects = stand.hears(message, Payload(Digest(b"p" * 32), most + 1, b""))
        faults = [e.fact for e in effects if isinstance(e, Emit) and isinstance(e.fact, ProtocolFault)]
        assert [f.peer for f in faults] == [MEMBER] and f"{most + 1} bytes" in faults[0].what
        assert not peer.early
    stand.hears(bulky(round.plan.round + 1)[0], Payload(Digest(b"p" * 32), most, b""))
    assert most < peer.early.size_bytes < most + 200  # with the message around it


@pytest.mark.parametrize("codec", ["fp32", "topk:1+fp32", "topk-rice:1+fp32", "randk:1+fp32"])
@pytest.mark.parametrize("values", [1, 300, 70_000, 2**21])
def test_no_codec_makes_an_honest_part_too_long(codec: str, values: int):
    """The one owner of a whole update gets it in one piece: values, places and all."""
    known = SharedKnowledge(seed=b"any")
    wire = codec_named(codec, known).encode(torch.randn(values, generator=torch.Generator().manual_seed(1)))
    assert memoryview(wire).nbytes <= part_bytes_most(4 * values)


# ---- words ---------------------------------------------------------------------------------------------------


def padded(swarm: VirtualSwarm, statement, by: PeerId, junk: int) -> SignedStatement:
    """The same statement with an unknown field."""
    fields = msgspec.msgpack.decode(encode(statement))
    raw = msgspec.msgpack.encode(fields | {"junk": bytes(junk)})
    return SignedStatement(by, raw, VirtualSigner(by).sign(signed_bytes(swarm.run_id, raw)))


def test_a_commitment_or_answer_that_would_fill_the_vertex_is_a_fault():
    """Fields from the future are no fault, but a megabyte of them would leave no room for the others'
    statements.
    """
    swarm = VirtualSwarm(1, SwarmKnobs(4))
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    assert peer is not None and peer.round is not None
    plan = peer.round.plan
    commit = Commitment(0, 0, Digest(b"r" * 32), 4, 20, 320, 1.0, 0.1, 320)
    part = next(k for k, owners in enumerate(peer.round.ground.owners) if owners[0] == MEMBER)
    answer = OwnerResult(0, 0, part, 0, Digest(b"d" * 32), 8, (ME, MEMBER))

    def faults(message) -> list[PeerId]:
        effects = peer.handle(Received(MEMBER, message), 0.5)
        return [e.fact.peer for e in effects if isinstance(e, Emit) and isinstance(e.fact, ProtocolFault)]

    assert faults(UpdateCommitmentMessage(0, 0, plan.trace, padded(swarm, commit, MEMBER, COMMIT_BYTES_MAX))) == [
        MEMBER
    ]
    assert faults(PartResult(0, 0, plan.trace, padded(swarm, answer, MEMBER, 1000))) == [MEMBER]
    assert faults(UpdateCommitmentMessage(0, 0, plan.trace, padded(swarm, commit, MEMBER, 100))) == []
    assert faults(PartResult(0, 0, plan.trace, padded(swarm, answer, MEMBER, 100))) == []


@pytest.mark.parametrize(("statistic", "names", "most"), [("mean", 1, 0), ("robust", 7, 7), ("robust", 20, 7)])
def test_weights_beside_an_answer_are_no_longer_than_the_plan_allows(statistic: str, names: int, most: int):
    """They go into the vertex; where rows are not weighted there are none."""
    swarm = VirtualSwarm(1, SwarmKnobs(7, run=RunSettings(open_to_all=True, statistic=statistic, tolerance=0.33)))
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    assert peer is not None and peer.round is not None
    plan, ground = peer.round.plan, peer.round.ground
    assert ground.trainers_most == (WEIGHED_ROWS_MAX if statistic == "robust" else PEERS_MAX)
    part = next(k for k, owners in enumerate(ground.owners) if owners[0] == MEMBER)
    signed = padded(swarm, OwnerResult(0, 0, part, 0, Digest(b"d" * 32), 8, (ME, MEMBER)), MEMBER, 0)
    peers = tuple(PeerId(f"{k}".rjust(len(ME), "z")) for k in range(names))
    weighing = AgreedWeights(peers, (0.1,) * names, ZERO_DIGEST, tuple(range(len(ground.owners))))
    effects = peer.handle(Received(MEMBER, PartResult(0, 0, plan.trace, signed, weighing)), 0.5)
    why = [e.fact.what for e in effects if isinstance(e, Emit) and isinstance(e.fact, ProtocolFault)]
    assert any("bytes of weights" in what for what in why) == (names > most)


def test_a_proposal_that_could_be_shown_to_nobody_gets_no_vote():
    swarm = VirtualSwarm(1, SwarmKnobs(4))
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    assert peer is not None and peer.round is not None
    effects = peer.round._judge(ProposalReceived(view=0, digest=ZERO_DIGEST, body=bytes(BODY_BYTES_MAX + 1)), 0.5)
    assert [type(e.fact) for e in effects if isinstance(e, Emit)] == [ProposalRejected]


def test_who_asks_to_join_a_full_run_is_told_so_and_what_to_do():
    """A model with enough parts that a vertex has no room for one more member."""
    knobs = SwarmKnobs(4)
    knobs.run = replace(knobs.run, update_bytes=6000 * PART_BYTES_MAX)
    swarm = VirtualSwarm(1, knobs)
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    assert peer is not None and peer.history is not None
    signer = VirtualSigner(STRANGER)
    join = JoinRequest(STRANGER, signer.vote_key, signer.certificate, (), "trainer", "", peer.history.head_id, b"")
    notary = StatementSigner(swarm.run_id, signer, VirtualSignatureVerifier())
    effects = peer.handle(Received(STRANGER, ReportMessage(notary.sign(join))), 0.5)
    (told,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, JoinRefused)]
    what, fix = REFUSALS[told.code]
    assert told.code == "E-JOIN-02" and "full" in what and "atoll up" in fix
