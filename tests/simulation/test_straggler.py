"""Rounds that wait for a quorum of updates and a grace: a member that is slow holds no member up, and loses
nothing.
"""

from __future__ import annotations

import pytest

from atoll.base.ids import Seconds
from atoll.base.machine import Fact
from atoll.peer.events import LocalTrainingEnded, RoundClosed, UpdateSharingBegan
from atoll.peer.tasks import AdoptState, EncodeUpdate
from atoll.policy.plan import StragglerPolicy
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.straggler import ACCEPTANCE, SLOWER, straggler, tell
from atoll.simulation.world import VirtualComputer


def measured(acceptance: StragglerPolicy | None) -> dict[str, float]:
    stage = ScenarioContext("straggler", 1, 4, 10, "majority")
    tell(stage, acceptance)
    return stage.measured


def test_one_of_four_that_is_four_times_slower_costs_the_others_next_to_nothing():
    """Of all steps that four trainers could take, 0.85 stand in vertices; where all are waited for, a third."""
    assert measured(None)["useful"] < 0.4
    quick = run_scenario("straggler", 1).measured
    assert quick["useful"] >= 0.85 and quick["slow"] > 0.6


def test_where_each_takes_steps_by_its_own_speed_nobody_waits_for_long():
    """The same four, and all are waited for: the slow one takes a quarter of the others' steps."""
    assert run_scenario("by_speed", 1, rounds=10).measured["useful"] >= 0.85


def test_a_round_waits_until_the_quorum_is_there_and_no_longer_than_the_grace():
    """No member shares before two have their updates; where a member is late, one grace after the second."""
    stage = ScenarioContext("straggler", 5, 4, 10, "majority")
    ended: dict[int, list[Seconds]] = {}
    shared: list[tuple[int, Seconds, int]] = []

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, LocalTrainingEnded) and fact.steps:
            ended.setdefault(fact.round, []).append(now)
        if isinstance(fact, UpdateSharingBegan):
            shared.append((fact.round, now, len(fact.absent)))

    gather = stage.gather

    def gathered(*words: object, **more: object):
        swarm = gather(*words, **more)
        swarm.world.watchers.append(watch)
        return swarm

    stage.gather = gathered
    straggler(stage)
    late = [(round, now) for round, now, absent in shared if absent]
    assert late, "this seed has somebody late"
    for round, now in late:
        second = sorted(ended[round])[ACCEPTANCE.quorum - 1]
        grace_s = ACCEPTANCE.grace * 0.1 + 6.0 / 12
        assert second < now < second + grace_s + 0.1


def test_steps_that_came_too_late_for_a_round_are_in_the_next_update():
    """Without any grace the slow one misses rounds again and again; what it then sends is of several rounds."""
    stage = ScenarioContext("straggler", 2, 4, 16, "majority")
    slow, said = [], []

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed) and node.name == stage.swarm.founders[0] and fact.body.round > 2:
            slow.append(stage.swarm.founders[-1] in fact.counted)
            said.append(fact.body.metrics.steps)

    gather = stage.gather

    def gathered(*words: object, **more: object):
        swarm = gather(*words, **more)
        swarm.world.watchers.append(watch)
        return swarm

    stage.gather = gathered
    tell(stage, StragglerPolicy(quorum=3, grace=0))
    assert 3 < slow.count(False) < len(slow)
    per_round = 20 / SLOWER  # steps of its own in the time of one round
    assert stage.measured["slow"] * len(slow) > 1.3 * slow.count(True), "a round's worth each would be less"
    assert max(said) > 3 * 20 + 1.5 * per_round


def test_an_update_that_nobody_was_told_of_is_none():
    """The slow one encodes for so long that the others share without it: its steps stay where they are, with their
    samples. In error feedback they would weigh nothing, and where there is none they would be lost."""
    stage = ScenarioContext("straggler", 3, 4, 8, "majority")
    encoded, adopted, told = set[int](), dict[int, AdoptState](), set[int]()

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        slow = stage.swarm.founders[-1]
        if isinstance(fact, RoundClosed) and node.name == slow:
            told.update(fact.body.round for signed in fact.body.commits if signed.signer == slow)

    gather = stage.gather

    def gathered(*words: object, **more: object):
        swarm = gather(*words, **more)
        swarm.world.watchers.append(watch)
        island = swarm.world.nodes[swarm.founders[-1]].island
        takes_s, do = island.takes_s, island.run

        def does(work: object) -> object:
            if isinstance(work, AdoptState):
                adopted[work.round] = work
            return do(work)

        def takes(work: object) -> Seconds:
            if isinstance(work, EncodeUpdate):
                encoded.add(work.round)
                return 0.55
            return takes_s(work)

        island.takes_s, island.run = takes, does
        return swarm

    stage.gather = gathered
    tell(stage, StragglerPolicy(quorum=2, grace=2))
    in_vain = (encoded & adopted.keys()) - told
    assert in_vain, "it was still encoding"
    assert [adopted[round].counted for round in sorted(in_vain)] == [None] * len(in_vain)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_swarm_that_goes_on_without_the_slow_weathers_everything(seed: int):
    assert run_scenario("straggler_churn", seed, peers=6, rounds=8).rounds >= 8


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6000, 6050))
def test_fifty_swarms_that_go_on_without_the_slow(seed: int):
    run_scenario("straggler_churn", seed)
