"""What a member hears of its vote, and of work that nobody could replay, before it trains for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.base.errors import UsageError
from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.cli.watch import introduction
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.settings import RunSettings
from atoll.runtime.config import load_config, recipe_of, settings_of
from atoll.runtime.control.status import unaudited_text, vote_text
from atoll.wire.messages.vertex import EarnedVoteRecord, Member, SwarmRoundMetrics, VertexBody

ME = PeerId("n")


def host(settings: RunSettings, counted: int = 0, unaudited: bool = False) -> Any:
    members = tuple(
        Member(PeerId(name), b"", (), role, "member", 0, 0.1, name)  # type: ignore[arg-type]
        for name, role in (("a", "trainer"), (ME, "apprentice"))
    )
    invited = EarnedVoteRecord((0, 1), (9, counted), ())
    numbers = SwarmRoundMetrics(0.0, 0, 0)
    body = VertexBody(
        ZERO_DIGEST,
        5,
        0,
        ZERO_DIGEST,
        0.0,
        PeerId("a"),
        (),
        ZERO_DIGEST,
        (),
        members,
        (),
        (),
        numbers,
        invited=invited,
    )
    machine = SimpleNamespace(settings=settings, history=SimpleNamespace(head_body=body))
    return SimpleNamespace(me=ME, wish=DesiredRole(unaudited=unaudited), machine=machine)


def test_a_member_on_a_gpu_is_told_that_it_decides_nothing_where_work_is_replayed():
    assert "it gets no vote" in unaudited_text(host(RunSettings(audit_rate=0.1), unaudited=True))
    assert not unaudited_text(host(RunSettings(audit_rate=0.1)))
    assert not unaudited_text(host(RunSettings(), unaudited=True))


def test_an_apprentice_is_told_how_far_its_vote_is():
    run = RunSettings(vote_after_rounds=10, sponsor_rounds=50)
    assert "10 of its updates have counted; 3 have so far" in vote_text(host(run, 3))
    assert "the same invitation" in vote_text(host(run, 12))
    assert not vote_text(host(RunSettings()))


def test_a_founder_on_a_gpu_has_no_audits_and_may_not_ask_for_them():
    """It votes from the beginning, and nobody could replay its work."""
    community = ("run.trust=community", "run.start_peers=5", "node.device=cuda")

    def rate(*more: str) -> float:
        config = load_config(None, (*community, *more), {})
        return settings_of(config, recipe_of(config)).audited_share

    assert rate() == 0.0 and rate("node.device=cpu") > 0
    assert bool(rate("node.device=auto")) == (not torch.cuda.is_available())
    with pytest.raises(UsageError, match="E-RUN-16"):
        rate("run.audit_rate=0.1")


def test_whoever_founds_where_members_may_lie_hears_that_its_ticket_admits_one():
    news = {"name": "ada", "peer": "p", "run_id": "r", "folder": "there", "addresses": [], "ticket": "ATOLL1:"}
    assert "atoll invite --dir there" in introduction(news | {"ticket_uses": 1})
    assert "atoll invite" not in introduction(news | {"ticket_uses": 64})
