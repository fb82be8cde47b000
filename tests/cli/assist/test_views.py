"""What a running peer prints: much, little, with times, as objects, or as a picture."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
from pathlib import Path

import pytest
from processes import atoll
from rich.console import Console

from atoll.cli.display.follow import _news
from atoll.cli.display.log_views import NoticeLogHandler
from atoll.cli.display.options import OutputOptions
from atoll.cli.picture import peer_picture, swarm_picture
from atoll.cli.watch import view_of
from atoll.runtime.control.socket import door_path
from atoll.runtime.event_log import EventLog, RunStatus
from atoll.runtime.supervisor import PeerDisplay

NEWS = {
    "fact": "Opened",
    "name": "ada",
    "peer": "adaadaada",
    "run_id": "12" * 32,
    "folder": "f",
    "ticket": "ATOLL1:X",
}
NEWS |= {"addresses": ["/ip4/10.0.0.5/tcp/7071"], "ticket_uses": 64}
END = {"fact": "Ended", "why": "Ctrl-C", "trained": 1, "tokens": 512, "unit": "tokens", "bytes_data_parallel": 0}


def told_by(view: PeerDisplay) -> None:
    """A short life: a ticket, a round, silence of a member, a fact without a line, a notice, the end."""
    closed = {"fact": "RoundClosed", "round": 4, "trained": 5, "loss": 2.5, "counted": ["ada"], "missing": []}
    progress = RunStatus(rounds=30, trained=5, round_s=12.0, timed_rounds=3)
    view.opened(NEWS)
    view.entry(closed, progress)
    view.entry({"fact": "PeerSuspected", "peer": "bobbobby", "why": "silent"}, progress)
    view.entry({"fact": "Stepped", "steps": 3, "loss": 2.4}, progress)
    view.notice("training begins now")
    view.ended(END | {"model": None})


def test_a_peer_says_as_much_as_it_is_asked_to(capsys: pytest.CaptureFixture[str]):
    """Quiet: ticket, warnings, end. Verbose: each fact. Else with times, or as objects with a level."""
    told_by(view_of(OutputOptions(quiet=True)))
    ticket, silent, end = capsys.readouterr().out.splitlines()
    assert ticket == "atoll join ATOLL1:X" and silent.startswith("! bobbobby") and end.startswith("bye (Ctrl-C)")
    told_by(view_of(OutputOptions()))
    usual = capsys.readouterr().out
    told_by(view_of(OutputOptions(verbose=True)))
    more = capsys.readouterr().out
    assert "round 5/30  loss 2.500" in usual and "fact=Stepped" not in usual
    assert more.replace("fact=Stepped steps=3 loss=2.4\n", "") == usual
    told_by(view_of(OutputOptions(log_format="text")))
    stamped = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z .", line) for line in stamped)
    assert [line[25:] for line in stamped] == [line for line in usual.splitlines() if line.strip()]
    told_by(view_of(OutputOptions(log_format="json")))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in events] == ["Opened", "RoundClosed", "PeerSuspected", "Notice", "Ended"]
    assert [one["level"] for one in events] == ["info", "info", "warning", "info", "info"]
    assert events[0]["ticket"] == "ATOLL1:X" and all(one["time"].endswith("Z") for one in events)
    assert (events[1]["loss"], events[1]["counted"], events[1]["left_s"]) == (2.5, ["ada"], 300)


def test_a_log_in_json_ends_with_the_error_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the option or by the variable; other commands and other formats keep the text for people."""
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path))
    for words in (["--log-format", "json"], ["--log-format=json"]):
        assert json.loads(atoll("up", "nope.toml", *words).stderr)["error"] == "E-CFG-09"
    monkeypatch.setenv("ATOLL_LOG_FORMAT", "json")
    assert json.loads(atoll("up", "nope.toml").stderr)["exit"] == 2
    assert atoll("up", "nope.toml", "--log-format", "text").stderr.startswith("E-CFG-09")
    assert atoll("config", "nope.toml").stderr.startswith("E-CFG-09")


def test_verbose_shows_the_messages_of_the_log(capsys: pytest.CaptureFixture[str]):
    handler = NoticeLogHandler(view_of(OutputOptions(verbose=True)).notice)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        record = logging.LogRecord("atoll.runtime", level, "", 0, "level %d\n\x1b[2J", (level,), None)
        if level >= handler.level:
            handler.emit(record)
    handler.emit(logging.LogRecord("atoll.cli.watch", logging.INFO, "", 0, "round 5", (), None))
    assert capsys.readouterr().out.splitlines() == [
        "atoll.runtime: level 20  [2J",
        "! atoll.runtime: level 30  [2J",
    ]


