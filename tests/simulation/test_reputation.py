"""Swarms that keep records: all agree on every score, liars cannot write their own, and rows weigh by them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.limits import SCORE_ONE
from atoll.base.machine import Effect, Fact, Send
from atoll.peer.events import ProposalRejected, ProtocolFault, RoundClosed
from atoll.peer.round import reputation as shown_by_bodies
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.peer.tasks import EncodeUpdate, UpdateEncoded
from atoll.policy import reputation
from atoll.policy.plan import RoundSettings, plan_round
from atoll.policy.reputation import FLOOR, influence_of, scores_of, tier_of
from atoll.protocol.allreduce.weighted import apply_influence
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.reputation import ReputationReports, play_records
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.tensors import POISONS, VALUES, TensorWorker
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_body, decode_statement, encode, vertex_id
from atoll.wire.messages.round import ProposalMessage, RowContribution, UpdateCommitmentMessage
from atoll.wire.messages.statements import Commitment, Proposal
from atoll.wire.messages.vertex import VertexBody


def played(kinds: dict[int, str], audited: bool = False, **settings: object) -> ReputationReports:
    return play_records(ScenarioContext("reputation", 4, 7, 36, ""), kinds, audited, **settings)


def final(records: ReputationReports) -> dict[PeerId, int]:
    return {peer: history[-1] for peer, history in records.history.items()}


# ---- stories ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (4, 6, 8))])
def test_poor_records_are_told_from_good_ones_and_villains_weigh_little(seed: int):
    """A newcomer, one who leaves and returns, and two of: cheat, idler, boaster, flapper. All vertices agree."""
    run_scenario("reputation", seed)


@pytest.mark.parametrize("seed", [2, pytest.param(4, marks=pytest.mark.long)])
def test_records_weather_everything(seed: int):
    run_scenario("reputed_churn", seed, peers=6, rounds=8)


SORTED = {"statistic": "trimmed_mean", "tolerance": 0.33, "witnessed": True}


@pytest.mark.parametrize("trust", [{}, pytest.param(SORTED, marks=pytest.mark.long)])
def test_an_idler_and_a_boaster_stay_on_probation_and_weigh_half_of_the_others(trust: dict[str, object]):
    records = played({1: "idler", 2: "boaster"}, **trust)
    worth = final(records)
    assert {tier_of(worth[liar]) for liar in ("p0001", "p0002")} == {"probation"} and worth["p0000"] > 9000
    assert records.share_most < 2 * 3 / (2 * 7)


def test_a_founder_that_leaves_comes_back_with_what_it_left_with():
    worth = played({}).history["p0006"]
    plateau = max(set(worth), key=worth.count)  # while it was away, and in its first round
    assert worth.count(plateau) >= 8
    assert worth[-1] > plateau > FLOOR


def test_a_committee_drawn_by_records_agrees_and_who_was_away_follows_it():
    """Five of nine vote, other ones in every round; the certificates of rounds that a member slept through hold for
    it, eras are sealed by the committees that began them, and a newcomer comes in."""
    run = RunSettings(
        open_to_all=True, reputation=True, era_rounds=5, round=RoundSettings(inner_steps=20, committee=5)
    )
    swarm = VirtualSwarm(5, SwarmKnobs(9, island=WorkerKnobs(update_bytes=4096), run=run))
    swarm.world.run(600, stop=lambda: min(swarm.heads()) >= 4)
    swarm.world.crash(peer_name(3))
    swarm.join(9, peer_name(0))
    swarm.world.run(swarm.world.now + 60, stop=lambda: swarm.head(peer_name(0)) >= 14)
    swarm.world.start(peer_name(3))
    swarm.world.run(swarm.world.now + 60, stop=lambda: min(swarm.heads()) >= 20)
    assert min(swarm.heads()) >= 20 and not swarm.checkers.complaints
    machine = swarm.world.nodes[peer_name(3)].machine
    assert machine is not None and machine.history is not None
    history = machine.history
    drawn = [plan_round(history.ids[r], history.bodies[r], run.round) for r in range(4, 20)]
    assert all(len(p.committee) == 5 and p.scores for p in drawn) and len({p.committee for p in drawn}) > 8
    kept = swarm.world.nodes[peer_name(9)].kept
    assert {"sealed/4", "sealed/9"} <= kept.keys()


# ---- liars about scores ----------------------------------------------------------------------------------------


def test_a_proposer_that_praises_itself_finds_no_votes():
    """Its own score as high as can be, in every body that it proposes: no member votes, another proposer
    goes on.
    """

    def praise(liar: ByzantineMember, send: Send) -> list[Effect]:
        if not isinstance(send.message, ProposalMessage) or not send.message.body:
            return [send]
        body = decode_body(send.message.body)
        if body.proposer != liar.peer.me or body.reputation is UNSET:
            return [send]
        place = [m.peer for m in body.members].index(liar.peer.me)
        scores = [*body.reputation[:place], SCORE_ONE, *body.reputation[place + 1 :]]
        raw = encode(replace(body, reputation=tuple(scores)))
        said = decode_statement(send.message.statement.body, liar.peer.me)
        assert isinstance(said, Proposal)
        signed = liar.notary.sign(replace(said, digest=vertex_id(raw)))
        return [replace(send, message=replace(send.message, body=raw, statement=signed))]

    swarm, facts = watched(4, {1: praise}, rounds=20)  # one of four proposes first, drawn in every round
    assert any("reputations do not follow" in f.why for f in facts if isinstance(f, ProposalRejected))
    for body in bodies(facts):
        assert body.proposer != peer_name(1) and scores_of(body)[peer_name(1)] < SCORE_ONE
    assert min(swarm.heads()) >= 19


def test_who_claims_to_weigh_what_its_samples_say_counts_for_nobody():
    """A million samples, as a mean by samples would have believed: a fault at every member."""

    def boast(liar: ByzantineMember, send: Send) -> list[Effect]:
        message = send.message
        if (
            not isinstance(message, UpdateCommitmentMessage | RowContribution)
            or message.statement.signer != liar.peer.me
        ):
            return [send]
        commit = decode_statement(message.statement.body, liar.peer.me)
        assert isinstance(commit, Commitment)
        said = liar.notary.sign(replace(commit, samples=10**6, weight=10**6))
        return [replace(send, message=replace(message, statement=said))]

    _, facts = watched(4, {1: boast})
    assert any("a weight that is not its own" in f.what for f in facts if isinstance(f, ProtocolFault))
    assert 10**6 not in {said.weight for body in bodies(facts) for said in commits_of(body)}


def watched(
    peers: int, twists: dict[int, Callable[[ByzantineMember, Send], list[Effect]]], rounds: int = 7
) -> tuple[VirtualSwarm, list[Fact]]:
    """Some rounds of a run that keeps records, and what its honest peers told."""
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds")
    knobs = SwarmKnobs(peers, run=RunSettings(open_to_all=True, round=plan, reputation=True))
    swarm = VirtualSwarm(1, knobs, villains={place: villain(twist) for place, twist in twists.items()})
    facts: list[Fact] = []

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name not in swarm.checkers.villains:
            facts.append(fact)

    swarm.world.watchers.append(watch)
    honest = [p for p in swarm.founders if p not in swarm.checkers.villains]
    swarm.world.run(900.0, stop=lambda: min(swarm.head(p) for p in honest) >= rounds - 1)
    return swarm, facts


def commits_of(body: VertexBody) -> list[Commitment]:
    said = [decode_statement(signed.body, signed.signer) for signed in body.commits]
    return [commit for commit in said if isinstance(commit, Commitment)]


def bodies(facts: list[Fact]) -> list[VertexBody]:
    return [fact.body for fact in facts if isinstance(fact, RoundClosed)]


def test_whoever_holds_one_vertex_knows_every_score_and_plans_by_it():
    """No earlier vertex is asked for: the plan of a stranger that fetched the newest one is that of the members."""
    swarm, facts = watched(4, {})
    body, plan = bodies(facts)[-1], swarm.knobs.run.round
    stranger = plan_round(vertex_id(encode(body)), decode_body(encode(body)), plan)
    assert stranger.scores == scores_of(body) and set(stranger.scores.values()) != {FLOOR}


# ---- what rows weigh -------------------------------------------------------------------------------------------


class Recorder(TensorWorker):
    """Remembers the updates that it encoded, one vector per round."""

    def __init__(self, *how: object) -> None:
        super().__init__(*how)  # pyright: ignore[reportArgumentType]
        self.sent: dict[int, torch.Tensor] = {}

    def run(self, work: object) -> object:
        done = super().run(work)
        if isinstance(work, EncodeUpdate) and isinstance(done, UpdateEncoded):
            wire = bytearray(b"".join(bytes(part.data) for part in done.parts))
            self.sent[work.round] = torch.frombuffer(wire, dtype=torch.float32)
        return done


def with_numbers(rounds: int, poison: str = "", **trust: object) -> tuple[VirtualSwarm, dict[int, RoundClosed]]:
    """Seven peers with real numbers; the second fails to train in two rounds of three, or sends poison."""
    plan = RoundSettings(inner_steps=5, first_train_s=10, quorum="two-thirds")
    settings = replace(RunSettings(open_to_all=True, round=plan, reputation=True), **trust)

    def island(me: PeerId, knobs: WorkerKnobs, draw: random.Random) -> Recorder:
        if me != peer_name(1):
            return Recorder(me, knobs, draw)
        knobs = knobs if poison else WorkerKnobs(train_failure_rate=0.66)
        return Recorder(me, knobs, draw, POISONS[poison] if poison else None)

    swarm = VirtualSwarm(3, SwarmKnobs(7, run=settings), island=island)
    closed: dict[int, RoundClosed] = {}

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            closed.setdefault(fact.body.round, fact)

    swarm.world.watchers.append(watch)
    swarm.world.run(900.0, stop=lambda: min(swarm.heads()) >= rounds - 1)
    return swarm, closed


def after_a_lapse(closed: dict[int, RoundClosed]) -> tuple[int, dict[PeerId, int]]:
    """The first round that counts every member although the second peer had missed some; and what rows
    weigh in it.
    """
    for round in sorted(closed)[1:]:
        weighs = influence_of(scores_of(closed[round - 1].body)) if round - 1 in closed else {}
        if len(closed[round].counted) == 7 and weighs and weighs[peer_name(1)] < 0.9 * weighs[peer_name(0)]:
            return round, weighs
    raise AssertionError("no such round")


def test_a_mean_weighs_rows_by_their_authors_records():
    """What was agreed on is the mean with the weights of the scores in the vertex before, except for roundings."""
    swarm, closed = with_numbers(14)
    round, weighs = after_a_lapse(closed)
    rows = {peer: swarm.world.nodes[peer].island.sent[round].double() for peer in weighs}
    expected = sum(weighs[peer] / sum(weighs.values()) * row for peer, row in rows.items())
    island = swarm.honest[0].island
    assert isinstance(island, Recorder)
    before, after = (island.anchor(closed[r].body.state).double() for r in (round - 1, round))
    torch.testing.assert_close(before - after, expected, rtol=1e-5, atol=1e-6)
    commits = {s.signer: decode_statement(s.body, s.signer) for s in closed[round].body.commits}
    weights = {peer: commit.weight for peer, commit in commits.items() if isinstance(commit, Commitment)}
    assert weights == {peer: 5 * weight for peer, weight in weighs.items()}  # all took their five steps


def test_distances_look_first_and_records_count_afterwards():
    """A poisoner with as good a record as any member weighs next to nothing; honest rows weigh as their
    authors do.
    """
    _, closed = with_numbers(7, "scaling", statistic="robust", tolerance=0.33)
    assert len(set(scores_of(closed[5].body).values())) == 1  # no member missed anything
    weights = weights_in(closed[6].body)
    assert weights[peer_name(1)] < 0.02 < 0.1 < weights[peer_name(0)]
    _, closed = with_numbers(14, statistic="robust", tolerance=0.33)
    round, worth = after_a_lapse(closed)
    weights = weights_in(closed[round].body)
    assert sum(weights.values()) == pytest.approx(1.0)
    per_worth = [weights[peer] / worth[peer] for peer in weights]
    assert max(per_worth) < 1.1 * min(per_worth)  # the rule finds no member worse than the others


def weights_in(body: VertexBody) -> dict[PeerId, float]:
    assert body.weighing is not UNSET
    return dict(zip(body.weighing.peers, body.weighing.weights, strict=True))


def test_weights_keep_their_sum_and_what_is_no_weight_is_left_to_its_judges():
    names, worth = (PeerId("a"), PeerId("b"), PeerId("c")), {PeerId("a"): 1000, PeerId("b"): 3000, PeerId("c"): 7}
    assert apply_influence(names, (0.5, 0.25, 0.0), worth) == pytest.approx([0.3, 0.45, 0.0])
    for odd in ((float("nan"), 1.0, 0.0), (-1.0, 1.0, 0.0), (1e308, 1e308, 1e308), (0.0, 0.0, 0.0)):
        assert apply_influence(names, odd, worth) is odd
    assert apply_influence(names, (0.5, 0.25, 0.0), {}) == (0.5, 0.25, 0.0)


def test_order_statistics_count_every_row_once():
    _, closed = with_numbers(4, statistic="median", tolerance=0.33)
    commits = [decode_statement(s.body, s.signer) for s in closed[3].body.commits]
    assert all(isinstance(c, Commitment) and c.weight == c.samples > 0 for c in commits) and VALUES


# ---- runs without records --------------------------------------------------------------------------------------


def test_runs_without_records_are_encoded_as_they_always_were():
    """A field that is left out of genesis and of vertices: old runs keep their names."""
    plain = encode_settings(RunSettings())
    assert b"reputation" not in plain and not decode_settings(plain).reputed
    assert decode_settings(encode_settings(RunSettings(reputation=True))).reputed


# ---- a rule is deleted, and the scenario notices ---------------------------------------------------------------


@pytest.mark.long
def test_if_boasting_were_believed_boasters_would_be_trusted(monkeypatch: pytest.MonkeyPatch):
    believe = lambda losses: dict.fromkeys(losses, SCORE_ONE)  # noqa: E731
    monkeypatch.setattr(shown_by_bodies, "beliefs", believe)
    with pytest.raises(ScenarioFailed, match="the boaster"):
        run_scenario("reputation", 6)


def test_if_newcomers_began_in_the_middle_leaving_would_pay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shown_by_bodies, "FLOOR", SCORE_ONE // 2)
    with pytest.raises(ScenarioFailed, match="newcomer"):
        run_scenario("reputation", 4)


@pytest.mark.long
def test_if_missing_rounds_cost_nothing_flappers_would_be_trusted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reputation, "FALL", 10**9)
    with pytest.raises(ScenarioFailed, match="the flapper"):
        run_scenario("reputation", 4, rounds=70)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3000, 3060))
def test_many_swarms_that_keep_records(seed: int):
    run_scenario("reputation", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("reputed_churn", seed)
