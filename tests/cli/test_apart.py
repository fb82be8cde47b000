"""`sync.apart = "merge"` between real processes: who hears no member trains on, and the history says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import SMALL, Peer, answer_of, atoll, peers

pytestmark = [pytest.mark.long, pytest.mark.net]
FAST = ("--set", "run.beat=0.5", "--set", "run.suspect=1.5", "--set", "consensus.timeout=7.5")
APART = ("--set", 'sync.apart="merge"', "--set", "sync.apart_rounds=3", "--set", "run.rounds=0")


def test_who_hears_nobody_trains_on_and_brings_it_when_the_other_is_back(tmp_path: Path):
    """Ada stops like a computer that sleeps. Bob takes three rounds' worth of steps alone; both count again."""
    a, b = tmp_path / "a", tmp_path / "b"
    with peers(Peer("up", "--dir", a, "--name", "ada", *SMALL, *FAST, *APART)) as running:
        ada = running[0]
        bob = Peer("join", ada.until_fact("Opened")["ticket"], "--dir", b, "--name", "bob")
        running.append(bob)
        bob.trained_with(2)
        os.kill(ada.process.pid, signal.SIGSTOP)
        bob.facts.clear()
        last = bob.until_fact("TrainedWithoutQuorum", steps=0)
        assert (last["heard"], last["quorum"]) == (1, 2)
        assert "steps taken apart" in atoll("status", "--dir", b).stdout
        os.kill(ada.process.pid, signal.SIGCONT)
        merged = ada.until(lambda f: f["fact"] == "RoundClosed" and f.get("late"))
        ((peer, late),) = merged["late"].items()
        assert peer in merged["counted"]
        assert late["steps"] == sum(f["steps"] for f in bob.facts if f["fact"] == "TrainedWithoutQuorum") == 3 * 8
        later = [p.until_fact("RoundClosed", round=merged["round"] + 1) for p in running]
        assert later[0]["state"] == later[1]["state"]

        row = next(r for r in answer_of("checkpoint", "list", a) if r["round"] == merged["round"])
        assert row["late"] == {"bob": {"since": late["since"], "steps": late["steps"]}}
        assert f"bob, {late['steps']} steps apart since round" in atoll("checkpoint", "list", a, "--all").stdout
        audit = answer_of("verify", a)
        assert audit["intact"] and audit["contributions"][peer]["late"] == late["steps"]
        assert (
            f"took in what bob did apart since history round {late['since']}" in atoll("status", "--dir", a).stdout
        )
