"""What a person reads of a run, as the peer at hand sees it. No alarm has no cause; the log has each line."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.machine import LinkUp
from atoll.cli.amend import amend
from atoll.cli.leave import stop
from atoll.cli.status import peers
from atoll.cli.watch import FinalJsonView, LogFileTee, farewell, introduction, line_of
from atoll.peer.round.vertex_body import write_genesis
from atoll.peer.settings import RunSettings
from atoll.protocol.membership.failure_detector import FailureDetector
from atoll.runtime.bootstrap import prepare_folder
from atoll.runtime.control import socket as control_socket
from atoll.runtime.control.status import peers_of
from atoll.runtime.event_log import RunStatus
from atoll.runtime.reachability import unanswered_text
from atoll.wire.messages.vertex import Member

NEWS: dict[str, Any] = {
    "fact": "Opened",
    "resumed": False,
    "ticket": "ATOLL1:SECRET",
    "ticket_uses": 1,
    "peer": "ada" * 4,
    "run_id": "ab" * 32,
    "name": "ada",
    "folder": "here",
    "addresses": ["/ip4/127.0.0.1/tcp/7071"],
    "process": 7,
}


def _change(progress: RunStatus, joined: str = "", left: str = "", away: str = "") -> str:
    """The line about a vertex after which these members, of one letter each, are there."""
    before = {m["peer"] for m in progress.members}
    names = sorted(before | set(joined))
    members = [
        {"peer": n, "name": n, "standing": "away" if n in away else "member", "role": "trainer"} for n in names
    ]
    entry = {"fact": "MembershipChanged", "joined": list(joined), "left": list(left), "members": members}
    progress.fold(entry)
    return line_of(entry, progress)


def test_a_newcomer_reads_who_is_here_and_a_leaver_nothing_of_its_own_end():
    """Old vertices are history, not news; members that were there before it did not join now."""
    progress = RunStatus(me="m")
    assert _change(progress, joined="ab") == "" and _change(progress, left="b", away="b") == ""
    assert _change(progress, joined="m", away="b") == "this peer is a member now  a is here"
    assert _change(progress, joined="b") == "+ b is back: its updates count from the next round on"
    assert _change(progress, left="a", away="a") == "- a is gone"
    progress.fold(entry := {"fact": "MembershipChanged", "joined": [], "left": ["a"], "members": progress.members})
    assert line_of(entry | {"behind": True}, progress) == "earlier: - a is gone"
    assert _change(progress, left="m", away="am") == "the others go on without this peer"


def test_a_member_that_is_back_counts_when_the_line_says_so():
    """It observes until it has caught up, unless it alone has the vote; a member that never trains is only back."""
    line = {"peer": "b", "name": "bob", "role": "trainer", "standing": "away"}
    for standing, role, says in (
        ("observer", "trainer", "bob is back: its updates count once it has caught up"),
        ("member", "trainer", "bob is back: its updates count from the next round on"),
        ("observer", "observer", "bob is back"),
    ):
        progress, back = RunStatus(members=[line]), line | {"standing": standing, "role": role}
        entry = {"fact": "MembershipChanged", "joined": ["b"], "left": [], "members": [back]}
        progress.fold(entry)
        assert line_of(entry, progress) == f"+ {says}"


def test_a_member_that_left_in_order_is_not_called_lost_nor_said_to_respond_again():
    """The reason is that of its signed farewell. Only a member that was reported silent can respond again."""
    progress, closed = RunStatus(), {"fact": "RoundClosed", "round": 3, "missing": [], "counted": [], "state": ""}
    closed |= {"time_s": 9.0, "trained": 1, "loss": None, "samples": 1, "steps": 1}
    _change(progress, joined="abc")
    back, silent = {"fact": "PeerReturned", "peer": "a"}, {"fact": "PeerSuspected", "peer": "b", "why": "silent"}
    progress.fold(back)
    assert line_of(back, progress) == ""
    progress.fold(closed | {"farewells": {"a": "Ctrl-C"}})
    assert _change(progress, left="a", away="a") == "- a has left (Ctrl-C)"
    progress.fold(silent)
    progress.fold(closed)
    assert _change(progress, left="b", away="ab") == "- b is lost: it stopped responding"
    progress.fold(silent | {"peer": "c"})
    progress.fold(back | {"peer": "c"})
    assert line_of(back | {"peer": "c"}, progress) == "c responds again"


def test_a_member_that_trains_on_its_own_data_is_told_so():
    entry = {"fact": "LearningKnown", "data": "own data"}
    assert line_of(entry, RunStatus()) == "this peer trains on data of its own, which never leave this computer"
    assert line_of(entry | {"data": "stdlib"}, RunStatus()) == ""


def test_waiting_for_members_is_no_failed_attempt_and_a_member_without_a_link_is_not_silent():
    progress = RunStatus(phase="assembling", members=[{"peer": "a", "name": "anna", "standing": "member"}])
    failed = {"fact": "RoundAttemptFailed", "attempt": 3, "round": 4}
    progress.fold(failed)
    assert line_of(failed, progress) == "" and not progress.trouble
    assert "1 of 2 voters" in line_of(failed | {"paused": "paused: 1 of 2 voters"}, progress)
    silent = {"fact": "PeerSuspected", "peer": "a", "why": "silent"}
    assert line_of(silent, progress).startswith("! anna does not respond")
    assert line_of(silent | {"never_linked": True}, progress).startswith("no direct link to anna")
    departed = {"fact": "PeerDeparted", "peer": "a"}
    assert line_of(departed, progress) == ""  # the line of the agreed farewell follows
    paused = departed | {"paused": "paused: 1 of 2 voters are here, 2 are needed"}
    assert line_of(paused, progress) == "! anna has left; paused: 1 of 2 voters are here, 2 are needed"


def test_a_member_that_comes_back_after_the_end_reads_once_that_nobody_answers_until_a_member_responds():
    """Of two silent members and a failed attempt one calm line is left, and no trouble once a member is back."""
    progress, why = RunStatus(trained=5), unanswered_text(5, 30, "")
    facts = [{"fact": "PeerSuspected", "peer": peer, "why": "silent", "never_linked": True} for peer in "ab"]
    lines = []
    for fact in (*facts, {"fact": "RoundAttemptFailed", "attempt": 0}):
        progress.fold(fact | {"paused": why})
        lines.append(line_of(fact | {"paused": why}, progress))
    assert lines == [why, "", ""] and progress.trouble == why
    assert why.startswith("no member answers: the run may be over, or paused") and "here is 5 of 30;" in why
    assert "atoll export" in why and "`atoll up --stay`" in why and "recover" not in why
    progress.fold({"fact": "PeerReturned", "peer": "a"})
    assert not progress.trouble


def test_a_founder_that_only_this_computer_can_dial_is_told_calmly():
    told = introduction(NEWS | {"ticket": None})
    assert "only this computer can dial these" in told and "--listen" in told
    assert "!" not in told and "--role" not in told
    news = {"why": "Ctrl-C", "trained": 1, "tokens": 64, "unit": "tokens", "bytes_data_parallel": 0, "model": None}
    assert farewell(news) == "bye (Ctrl-C): 1 round, 64 tokens learned together"
    assert farewell(news | {"why": "no member answered", "trained": 0}) == "bye (no member answered)"


def test_what_a_person_reads_is_in_the_log_with_its_time_and_without_the_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Whatever the screen shows; a full log goes on in a new file, closed to others like the first."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    prepare_folder(tmp_path)
    (handler,) = logging.getLogger().handlers
    shell, progress = LogFileTee(FinalJsonView()), RunStatus()
    shell.opened(NEWS)
    shell.entry({"fact": "RunOver", "rounds": 1, "state": "ab"}, progress)
    shell.notice("leaving")
    lines = (tmp_path / "atoll.log").read_text().splitlines()
    assert len(lines) == 3 and "SECRET" not in lines[0] and "process 7" in lines[0]
    assert lines[1].startswith("20") and lines[1].endswith("the run is over after 1 round; state ab")
    cast(Any, handler).maxBytes = 1
    shell.notice("bye")
    handler.close()
    assert (tmp_path / "atoll.log.1").read_text().splitlines() == lines
    assert (tmp_path / "atoll.log").read_text().endswith("bye\n")
    assert [f.stat().st_mode & 0o077 for f in tmp_path.iterdir()] == [0, 0]


def test_gone_is_a_member_and_not_a_link(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """No link leads to bob, but his updates count. Once they do not, he is gone. No peer can dial the loopback
    address of another computer."""
    me, anna, bob = (PeerId(name * 4) for name in ("me", "anna", "bob"))
    members = tuple(
        Member(p, b"", ("/ip4/127.0.0.1/tcp/7",), "trainer", "member", 0, 0.0, name)
        for p, name in ((me, "me"), (anna, "anna"), (bob, "bob"))
    )
    body = msgspec.structs.replace(write_genesis(RunSettings(), ZERO_DIGEST, members[0], (), 0.0), members=members)
    heartbeat, progress = FailureDetector(me, 2.0, 6.0), RunStatus(counted=[me, anna, bob], closed_at_s=30.0)
    progress.members = [{"peer": m.peer, "name": m.name, "standing": "member"} for m in members]
    heartbeat.set_members((me, anna, bob), 0.0)
    heartbeat.on_link_event(LinkUp(anna), 20.0)
    heartbeat.tick(21.0, 4)
    up = SimpleNamespace(up=True, rtt_s=0.01, same_computer=False)
    host = SimpleNamespace(
        me=me,
        progress=progress,
        machine=SimpleNamespace(history=SimpleNamespace(head_body=body), heartbeat=heartbeat),
        links=SimpleNamespace(stats=lambda: {anna: up}),
    )

    def shown() -> list[str]:
        monkeypatch.setattr(control_socket, "send_request", lambda *_: peers_of(cast(Any, host)))
        peers()
        return capsys.readouterr().out.splitlines()

    assert [line["link"] for line in peers_of(cast(Any, host))] == ["me", "up", "indirect"]
    _, of_anna, of_bob = shown()
    assert "indirect" in of_bob and "no direct link, through anna" in of_bob
    assert of_anna.endswith("/ip4/127.0.0.1/tcp/7 (not dialable)") and of_bob.endswith("(not dialable)")
    progress.counted = [me, anna]
    assert [line["link"] for line in peers_of(cast(Any, host))] == ["me", "up", "gone"]
    assert "gone" in shown()[2]


AMENDED: dict[str, Any] = {"agreed": True, "amended": {"run.rounds": 60}, "round": 33, "trained": 30}
AMENDED |= {"was_over": False, "over": False, "changes_rate": False}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"was_over": True}, "; the run had ended and goes on"),
        ({"was_over": True, "over": True}, "the run has ended, so nothing trains until it has more rounds: atoll"),
        ({"was_over": True, "agreed": False}, "the run has ended; it takes effect once a quorum"),
        ({"agreed": False}, "it takes effect when the current round ends"),
        ({"changes_rate": True}, "a higher one can raise the loss at first"),
    ],
)
def test_an_amendment_says_what_happens_next(
    change: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(control_socket, "send_request", lambda *_, **__: AMENDED | change)
    amend("run.rounds=60", dir=tmp_path)
    assert says in capsys.readouterr().out


def test_a_person_reads_one_count_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rounds that only assembled members train nothing: after round 33 of the history, 30 rounds are trained."""
    answer = AMENDED | {"process": 1}
    monkeypatch.setattr(control_socket, "send_request", lambda *_, **__: answer)
    amend("run.rounds=60", dir=tmp_path)
    stop(tmp_path)
    amended, ended = capsys.readouterr().out.splitlines()
    assert amended == "run.rounds = 60: in effect after 30 trained rounds"
    assert ended.startswith("ended after 30 trained rounds; ")


def test_stop_of_a_loops_peer_names_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`atoll up` would be refused in its folder."""
    answer = {"trained": 1, "process": 1, "attached": True}
    monkeypatch.setattr(control_socket, "send_request", lambda *_, **__: answer)
    stop(tmp_path)
    assert capsys.readouterr().out == "ended after 1 trained round; run its program again to resume\n"
