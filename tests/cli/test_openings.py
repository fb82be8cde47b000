"""Openings among real processes: an owner that answers with one other byte per block is expelled by a vertex."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import answer_of, beside_eve

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

CHECKED = [
    *("--set", "model.name=gpt-nano", "--set", "train.seq_len=32", "--set", "train.batch=2"),
    *("--set", "train.inner_steps=4", "--set", "run.rounds=0", "--set", "run.trust=community"),
    *("--set", "run.openings=0.5", "--set", "run.start_peers=5", "--set", "run.min_peers=4"),
    *("--uses", "8"),
]
LIAR = """
from atoll.runtime.worker.training_worker import TrainingWorker
honest = TrainingWorker._combine
def spoilt(self, work, common):
    from atoll.worker.arithmetic import payload_of
    from msgspec.structs import replace
    done = honest(self, work, common)
    if done.payload is None:
        return done
    wire = bytearray(done.payload.data)
    for at in range(900, len(wire), 1000):  # a level or two of every block
        wire[at] = wire[at] == 0
    return replace(done, payload=payload_of(bytes(wire), self._down_name))
TrainingWorker._combine = spoilt
"""


def test_an_owner_that_answers_with_other_bytes_is_expelled_and_nobody_else_is_named(tmp_path: Path):
    """What it shows are true rows: that they do not make what it signed is the proof."""
    with beside_eve(tmp_path, LIAR, CHECKED, "bob", "cid", "dan") as (ada, eve):
        villain = eve.until_fact("Opened")["peer"]
        ada.until(lambda f: f["fact"] == "RoundClosed" and f["trained"] > 0)
        ada.until(
            lambda f: f["fact"] == "SumCheckFindingRecorded" and f["peer"] == villain and f["finding"] == "mismatch"
        )
        ada.until_expelled(villain)
        at = max(f["trained"] for f in ada.facts if f["fact"] == "RoundClosed")
        ada.until(lambda f: f["fact"] == "RoundClosed" and f["trained"] > at + 3)
        told = [f for f in ada.facts if f["fact"] == "SumCheckFindingRecorded"]
        assert {f["peer"] for f in told} == {villain} and {f["finding"] for f in told} == {"mismatch"}
    others = ("--also", tmp_path / "bob", "--also", tmp_path / "cid")
    verified = answer_of("verify", tmp_path / "ada", "--verdicts", *others)
    assert verified["problems"] == []
    (out,) = (d for d in verified["verdicts"]["departures"] if d["standing"] == "expelled")
    assert out["peer"] == villain and {reason["ground"] for reason in out["reasons"]} == {"audit"}
    words = [word["result"] for doubt in verified["verdicts"]["doubts"] for word in doubt["words"]]
    assert "agrees" in words and set(words) <= {"agrees", "unknown"}, words  # they keep the newest of many
