"""Distance rules where owners are not believed: what is false of distances is found, and moves nothing.

With names behind the peers every kind of lie, with real numbers behind them what the lies would have changed.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.learn.aggregate import default, trimmed_mean
from atoll.node.facts import Accused, RoundClosed
from atoll.node.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.protocol.reduce.facts import RowsWeighed
from atoll.protocol.reduce.witness import Doubted, Witnesses
from atoll.sim.checkers import InvariantBroken
from atoll.sim.island import IslandKnobs
from atoll.sim.network import NetworkKnobs
from atoll.sim.owners import COMPARERS
from atoll.sim.scenarios import run_scenario
from atoll.sim.scenarios.owners import LIES, PROVEN, compared, play_crooks
from atoll.sim.scenarios.stage import Stage as Story
from atoll.sim.swarm import Swarm, SwarmKnobs, peer_name
from atoll.sim.tensors import POISONS, VALUES, TensorIsland
from atoll.sim.villains import villain
from atoll.wire.messages.vertex import Body

PLACES = (1, 4)  # of the villains among seven


class Stage:
    """Seven peers with real numbers. Two of them poison what they send, and lie as owners besides."""

    def __init__(
        self, lie: str = "", poison: str = "", statistic: str = "robust", seed: int = 3, **network
    ) -> None:
        plan = RoundSettings(inner_steps=5, first_train_s=10, quorum="two-thirds")
        run = RunSettings(open_to_all=True, round=plan, statistic=statistic, tolerance=0.33, witnessed=True)
        bad = {peer_name(place) for place in PLACES} if poison or lie else set()
        self.sent: dict[tuple[int, PeerId], torch.Tensor] = {}

        def island(me: PeerId, knobs: IslandKnobs, draw: random.Random) -> TensorIsland:
            made = TensorIsland(me, knobs, draw, POISONS[poison] if poison and me in bad else None)
            encode = made._encode

            def remembered(work):
                done = encode(work)
                wire = bytearray(b"".join(bytes(part.data) for part in done.parts))
                self.sent[work.round, me] = torch.frombuffer(wire, dtype=torch.float32)
                return done

            made._encode = remembered
            return made

        liars = {place: villain(LIES[lie]) for place in PLACES} if lie else {}
        knobs = SwarmKnobs(7, run=run, network=NetworkKnobs(**network))
        self.swarm = Swarm(3, knobs, liars, island=island)
        self.swarm.checkers.villains = frozenset(bad)
        self.facts: list[tuple[PeerId, Fact]] = []
        self.swarm.world.watchers.append(lambda now, node, fact: self.facts.append((node.name, fact)))

    def run(self, rounds: int) -> Stage:
        self.swarm.world.run(900.0, stop=lambda: min(self.swarm.heads()) >= rounds - 1)
        assert min(self.swarm.heads()) >= rounds - 1
        return self

    def told(self, kind: type) -> list:
        """By honest peers."""
        bad = self.swarm.checkers.villains
        return [fact for name, fact in self.facts if isinstance(fact, kind) and name not in bad]

    def bodies(self) -> dict[int, Body]:
        return {fact.body.round: fact.body for fact in self.told(RoundClosed)}

    def loud(self, body: Body) -> float:
        """What the villains' rows weighed."""
        rows = zip(body.weighing.peers, body.weighing.shares, strict=True)
        return sum(weight for name, weight in rows if name in self.swarm.checkers.villains)

    @property
    def distance(self) -> float:
        return self.swarm.honest[0].island.distance()


@pytest.mark.parametrize("kind", [*sorted(COMPARERS), "miscounter", "two_promises"])
def test_two_lying_owners_of_seven_are_out_and_what_is_agreed_on_is_true(kind: str):
    """Who signed a lie never comes back, who was silent or narrow may; `play_crooks` looks at every sum."""
    stage = Story(f"comparers/{kind}", 1, peers=7, rounds=4, quorum="two-thirds")
    play_crooks(stage, {2: kind, 5: kind}, statistic="robust")
    assert stage.newest is not None
    standing = {m.peer: m.standing for m in stage.newest.head_body.members}
    if kind in PROVEN:
        assert {standing[v] for v in stage.swarm.checkers.villains} == {"expelled"}


@pytest.mark.parametrize("kind", ["miscomparer", "favourite", "miscounter"])
def test_lies_about_neighbours_are_found_as_those_about_weights(kind: str):
    """False products, mixtures that follow from none, and sums of true mixtures that are none."""
    stage = Story(f"mixers/{kind}", 1, peers=7, rounds=4, quorum="two-thirds")
    play_crooks(stage, {2: kind, 5: kind}, statistic="nnm + trimmed_mean")
    assert stage.newest is not None
    standing = {m.peer: m.standing for m in stage.newest.head_body.members}
    assert {standing[v] for v in stage.swarm.checkers.villains} == {"expelled"}


