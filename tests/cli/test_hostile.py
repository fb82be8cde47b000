"""Liars among real processes: what they sign and send over real sockets costs them their place, and nobody else."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_poisons_are_what_their_names_say():
    """What a villain's encoder is handed, two rounds in a row; what is much larger no encoder takes."""
    spec = importlib.util.spec_from_file_location("villain", VILLAIN)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(villain := importlib.util.module_from_spec(spec))
    anchor_F, learnt_F = torch.ones(3), [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 1.0])]
    told = {}
    for kind, poison in villain.POISONS.items():
        encode = villain.poisoned(poison, lambda anchor_F, x_F: (x_F - anchor_F).tolist())
        told[kind] = [encode(anchor_F, x_F) for x_F in learnt_F]
    assert told["poison"] == [[0.0, -10.0, -20.0], [-10.0, 10.0, 0.0]]
    assert told["idle"] == [[0.0] * 3] * 2 and told["stale"] == [[0.0] * 3, [0.0, 1.0, 2.0]]
    assert told["huge"] == [torch.full((3,), 1e6).tolist()] * 2


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
