"""`keep.coded` between real processes: no member holds an older state, a holder is killed, and it still
comes back.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from processes import PATIENCE_S, SMALL, Peer, answer_of, atoll, peers

pytestmark = [pytest.mark.net]
pytest.importorskip("pyeclib")


def test_an_older_state_comes_back_from_two_of_three_pieces(tmp_path: Path):
    """Its whole copies are taken out of all three folders, one holder is killed; a passer-by pulls it, all go
    back."""
    a, b, c = (tmp_path / name for name in "abc")
    words = ("--set", "run.rounds=0", "--set", "run.start_peers=3", "--set", "keep.coded=2/3")
    spaced = ("--set", "keep.every_rounds=3", "--set", "run.era_rounds=0")
    with peers(Peer("up", "--dir", a, "--name", "ada", *words, *spaced, *SMALL)) as running:
        ada = running[0]
        opened = ada.until_fact("Opened")
        for name, folder in (("bob", b), ("cyd", c)):
            running.append(Peer("join", opened["ticket"], "--dir", folder, "--name", name))
        cyd = running[2]
        ada.trained_with(3)
        until = time.monotonic() + PATIENCE_S
        while not (kept := answer_of("status", "--dir", a)["kept"]).get("states_in_pieces"):
            assert time.monotonic() < until, kept
            ada.trained_with(3)
        assert kept["coded"] == "2/3" and kept["pieces"] >= 1 and kept["piece_bytes"] > 0
        shown = atoll("status", "--dir", a).stdout
        assert "in pieces (2/3)" in shown

        row = next(r for r in answer_of("checkpoint", "list", a) if r.get("in_pieces"))
        round = row["round"]
        assert "lie in pieces at the members: history rounds " in atoll("checkpoint", "list", a).stdout
        cyd.close()
        for folder in (a, b, c):
            for end in ("", ".manifest"):
                (folder / "blobs" / (row["state"] + end)).unlink(missing_ok=True)
        ticket = opened["ticket"]
        taken = answer_of("checkpoint", "pull", ticket, "--round", str(round), "--to", tmp_path / "x")
        assert taken["round"] == round and taken["state"] == row["state"]
        assert (tmp_path / "x" / "model.safetensors").exists()
        done = answer_of("checkpoint", "rollback", str(round), "--dir", a)
        assert done["agreed"] and done["back_to"] == round and done["state"] == row["state"]

        gone = atoll("checkpoint", "pull", ticket, "--round", "1000000", "--to", tmp_path / "y")
        assert gone.returncode == 2 and "E-CHK-01" in gone.stderr
    audit = answer_of("verify", a)
    assert audit["intact"] and [r["back_to"] for r in audit["rollbacks"]] == [round]
