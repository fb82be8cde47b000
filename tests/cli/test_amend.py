"""`atoll amend` at a real process: a run that is over gets more rounds, of another length and at another rate."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SMALL, Peer, answer_of, atoll, peers

pytestmark = pytest.mark.net


def test_a_run_that_is_over_gets_more_rounds_and_another_rate(tmp_path: Path):
    """Ada founded it and stays when it is over. That others may not say it is asked in test_rollback."""
    a = tmp_path / "a"
    with peers(Peer("up", "--dir", a, "--name", "ada", "--stay", "--set", "run.rounds=2", *SMALL)) as (ada,):
        ada.until_fact("RunOver", rounds=2)
        assert answer_of("status", "--dir", a)["amended"] is None
        for numbers, status, told in (
            (["train.batch=4"], 2, "place in the data is counted"),
            (["train.lr=fast"], 2, "expected a number"),
            (["run.rounds=2"], 4, "asks for 2 rounds, but 2 will have trained"),
        ):
            refused = atoll("amend", *numbers, "--dir", a)
            assert refused.returncode == status and told in refused.stderr, refused.stderr
        done = answer_of("amend", "run.rounds=4", "train.inner_steps=4", "train.lr=0.002", "--dir", a)
        assert done["agreed"] and done["trained"] == 2
        ada.until_fact("RunOver", rounds=4)
        began = [f for f in ada.facts if f["fact"] == "RoundBegan" and not f["assembling"]]
        assert [f["steps"] for f in began] == [8, 8, 4, 4]
        s = answer_of("status", "--dir", a)
        numbers = {"run.rounds": 4, "train.inner_steps": 4, "train.lr": 0.002}
        words = "4 rounds, 4 steps a round, learning rate 0.002"
        assert (s["rounds"], s["amended"]) == (4, {"numbers": numbers, "trained": 2, "words": words})
        assert f"amended after 2 rounds: {words}" in atoll("status", "--dir", a).stdout
        audit = answer_of("verify", a)
        assert audit["intact"] and [t["to"]["lr"] for t in audit["amendments"]] == [0.002]
