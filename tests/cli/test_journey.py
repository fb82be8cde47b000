"""Real peers in real processes on loopback, driven by the commands that people type."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes import SMALL, TWO, Peer, atoll, peers

from atoll import reduce as atoll_reduce
from atoll.base.errors import UsageError

pytestmark = [pytest.mark.net]


def test_a_ctrl_c_during_the_farewell_ends_at_once_and_a_second_sigterm_does_not(tmp_path: Path):
    """The other voter is frozen, so a farewell that needs its vote cannot be agreed on. `timeout` and managers of
    processes send SIGTERM twice, which is one wish."""
    a, b = tmp_path / "a", tmp_path / "b"
    with peers(Peer("up", "--dir", a, "--set", "run.rounds=0", *TWO)) as running:
        ada = running[0]
        bob = Peer("join", ada.until_fact("Opened")["ticket"], "--dir", b)
        running.append(bob)
        ada.trained_with(2)
        bob.process.send_signal(signal.SIGSTOP)
        for told in ("leaving: saying farewell", "still saying farewell"):
            ada.process.send_signal(signal.SIGTERM)
            ada.until(lambda f, told=told: f["fact"] == "Notice" and told in f["text"])
        ada.process.send_signal(signal.SIGINT)
        assert ada.ends() == 130


def test_a_founder_alone_turns_tickets_of_another_kind_away_and_ends_with_its_parent(tmp_path: Path):
    """The ticket of a group, and a group that is given hers; then her stdin ends, which is all she sees of a
    killed parent."""
    a, b = tmp_path / "a", tmp_path / "b"
    with peers(Peer("up", "--dir", a, "--set", "run.rounds=0", *SMALL)) as running:
        ada = running[0]
        ticket = ada.until_fact("Opened")["ticket"]
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
