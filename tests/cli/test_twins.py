"""Twins among real processes: who learns from other samples than it was given is told from those who do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import answer_of, atoll, beside_eve

pytestmark = [pytest.mark.long, pytest.mark.net, pytest.mark.timeout(300)]

TWINNED = [
    *("--set", "model.name=gpt-nano", "--set", "train.seq_len=32", "--set", "train.batch=8"),
    *("--set", "train.recipe=fedavg", "--set", "train.inner_steps=16", "--set", "run.rounds=0"),
    *("--set", "run.reputation=true", "--set", "run.twin_rate=0.5"),
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


def test_work_on_other_samples_strays_and_nobody_elses_does(tmp_path: Path):
    """It takes every step, on the wrong samples, and its twin has taken the right ones."""
    with beside_eve(tmp_path, COPYCAT, TWINNED, "bob", in_trainer=True) as (ada, eve):
        villain = eve.until_fact("Opened")["peer"]

        def strayed() -> list[str]:
            return [peer for f in ada.facts if f["fact"] == "ReviewDecided" for peer in f["against"]]

        def alike() -> int:
            return sum(f["opinion"] == "alike" for f in ada.facts if f["fact"] == "ReviewDecided")

        ada.until(lambda f: strayed() and alike())
        assert set(strayed()) == {villain}
        assert answer_of("status", "--dir", tmp_path / "ada")["checks"]["twins"]["outcomes"]["strayed"] > 0
        assert "twins compared:" in atoll("status", "--dir", tmp_path / "ada").stdout
        verified = answer_of("verify", tmp_path / "ada")
        assert verified["intact"] and verified["checks"]["twins"]["outcomes"]["strayed"] > 0