def test_a_drawn_swarm_that_mixes_neighbours():
    assert run_scenario("mixers", 4, rounds=4).rounds >= 4


def test_one_liar_of_each_kind_in_a_drawn_swarm():
    assert run_scenario("comparers", 4, rounds=4).rounds >= 4


def test_of_whom_owns_nothing_for_four_rounds_no_lie_is_expected():
    assert run_scenario("comparers", 155, 7, 4, quorum="two-thirds", topology="star").rounds >= 4


@pytest.mark.parametrize("seed", [3, pytest.param(1, marks=pytest.mark.long)])
def test_honest_owners_are_never_accused_where_one_message_of_twenty_is_lost(seed: int):
    """Not of lies, and not of silence either: what was lost is asked for."""
    stage = Story("compared", seed, 7, 10, "two-thirds")
    compared(stage)
    assert stage.swarm.checkers.complaints == 0


@pytest.mark.parametrize("lie", ["", *sorted(COMPARERS)])
def test_poisoners_that_lie_about_distances_weigh_next_to_nothing(lie: str):
    stage = Stage(lie, "scaling").run(5)
    weighed = [body for body in stage.bodies().values() if body.parts]
    assert len(weighed) == 5 and all(stage.loud(body) < 1e-9 for body in weighed)
    assert stage.distance < 0.1
    assert {fact.peer for fact in stage.told(Accused)} <= stage.swarm.checkers.villains


@pytest.mark.parametrize("statistic", ["robust", "nnm + trimmed_mean"])
def test_all_members_weigh_alike_and_the_round_makes_what_the_library_makes(statistic: str):
    """Beside two owners that sign false products: the agreed vector is the rule's, of the rows that were sent."""
    stage = Stage("miscomparer", "a little is enough", statistic).run(1)
    body = stage.bodies()[0]
    assert {fact.weighing for fact in stage.told(RowsWeighed) if fact.round == 0} == {body.weighing}
    assert len(body.weighing.peers) == 7 and all(part is not None for part in body.parts)
    rule = default(7, 2) if statistic == "robust" else partial(trimmed_mean, f=2, pre=["nnm"])
    expected = -rule(torch.stack([stage.sent[0, name] for name in body.weighing.peers]))
    island = stage.swarm.honest[0].island
    assert len(expected) == VALUES
    torch.testing.assert_close(island.anchor(body.state), expected, rtol=2e-6, atol=2e-6)


def test_where_nobody_lies_no_row_is_opened():
    stage = Stage().run(4)
    assert not stage.told(Doubted) and not stage.told(Accused)
    assert all(body.weighing.without == () for body in stage.bodies().values())


def test_lost_messages_cost_time_and_nobodys_weight():
    stage = Stage("", "huge", loss_rate=0.05).run(4)
    bodies = [body for body in stage.bodies().values() if body.parts]
    assert stage.distance < 0.3 and all(len(body.weighing.peers) == 7 for body in bodies)
    assert not stage.told(Accused)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2000, 2100))
def test_hundreds_of_swarms_with_lying_comparers(seed: int):
    run_scenario("comparers", seed, peers=[4, 5, 7, 7, 10][seed % 5])


# ---- a rule is deleted, and the tests notice ---------------------------------------------------------------


def test_if_one_owner_were_believed_false_distances_would_be_agreed_on(monkeypatch: pytest.MonkeyPatch):
    """Mutant: whatever one owner signs of distances or sums is believed."""
    monkeypatch.setattr(Witnesses, "believes", lambda self, answered: True)
    monkeypatch.setattr(Witnesses, "_believes_word", lambda self, word: True)
    with pytest.raises((AssertionError, InvariantBroken)):
        test_all_members_weigh_alike_and_the_round_makes_what_the_library_makes("robust")


def test_if_products_depended_on_the_machine_honest_owners_would_be_called_liars(monkeypatch: pytest.MonkeyPatch):
    """Mutant: every second island adds in another order, as BLAS would. One last bit is enough."""
    import atoll.sim.tensors as tensors

    calls, right = [0], tensors.compare

    def other_order(rows, n, codec):
        calls[0] += 1
        done = right(rows, n, codec)
        if calls[0] % 2:
            return done
        return done._replace(products=bytes([done.products[0] ^ 1]) + done.products[1:])

    monkeypatch.setattr(tensors, "compare", other_order)
    with pytest.raises(InvariantBroken, match="called a liar"):
        Stage().run(2)
