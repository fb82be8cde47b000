"""`atoll checkpoint pull`: a member that passes by takes the agreed model with it, checked, and leaves no trace."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import SMALL, Peer, answer_of, atoll, peers
from safetensors.torch import load_file

from atoll.training.models import build_model
from atoll.wire.codec import decode_vertex, encode
from atoll.wire.messages.vertex import Vertex

pytestmark = [pytest.mark.net]


class Alone(NamedTuple):
    ada: Peer
    folder: Path
    opened: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """Ada trains alone, and has trained two rounds."""
    folder = tmp_path_factory.mktemp("ada")
    words = ("--name", "ada", "--set", "run.rounds=0", "--set", "run.era_rounds=2")
    with peers(Peer("up", "--dir", folder, *words, *SMALL)) as (ada,):
        opened = ada.until_fact("Opened")
        ada.trained_with(1)
        ada.trained_with(1)
        yield Alone(ada, folder, opened)


def test_a_model_is_pulled_out_of_a_living_run_by_ticket_or_by_a_folder(run: Alone, tmp_path: Path):
    """Its state is one that ada agreed on; she has no new member, her ticket all its uses, and the run goes on. The
    run's id and an address are not enough."""
    ada, a, opened = run
    invited = answer_of("invite", "--dir", a, "--list")
    by_ticket = answer_of("checkpoint", "pull", opened["ticket"], "--to", tmp_path / "x")
    address = opened["addresses"][0]
    by_name = atoll("checkpoint", "pull", opened["run_id"], "--via", address, "--to", tmp_path / "y")
    assert by_name.returncode == 4 and "E-JOIN-01" in by_name.stderr and "atoll invite" in by_name.stderr
    assert "this run is not public" in by_name.stderr
    assert not list((tmp_path / "y.pull" / "blobs").glob("*"))
    elsewhere = ("--via", "/ip4/127.0.0.1/tcp/9", "--dir", a)  # no member is there; the folder knows who is
    by_folder = answer_of("checkpoint", "pull", opened["run_id"], *elsewhere, "--to", tmp_path / "z")
    another = atoll("checkpoint", "pull", "ab" * 32, *elsewhere, "--to", tmp_path / "w")
    assert another.returncode == 2 and "E-CHK-15" in another.stderr
    ada.trained_with(1)
    assert [m["name"] for m in answer_of("peers", "--dir", a)] == ["ada"]
    assert answer_of("invite", "--dir", a, "--list") == invited
    states = {row["round"]: row["state"] for row in answer_of("checkpoint", "list", a)}
    for taken in (by_ticket, by_folder):
        assert taken["run_id"] == opened["run_id"] and taken["state"] == states[taken["round"]]
        assert sorted(p.name for p in Path(taken["folder"]).iterdir()) == [
            "README.md",
            "config.json",
            "model.safetensors",
        ]
        model = build_model("gpt-nano", 1)
        model.load_state_dict(load_file(Path(taken["folder"]) / "model.safetensors"))
        ((first, last),) = taken["votes_alone"] or [(0, 0)]
        assert last - first <= 3  # older eras came with their signatures
    assert by_folder["round"] >= by_ticket["round"] >= 1
    card = (tmp_path / "x" / "README.md").read_text()
    assert "| ada |" in card and opened["run_id"] not in card
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y.pull", "z"]


def test_what_is_no_run_or_cannot_be_written_is_told_before_anything_is_fetched(tmp_path: Path):
    address = "/ip4/127.0.0.1/tcp/9"
    for words, code in (
        ((address, "--to", tmp_path / "x"), "E-CHK-07"),
        (("ab" * 32, "--to", tmp_path / "x"), "E-CHK-07"),
        (("--dir", tmp_path, "--to", tmp_path / "x"), "E-VER-12"),
        (("ab" * 32, "--via", address, "--to", tmp_path), "E-CHK-04"),
        (("ab" * 32, "--via", address, "--to", tmp_path / "x", "--timeout", "soon"), "E-ARG-06"),
    ):
        refused = atoll("checkpoint", "pull", *words)
        assert refused.returncode == 2 and code in refused.stderr
    assert list(tmp_path.iterdir()) == []
    nobody = atoll("checkpoint", "pull", "ab" * 32, "--via", address, "--to", tmp_path / "x", "--timeout", "1s")
    assert nobody.returncode == 3 and "E-NET-01" in nobody.stderr and not (tmp_path / "x").exists()


def test_a_history_that_does_not_hold_makes_no_model(run: Alone, tmp_path: Path):
    """What an earlier, interrupted pull left behind was changed on disk: the state is whole, the past is not."""
    ticket = run.opened["ticket"]
    early = atoll("checkpoint", "pull", ticket, "--to", tmp_path / "x", "--timeout", "0.001s")
    assert early.returncode in (3, 5) and not (tmp_path / "x").exists()
    with closing(sqlite3.connect(run.folder / "kept.sqlite")) as theirs:
        rows = theirs.execute("SELECT * FROM kept WHERE name = 'genesis' OR name GLOB 'vertex/[01]'").fetchall()
    kept = dict(rows)
    vertex = decode_vertex(kept["vertex/0"])
    kept["vertex/0"] = encode(Vertex(vertex.body, None))
    with closing(sqlite3.connect(tmp_path / "x.pull/kept.sqlite")) as mine, mine:
        mine.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", kept.items())
    broken = atoll("checkpoint", "pull", ticket, "--to", tmp_path / "x")
    assert broken.returncode == 5 and "E-CHK-09" in broken.stderr and not (tmp_path / "x").exists()
