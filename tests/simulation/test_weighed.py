"""Rules by distance on the real round: poison weighs next to nothing, and owners may die between their two words.

Seven peers with real numbers behind them; the checkers hold them to one vertex and one state per round throughout.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed, UpdateSharingBegan
from atoll.peer.round.vertex_body import check_body
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import EncodeUpdate, UpdateEncoded
from atoll.policy.fault_tolerance import DISTANCES
from atoll.policy.plan import RoundSettings
from atoll.protocol.allreduce.buffers import weights_digest, weights_of
from atoll.protocol.allreduce.events import (
    LocalPartCombineFailed,
    PartResultAccepted,
    RowDecodeFailed,
    RowWeightsComputed,
)
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.tensors import POISONS, VALUES, TensorWorker
from atoll.simulation.worker import WorkerKnobs
from atoll.training.codec import CODECS
from atoll.training.exchange.combine import combine
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.training.recipe.update import part_bounds
from atoll.training.robust import RULES, caf
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.vertex import VertexBody

LIARS = (1, 4)
FP32 = CODECS["fp32"]


class Recorder(TensorWorker):
    """Remembers the updates that it encoded, one vector per round, and how it was cut."""

    def __init__(self, *how: object) -> None:
        super().__init__(*how)
        self.sent: dict[int, torch.Tensor] = {}
        self.cuts: dict[int, tuple[int, ...]] = {}

    def run(self, work: object) -> object:
        done = super().run(work)
        if isinstance(work, EncodeUpdate) and isinstance(done, UpdateEncoded):
            wire = bytearray(b"".join(bytes(part.data) for part in done.parts))
            self.sent[work.round] = torch.frombuffer(wire, dtype=torch.float32)
            self.cuts[work.round] = work.shares
        return done


class Stage:
    def __init__(
        self, statistic: str, poison: str = "", quorum: str = "two-thirds", seed: int = 3, **network
    ) -> None:
        plan = RoundSettings(inner_steps=5, first_train_s=10, quorum=quorum)
        settings = RunSettings(open_to_all=True, round=plan, statistic=statistic, tolerance=0.33)
        poisoners = {peer_name(i) for i in LIARS} if poison else set()

        def island(me: PeerId, knobs: WorkerKnobs, draw: random.Random) -> Recorder:
            return Recorder(me, knobs, draw, POISONS[poison] if me in poisoners else None)

        knobs = SwarmKnobs(7, run=settings, network=NetworkKnobs(**network))
        self.swarm = VirtualSwarm(seed, knobs, island=island)
        self.world = self.swarm.world
        self.world.weighs = True
        self.swarm.checkers.villains = frozenset(poisoners)
        self.facts: list[tuple[PeerId, Fact]] = []
        self.world.watchers.append(lambda now, node, fact: self.facts.append((node.name, fact)))

    def run(self, rounds: int) -> Stage:
        self.world.run(900.0, stop=lambda: min(self.swarm.heads()) >= rounds - 1)
        assert min(self.swarm.heads()) >= rounds - 1
        return self

    def once(self, true: Callable[[Fact], bool], act: Callable[[PeerId], None]) -> Stage:
        """When a fact like this is told for the first time, in the middle of it."""
        left = [act]

        def watch(now: float, node, fact: Fact) -> None:
            if left and true(fact):
                left.pop()(node.name)

        self.world.watchers.append(watch)
        return self

    def told(self, kind: type[Fact]) -> list:
        return [fact for _, fact in self.facts if isinstance(fact, kind)]

    def closed(self, round: int) -> RoundClosed:
        return next(fact for fact in self.told(RoundClosed) if fact.body.round == round)

    @property
    def island(self) -> Recorder:
        island = self.swarm.honest[0].island
        assert isinstance(island, Recorder)
        return island

    def updates(self, round: int, names: tuple[PeerId, ...]) -> torch.Tensor:
        return torch.stack([self.world.nodes[name].island.sent[round] for name in names])

    def loud(self, body: VertexBody) -> float:
        """What the poisoners' rows weighed."""
        rows = zip(body.weighing.peers, body.weighing.shares, strict=True)
        return sum(weight for name, weight in rows if name in self.swarm.checkers.villains)

    def anchor(self, round: int) -> torch.Tensor:
        return self.island.anchor(self.closed(round).body.state)


@pytest.mark.parametrize("poison", POISONS)
def test_two_poisoners_of_seven_learn_the_others_nothing_wrong(poison: str):
    """Six rounds under the default rule: nearer than five per cent, where one honest peer alone is at ten."""
    stage = Stage("robust", poison).run(6)
    assert stage.island.distance() < 0.05
    assert stage.loud(stage.closed(5).body) < 0.05
    garbage = {fact.peer for fact in stage.told(RowDecodeFailed)}
    assert garbage == ({peer_name(i) for i in LIARS} if poison in ("not a number", "infinity", "1e30") else set())


