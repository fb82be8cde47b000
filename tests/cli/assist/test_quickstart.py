"""From an empty folder to two members by what `atoll quickstart` prints, and `atoll check` on the way."""

from __future__ import annotations

import asyncio
import io
import shlex
import socket
import sys
import tomllib
from pathlib import Path

import pytest
from processes import Peer, answer_of, atoll, peers

from atoll.base.errors import NetworkError, RunFailedError
from atoll.cli.assist import quickstart as module
from atoll.cli.main import main as command
from atoll.runtime import preflight


@pytest.mark.net
def test_the_printed_commands_lead_to_two_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Five answers as options; the ticket is checked before it is used, and no use of it is spent."""
    monkeypatch.chdir(tmp_path)
    answers = (
        "--machines",
        "2",
        "--trust",
        "private",
        "--model",
        "gpt-nano",
        "--data",
        "stdlib",
        "--link",
        "local",
    )
    told = answer_of("quickstart", *answers)
    (_, up), (_, join) = told["commands"]
    assert told["answers"]["machines"] == 2 and len(Path("run.toml").read_text().splitlines()) < 20
    again = atoll("quickstart", *answers)
    assert again.returncode == 2 and again.stderr.startswith("E-ARG-08")
    # fewer steps, so that the test ends soon; everything else as printed
    few = ("--set", "train.inner_steps=8", "train.batch=2", "train.seq_len=32")
    with peers(Peer(*shlex.split(up)[1:], *few)) as running:
        ticket = running[0].until_fact("Opened")["ticket"]
        checked = answer_of("check", ticket)["checks"]
        assert {one["check"] for one in checked} == {"versions", "disk", "memory", "ticket", "link", "device"}
        assert all(one["verdict"] != "failed" for one in checked)
        running.append(Peer(*shlex.split(join.replace("TICKET", ticket))[1:]))
        running[0].trained_with(2)
    gone = atoll("check", ticket)
    assert gone.returncode == 3 and gone.stderr.startswith("E-NET-12") and "  failed   link" in gone.stdout
    # a run lies in the default folder now, so the next one is told to take another
    other = answer_of("quickstart", "other.toml", *answers)
    assert other["commands"][0][1] == "atoll up other.toml --dir other-peer"


def test_questions_are_asked_until_the_answer_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said = iter(["many", "6", "", "gpt-tinny", "gpt-nano", "nowhere.txt", "stdlib", "20", "20Mbit"])
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command(["quickstart"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and not [*said]
    for refused in (
        "'many' is not a number of machines",
        "did you mean 'gpt-tiny'",
        "nothing at nowhere.txt",
        "write for example 20Mbit",
    ):
        assert refused in told
    written = tomllib.loads((tmp_path / "run.toml").read_text())
    assert (
        written["run"] == {"start_peers": 6, "rounds": 47, "trust": "private"}
        and written["train"]["recipe"] == "auto"
    )
    assert "the run has 47 rounds of 32 steps, so each machine trains 1,504 steps; " in told
    assert (
        "for more or fewer rounds change `rounds` in run.toml now, or in the running run: atoll amend run.rou"
        in told
    )
    assert "on each of the 5 other machines" in told and "--announce /ip4/PUBLIC/tcp/7071" in told


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--machines", "0"], "E-ARG-17"),
        (["--link", "20"], "E-ARG-17"),
        (["--trust", "comunity"], "E-ARG-17"),
        (["--model", "cnn-mnist"], "E-ARG-17"),
        (["--machines", "3", "--trust", "open"], "E-ARG-17"),
    ],
)
def test_answers_that_found_no_run_write_no_file(words: list[str], code: str, tmp_path: Path):
    file = tmp_path / "run.toml"
    refused = atoll("quickstart", file, *words)
    assert refused.returncode == 2 and refused.stderr.startswith(code) and not file.exists()


def test_without_a_terminal_the_answers_that_were_not_given_are_named(tmp_path: Path):
    """Piped answers would be lost: they are no options, and no question was asked."""
    told = atoll("quickstart", tmp_path / "run.toml", "--machines", "3").stdout
    first, *_ = told.splitlines()
    assert first.startswith("no question was asked, because standard input is no terminal; the usual answers: ")
    assert first.endswith(": --trust private --model gpt-tiny --data stdlib --link lan")
    written = tomllib.loads((tmp_path / "run.toml").read_text())
    assert written["run"]["rounds"] == 30 and "the run has 30 rounds of 50 steps" in told


@pytest.mark.parametrize("trust", ["private", "community", "open"])
@pytest.mark.parametrize("link", ["lan", "20Mbit"])
def test_every_trust_gets_a_run_that_can_be_founded(trust: str, link: str, tmp_path: Path):
    """As `atoll up` would check it; where tickets admit one, more of them are asked for."""
    told = answer_of("quickstart", tmp_path / "run.toml", "--machines", "6", "--trust", trust, "--link", link)
    assert ("atoll invite" in [line for _, line in told["commands"]]) == (trust != "private")


def test_trust_that_the_machines_cannot_have_is_refused_at_its_question(tmp_path: Path):
    """It was refused after the last answer, and all answers were lost."""
    done = atoll("quickstart", tmp_path / "run.toml", "--machines", "2", "--trust", "community")
    assert done.returncode == 2 and "E-ARG-17 --trust community: community needs 4 machines" in done.stderr


def test_links():
    asyncio.run(links())


async def links() -> None:
    """One address that answers is enough; the others are then warnings."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        good = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
        bad = "/ip4/127.0.0.1/tcp/9"
        both = await preflight.check_links((good, bad))
        assert [one.verdict for one in both] == ["ok", "warning"] and "answers after" in both[0].text
        alone = await preflight.check_links((bad,))
        assert isinstance(alone[0].error, NetworkError)
        wrong = await preflight.check_links(("10.0.0.5:7071",))
        assert wrong[0].error is not None and wrong[0].error.code == "E-NET-10"


def test_a_computer_without_room_is_named_before_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also by `atoll join`, before torch is loaded and before a folder is made."""
    monkeypatch.setattr(preflight, "DISK_LEAST_BYTES", 10**18)
    found = preflight.check_disk(tmp_path / "new" / "peer")
    assert isinstance(found.error, RunFailedError) and str(tmp_path) in found.text
    (tmp_path / "file").write_text("")
    held = preflight.check_disk(tmp_path / "file" / "peer")
    assert held.error is not None and held.error.code == "E-DIR-05"
    monkeypatch.setattr(preflight, "MEMORY_LEAST_BYTES", 10**18)
    assert preflight.check_memory().verdict == "failed"


def test_the_questions_have_an_option_each():
    assert [question.option for question in module.questions()] == [*module.RunAnswers._fields]
    assert all(question.check(question.usual) is not None for question in module.questions())
