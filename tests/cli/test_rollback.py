"""`atoll checkpoint rollback` between real processes: both go back, train on alike, and the history says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import TWO, Peer, answer_of, atoll, peers

pytestmark = [pytest.mark.net]


def test_a_run_goes_back_and_trains_on_at_both_members(tmp_path: Path):
    """Ada founded; Bob may not say so. After four rounds with Bob all go back to the first of them."""
    a, b = tmp_path / "a", tmp_path / "b"
    kept = ("--set", "keep.newest=1000")  # however long a command takes on a busy computer
    with peers(Peer("up", "--dir", a, "--name", "ada", "--set", "run.rounds=0", *kept, *TWO)) as running:
        ada = running[0]
        ticket = ada.until_fact("Opened")["ticket"]
        bob = Peer("join", ticket, "--dir", b, "--name", "bob")
        running.append(bob)
        goal = ada.trained_with(2)
        for _ in range(3):
            ada.trained_with(2)

        refused = atoll("checkpoint", "rollback", str(goal["round"]), "--dir", b)
        assert refused.returncode == 4 and "E-RUN-25" in refused.stderr and "founder's folder" in refused.stderr
        for words in (["pause"], ["amend", "train.lr=0.1"]):
            not_his = atoll(*words, "--dir", b)
            assert not_his.returncode == 4 and "E-RUN-25" in not_his.stderr and "founder's folder" in not_his.stderr
        unknown = atoll("checkpoint", "rollback", "100000", "--dir", a)
        assert unknown.returncode == 2 and "E-CHK-01" in unknown.stderr
        done = answer_of("checkpoint", "rollback", str(goal["round"]), "--dir", a)
        assert done["agreed"] and done["back_to"] == goal["round"] and done["trained"] == goal["trained"]

        returned = ada.until_fact("RoundClosed", round=done["round"])
        at_bob = bob.until_fact("RoundClosed", round=done["round"])
        assert returned["back_to"] == at_bob["back_to"] == goal["round"]
        assert returned["state"] == at_bob["state"] != goal["state"]
        later = [p.until(lambda f: f["fact"] == "RoundClosed" and f["round"] == done["round"] + 3) for p in running]
        assert later[0]["state"] == later[1]["state"] and later[0]["loss"] == later[1]["loss"]
        assert [f["trained"] for f in later] == [goal["trained"] + 3] * 2
        assert all(len(f["counted"]) == 2 for f in later)

        # what happened before it came is no news for an observer
        running.append(Peer("join", ticket, "--dir", tmp_path / "c", "--role", "observer"))
        assert running[-1].until(lambda f: f["fact"] == "MembershipChanged" and f["joined"])["behind"]

        # a round without its state file cannot be gone back to, and the answer names one that can
        rows = {row["round"]: row for row in answer_of("checkpoint", "list", a)}
        assert rows[done["round"]]["back_to"] == goal["round"] and rows[goal["round"]]["back_to"] is None
        assert rows[goal["round"]]["size_bytes"] is not None
        (a / "blobs" / rows[goal["round"]]["state"]).unlink()
        gone = atoll("checkpoint", "rollback", str(goal["round"]), "--dir", a)
        assert gone.returncode == 2 and "E-CHK-03" in gone.stderr and "keep.newest" in gone.stderr
        assert f"try: atoll checkpoint rollback {goal['round'] - 1}" in gone.stderr

        for folder in (a, b):
            audit = answer_of("verify", folder)
            assert audit["intact"]
            assert [(r["round"], r["back_to"]) for r in audit["rollbacks"]] == [(done["round"], goal["round"])]
        words = atoll("checkpoint", "list", b, "--all").stdout
        assert (
            f"back to history round {goal['round']}" in words
            and "the run can go back from here to history rounds " in words
        )
        assert f"went back to the state of history round {goal['round']}" in atoll("verify", a).stdout

        # by name, and only by a name that one member has, a member is sent away for good with it
        for name, what in (("zoe", "names 0 members"), ("ada", "cannot send itself away")):
            wrong = atoll("checkpoint", "rollback", str(done["round"]), "--without", name, "--dir", a)
            assert wrong.returncode == 2 and "E-CHK-14" in wrong.stderr and what in wrong.stderr
        # settings amended after that round go back with it, and the answer names them
        assert answer_of("amend", "train.lr=0.1", "--dir", a)["agreed"]
        again = answer_of("checkpoint", "rollback", str(done["round"]), "--without", "bob", "--dir", a)
        assert again["agreed"] and again["without"] == [bob.until_fact("Opened")["peer"]]
        assert again["numbers"] and again["undone"] == "learning rate 0.1"
        orders = atoll("verify", a).stdout
        assert (
            ": the founder changed settings: learning rate 0.1\n" in orders and "by order of the founder" in orders
        )
        standings = {m["name"]: m["standing"] for m in answer_of("peers", "--dir", a)}
        assert standings | {"ada": "member", "bob": "expelled"} == standings
