"""Late work as others see it: what a member may claim of steps that it took apart, and what such steps weigh."""

from __future__ import annotations

from dataclasses import replace as replaced

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Emit, Received, RunTask, TaskDone, TaskFailed
from atoll.crypto.digest import digest
from atoll.features.partition_training.machine import DisconnectedTraining as Apartness
from atoll.peer.events import ProtocolFault
from atoll.peer.round.outcome import left_open
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.peer.tasks import AbandonedRoundSettlement, StateRestored, TrainingResult
from atoll.policy.capability_terms import PartitionPolicy
from atoll.policy.contributions import late_of
from atoll.policy.plan import RoundSettings, StragglerPolicy
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import UpdateCommitmentMessage
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement, StepsTakenWhilePartitioned
from atoll.wire.messages.vertex import VertexBody

ME, OTHER = peer_name(0), peer_name(2)
MERGE = PartitionPolicy("merge", 3)
SETTINGS = RunSettings(open_to_all=True, round=RoundSettings(inner_steps=20, first_train_s=10))


class Stand:
    """The peer that is spoken to, early in the third round of a swarm of four."""

    def __init__(self, apart: PartitionPolicy | None = MERGE) -> None:
        settings = SETTINGS if apart is None else replace(SETTINGS, apart=apart)
        self.swarm = VirtualSwarm(1, SwarmKnobs(4, run=settings))
        self.swarm.world.run(60.0, stop=lambda: self.swarm.head(ME) == 1)
        peer = self.swarm.world.nodes[ME].machine
        assert peer is not None and peer.round is not None
        self.peer, self.plan = peer, peer.round.plan

    def blames(self, commit: Commitment) -> list[PeerId]:
        signed = StatementSigner(self.swarm.run_id, VirtualSigner(OTHER), VirtualSignatureVerifier()).sign(commit)
        heard = Received(OTHER, UpdateCommitmentMessage(self.plan.round, 0, self.plan.trace, signed))
        effects = self.peer.handle(heard, self.swarm.world.now)
        return [e.fact.peer for e in effects if isinstance(e, Emit) and isinstance(e.fact, ProtocolFault)]

    @property
    def commit(self) -> Commitment:
        """A commitment to this round's 20 steps of 16 samples."""
        return Commitment(self.plan.round, 0, digest(b"root"), 4, 20, 320, 2.0, 0.1, 320)


def late(commit: Commitment, claim: StepsTakenWhilePartitioned, **other: object) -> Commitment:
    more = {"steps": commit.steps + claim.steps, "samples": commit.samples + claim.samples}
    return replace(commit, claim=claim, **(more | other))


def test_late_steps_are_counted_and_weigh_nothing():
    """Its row weighs the samples of this round; a member that claims the weight of all of them is at fault."""
    stand = Stand()
    claim = StepsTakenWhilePartitioned(0, 60, 960)
    assert stand.blames(late(stand.commit, claim, weight=320 + 960)) == [OTHER]
    assert stand.blames(late(stand.commit, claim)) == []


@pytest.mark.parametrize(
    ("claim", "other"),
    [
        (StepsTakenWhilePartitioned(2, 60, 960), {}),  # of this very round
        (StepsTakenWhilePartitioned(-1, 60, 960), {}),
        (StepsTakenWhilePartitioned(0, 0, 960), {}),
        (StepsTakenWhilePartitioned(0, 60, 0), {}),
        (StepsTakenWhilePartitioned(0, 60, 960), {"steps": 60}),  # nothing is left for this round
        (StepsTakenWhilePartitioned(0, 60, 960), {"samples": 960, "weight": 0}),
        (StepsTakenWhilePartitioned(0, 60, -960), {"samples": 320, "weight": 1280}),  # weight out of nothing
        (StepsTakenWhilePartitioned(0, -60, 960), {}),
        (StepsTakenWhilePartitioned(0, 60, 960), {"parts": 0, "weight": 0}),  # in a pass
    ],
)
def test_late_work_that_cannot_be_is_a_fault(claim: StepsTakenWhilePartitioned, other: dict[str, object]):
    stand = Stand()
    assert stand.blames(late(stand.commit, claim, **other)) == [OTHER]


@pytest.mark.parametrize("apart", [None, PartitionPolicy("drop", 3)], ids=["wait", "drop"])
def test_late_work_is_a_fault_where_genesis_does_not_have_it_merged(apart: PartitionPolicy | None):
    stand = Stand(apart)
    assert stand.blames(late(stand.commit, StepsTakenWhilePartitioned(0, 60, 960))) == [OTHER]
    assert stand.blames(stand.commit) == []


def test_a_newcomer_brings_no_late_work():
    """Its row weighs nothing: what rides on it would be lost."""
    ground = Stand().peer.round.ground
    members = tuple(replace(m, standing="new") if m.peer == OTHER else m for m in ground.plan.members)
    fresh = replaced(ground, plan=replaced(ground.plan, members=members))
    assert ground.takes_late(OTHER) and not fresh.takes_late(OTHER) and fresh.takes_late(ME)


