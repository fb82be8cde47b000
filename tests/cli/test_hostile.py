"""Liars among real processes: what they sign and send over real sockets costs them their place, and nobody else."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from processes import SMALL, Peer, peers

pytestmark = [pytest.mark.net]

VILLAIN = Path(__file__).parents[2] / "bench" / "villain.py"
OPEN = [
    *("--set", "run.trust=open", "--set", "sync.statistic=trimmed_mean", "--set", "run.rounds=0"),
    *("--set", "run.start_peers=4", "--set", "run.min_peers=4"),
]


def expelled(fact: dict[str, Any], peer: str) -> bool:
    return fact["fact"] == "MembershipChanged" and any(
        m["peer"] == peer and m["standing"] == "expelled" for m in fact["members"]
    )


def test_an_owner_that_answers_with_false_sums_is_expelled_and_nobody_else_is(tmp_path: Path):
    with peers(Peer("up", "--dir", tmp_path / "ada", "--name", "ada", *OPEN, *SMALL)) as running:
        ticket = running[0].until_fact("Opened")["ticket"]
        for name in ("bob", "cleo"):
            running.append(Peer("join", ticket, "--dir", tmp_path / name, "--name", name))
        lie = ("--villain", "miscounter", "--honest-rounds", "1")
        liar = Peer("join", ticket, "--dir", tmp_path / "dan", "--name", "dan", *lie, command=(VILLAIN,))
        running.append(liar)
        name = liar.until_fact("Opened")["peer"]
        states: dict[int, set[str]] = defaultdict(set)
        for peer in running[:3]:
            out = peer.until(lambda f: expelled(f, name))
            assert not any(m["standing"] in ("expelled", "away") for m in out["members"] if m["peer"] != name)
            for fact in peer.facts:
                if fact["fact"] == "RoundClosed":
                    states[fact["round"]].add(fact["state"])
        assert all(len(agreed) == 1 for agreed in states.values())
