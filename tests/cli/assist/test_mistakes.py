"""Mistakes of the first hour: each is refused with its value, a code and a next command, and that command works.

Not here, since other tests provoke them with several peers: links, disks, clocks, signals, loops in Python.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import TWO, Peer, answer_of, atoll, peers

from atoll.runtime.config import load_config
from atoll.runtime.network.dialer import endpoint_of


def refusal(words: str, status: int, *says: str) -> str:
    """What this command prints on stderr; it ends with that status, says all of this, and leaves no folder."""
    done = atoll(*shlex.split(words))
    assert done.returncode == status, done.stderr
    for text in says:
        assert text in done.stderr
    assert "\n  try: " in done.stderr and not Path("atoll-run").exists()
    return done.stderr


def toml(text: str) -> None:
    Path("run.toml").write_text(text)


SETTINGS: list[tuple[str, str, tuple[str, ...], str]] = [
    # run.toml, words, what is said, run.toml as the message says
    (
        "[train]\nlearning_rate = 1\n",
        "up run.toml",
        ("E-CFG-03 run.toml:2: train.learning_rate", "write train.lr"),
        "[train]\nlr = 1\n",
    ),
    (
        "[train]\n\ninner_step = 3\n",
        "up run.toml",
        ("E-CFG-01 run.toml:3:", "did you mean train.inner_steps?"),
        "[train]\ninner_steps = 3\n",
    ),
    (
        '[run]\nrounds = "many"\n',
        "up run.toml",
        ("E-CFG-02 run.toml:2: run.rounds: expected a whole number, not 'many'",),
        "[run]\nrounds = 9\n",
    ),
    ("[run\nrounds = 3\n", "up run.toml", ("E-CFG-09 run.toml is not TOML", "line 1"), "[run]\nrounds = 3\n"),
    (
        '[run]\ntrust = "comunity"\n',
        "up run.toml",
        ("E-CFG-02 run.toml:2: run.trust", "'comunity'", "did you mean 'community'?"),
        "[run]\ntrust = 'private'\n",
    ),
    (
        "[run]\nrounds = true\n",
        "up run.toml",
        ("E-CFG-02 run.toml:2: run.rounds: expected a whole number, not true\n",),
        "[run]\nrounds = 9\n",
    ),
    (
        '[consensus]\ntimeout = "2 fortnights"\n',
        "up run.toml",
        ("E-CFG-02 run.toml:2: consensus.timeout", "write for example"),
        "[consensus]\ntimeout = '2 hours'\n",
    ),
]


@pytest.mark.parametrize(("written", "words", "says", "mended"), SETTINGS)
def test_a_wrong_setting_is_named_with_its_line_and_what_to_write_is_accepted(
    written: str, words: str, says: tuple[str, ...], mended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    toml(written)
    refusal(words, 2, *says)
    toml(mended)
    load_config(Path("run.toml"), (), {})


WORDS: list[tuple[str, tuple[str, ...], str]] = [
    # words of a command, what is said, the command as the message says; empty: none is suggested whole
    ("up --set trian.lr=1", ("E-CFG-01", "did you mean train.lr?"), "config --set train.lr=1"),
    ("up --set train.lr", ("E-CFG-07", "write --set train.lr=0.004"), "config --set train.lr=0.004"),
    ("up --set run.rounds", ("E-CFG-07", "write --set run.rounds=30"), "config --set run.rounds=30"),
    ("up --set train.lr=-1", ("E-CFG-02 train.lr: expected a number > 0.0, not -1",), "explain train.lr"),
    ("up --set train.foo=3", ("E-CFG-01 unknown key train.foo\n", "atoll config --all"), "config --all"),
    (
        "up --set model.name=gpt-tinny",
        ("E-CFG-02 model.name: no built-in model is called 'gpt-tinny' (did you mean 'gpt-tiny'?)",),
        "config --set model.name=gpt-tiny",
    ),
    ("up --set train.recipe=dilocco", ("E-CFG-02", 'did you mean "diloco"?'), "config --set train.recipe=diloco"),
    (
        "config --set train.recipe=sparseloco run.trust=community run.start_peers=6",
        ("E-RUN-18", 'write run.trust = "private"'),
        "config --set train.recipe=sparseloco run.trust=private",
    ),
    (
        "up --set data.source=nowhere",
        ("E-DATA-01 data.source: there is nothing at nowhere", 'write "stdlib"'),
        "config --set data.source=stdlib",
    ),
    ("up nope.toml", ("E-CFG-09 cannot read nope.toml", "atoll init run.toml writes one"), "init run.toml"),
    ("stauts", ("E-ARG-01", 'Did you mean "status"?', "atoll --help"), "--help"),
    ("status --jsno", ("E-ARG-01", "Did you mean --json?"), "status --help"),
    ("join", ("E-ARG-05 there is no ticket",), "join --help"),
    ("join ATOLL1:HELLO", ("E-TKT-02 this ticket is cut short: 3 bytes\n",), ""),
    ("check ATOLL1:HELLO", ("E-TKT-02",), ""),
    (
        "plan --model 1B --peers 8 --uplink 20",
        ("E-PLAN-02 '20' is not a rate; write for example 20Mbit",),
        "plan --model 1B --peers 8 --uplink 20Mbit --latency 50ms",
    ),
    (
        "plan --model gpt-tinny --peers 8 --uplink 20Mbit",
        ("E-PLAN-04", "did you mean 'gpt-tiny'?"),
        "plan --model gpt-small --peers 8 --uplink 20Mbit",
    ),
    ("simulate clam", ("E-ARG-09 there is no scenario 'clam'; did you mean calm?",), "simulate"),
    ("explain lr", ("E-ARG-16 'lr' is neither", "did you mean train.lr?"), "explain train.lr"),
    ("export nowhere/m.safetensors", ("E-ARG-04", "there is no folder", "mkdir -p "), ""),
    ("explain E-NET-00", ("E-ARG-16", "did you mean E-NET-"), "explain E-NET-01"),
]


@pytest.mark.parametrize(("words", "says", "instead"), WORDS, ids=[words for words, *_ in WORDS])
def test_a_wrong_word_is_shown_and_the_suggested_command_succeeds(
    words: str, says: tuple[str, ...], instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_TICKET", raising=False)
    refusal(words, 2, *says)
    if instead:
        done = atoll(*shlex.split(instead))
        assert done.returncode == 0 and done.stdout, done.stderr


TICKET = "ATOLL1:" + "A2B3" * 85  # as long as a ticket is
MISPLACED = [
    (f"status {TICKET}", "E-ARG-21"),
    (f"up {TICKET}", "E-ARG-21"),
    (f"join --ticket-file {TICKET}", "E-ARG-21"),
    (f"config {TICKET}", "E-CFG-09"),
    (f"join --role {TICKET}", "E-ARG-01"),
    (f"explain {TICKET}", "E-ARG-16"),
    (f"join {TICKET}{TICKET}", "E-TKT-07"),
]


@pytest.mark.parametrize(("words", "code"), MISPLACED, ids=[words[:12] for words, _ in MISPLACED])
@pytest.mark.parametrize("form", ["", " --json"])
def test_a_ticket_in_the_wrong_place_is_named_and_not_shown_whole(
    words: str, code: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A screen or a log that shows the error does not admit its readers to the run."""
    monkeypatch.chdir(tmp_path)
    done = atoll(*shlex.split(words + form))
    assert done.returncode == 2 and code in done.stderr and TICKET[7:] not in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_wrong_address_and_a_wrong_folder_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = refusal("up --listen 0.0.0.0:7071", 2, "E-NET-10", "0.0.0.0:7071")
    for address in re.findall(r"/(?:ip4|dns)/\S+/tcp/\d+", text):
        endpoint_of(address)
    Path("file").write_text("")
    refusal("up --dir file", 2, "E-DIR-05", "file cannot be a peer's folder", "--dir")
    Path("short.txt").write_text("too short to learn from\n" * 20)
    refusal("up --set data.source=short.txt", 2, "E-DATA-02", "give at least", "data.source", "train.seq_len")
    refusal("up --set node.device=cuda:99", 2, "E-TRN-14", "cuda:99")
    assert not Path("atoll-run").exists()
    refusal("status --dir elsewhere", 3, "E-DOOR-01 no peer is running in", "elsewhere")