def test_every_member_reports_far_rows_and_excludes_nobody_for_them():
    """Two of seven send rows of ten times the length: the event of each round names them, and they stay members."""
    stage, liars = Stage("robust", "scaling").run(2), tuple(peer_name(i) for i in LIARS)
    assert len(stage.told(RoundClosed)) >= 7 and {fact.outliers for fact in stage.told(RoundClosed)} == {liars}
    assert all(m.is_present for m in stage.closed(1).body.members)
    assert {fact.outliers for fact in Stage("robust").run(2).told(RoundClosed)} == {()}


@pytest.mark.parametrize("poison", POISONS)
def test_two_poisoners_of_seven_learn_the_others_nothing_wrong_by_mixed_neighbours(poison: str):
    """Rows that are no numbers are named and in no mixture, and the others still withstand two: three of five are
    averaged, which is nearer than one alone by less. What hides in the spread moves it a little."""
    stage = Stage("nnm + trimmed_mean", poison).run(6)
    assert stage.island.distance() < (0.12 if poison == "a little is enough" else 0.07)
    garbage = {fact.peer for fact in stage.told(RowDecodeFailed)}
    assert garbage == ({peer_name(i) for i in LIARS} if poison in ("not a number", "infinity", "1e30") else set())


@pytest.mark.parametrize("statistic", sorted(set(DISTANCES) - {"robust"}))
def test_every_rule_by_distance_learns_beside_two_poisoners(statistic: str):
    assert Stage(statistic, "scaling").run(6).island.distance() < 0.15


@pytest.mark.parametrize("statistic", DISTANCES)
def test_a_round_makes_what_the_library_makes_of_the_same_rows(statistic: str):
    """Cut in seven parts, compared and combined by seven owners: the rule's vector except for fp32 roundings."""
    stage = Stage(statistic, "a little is enough").run(1)
    body = stage.closed(0).body
    *pre, name = statistic.split(" + ")
    rule = RULES["coordinate_median" if name == "median" else name] if name != "robust" else caf
    expected = -rule(stage.updates(0, body.weighing.peers), f=2, pre=pre)
    assert len(expected) == VALUES and len(body.weighing.peers) == 7
    torch.testing.assert_close(stage.anchor(0), expected, rtol=2e-6, atol=2e-6)


def test_the_vertex_says_what_every_row_weighed_and_all_owners_said_the_same():
    stage = Stage("robust", "scaling").run(2)
    told = {fact.weighing for fact in stage.told(RowWeightsComputed) if fact.round == 0}
    assert told == {stage.closed(0).body.weighing} and len(told) == 1
    weights = stage.closed(0).body.weighing.weights  # in the order of names, which is that of founding
    assert weights == pytest.approx([0.2 * (i not in LIARS) for i in range(7)], abs=1e-2)


def test_what_it_costs_beside_a_trimmed_mean_is_one_small_message_per_owner_and_reader():
    """Payloads are the same bytes; the rest is 42 comparisons of 28 products and weights in answers."""
    plain, weighed = Stage("trimmed_mean").run(1), Stage("robust").run(1)
    rounds = [min(stage.swarm.heads()) + 1 for stage in (plain, weighed)]
    assert rounds == [1, 1] and plain.world.network.bytes == weighed.world.network.bytes
    more = weighed.world.control_bytes - plain.world.control_bytes
    name = len(encode(weighed.closed(0).body.weighing))
    assert 42 * 28 * 8 < more < 42 * (28 * 8 + 300) + 42 * (name + 20) + 30 * (name + 20) + 3000


SHARE = lambda fact: isinstance(fact, UpdateSharingBegan)  # noqa: E731
WEIGHED = lambda fact: isinstance(fact, RowWeightsComputed)  # noqa: E731
ANSWERED = lambda fact: isinstance(fact, PartResultAccepted)  # noqa: E731


def closed_without(stage: Stage, phase: Callable[[Fact], bool]) -> RoundClosed:
    """The first peer known for this is killed in that very moment: the round counts all its parts."""
    killed: list[PeerId] = []

    def kill(name: PeerId) -> None:
        killed.append(name)
        stage.world.at(stage.world.now, lambda: stage.world.crash(name))

    stage.once(phase, kill).run(3)
    first = stage.closed(0)
    assert first.parts_missing == 0 and first.body.attempt == 0 and len(killed) == 1
    assert all(fact.parts_missing == 0 for fact in stage.told(RoundClosed))
    assert stage.island.distance(first.body.state) < 0.55  # it began at 1, and a round goes half of the way
    return first


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (4, 5))])
@pytest.mark.parametrize("quorum", ["majority", "two-thirds"])
@pytest.mark.parametrize("phase", [SHARE, WEIGHED, ANSWERED], ids=["before it compares", "weighed", "answered"])
def test_an_owner_may_die_at_any_moment_and_no_part_is_lost(phase, quorum: str, seed: int):
    """The first peer known for this is killed in that very moment: the round counts all its parts."""
    stage = Stage("robust", "scaling", quorum, seed)
    first = closed_without(stage, phase)
    assert stage.loud(first.body) < 1e-9


