"""Poisoned updates on the real round: a mean is whatever the liars want, an order statistic is not.

Seven peers with real numbers behind them learn one point; two commit to, sign and send poison.
"""

from __future__ import annotations

import random

import pytest

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.peer.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.protocol.allreduce.cross_check import OwnerResultsDisagreed
from atoll.protocol.allreduce.events import LocalPartCombineFailed, RowDecodeFailed
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.tensors import POISONS, TensorWorker
from atoll.simulation.worker import WorkerKnobs

ROUNDS = 6
LIARS = (1, 4)
NO_NUMBERS = ("not a number", "infinity", "1e30")


class Stage:
    """`dead` founders stop before anything is sent. Five of seven may agree, or with `majority` four."""

    def __init__(
        self,
        statistic: str,
        poison: str = "",
        dead: tuple[int, ...] = (),
        quorum: str = "two-thirds",
        witnessed: bool = False,
    ) -> None:
        plan = RoundSettings(inner_steps=5, first_train_s=10, quorum=quorum)
        trust = {"statistic": statistic, "tolerance": 0.33, "witnessed": witnessed}
        settings = RunSettings(open_to_all=True, round=plan, **trust)
        poisoners = {peer_name(i) for i in LIARS} if poison else set()

        def island(me, knobs: WorkerKnobs, draw: random.Random) -> TensorWorker:
            return TensorWorker(me, knobs, draw, POISONS[poison] if me in poisoners else None)

        self.swarm = VirtualSwarm(3, SwarmKnobs(7, run=settings), island=island)
        self.swarm.checkers.villains = frozenset(poisoners)
        self.facts: list[Fact] = []
        self.swarm.world.watchers.append(lambda now, node, fact: self.facts.append(fact))
        for name in map(peer_name, dead):
            self.swarm.world.at(0.001, lambda name=name: self.swarm.world.crash(name))

    def run(self, rounds: int = ROUNDS) -> Stage:
        self.swarm.world.run(600.0, stop=lambda: min(self.swarm.heads()) >= rounds - 1)
        assert min(self.swarm.heads()) >= rounds - 1
        return self

    @property
    def distance(self) -> float:
        """0 where every member wants to be; they begin at 1."""
        island = self.swarm.honest[0].island
        assert isinstance(island, TensorWorker)
        return island.distance()

    @property
    def expelled(self) -> dict[PeerId, int]:
        """Who is, since the vertex of which round."""
        since: dict[PeerId, int] = {}
        for body in (fact.body for fact in self.told(RoundClosed)):
            for member in body.members:
                if member.standing == "expelled":
                    since[member.peer] = min(body.round, since.get(member.peer, body.round))
        return since

    def told(self, kind: type[Fact]) -> list:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@pytest.mark.parametrize(
    ("statistic", "poison"),
    [*(("trimmed_mean", poison) for poison in POISONS), ("median", "scaling"), ("meamed", "huge")],
)
def test_two_poisoners_of_seven_do_not_stop_the_others_from_learning(statistic: str, poison: str):
    """What is no number is refused by name, and its author is out at once; what is one is sorted out."""
    stage = Stage(statistic, poison).run()
    assert stage.distance < 0.15
    garbage = {fact.peer for fact in stage.told(RowDecodeFailed)}
    assert garbage == ({peer_name(i) for i in LIARS} if poison in NO_NUMBERS else set())
    assert stage.expelled == dict.fromkeys(garbage, 0)


@pytest.mark.parametrize("poison", ["scaling", "huge"])
def test_the_same_poison_spoils_a_mean(poison: str):
    """Two of seven drive it away from where it began. A plain sign flip would only slow it down to 3/7."""
    assert not Stage("mean", poison).run().distance < 1.0


def test_without_poison_a_sorted_part_is_as_good_as_a_mean():
    for statistic in ("mean", "trimmed_mean"):
        assert Stage(statistic).run().distance < 0.1


def test_too_few_rows_are_no_answer_and_never_a_mean():
    """Four of seven live, too few for two liars: the rule says so, and the round agrees that no part counts."""
    stage = Stage("trimmed_mean", dead=(0, 2, 6), quorum="majority").run(1)
    assert any(
        "needs 5 rows to withstand 2 liars, not 4" in fact.why for fact in stage.told(LocalPartCombineFailed)
    )
    first = [fact for fact in stage.told(RoundClosed) if fact.body.round == 0]
    assert first and all(fact.parts_missing == len(fact.body.parts) for fact in first)
    assert stage.swarm.honest[0].island.distance(first[0].body.state) == 1.0


def test_owners_that_watch_each_other_sort_alike():
    """Three owners of every part sort the same poisoned rows with real arithmetic: no member ever doubts
    an answer.
    """
    stage = Stage("trimmed_mean", "scaling", witnessed=True).run(4)
    assert stage.distance < 0.15
    assert stage.told(OwnerResultsDisagreed) == [] and all(
        fact.parts_missing == 0 for fact in stage.told(RoundClosed)
    )
