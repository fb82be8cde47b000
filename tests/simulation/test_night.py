"""A long night of the simulator, made short."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import replace

import pytest

from atoll.cli import simulate
from atoll.peer.round.topology_choice import TOPOLOGIES
from atoll.simulation.scenarios import SCENARIOS, ScenarioFailed, ScenarioReport, ScenarioUnsupported
from atoll.simulation.scenarios.random_campaign import SIZES, drawn, night


def test_many_numbers_draw_every_story_at_every_size_by_both_protocols_and_one_number_always_the_same():
    worlds = [drawn(number, SCENARIOS) for number in range(6000)]
    assert {w.story for w in worlds} == set(SCENARIOS) and {w.protocol for w in worlds} == {"bft", "raft"}
    assert {w.topology for w in worlds} == {None, *TOPOLOGIES}
    for story, sizes in SIZES.items():
        assert {w.peers for w in worlds if w.story == story} == set(sizes)
    assert worlds[17] == drawn(17, SCENARIOS) and [w.seed for w in worlds] == list(range(6000))


def test_a_night_goes_on_after_a_failure_and_tells_how_to_see_it_again():
    """Time passes by the test's clock: two worlds begin before it is up."""

    def breaks(stage):
        stage.gather()
        raise RuntimeError("the virtual sky fell")

    hours = iter([0.0, 1.0, 9.0])
    stories = {"calm": replace(SCENARIOS["calm"], tell=breaks)}
    told = list(night(stories, 40, 8.0, clock=lambda: next(hours)))
    assert [isinstance(t, ScenarioFailed) for t in told] == [True, True]
    assert "atoll simulate calm --seed 41 --peers" in str(told[1]).splitlines()[-1]


def test_stories_in_which_members_lie_are_told_by_two_phases():
    number = next(n for n in range(100) if drawn(n, {"liars": SCENARIOS["liars"]}).protocol == "raft")

    def lie(stage):
        if stage.protocol == "raft":
            raise ScenarioUnsupported("members lie")
        stage.gather()

    (told,) = night({"liars": replace(SCENARIOS["liars"], tell=lie)}, number, 0.0)
    assert isinstance(told, ScenarioReport) and told.protocol == "bft"


def test_several_worlds_at_a_time_are_those_of_one_at_a_time_and_as_large_as_they_are_told():
    """Played here instead of in processes; time is up after three more worlds have begun."""

    class Here(Executor):
        def submit(self, play, *given):
            done = Future()
            done.set_result(play(*given))
            return done

    small = {"calm": SCENARIOS["calm"]}
    hours = iter([0.0, 1.0, 1.0, 1.0, *[9.0] * 9])
    told = list(night(small, 7, 8.0, lambda: next(hours), peers=2, rounds=1, jobs=2, pool=lambda jobs: Here()))
    assert sorted((t.seed, t.peers) for t in told) == [(seed, 2) for seed in range(7, 12)]
    (alone,) = night(small, 7, 0.0, peers=2, rounds=1)
    assert alone.digest in {t.digest for t in told if t.seed == 7}


def test_the_command_says_how_many_worlds_there_were_and_where_to_go_on(capsys: pytest.CaptureFixture[str]):
    seed = next(n for n in range(100) if drawn(n, {"calm": SCENARIOS["calm"]}).peers == 1)
    simulate.simulate("calm", swarm=True, minutes=0.0, seed=seed)
    assert f"1 worlds, 0 failed; to go on: atoll simulate calm --swarm --seed {seed + 1}" in capsys.readouterr().out