@pytest.mark.net
def test_mistakes_beside_a_running_peer_and_with_its_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A second peer in one folder, wrong amendments, durations in words; then a damaged key and database."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ada"
    at = f"--dir {folder}"
    with peers(Peer("up", "--dir", folder, "--name", "ada", *TWO)) as running:
        running[0].until_fact("Opened")
        refusal(f"up {at}", 2, "E-DIR-01", str(folder), "--dir")
        refusal(f"amend train.foo=3 {at}", 2, "E-CFG-01 unknown key train.foo\n")
        refusal(f"amend train.lr=-1 {at}", 2, "E-CFG-02 train.lr: expected a number > 0.0, not -1")
        refusal(f"amend run.trust=open {at}", 2, "E-RUN-27 run.trust stays as genesis has it")
        refusal(f"invite --ttl soon {at}", 2, "E-ARG-06 --ttl soon: 'soon' is not a duration", "--ttl 24h")
        for ttl, lasts_s in (("3days", 259_200), ("5minutes", 300), ("1 week", 604_800)):
            expires_s = answer_of("invite", "--ttl", ttl, folder)["expires_wall_s"]
            assert 0 < expires_s - time.time() <= lasts_s
        refusal(f"amend run.rounds {at}", 2, "E-CFG-07 run.rounds has no value", "write run.rounds=30")
        refusal(f"status {tmp_path / 'adda'}", 3, "E-DOOR-01", f"a peer is running: --dir {folder}\n")
        monkeypatch.chdir(folder)  # where a person looks into a peer's folder, ./atoll-run is meant by default
        refusal("peers", 3, "E-DOOR-01", f"a peer is running: --dir {folder}\n")
        monkeypatch.chdir(tmp_path)
        exports_replace_no_other_file(folder)
        refusal(f"recover {at}", 4, "E-ARG-10", f"atoll recover --dir {folder} --yes")
        stopped = atoll("stop", folder)
        assert stopped.returncode == 0 and f"atoll up --dir {folder} resumes it" in stopped.stdout
    key, base = folder / "peer.key", folder / "kept.sqlite"
    for file, spoil, says in (
        (key, lambda data: b"not a key", f"E-KEY-01 {key} is not an Atoll identity"),
        (key, lambda data: data[:-1], f"E-KEY-02 {key} is a damaged identity"),
        (base, lambda data: data[:100] + bytes(400) + data[500:], "E-DIR-07"),
    ):
        spoiled(file, spoil, lambda says=says: refusal(f"up {at}", 2, says))
    exports_replace_no_other_file(folder)
    with peers(Peer("up", "--dir", folder)) as running:  # whole again, it goes on as the stop said
        assert running[0].until_fact("Opened")["resumed"]
        assert answer_of("status", "--dir", folder)["name"] == "ada"


def exports_replace_no_other_file(folder: Path) -> None:
    """Beside a peer and without one: into a folder, over an earlier export, and never over another file."""
    Path("models").mkdir(exist_ok=True)
    (toml := Path("run.toml")).write_text("[run]\nrounds = 9\n")
    refusal(f"export run.toml --dir {folder}", 2, "E-ARG-08", "run.toml is there already, and it is no model")
    assert toml.read_text() == "[run]\nrounds = 9\n"
    refusal(f"export none/m.safetensors --dir {folder}", 2, "E-ARG-04", "there is no folder", "mkdir -p ")
    for _ in range(2):
        assert answer_of("export", "models", "--dir", folder)["path"].endswith("models/model.safetensors")
        assert answer_of("export", "m.safetensors", "--dir", folder)["path"] == str(
            Path("m.safetensors").absolute()
        )
    assert answer_of("export", folder)["path"] == str(folder / "model.safetensors")


def spoiled(file: Path, spoil: Callable[[bytes], bytes], check: Callable[[], Any]) -> None:
    whole = file.read_bytes()
    file.write_bytes(spoil(whole))
    check()
    file.write_bytes(whole)
