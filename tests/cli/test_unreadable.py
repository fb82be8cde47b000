"""Rows that no member can read, among real processes: their author is expelled at once, and any member can look
again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import answer_of, beside_eve, started

pytestmark = [pytest.mark.long, pytest.mark.net, pytest.mark.timeout(300)]

COMMUNITY = [
    *("--set", "model.name=gpt-nano", "--set", "train.seq_len=32", "--set", "train.batch=2"),
    *("--set", "train.inner_steps=2", "--set", "run.rounds=0", "--set", "run.trust=community"),
    *("--set", "run.audit_rate=0", "--set", "run.start_peers=5", "--set", "run.min_peers=4"),
    *("--uses", "8"),
]
LIAR = """
from atoll.runtime.worker.training_worker import TrainingWorker
honest = TrainingWorker._encode
def unreadable(self, work):
    from atoll.worker.arithmetic import payload_of
    from msgspec.structs import replace
    made = honest(self, work)
    parts = tuple(payload_of(b"\\xff" * part.size_bytes, self._up_name) for part in made.parts)
    return replace(made, parts=parts)
TrainingWorker._encode = unreadable
"""


def test_who_sends_what_no_codec_reads_is_expelled_within_three_rounds_and_the_proof_can_be_read(tmp_path: Path):
    with beside_eve(tmp_path, LIAR, COMMUNITY, "bob", "cid", "dan") as (ada, eve):
        villain = eve.until_fact("Opened")["peer"]
        first = ada.until(lambda f: f["fact"] == "RowDecodeFailed")["round"]
        out = ada.until_expelled(villain)
        assert out["round"] < first + 3
        ada.until(lambda f: f["fact"] == "RoundClosed" and f["round"] > out["round"] + 1)
        assert eve.until_fact("Ended")["why"] == "expelled" and eve.ends() == 4
        assert {
            f["peer"]
            for f in ada.facts
            if f["fact"] in ("RowDecodeFailed", "MalformedRowDetected", "MemberAccused")
        } == {villain}
    verified = answer_of("verify", tmp_path / "ada", "--verdicts", "--also", tmp_path / "bob")
    assert verified["problems"] == []
    (left,) = (d for d in verified["verdicts"]["departures"] if d["standing"] == "expelled")
    assert left["peer"] == villain and {reason["ground"] for reason in left["reasons"]} == {"row"}
    words = [word["result"] for doubt in verified["verdicts"]["doubts"] for word in doubt["words"]]
    assert len(words) >= 2 and set(words) == {"agrees"}, verified["verdicts"]
    again = started("up", "--dir", tmp_path / "eve")  # it has read the vertex that expelled it
    assert again.returncode == 4 and "E-JOIN-03 this run has expelled this peer" in again.stderr, again.stderr
