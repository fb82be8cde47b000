"""Commands that wait for the members say at once what they wait for, and Ctrl-C ends only the wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE_S, answering, atoll

RUN: dict[str, Any] = {"phase": "training", "step": 14, "inner_steps": 50, "present": 2, "quorum": 2, "over": False}
ANSWER: dict[str, Any] = {"agreed": True, "amended": {"train.lr": 0.1}, "round": 3, "trained": 3}
ANSWER |= {"was_over": False, "changes_rate": False, "refused": False}
ORDERS = (
    ("amend train.lr=0.1", "train.lr = 0.1: in effect after 3 trained rounds"),
    ("pause", "the run is paused after 3 trained rounds"),
    ("resume", "the run goes on after 3 trained rounds"),
    ("checkpoint rollback 1", "history round 3 went back to the state of history round 1 (after 3 trained rounds)"),
)


def begun(words: str, folder: Path, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "atoll", *words.split(), "--dir", str(folder)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True)


@pytest.mark.parametrize(("words", "says"), ORDERS, ids=[words for words, _ in ORDERS])
def test_an_order_says_what_it_waits_for_and_ends_with_the_result(words: str, says: str, tmp_path: Path):
    """The peer answers only after the command has said so."""
    release = threading.Event()
    with answering(tmp_path, RUN | ANSWER, release=release), begun(words, tmp_path) as command:
        assert command.stderr is not None and command.stdout is not None
        line = command.stderr.readline()
        release.set()
        assert command.stdout.readline().startswith(says)
    assert line == "waiting for the current round to end (step 14 of 50), at most 30 s\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"over": True}, "the run has ended: waiting until a quorum of members is running"),
        ({"present": 1}, "waiting for voting members: 1 of the 2 needed are here, at most 30 s"),
        ({"phase": "sharing"}, "waiting for the current round to end, at most 30 s"),
    ],
)
def test_what_an_order_waits_for_depends_on_the_run(change: dict[str, Any], says: str, tmp_path: Path):
    release = threading.Event()
    with (
        answering(tmp_path, RUN | ANSWER | change, release=release),
        begun("amend train.lr=0.1", tmp_path) as command,
    ):
        assert command.stderr is not None
        line = command.stderr.readline()
        release.set()
    assert line.startswith(says)


def test_on_a_terminal_the_wait_is_a_line_with_the_time_that_vanishes(tmp_path: Path):
    release, (master, slave) = threading.Event(), os.openpty()
    seen = b""
    with answering(tmp_path, RUN | ANSWER, release=release), begun("pause", tmp_path, slave) as command:
        os.close(slave)
        while b"(step 14 of 50)" not in seen:
            seen += os.read(master, 4096)
        release.set()
        assert command.stdout is not None and command.stdout.readline().startswith("the run is paused")
    os.close(master)


def test_an_order_in_json_prints_the_answer_alone(tmp_path: Path):
    with answering(tmp_path, RUN | ANSWER):
        assert atoll("pause", tmp_path, "--json").stderr == ""


def test_ctrl_c_ends_the_wait_and_says_that_the_order_stays(tmp_path: Path):
    release = threading.Event()
    with answering(tmp_path, RUN | ANSWER, release=release), begun("amend train.lr=0.1", tmp_path) as command:
        assert command.stderr is not None and command.stderr.readline().startswith("waiting for")
        command.send_signal(signal.SIGINT)
        assert command.wait(PATIENCE_S) == 130
        assert command.stderr.read() == "only the wait has ended: the members have the order; atoll status\n"
        release.set()


def test_a_leave_says_that_the_others_must_agree(tmp_path: Path):
    """The peer of the folder ends only after the command has said so."""
    with answering(tmp_path, {"trained": 3}) as gone, begun("leave", tmp_path) as command:
        assert command.stderr is not None and command.stdout is not None
        assert command.stderr.readline().startswith("waiting for the other members to agree that this peer leaves")
        gone.set()
        assert command.stdout.readline().startswith("left the run after 3 trained rounds; ")