@pytest.mark.parametrize("phase", [SHARE, WEIGHED, ANSWERED], ids=["before it compares", "weighed", "answered"])
def test_an_owner_may_die_at_any_moment_where_neighbours_are_mixed(phase):
    """Its part is answered by the next owner out of the same mixtures, without the rows that died with it.

    Every answer in the vertex is made again here, out of the rows that were sent and the bits that it names.
    """
    stage = Stage("nnm + trimmed_mean", "scaling")
    first = closed_without(stage, phase)
    weighing, made = first.body.weighing, []
    bounds = part_bounds(VALUES, stage.island.cuts[0])
    for signed, (lo, hi) in zip(first.body.parts, bounds, strict=True):
        names = decode_statement(signed.body, signed.signer).contributors
        rule = RowCombinationRule("nnm + trimmed_mean", 2, weights_of(weighing, names))
        rows = [(1, FP32.encode(row[lo:hi].clone())) for row in stage.updates(0, names)]
        made.append(FP32.decode(combine(rows, hi - lo, FP32, FP32, rule).wire, hi - lo))
    assert torch.equal(stage.anchor(0), -torch.cat(made))


def test_with_too_few_rows_nothing_moves_and_it_says_so():
    """Three of seven are dead: four rows are too few for two liars, and it is no mean of four either."""
    stage = Stage("robust", quorum="majority")
    for index in (0, 2, 6):
        stage.world.at(0.001, lambda index=index: stage.world.crash(peer_name(index)))
    stage.run(1)
    assert any(
        "needs 5 rows to withstand 2 liars, 4 are in all parts" in fact.why
        for fact in stage.told(LocalPartCombineFailed)
    )
    first = stage.closed(0)
    assert first.parts_missing == len(first.body.parts) and first.body.weighing is UNSET
    assert stage.island.distance(first.body.state) == 1.0


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_lost_messages_cost_time_and_nobodys_weight(seed: int):
    """One message in twelve is lost: rows and comparisons are asked for again."""
    stage = Stage("robust", "huge", seed=seed, loss_rate=0.08).run(4)
    assert stage.island.distance() < 0.3
    bodies = {fact.body.round: fact.body for fact in stage.told(RoundClosed) if fact.body.parts}
    whole = sum(body.weighing is not UNSET and len(body.weighing.peers) >= 6 for body in bodies.values())
    assert whole >= len(bodies) - 1


@pytest.mark.parametrize(
    "seed",
    [
        1,
        pytest.param(2, marks=pytest.mark.long),
        pytest.param(3, marks=pytest.mark.long),
        pytest.param(4, marks=pytest.mark.long),
        pytest.param(6, marks=pytest.mark.long),
    ],
)
def test_a_swarm_that_weighs_rows_weathers_everything(seed: int):
    """Kills with lost writes, sleeps, partitions, joins, leaves, loss: rounds of two words per owner go on."""
    assert run_scenario("weighed", seed).rounds >= 12


def test_voters_refuse_a_body_that_says_something_else_of_its_rows():
    """Other weights than its answers were made with, none, or weights where nothing was answered."""
    stage, grounds = Stage("robust", "a little is enough"), []

    def watch(now: float, node, fact: Fact) -> None:
        if isinstance(fact, UpdateSharingBegan) and not grounds:
            grounds.append((node.machine.round.ground, node.machine.notary))

    stage.world.watchers.append(watch)
    body = stage.run(1).closed(0).body
    (ground, notary), weighing = grounds[0], body.weighing
    assert check_body(ground, notary, body, body.time_s) is None
    for wrong, why in (
        (replace(body, weighing=UNSET), "does not say what its rows weigh"),
        (
            replace(body, weighing=replace(weighing, weights=(1.0, *weighing.weights[1:]))),
            "do not sum to at most 1",
        ),
        (replace(body, weighing=replace(weighing, weights=weighing.weights[::-1])), "another weighing"),
        (replace(body, weighing=replace(weighing, without=(0,))), "another weighing"),
        (replace(body, weighing=replace(weighing, compared=weights_digest(weighing))), "another weighing"),
        (replace(body, parts=(None,) * len(body.parts), commits=()), "no owner weighed"),
    ):
        assert why in (check_body(ground, notary, wrong, body.time_s) or "nothing is wrong")
