"""Help beside a run: version, explanations of codes and settings, groups of commands, folders as words."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from processes import answer_of, atoll

from atoll import __version__
from atoll.cli.assist.explain import PAGE
from atoll.cli.main import app
from atoll.runtime.demo import LOSS_BAR
from atoll.runtime.shipped_files import pages

ROOT = Path(__file__).parents[3]


def test_the_version_comes_first_and_then_what_a_report_of_a_bug_needs():
    first, *facts = atoll("--version").stdout.splitlines()
    assert first == __version__ and "\n".join([first, *facts, ""]) == atoll("version").stdout
    told = answer_of("version")
    assert told["version"] == __version__ and told["torch"] == metadata.version("torch")
    assert [line.partition(": ")[0] for line in facts] == [*told][1:] and platform.python_version() in told[
        "python"
    ]


def test_every_code_and_every_setting_can_be_explained():
    """The page of errors is complete (tests/test_reference.py); it lies in the package, or in the repository."""
    told = atoll("explain", "e-net-01")
    assert told.returncode == 0 and "exit status 3" in told.stdout and "likely cause: a member's" in told.stdout
    assert told.stdout.count("try: start the peer that made the ticket") == 1 and "{cause}" not in told.stdout, (
        "variants of one message"
    )
    assert answer_of("explain", "E-CHK-05")["exit"] == 5
    assert answer_of("explain", "E-VER-03")["exit"] is None, "atoll verify reports it, among others"
    assert "exit status" not in atoll("explain", "E-VER-03").stdout
    lr = answer_of("explain", "train.lr")
    assert lr["default"] == "0.004" and "atoll amend train.lr" in lr["text"]
    for unknown, meant in (("E-NET-91", "E-NET-"), ("train.lrr", "train.lr?")):
        refused = atoll("explain", unknown)
        assert refused.returncode == 2 and f"did you mean {meant}" in refused.stderr
    assert PAGE in pages()


def test_help_groups_commands_and_names_exit_statuses():
    told = atoll("--help").stdout
    assert all(f"─ {title} ─" in told for title in ("Begin", "Run", "Peer", "Checkpoint", "History"))
    assert "Exit status: 0 success, 2 wrong request, 3 no peer answered, 4 refused,\n5 the run failed, 130" in told
    unit = (ROOT / "examples" / "atoll.service").read_text()
    assert "RestartPreventExitStatus=2 4\n" in unit
    words = shlex.split(re.findall(r"ExecStart=\S+atoll (.*)", unit)[0])
    app.parse_args(words, exit_on_error=False, print_error=False)


def test_help_names_the_loss_that_the_demo_must_reach():
    assert f"a validation loss of at most {LOSS_BAR} " in " ".join(atoll("demo", "--help").stdout.split())


def test_a_shell_completes_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only the named file is written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    script = tmp_path / "atoll.bash"
    assert atoll("--install-completion", "--shell", "bash", "--output", str(script)).returncode == 0
    words = f"source {script}; COMP_WORDS=(atoll quicks) COMP_CWORD=1; _atoll; echo ${{COMPREPLY[@]}}"
    told = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert told.stdout == "quickstart\n", told.stderr
    assert not (tmp_path / "home").exists()


def test_a_check_without_a_ticket_says_that_it_asked_no_member(tmp_path: Path):
    told = atoll("check", "--dir", str(tmp_path / "new"))
    assert told.returncode == 0 and told.stdout.endswith("no member was asked: atoll check TICKET dials them\n")


def test_a_folder_may_stand_where_a_file_or_a_ticket_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Where only a folder can be meant: `up FOLDER`, `amend KEY=VALUE FOLDER`, `join - FOLDER`, `check -`."""
    (tmp_path / "run.toml").write_text("[run]\nrounds = 0\n")
    (file := tmp_path / "ticket").write_text("ATOLL1:AAAA\n")
    for words, code in (
        (["up", str(tmp_path), "--set", "train.foo=1"], "E-CFG-01"),
        (["amend", "run.rounds=3", str(tmp_path)], f"E-DOOR-01 no peer is running in {tmp_path}"),
        (["join", "--ticket-file", str(file), str(tmp_path / "new")], "E-TKT-03"),
        (["join", "-", str(tmp_path / "new")], "E-ARG-05"),
        (["check", "--ticket-file", str(file), str(tmp_path / "new")], "E-TKT-03"),
        (["check", "-", str(tmp_path / "new")], "E-ARG-05"),
    ):
        assert atoll(*words).stderr.startswith(code)
