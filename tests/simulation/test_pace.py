"""Silence costs some rounds' time where windows follow the pace, and no member who is only slow is complained of.

Virtual time says how long rounds take.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from msgspec.structs import replace as changed

from atoll.base.ids import PeerId
from atoll.base.machine import Broadcast, Effect, Event, Fact, Send
from atoll.peer.events import RoundAttemptFailed, RoundClosed, UpdateSharingBegan
from atoll.peer.peer import Peer
from atoll.peer.round.vertex_body import check_body
from atoll.peer.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.protocol.allreduce.events import PartsReduced
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.adversaries.lying_owners import mute
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.harness import WINDOW_MIN_S, ScenarioContext
from atoll.simulation.scenarios.lying_owners import watched
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.round import RoundMessage

PEERS, MUTE, HONEST = 7, (2, 5), 5
ROUND = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds")
PACED = changed(ROUND, window_min_s=WINDOW_MIN_S)


class Story:
    """Seven members, some of them mute owners after HONEST rounds; how long rounds take and what they come to."""

    def __init__(self, round: RoundSettings, mutes: bool = False, **run: object) -> None:
        settings = changed(RunSettings(round=round, tolerance=0.33), **run)
        island = WorkerKnobs(update_bytes=400_000)
        knobs = SwarmKnobs(PEERS, NetworkKnobs(0.005, 0.02, jitter_s=0.005), island, run=settings)
        self.swarm = VirtualSwarm(1, knobs, {place: villain(falls_silent) for place in MUTE} if mutes else None)
        self.closed: dict[int, RoundClosed] = {}
        self.ends: dict[int, float] = {}
        self.failed = 0
        self.swarm.world.watchers.append(self._watch)

    def run(self, rounds: int) -> None:
        self.swarm.world.run(self.swarm.world.now + 3600.0, stop=lambda: min(self.swarm.heads()) >= rounds - 1)
        assert min(self.swarm.heads()) >= rounds - 1

    def length(self, round: int) -> float:
        return self.ends[round] - self.ends[round - 1]

    @property
    def standing(self) -> dict[PeerId, str]:
        return {m.peer: m.standing for m in self.closed[max(self.closed)].body.members}

    def _watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            self.closed[fact.round], self.ends[fact.round] = fact, now
        self.failed += isinstance(fact, RoundAttemptFailed)


def falls_silent(villain: ByzantineMember, send: Send) -> list[Effect]:
    history = villain.peer.history
    return mute(villain, send) if history is not None and history.head >= HONEST else [send]


# ---- silent owners -----------------------------------------------------------------------------------------


def test_owners_that_fall_silent_cost_seconds_until_they_are_away():
    """Two of seven who watch each other never say a word as owners: with fixed windows a minute long."""
    told: dict[bool, tuple[float, int]] = {}
    for paced in (False, True):
        story = Story(PACED if paced else ROUND, mutes=True, witnessed=True)
        story.run(HONEST + 1)
        rounds = HONEST + 1
        while {story.standing[peer_name(place)] for place in MUTE} != {"away"}:
            rounds += 1
            story.run(rounds)
        told[paced] = story.ends[rounds - 1] - story.ends[HONEST], rounds - 1 - HONEST
        assert not story.failed
    (fixed_s, fixed_rounds), (paced_s, paced_rounds) = told[False], told[True]
    assert fixed_s > 50.0 and fixed_rounds == 3
    assert paced_s < 0.6 * fixed_s and paced_rounds <= 4


def test_silent_owners_whom_nobody_watches_cost_the_same_few_seconds_in_every_round():
    """In a community there is no member to complain of them: their parts are answered by the next,
    nothing is lost.
    """
    story = Story(PACED, mutes=True)
    story.run(HONEST + 12)
    undisturbed = median(story.length(round) for round in range(2, HONEST + 1))
    for round in range(HONEST + 1, HONEST + 12):
        assert story.length(round) < undisturbed + 8.0
        assert not story.closed[round].missing and not story.closed[round].parts_missing
    assert story.closed[HONEST + 11].body.window_s == WINDOW_MIN_S and not story.failed


def test_undisturbed_rounds_are_as_long_with_windows_of_any_length():
    """Deadlines are for trouble: a healthy round meets none."""
    typical: list[float] = []
    for round in (ROUND, PACED):
        story = Story(round, witnessed=True)
        story.run(12)
        typical.append(median(story.length(round) for round in range(1, 12)))
        assert all(not closed.missing and not closed.partly for closed in story.closed.values())
    assert typical[0] == pytest.approx(typical[1], rel=0.02)


def test_votes_that_take_seconds_leave_the_next_round_its_training():
    """Nothing passes for three seconds while round 8 is voted on: in round 9 all take all their steps."""
    story = Story(PACED, witnessed=True)
    world, reduced, cut = story.swarm.world, set[PeerId](), []

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, PartsReduced) and fact.round == 8:
            reduced.add(node.name)
        if len(reduced) == PEERS and not cut:
            cut.append(now)
            everybody = set(story.swarm.founders)
            world.at(now + 0.03, lambda: world.network.split(everybody, everybody))
            world.at(now + 3.03, world.network.heal)

    world.watchers.append(watch)
    story.run(12)
    body = story.closed[9].body
    assert story.length(8) > 3.0 and story.closed[8].body.time_s < cut[0] + 3.0
    assert len(body.commits) == PEERS and body.metrics.steps == PEERS * ROUND.inner_steps


# ---- slow members ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("witnessed", [True, False])
def test_a_network_that_becomes_ten_times_slower_in_an_instant_loses_nobody(witnessed: bool):
    """From 12 to 1.2 MB/s and from 20 to 400 ms: soon all count again, and no member was complained of."""
    story = Story(PACED, witnessed=witnessed)
    story.run(8)
    assert story.closed[7].body.window_s == WINDOW_MIN_S
    network = story.swarm.world.network
    knobs = network.knobs
    network.knobs = replace(
        knobs, latency_min_s=0.2, latency_max_s=0.4, uplink_bytes_s=1.2e6, downlink_bytes_s=1.2e6
    )
    network.latency.clear()
    story.run(20)
    assert set(story.standing.values()) == {"member"} and story.swarm.checkers.complaints == 0
    for round in range(11, 20):
        closed = story.closed[round]
        assert not closed.missing and not closed.partly and not closed.parts_missing, round
    assert story.closed[19].body.window_s > WINDOW_MIN_S


@pytest.mark.parametrize("witnessed", [True, False])
def test_one_member_whose_link_becomes_slow_is_given_its_time(witnessed: bool):
    """Its uplink falls from 12.5 MB/s to 0.2: rounds wait for it again, and it counts."""
    story = Story(PACED, witnessed=witnessed)
    story.run(8)
    story.swarm.world.network.uplink_bytes_s[peer_name(3)] = 0.2e6
    story.run(18)
    assert set(story.standing.values()) == {"member"} and story.swarm.checkers.complaints == 0
    counted = [peer_name(3) in story.closed[round].counted for round in range(12, 18)]
    assert all(counted), counted


def test_rows_of_a_failed_attempt_do_not_stand_in_front_of_those_of_the_next():
    """Its uplink falls to 0.2 MB/s where owners watch each other: what every attempt says again waits only once."""
    story = Story(PACED, witnessed=True)
    story.run(8)
    story.swarm.world.network.uplink_bytes_s[peer_name(3)] = 0.2e6
    story.run(11)
    assert story.length(8) + story.length(9) < 60.0  # 280 s where every attempt queues its rows behind the others'


@pytest.mark.parametrize("bytes_s", [0.2e6, pytest.param(0.06e6, marks=pytest.mark.long)])
def test_an_owner_to_which_rows_come_late_is_not_complained_of(bytes_s: float):
    """Its downlink falls to a sixtieth, or a two-hundredth: what it answers lacks rows that others got, and as soon
    as it is a round behind it answers nothing. Nor does it complain of the others that it cannot receive from.
    """
    story = Story(PACED, witnessed=True)
    story.run(5)
    story.swarm.world.network.downlink_bytes_s[peer_name(3)] = bytes_s
    story.run(11)
    assert set(story.standing.values()) == {"member"} and story.swarm.checkers.complaints == 0


def test_whoever_is_not_in_a_round_owes_it_nothing_and_holds_it_up_for_a_third_of_a_window(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is heard and says not a word of rounds: as it owns parts all wait for it once training is over."""
    story, late = Story(PACED, witnessed=True), dict[int, float]()
    handle, silent = Peer.handle, peer_name(3)

    def says_nothing(self: Peer, event: Event, now: float) -> list[Effect]:
        effects = handle(self, event, now)
        if self.me != silent or story.swarm.world.now < story.ends.get(4, 1e9):
            return effects
        return [
            e for e in effects if not isinstance(e, Send | Broadcast) or not isinstance(e.message, RoundMessage)
        ]

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, PartsReduced) and fact.round > 5 and node.name != silent:
            times = node.machine.round.sharing.timing.times(0)
            late[fact.round] = (now - times.train_until) / (times.answer_until[0] - times.train_until)

    monkeypatch.setattr(Peer, "handle", says_nothing)
    story.swarm.world.watchers.append(watch)
    story.run(9)
    assert set(story.standing.values()) == {"member"} and story.swarm.checkers.complaints == 0
    assert len(late) == 3 and min(late.values()) > 0.3 and max(late.values()) < 0.5


