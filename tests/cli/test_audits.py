"""Audits among real processes: honest trainers are accepted, one that skips steps is expelled by a vertex."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import answer_of, atoll, beside_eve

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

AUDITED = [
    *("--set", "model.name=gpt-nano", "--set", "train.seq_len=32", "--set", "train.batch=2"),
    *("--set", "train.inner_steps=12", "--set", "run.rounds=0", "--set", "run.trust=community"),
    *("--set", "run.audit_rate=1.0", "--set", "run.start_peers=5", "--set", "run.min_peers=4"),
    *("--uses", "8"),
]
CHEAT = """
import sys
if "atoll.runtime.trainer" in sys.orig_argv:
    from atoll.runtime.trainer.process import TrainerCommandLoop
    honest = TrainerCommandLoop._take_step
    def every_second(self, job):
        if self.span.steps % 2:
            return honest(self, job)
        self.span.steps, self.span.samples = self.span.steps + 1, self.span.samples + self.spec.batch
        self.inner.steps += 1
    TrainerCommandLoop._take_step = every_second
"""


def test_one_of_five_that_takes_every_second_step_is_found_out_and_the_others_are_accepted(tmp_path: Path):
    """Its statements are true to its chain and its updates look like any member's: taking its steps again tells."""
    with beside_eve(tmp_path, CHEAT, AUDITED, "bob", "cid", "dan", in_trainer=True) as (ada, eve):
        villain = eve.until_fact("Opened")["peer"]
        ada.until_fact("RoundBegan", assembling=False)
        ada.until(lambda f: f["fact"] == "RoundClosed" and f["trained"] > 0)
        ada.until(
            lambda f: f["fact"] == "AuditFindingRecorded" and f["peer"] == villain and f["finding"] == "mismatch"
        )
        ada.until_expelled(villain)
        ada.until(lambda f: f["fact"] == "AuditFindingRecorded" and f["peer"] != villain and f["of"] > 5)
        told = [f for f in ada.facts if f["fact"] == "AuditFindingRecorded" and f["peer"] != villain]
        assert {f["finding"] for f in told} == {"accepted"}
        status = answer_of("status", "--dir", tmp_path / "ada")
        assert status["audits"]["accepted"] > 0 and status["audits"]["mismatch"] >= 2
        assert "audits:" in atoll("status", "--dir", tmp_path / "ada").stdout
        others = [word for name in ("bob", "cid", "dan") for word in ("--also", tmp_path / name)]
        verified = answer_of("verify", tmp_path / "ada", "--verdicts", *others)
        assert verified["intact"] and verified["audits"]["accepted"] > 0
        (out,) = (d for d in verified["verdicts"]["departures"] if d["standing"] == "expelled")
        assert out["peer"] == villain and out["reasons"][0]["ground"] == "audit"
        words = [w for d in verified["verdicts"]["doubts"] if d["outcome"] == "refuted" for w in d["words"]]
        assert {w["result"] for w in words} == {"agrees"}, words
        for exhibit in {w["exhibit"] for w in words}:
            (tmp_path / "ada" / "blobs" / exhibit).unlink(missing_ok=True)
        looked = atoll("verify", tmp_path / "ada", "--verdicts").stdout
        assert "unknown" in looked and "--fetch" in looked
        looked = atoll("verify", tmp_path / "ada", "--verdicts", "--fetch").stdout
        assert "eve is expelled" in looked and "unknown" not in looked
        assert re.search("agrees   (bob|cid|dan) said mismatch", looked)
