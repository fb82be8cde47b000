"""Validation among real processes: one member ruins the mean, the others notice, and all go back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import Peer, answer_of, atoll, peers

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

VALIDATED = [
    *("--set", "model.name=gpt-nano", "--set", "train.seq_len=32", "--set", "train.batch=2"),
    *("--set", "train.inner_steps=6", "--set", "run.rounds=0", "--set", "run.trust=community"),
    *("--set", "sync.statistic=mean", "--set", "run.validate_every=1", "--set", "run.start_peers=4"),
    *("--set", "run.audit_rate=0"),  # an audit would expel Eve, and her row of her own part would go with her
    *("--uses", "4"),
]
POISON = """
from atoll.runtime.worker.training_worker import TrainingWorker
honest, ruined = TrainingWorker._encode, set()
def ruins(self, work):
    if self.head.round >= 2 and len(ruined | {work.round}) <= 2:
        ruined.add(work.round)
        x_F, anchor_F = self.trainer.read_x(), self.head.anchor_F
        x_F.copy_(anchor_F - 200 * (x_F - anchor_F))
    return honest(self, work)
TrainingWorker._encode = ruins
"""


def test_a_ruined_mean_is_left_and_who_counted_is_named(tmp_path: Path):
    """Eve's updates of two rounds point the wrong way, two hundred times as far; the run goes on from before.

    Bob, Cid and Eve fetch the canary data from Ada: all four measure two losses. All keep updates, so Ada can
    make a refused round again without each of them: it was Eve.
    """
    (canary := tmp_path / "canary.txt").write_text(Path(os.__file__).read_text())
    keep = ("--set", "keep.updates=150", "--set", "keep.newest=150")
    more = ("--set", f"data.canary={canary}", *keep)
    with peers(Peer("up", "--dir", tmp_path / "ada", "--name", "ada", *VALIDATED, *more)) as running:
        ada = running[0]
        ticket = ada.until_fact("Opened")["ticket"]
        running.append(Peer("join", ticket, "--dir", tmp_path / "bob", "--name", "bob", *keep))
        running.append(Peer("join", ticket, "--dir", tmp_path / "cid", "--name", "cid", *keep))
        running.append(Peer("join", ticket, "--dir", tmp_path / "eve", "--name", "eve", *keep, lies=POISON))
        ada.until_fact("RoundBegan", assembling=False)
        for trained in (1, 3):  # each with patience of its own
            ada.until(lambda f, least=trained: f["fact"] == "RoundClosed" and f["trained"] >= least)
        bad = ada.until_fact("StateValidationDecided", opinion="bad")
        went = ada.until_fact("BadStateRolledBack")
        good = next(f for f in ada.facts if f["fact"] == "StateValidationDecided" and f["of"] == went["back_to"])
        assert went["back_to"] < bad["of"] < went["round"] and bad["of"] in went["refused"]
        assert len(bad["values"]) == 2 and bad["values"][0] > 1.2 * good["values"][0]
        assert running[3].until_fact("Opened")["peer"] in went["contributors"]
        for peer in running[:3]:
            peer.until_fact("RoundClosed", round=went["round"], back_to=went["back_to"], by="validators")
        status = answer_of("status", "--dir", tmp_path / "ada")
        assert "eve" in status["validation"]["returns"][0]["contributors"]
        shown = answer_of("checkpoint", "show", went["back_to"], tmp_path / "ada")["validated"]
        assert [shown["loss"], shown["accuracy"]] == [
            good["values"][0],
            good["accuracy"][0],
        ] and "canary loss" in shown
        listed = {row["round"]: row for row in answer_of("checkpoint", "list", tmp_path / "ada")}
        assert listed[went["back_to"]]["validated"] == shown
        assert "validated: loss " in atoll("checkpoint", "list", tmp_path / "ada", "--all").stdout
        said = atoll("status", "--dir", tmp_path / "ada").stdout
        assert (
            "validated: history round" in said
            and ", right " in said
            and f"went back to round {went['back_to']}" in said
        )
        verified = answer_of("verify", tmp_path / "ada")
        assert verified["intact"] and verified["rollbacks"][0]["by"] == "validators"
        blamed = answer_of("blame", tmp_path / "ada")
        assert blamed["refused"][0]["back_to"] == went["back_to"] and set(went["refused"]) <= set(blamed["updates"])
        assert "the model was bad" in atoll("blame", tmp_path / "ada").stdout
        judged = answer_of("blame", tmp_path / "ada", "--metric", "validation")["judged"]
        assert {j["round"] for j in judged if j["opinion"] == "bad"} & set(went["refused"])
        found = [answer_of("blame", tmp_path / "ada", "--round", r) for r in went["refused"]]
        assert [(one["exact"], one["gone"]) for one in found] == [(True, [])] * len(found)
        named = [[p["name"] for p in one["peers"] if p["notable"]] for one in found]
        assert ["eve"] in named and {name for names in named for name in names} == {"eve"}
        back = atoll("checkpoint", "rollback", str(went["refused"][0]), tmp_path / "ada")
        assert f"validators went back behind history round {went['refused'][0]} (after " in back.stdout
    # without a running peer the folder of ada gives the same answer
    assert answer_of("blame", tmp_path / "ada", "--round", went["refused"][0]) == found[0]
