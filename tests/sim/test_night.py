"""A long night of the simulator, made short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.cli import simulate
from atoll.sim.scenarios import SCENARIOS, NotForRaft, ScenarioFailed, ScenarioReport
from atoll.sim.scenarios.night import SIZES, drawn, night


def test_many_numbers_draw_every_story_at_every_size_by_both_protocols_and_one_number_always_the_same():
    worlds = [drawn(number, SCENARIOS) for number in range(6000)]
    assert {w.story for w in worlds} == set(SCENARIOS) and {w.protocol for w in worlds} == {"bft", "raft"}
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
            raise NotForRaft("members lie")
        stage.gather()

    (told,) = night({"liars": replace(SCENARIOS["liars"], tell=lie)}, number, 0.0)
    assert isinstance(told, ScenarioReport) and told.protocol == "bft"


def test_the_command_says_how_many_worlds_there_were_and_where_to_go_on(capsys: pytest.CaptureFixture[str]):
    seed = next(n for n in range(100) if drawn(n, {"calm": SCENARIOS["calm"]}).peers == 1)
    simulate.simulate("calm", swarm=True, minutes=0.0, seed=seed)
    assert f"1 worlds, 0 failed; to go on: atoll simulate --swarm --seed {seed + 1}" in capsys.readouterr().out