@pytest.mark.parametrize("seed", [1, pytest.param(4, marks=pytest.mark.long)])
def test_lost_messages_make_nobody_complain(seed: int):
    """One of a hundred, over slow links, where owners watch each other."""
    stage = ScenarioContext("watched", seed, 5, 20, "two-thirds")
    watched(stage, round=stage.paced())
    assert stage.swarm.checkers.complaints == 0 and stage.swarm.checkers.full == stage.swarm.checkers.training


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_swarm_whose_windows_follow_the_pace_weathers_everything(seed: int):
    assert run_scenario("paced", seed, rounds=12).rounds >= 12


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3000, 3050))
def test_fifty_swarms_weather_everything(seed: int):
    run_scenario("paced", seed)


# ---- who makes up a window ---------------------------------------------------------------------------------


def test_voters_refuse_a_window_that_does_not_follow():
    """Another than the round shows, none, or one in a run with fixed windows."""
    story, found = Story(PACED), []

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, UpdateSharingBegan) and fact.round == 4 and not found:
            assert node.machine is not None and node.machine.round is not None
            found.append((node.machine.round.ground, node.machine.notary))

    story.swarm.world.watchers.append(watch)
    story.run(5)
    (ground, notary), body = found[0], story.closed[4].body
    assert check_body(ground, notary, body, body.time_s) is None
    for wrong in (0.0, 0.5, body.window_s + 0.001, 6.0, float("nan")):
        why = check_body(ground, notary, changed(body, window_s=wrong), body.time_s)
        assert why is not None and "window" in why
    fixed = replace(ground, plan=replace(ground.plan, pace=None))
    assert "window" in (check_body(fixed, notary, body, body.time_s) or "")
