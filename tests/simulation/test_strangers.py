"""Strangers in the virtual world: knowing the run's id, or a ticket that is used up, opens no door."""

from __future__ import annotations

import pytest

from atoll.peer.membership.admission import refused
from atoll.peer.membership.readers import ReadAccessControl
from atoll.simulation.scenarios import ScenarioFailed, run_scenario


@pytest.mark.parametrize("seed", [1, 2])  # two-thirds, and more than half
def test_strangers_are_told_nothing_and_end_no_peer(seed: int):
    """Two ask for everything and refuse everything, twice a second; an invited peer comes in beside them."""
    report = run_scenario("strangers", seed)
    assert report.members == 5 and report.measured["told_4"] > 100 and report.measured["told_5"] > 100


def test_the_story_fails_where_peers_answer_strangers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ReadAccessControl, "refusal", lambda self, peer, known, wall_s: None)
    with pytest.raises(ScenarioFailed, match="a stranger was told"):
        run_scenario("strangers", 1)


def test_the_story_fails_where_peers_believe_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "atoll.peer.peer.Peer._hear_refusal", lambda self, by, code: [self.participation.fact(refused(by, code))]
    )
    with pytest.raises(ScenarioFailed, match="was ended by strangers"):
        run_scenario("strangers", 1)