def test_it_goes_on_only_while_too_few_are_heard_and_stops_at_its_bound():
    """Four voters, three needed: with one gone a quorum is left; a trainer that fails is started again."""
    ground, gone = Stand().peer.round.ground, set[PeerId]()
    apart = Apartness(ground, ME, gone.__contains__)
    assert apart.on_attempt_failed(is_idle=True) == []
    gone.add(peer_name(1))
    assert apart.on_attempt_failed(is_idle=True) == []
    gone.add(peer_name(2))
    (asked,) = apart.on_attempt_failed(is_idle=True)
    assert (asked.work.steps, asked.work.steps_max, asked.work.merge) == (20, 60, True)
    assert apart.on_attempt_failed(is_idle=True) == [], "one worth at a time"
    assert apart.on_task_done(TaskFailed("another", ""), is_idle=True) is None
    assert apart.on_task_done(TaskFailed(apart.job, ""), is_idle=True) == []
    assert apart.on_attempt_failed(is_idle=True) == [asked]
    told, again = apart.on_task_done(TaskDone(apart.job, TrainingResult(20, 320, 2.0, 0.1)), is_idle=True)
    assert (told.fact.steps, told.fact.heard, told.fact.quorum, again) == (20, 2, 3, asked)
    (_,) = apart.on_task_done(TaskDone(apart.job, TrainingResult(0, 0, 0.0, 0.0)), is_idle=True)
    assert apart.on_attempt_failed(is_idle=True) == []


def test_how_a_round_that_was_left_counted_me_is_read_out_of_its_vertex():
    """Part by part; a round without its vertex is taken as counted, and nothing counts twice."""
    body: VertexBody = Stand().peer.history.head_body
    mine = [isinstance(s, SignedStatement) for s in body.parts]
    assert left_open(ME, 4, body) == AbandonedRoundSettlement((True,) * len(mine), late=False)
    without = replace(body, parts=tuple(_without(s, ME) for s in body.parts))
    assert left_open(ME, 4, without) == AbandonedRoundSettlement((False,) * len(mine), late=False)
    assert left_open(ME, 4, None) == AbandonedRoundSettlement((True,) * 4, late=True)
    assert left_open(ME, 0, body) == AbandonedRoundSettlement(None, late=False)
    assert left_open(ME, 4, replace(body, parts=())) == AbandonedRoundSettlement((False,) * 4, late=False)
    claim = StepsTakenWhilePartitioned(0, 60, 960)
    commits = tuple(SignedStatement(s.signer, encode(late(Stand().commit, claim)), b"") for s in body.commits[:1])
    assert late_of(replace(body, commits=(*commits, SignedStatement(ME, b"\xc1", b"")))) == {
        body.commits[0].signer: claim
    }


def test_late_work_of_a_life_before_is_given_up_where_its_round_is_not_in_memory_any_more():
    """It was restored from the private file while the history grew beyond memory: the vertex that may hold it is
    not available, and it must not be sent again.
    """
    stand = Stand()
    peer, history = stand.peer, stand.peer.history
    peer.participation.round, peer.regain.round = None, 0
    for held in (history.bodies, history.vertices, history.ids):
        del held[0]
    effects = peer.handle(TaskDone("restore", StateRestored()), stand.swarm.world.now)
    (asked,) = [e.work for e in effects if isinstance(e, RunTask)]
    assert asked.round == history.head and asked.left == AbandonedRoundSettlement(None, late=True)


def _without(signed: SignedStatement | None, peer: PeerId) -> SignedStatement | None:
    if signed is None:
        return None
    said = decode_statement(signed.body, signed.signer)
    assert isinstance(said, OwnerResult)
    names = tuple(p for p in said.contributors if p != peer)
    return SignedStatement(signed.signer, encode(replace(said, contributors=names)), signed.signature)


def test_whoever_restarts_while_cut_off_claims_nothing_late_in_the_round_that_it_left():
    """No quorum is left, one member is killed while apart, and the round that it resumes is still open.

    Others would blame it, since late work is of an earlier round. It travels with the next update.
    """
    swarm = VirtualSwarm(1, SwarmKnobs(4, run=replace(SETTINGS, apart=MERGE)))
    swarm.world.run(60.0, stop=lambda: swarm.head(ME) == 1)
    swarm.world.split({ME, peer_name(1)})
    alone = swarm.world.nodes[ME].island.alone
    swarm.world.run(swarm.world.now + 100, stop=lambda: alone.out == 60)
    swarm.world.crash(ME)
    swarm.world.start(ME)
    swarm.world.run(swarm.world.now + 100)  # an attempt fails, and it commits again; the checkers see accusations
    assert swarm.head(ME) == 1 and alone.held == 60
    swarm.world.network.heal()
    swarm.world.run(swarm.world.now + 200, stop=lambda: min(swarm.heads()) >= 8)  # put away, new, a member
    assert swarm.checkers.late[ME] == 60 and alone.held == 0


def test_genesis_cannot_ask_for_audits_and_for_steps_that_nobody_assigned():
    with pytest.raises(PeerFault, match="train apart"):
        decode_settings(encode_settings(replace(SETTINGS, apart=MERGE, audit_rate=0.1)))
    hasty = replace(SETTINGS.round, acceptance=StragglerPolicy(2, 2))
    with pytest.raises(PeerFault, match="train apart"):
        decode_settings(encode_settings(replace(SETTINGS, apart=MERGE, round=hasty, topology="butterfly")))
    assert decode_settings(encode_settings(replace(SETTINGS, apart=MERGE))).apart_terms == MERGE
    assert SETTINGS.apart is UNSET and b"apart" not in encode_settings(SETTINGS)