def test_a_terminal_shows_the_time_left_and_the_bytes_of_a_download():
    progress = RunStatus(run="r", rounds=30, trained=5, phase="training", step=5, inner_steps=10)
    progress.round_s, progress.timed_rounds = 12.0, 3
    assert "about 5 min left" in shown_on_a_terminal(progress) and "downloading" not in shown_on_a_terminal(
        progress
    )
    progress.transferred = lambda: (3_000_000, 12_000_000)
    assert "downloading 3.0 MB of 12.0 MB" in shown_on_a_terminal(progress)
    progress.timed_rounds = 2
    assert "left" not in shown_on_a_terminal(progress)
    assert "waiting for the members" in shown_on_a_terminal(RunStatus(phase="joining"))


def shown_on_a_terminal(progress: RunStatus) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(peer_picture(progress))
    return out.getvalue()


def test_the_pace_of_a_run_follows_its_newest_rounds():
    """The first round takes 90 s, since trainers start in it. No time left is shown before three others closed."""
    progress, shown = RunStatus(rounds=10, founded_rounds=10, unit="samples"), list[float | None]()
    for number, at in enumerate((10.0, 100.0, 112.0, 120.0, 130.0)):
        counted = ["a"] if number else []  # the first line closes a round in which members only assembled
        closed = {"fact": "RoundClosed", "round": number, "trained": number, "loss": 2.0, "counted": counted}
        progress.fold(closed | {"missing": [], "state": "", "time_s": at, "samples": 8, "steps": 1})
        shown.append(progress.left_s)
    assert shown == [None] * 4 + [pytest.approx(60.0)]


def test_no_rate_is_shown_before_one_was_measured():
    """A loop that founds alone closes its first round without an earlier one to measure from."""
    progress = RunStatus(run="r", unit="samples", members=[{"peer": "a", "name": "ada", "standing": "member"}])
    closed = {"fact": "RoundClosed", "round": 0, "trained": 1, "loss": 2.0, "counted": ["a"], "missing": []}
    progress.fold(closed | {"state": "", "time_s": 100.0, "samples": 8, "steps": 1})
    for shown in (shown_on_a_terminal(progress), _swarm_on_a_terminal(progress)):
        assert "loss 2.000" in shown and "/s" not in shown
    progress.fold(closed | {"round": 1, "trained": 2, "state": "", "time_s": 116.0, "samples": 8, "steps": 1})
    for shown in (shown_on_a_terminal(progress), _swarm_on_a_terminal(progress)):
        assert "0.5 samples/s" in shown


def _swarm_on_a_terminal(progress: RunStatus) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(swarm_picture(["ada"], {"ada": progress}, {}, progress, 0, 0))
    return out.getvalue()


def test_a_peer_can_be_watched_from_another_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its log gives what it prints itself: over a rotation, without a line that is half written, to its end.

    A killed peer has ended, too, although it leaves its door behind."""
    log, door = EventLog(tmp_path / "facts.jsonl"), socket.socket(socket.AF_UNIX)
    door.bind(str(door_path(tmp_path)))
    door.listen(16)
    (tmp_path / "door").write_text(f"{door_path(tmp_path)}\n")
    closed = {"fact": "RoundClosed", "state": "", "missing": [], "counted": ["ada"], "samples": 1, "steps": 1}

    def close_round(number: int) -> None:
        log.write(closed | {"round": number, "trained": number, "loss": 3.0, "time_s": 100.0 + number})

    close_round(1)
    news = _news(tmp_path, tmp_path / "facts.jsonl", (tmp_path / "facts.jsonl").stat().st_size)
    close_round(2)
    assert next(news)["round"] == 2
    log._turn()
    close_round(3)
    assert [next(news)["fact"], next(news)["round"]] == ["RecordTurned", 3]
    log._file.write(b'{"fact": "Half')
    door.close()
    assert [*news] == []
    log.close()
    done = atoll("watch", tmp_path)
    assert done.returncode == 0 and f"the peer in {tmp_path} has ended" in done.stdout
    told = json.loads(atoll("watch", tmp_path, "--json").stdout)
    assert told == {"folder": str(tmp_path), "trained": 3, "over": False}
    assert atoll("watch", tmp_path / "elsewhere").stderr.startswith("E-ARG-18")
