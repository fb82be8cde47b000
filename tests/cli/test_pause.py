"""`atoll pause` and `atoll resume` at a real process, which stands meanwhile and says how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SMALL, Peer, answer_of, atoll, peers

pytestmark = pytest.mark.net


def test_a_run_pauses_and_goes_on(tmp_path: Path):
    """Ada founded and trains alone. That others may not say it is asked in test_rollback, where there are two."""
    a = tmp_path / "a"
    with peers(Peer("up", "--dir", a, "--name", "ada", "--set", "run.rounds=0", *SMALL)) as (ada,):
        ada.trained_with(1)
        early = atoll("resume", "--dir", a)
        assert early.returncode == 4 and "E-RUN-26" in early.stderr and "it is not paused" in early.stderr
        held = answer_of("pause", "--dir", a)
        assert held["agreed"] and held["paused"]
        ada.until_fact("RoundBegan", paused=True)
        s = answer_of("status", "--dir", a)
        assert (s["phase"], s["trained"]) == ("paused", held["trained"])
        assert "by ada" in s["paused"] and "atoll resume" in s["paused"]
        assert "goes on after" in atoll("resume", "--dir", a).stdout
        ada.until(lambda f: f["fact"] == "RoundClosed" and f["counted"] and f["trained"] > held["trained"])
        assert answer_of("status", "--dir", a)["paused"] is None
        audit = answer_of("verify", a)
        assert audit["intact"] and [p["paused"] for p in audit["pauses"]] == [True, False]
