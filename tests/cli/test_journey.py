"""Real peers in real processes on loopback, driven by the commands that people type."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes import AS_TYPED, SMALL, TWO, Peer, answer_of, atoll, peers

from atoll import reduce as atoll_reduce
from atoll.base.errors import UsageError

pytestmark = [pytest.mark.net]


def test_founding_joining_asking_inviting_leaving_and_coming_back(tmp_path: Path):
    """Ada founds, Bob joins by her ticket; whatever a person asks is answered; Bob leaves, the run goes on with one
    and then with two again, without a ticket and under his old name."""
    a, b = tmp_path / "a", tmp_path / "b"
    with peers(
        Peer("up", "--dir", a, "--name", "ada", "--set", "run.rounds=0", *SMALL, command=AS_TYPED)
    ) as running:
        ada = running[0]
        opened = ada.until_fact("Opened")
        assert opened["ticket"].startswith("ATOLL1:") and opened["addresses"]
        (tmp_path / "ticket").write_text(opened["ticket"] + "\n")
        bob = Peer("join", "--ticket-file", tmp_path / "ticket", "--dir", b, "--name", "bob")
        running.append(bob)
        ada.trained_with(2)

        status = answer_of("status", "--dir", b)
        assert (status["name"], status["voters"], status["present"], status["paused"]) == ("bob", 2, 2, None)
        assert status["model"] == "gpt-nano" and status["bytes_out"] > 0 and status["loss"] > 0
        lines = {m["name"]: m for m in answer_of("peers", "--dir", a)}
        assert lines["bob"]["link"] == "up" and lines["ada"]["link"] == "me" and lines["ada"]["addresses"]
        invitation = answer_of("invite", "--dir", a, "--uses", "3")
        assert invitation["agreed"] and invitation["uses"] == 3
        bob.comes_to(a)  # he has the vertex that holds it, too
        assert {t["id"]: t["uses_left"] for t in answer_of("invite", "--dir", b, "--list")}[invitation["id"]] == 3
        revoked = answer_of("invite", "--dir", b, "--revoke", invitation["ticket"])
        assert revoked["agreed"] and revoked["id"] == invitation["id"]
        ada.comes_to(b)
        late = atoll("join", invitation["ticket"], "--dir", tmp_path / "c")
        assert late.returncode == 4 and "E-JOIN-01 this ticket is used up or revoked" in late.stderr, late.stderr
        refused = atoll("invite", "--dir", a, "--revoke", invitation["id"])
        assert refused.returncode == 4 and "E-TKT-11" in refused.stderr
        assert atoll("recover", "--dir", a, "--yes").returncode == 4  # there is nothing to recover
        model = answer_of("export", "--dir", b)
        assert Path(model["path"]).read_bytes()[8:9] == b"{"

        # two voters need each other's vote: the farewell waits for the vertex that lets bob go
        assert answer_of("leave", "--dir", b)["leaving"] == status["peer"]
        assert bob.ends() == 0
        ada.trained_with(1)
        assert {m["name"]: m["standing"] for m in answer_of("peers", "--dir", a)} == {
            "ada": "member",
            "bob": "away",
        }

        again = Peer("up", "--dir", b, "--set", "run.rounds=9")
        running.append(again)
        assert "other settings change nothing" in again.until_fact("Notice")["text"]
        assert again.until_fact("Opened")["name"] == "bob"
        ada.trained_with(2)

        again.process.send_signal(signal.SIGKILL)
        paused = ada.until_fact("PeerSuspected", why="refused")["paused"]
        assert paused == answer_of("status", "--dir", a)["paused"]
        assert paused.startswith("paused: 1 of 2 voters are here, 2 are needed; it goes on when bob came back")
        assert atoll("recover", "--dir", a).returncode == 4  # a program must say --yes
        assert answer_of("recover", "--dir", a, "--yes") == {
            "epoch": 1,
            "members": ["ada"],
            "gone": ["bob"],
            "began": True,
            "eras": [],
        }
        ada.trained_with(1)
        ada.process.send_signal(signal.SIGINT)
        assert ada.ends() == 0


def test_a_run_that_is_over_leaves_the_model_in_the_folder(tmp_path: Path):
    """Alone, two rounds; then the record draws a picture."""
    folder = tmp_path / "run"
    with peers(Peer("up", "--dir", folder, "--set", "run.rounds=2", *SMALL)) as (peer,):
        ended = peer.until_fact("Ended")
        assert peer.ends() == 0
        assert ended["over"] and ended["trained"] == 2 and Path(ended["model"]).exists()
    pytest.importorskip("matplotlib")
    drawn = answer_of("plot", folder, "--out", tmp_path / "picture.svg")
    assert drawn["rounds"] == 2 and (tmp_path / "picture.svg").read_text().startswith("<?xml")


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path):
    """The other voter is frozen, so a farewell that needs its vote cannot be agreed on; a second signal ends."""
    a, b = tmp_path / "a", tmp_path / "b"
    with peers(Peer("up", "--dir", a, "--set", "run.rounds=0", *TWO)) as running:
        ada = running[0]
        bob = Peer("join", ada.until_fact("Opened")["ticket"], "--dir", b)
        running.append(bob)
        ada.trained_with(2)
        bob.process.send_signal(signal.SIGSTOP)
        ada.process.send_signal(signal.SIGINT)
        ada.until(lambda f: f["fact"] == "Notice" and "once more" in f["text"])
        ada.process.send_signal(signal.SIGINT)
        assert ada.ends() == 130


def test_a_founder_alone_turns_away_who_is_wrong_and_ends_with_who_started_it(tmp_path: Path):
    """A second peer in her folder, tickets of the other kind; then her stdin ends, which is all she sees of a
    killed parent. A member that joins now is told at once which member it cannot reach, and goes on trying."""
    a, b = tmp_path / "a", tmp_path / "b"
    with peers(Peer("up", "--dir", a, "--set", "run.rounds=0", *SMALL)) as running:
        ada = running[0]
        ticket = ada.until_fact("Opened")["ticket"]
        second = atoll("join", ticket, "--dir", a, "--json")
        assert second.returncode == 2 and "E-DIR-01" in second.stderr

        # a group has nothing to learn, and a run does not wait for any member's tensors: both are told at once
        with atoll_reduce.found() as group:
            refused = atoll("join", group.ticket, "--dir", b)
        assert refused.returncode == 4 and "E-RUN-11" in refused.stderr and "atoll.reduce.join" in refused.stderr
        with pytest.raises(UsageError, match="E-RED-12"):
            atoll_reduce.join(ticket)

        ada.until_fact("RoundClosed", trained=1)
        assert ada.process.stdin is not None
        ada.process.stdin.close()
        assert ada.until_fact("Ended")["why"] == "its parent process is gone"
        assert ada.ends() == 0

        joiner = Peer("join", ticket, "--dir", tmp_path / "c")
        running.append(joiner)
        assert "cannot reach" in joiner.until_fact("Notice")["text"]
        assert atoll("stop", "--dir", tmp_path / "c").returncode == 0
        assert joiner.ends() == 0
