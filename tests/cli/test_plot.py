"""What `atoll plot` draws of a record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import answer_of, atoll

from atoll.cli.plot import rounds_of, smoothed


def test_rounds_that_the_run_went_back_behind_are_no_part_of_the_picture(tmp_path: Path):
    """After three rounds the run goes back to the first of them, and trains one more."""
    closed = [{"trained": n, "loss": float(n), "counted": ["ada"], "samples": 4} for n in (1, 2, 3)]
    closed += [
        {"trained": 1, "loss": 1.0, "back_to": 0},
        {"trained": 2, "loss": 0.5, "counted": ["ada"], "samples": 4},
    ]
    record = tmp_path / "facts.jsonl"
    lines = ({"at": at, "fact": "RoundClosed", "round": at} | told for at, told in enumerate(closed))
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(row["trained"], row["loss"]) for row in rounds_of(record)] == [(1, 1.0), (2, 0.5)]


def recorded(folder: Path, rounds: int, **fields: Any) -> Path:
    """A folder with the log of a run of this many rounds."""
    members = [{"peer": name, "name": name, "role": "trainer", "standing": "member"} for name in ("ada", "bob")]
    known = {
        "fact": "GenesisKnown",
        "round": -1,
        "name": "moon",
        "rounds": rounds,
        "min_peers": 1,
        "inner_steps": 8,
    }
    learns = {"fact": "LearningKnown", "model": "gpt-nano", "parameters": 22_000, "batch": 2, "seq_len": 32}
    lines: list[dict[str, Any]] = [known | {"members": members, "state": ""}, learns | {"unit": "tokens"}]
    for at in range(rounds):
        closed = {
            "fact": "RoundClosed",
            "round": at,
            "trained": at + 1,
            "loss": 3.0 - at / 50,
            "samples": 4,
            "steps": 16,
        }
        closed |= {
            "counted": ["ada", "bob"],
            "missing": [],
            "state": "",
            "time_s": 1.8e9 + at,
            "bytes_out": 1000 * at,
        }
        lines.append(closed | fields)
    folder.mkdir()
    (folder / "facts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def words_in(picture: Path) -> set[str]:
    return {*re.findall(r">([^<>]+)</text>", picture.read_text())}


def test_a_plot_says_of_which_run_it_is_and_what_its_lines_are(tmp_path: Path):
    """Name, model, members and day in the title; a legend for every line; noise is smoothed in long runs."""
    folder, picture = recorded(tmp_path / "run", 30), tmp_path / "run.svg"
    told = answer_of("plot", folder, "--out", picture)
    assert (told["rounds"], told["loss"]) == (30, pytest.approx(2.42))
    words = words_in(picture)
    assert "moon, gpt-nano (22 k), 2 peers, 2027-01-15" in words
    assert {"training loss", "its moving mean", "peers counted", "this peer sent"} <= words
    assert smoothed([2.0, 1.0, 1.0], 0.5) == [2.0, 1.5, 1.25]


def test_a_plot_leaves_out_what_was_not_reported_and_what_was_not_sent(tmp_path: Path):
    """Own loops report no loss unless they do; a run of one sends nothing."""
    silent, alone, short = (
        recorded(tmp_path / name, 5, **fields)
        for name, fields in (
            ("silent", {"loss": None}),
            ("alone", {"bytes_out": 0, "counted": ["ada"]}),
            ("both", {"loss": None, "bytes_out": 0}),
        )
    )
    assert "no loss was reported" in atoll("plot", silent, "--out", tmp_path / "a.svg").stdout
    assert not {"training loss", "nats"} & words_in(tmp_path / "a.svg") and "traffic" in words_in(
        tmp_path / "a.svg"
    )
    assert answer_of("plot", alone, "--out", tmp_path / "b.svg")["loss"] == pytest.approx(2.92)
    words = words_in(tmp_path / "b.svg")
    assert "training loss" in words and not {"traffic", "its moving mean"} & words
    assert answer_of("plot", short, "--out", tmp_path / "c.svg")["loss"] is None
    assert "peers counted" in words_in(tmp_path / "c.svg")
