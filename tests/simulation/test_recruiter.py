"""A member that was invited with one ticket and invites itself under twelve more names."""

from __future__ import annotations

import pytest

from atoll.simulation.scenarios import run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.recruiter import play_recruiter


def test_one_invited_member_never_has_more_votes_than_agreement_withstands():
    """Every vertex of the story is looked at: it has one vote of five or six while its invitation is young."""
    assert run_scenario("recruiter", 1).measured["votes_of_one"] <= 2


@pytest.mark.long
def test_without_the_rule_the_same_story_ends_with_most_votes_in_one_hand(monkeypatch: pytest.MonkeyPatch):
    """What the rule is for: nothing else in a run bounds how many names one invited person votes by."""
    monkeypatch.setitem(play_recruiter.__globals__, "TURNS", 0)  # its names come; none needs to leave
    votes = play_recruiter(ScenarioContext("recruiter", 1, 4, 4, "two-thirds"), 0, 0)
    assert votes.of_one == 13
