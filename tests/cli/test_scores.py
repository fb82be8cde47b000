"""Loss scores among real processes: who learns from another's samples is told from those who learn from theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import answer_of, atoll, beside_eve

pytestmark = [pytest.mark.long, pytest.mark.net, pytest.mark.timeout(300)]

SCORED = [
    *("--set", "model.name=gpt-nano", "--set", "train.seq_len=32", "--set", "train.batch=8"),
    *("--set", "train.inner_steps=16", "--set", "run.rounds=0", "--set", "run.reputation=true"),
    *("--set", "run.audit_rate=0", "--set", "run.score_rate=0.1", "--set", "sync.overlap=2"),
    *("--set", "run.start_peers=3", "--set", "run.min_peers=3"),
    *("--uses", "4"),
]
COPYCAT = """
import sys
if "atoll.runtime.trainer" in sys.orig_argv:
    from msgspec.structs import replace
    from atoll.runtime.trainer.process import TrainerCommandLoop
    honest = TrainerCommandLoop._batch
    TrainerCommandLoop._batch = lambda self, job, cursor: honest(self, replace(job, shard=(job.shard + 1) %
    job.shards), cursor)
"""


def test_work_on_another_members_samples_is_hollow_and_nobody_elses_is(tmp_path: Path):
    """It takes every step, on the wrong samples, in a run with overlap, which no replay could audit."""
    with beside_eve(tmp_path, COPYCAT, SCORED, "bob", in_trainer=True) as (ada, eve):
        villain = eve.until_fact("Opened")["peer"]

        def opinions(of_villain: bool) -> list[str]:
            told = (f for f in ada.facts if f["fact"] == "ReviewDecided")
            return [f["opinion"] for f in told if (f["peers"][0] == villain) == of_villain]

        ada.until(lambda f: opinions(False).count("taught") >= 4 and opinions(True).count("hollow") >= 1)
        ada.until(lambda f: len(opinions(True)) >= 3)
        theirs, honest = opinions(True), opinions(False)
        assert theirs.count("taught") * len(honest) < honest.count("taught") * len(theirs)
        status = answer_of("status", "--dir", tmp_path / "ada")
        assert status["checks"]["score"]["outcomes"]["taught"] > 0
        assert "updates scored:" in atoll("status", "--dir", tmp_path / "ada").stdout
        verified = answer_of("verify", tmp_path / "ada")
        assert verified["intact"] and verified["checks"]["score"]["outcomes"]["hollow"] > 0
