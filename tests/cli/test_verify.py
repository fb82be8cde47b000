"""`atoll verify` on the folder of a real run: intact while it runs and after; tampering is found and named."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from processes import SMALL, TWO, Peer, answer_of, atoll, peers
from safetensors.torch import load_file

from atoll.base.units import bytes_text, seconds_text
from atoll.cli.verify import check_blobs, verify
from atoll.training.models import build_model
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.messages.vertex import Vertex

pytestmark = [pytest.mark.net]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ada's folder: she founds, Bob joins, they train together; asked while she runs, then she is killed."""
    a, b = tmp_path_factory.mktemp("ada"), tmp_path_factory.mktemp("bob")
    words = ("--name", "ada", "--set", "run.rounds=0", "--set", "run.era_rounds=2")
    with peers(Peer("up", "--dir", a, *words, *SMALL)) as running:
        ada = running[0]
        bob = Peer("join", ada.until_fact("Opened")["ticket"], "--dir", b, "--name", "bob")
        running.append(bob)
        for _ in range(6):  # an era is two rounds, and sealed when its last one is some rounds old
            ada.trained_with(2)
        while_running = answer_of("verify", a, "--deep")
        assert while_running["intact"] and while_running["blobs"] > 0
        assert answer_of("verify", b)["intact"]
    return a


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def rewrite(folder: Path, change: Callable[[dict[int, bytes]], None]) -> None:
    """Tamper with the vertices in the database, as a member with a text editor for it would."""
    with sqlite3.connect(folder / "kept.sqlite") as database:
        rows = database.execute("SELECT name, value FROM kept WHERE name LIKE 'vertex/%'").fetchall()
        vertices = {int(name[7:]): value for name, value in rows}
        change(vertices)
        database.execute("DELETE FROM kept WHERE name LIKE 'vertex/%'")
        database.executemany("INSERT INTO kept VALUES (?, ?)", [(f"vertex/{r}", v) for r, v in vertices.items()])
    database.close()


def told(folder: Path, capsys: pytest.CaptureFixture[str], **how: Any) -> tuple[int, dict[str, Any]]:
    status = verify(folder, json=True, **how)
    return status, json.loads(capsys.readouterr().out)


def found(answer: dict[str, Any]) -> list[tuple[int, str]]:
    return [(p["round"], p["kind"]) for p in answer["problems"]]


def test_a_real_run_is_intact_and_says_who_gave_what(folder: Path, capsys: pytest.CaptureFixture[str]):
    status, answer = told(folder, capsys, deep=True)
    assert status == 0 and answer["intact"] and answer["gaps"] == answer["unchecked"] == []
    assert answer["vertices"] == answer["head"] + 1 >= answer["trained"] >= 3
    gave = {c["name"]: c["samples"] for c in answer["contributions"].values()}
    assert gave["ada"] >= gave["bob"] > 0
    assert [c["joined"] for c in answer["members"] if c["joined"]] == [["ada"], ["bob"]]


def test_eras_of_a_real_run_are_signed_by_both(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Ada alone signs until Bob has a vote, then both do; a signature with a flipped bit is named."""
    _, answer = told(folder, capsys)
    eras = [e for e in answer["eras"] if e["sealed"]]
    assert eras[0]["first"] == 0 and eras[0]["of"] == 1 and any(e["signed"] == e["of"] == 2 for e in eras)
    ((first, last),) = answer["votes_alone"] or [[answer["head"], answer["head"]]]
    assert last == answer["head"] and last - first <= 4
    words = atoll("verify", folder).stdout
    assert ": signed by the long-term keys (Ed25519 and ML-DSA-65) of a quorum of members, in " in words
    assert "  genesis: 1 member, 1 voter; joined: ada\n" in words and "2 members, 2 voters" in words
    with sqlite3.connect(folder / "kept.sqlite") as database:
        name = f"sealed/{eras[0]['last']}"
        (data,) = database.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        changed = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]  # flags are last
        database.execute("UPDATE kept SET value = ? WHERE name = ?", (changed, name))
    database.close()
    status, answer = told(folder, capsys)
    assert status == 5 and (eras[0]["last"], "era") in found(answer)
    assert answer["votes_alone"][0][0] == 0


def test_one_of_two_members_leaves_with_its_signature_under_their_era(tmp_path: Path):
    """The era needs both. Without the second one, newcomers refuse the history and `verify` calls it broken."""
    a, b = tmp_path / "a", tmp_path / "b"
    with peers(Peer("up", "--dir", a, "--set", "run.rounds=0", *TWO)) as running:
        running.append(Peer("join", running[0].until_fact("Opened")["ticket"], "--dir", b))
        running[0].trained_with(2)
        assert answer_of("leave", "--dir", b) and running[1].ends() == 0
        for _ in range(3):
            running[0].trained_with(1)
            assert all(fact["fact"] != "PeerSuspected" for fact in running[0].facts)  # it left, and ended
        newest = answer_of("verify", a)["eras"][-1]
    assert newest["of"] == newest["needed"] == 2 and newest["sealed"]


def test_words_for_people_end_with_the_verdict(folder: Path):
    told = atoll("verify", folder)
    assert told.returncode == 0 and told.stdout.splitlines()[-1] == "intact"
    rewrite(folder, lambda rows: rows.pop(2))
    told = atoll("verify", folder)
    first, *_, last = told.stdout.splitlines()
    assert told.returncode == 5 and last == "broken: 1 problem"
    assert first.startswith("E-VER-03 history round 2") and "likely cause: " in first and "; try: " in first


def test_verifying_changes_no_file_and_never_imports_torch(folder: Path):
    """Not even the shared memory that sqlite likes to leave beside a database."""
    with sqlite3.connect(folder / "kept.sqlite") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    for words in (["verify", str(folder), "--deep"], ["checkpoint", "list", str(folder)]):
        command = [sys.executable, "-X", "importtime", "-m", "atoll", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "atoll.peer.verify.chain" in done.stderr
        assert not {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()} & {"torch", "numpy"}
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_bit_in_a_body_a_certificate_or_a_blob_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    def flip_body(rows: dict[int, bytes]) -> None:
        vertex = decode_vertex(rows[2])
        body = decode_body(vertex.body)
        state = bytes([body.state[0] ^ 1]) + body.state[1:]
        rows[2] = encode(replace(vertex, body=encode(replace(body, state=state))))

    def flip_certificate(rows: dict[int, bytes]) -> None:
        vertex = decode_vertex(rows[4])
        assert vertex.certificate is not None
        (peer, signature), *others = vertex.certificate.votes
        votes = ((peer, signature[:-1] + bytes([signature[-1] ^ 1])), *others)
        rows[4] = encode(replace(vertex, certificate=replace(vertex.certificate, votes=votes)))

    rewrite(folder, flip_body)
    rewrite(folder, flip_certificate)
    blob = next(p for p in sorted((folder / "blobs").iterdir()) if not p.suffix)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    status, answer = told(folder, capsys)
    assert status == 5 and found(answer) == [(2, "body"), (4, "certificate")] and answer["unchecked"] == [3]
    status, answer = told(folder, capsys, deep=True)
    assert [k for _, k in found(answer)] == ["body", "certificate", "blob"]
    assert blob.name[:8] in answer["problems"][-1]["what"]
    assert check_blobs(folder / "blobs")[1] == [blob.name]


def test_dropped_exchanged_and_forged_vertices_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def drop(rows: dict[int, bytes]) -> None:
        del rows[3]

    def exchange(rows: dict[int, bytes]) -> None:
        rows[2], rows[3] = rows[3], rows[2]

    def promote(rows: dict[int, bytes]) -> None:
        """A member gives itself a vote in the newest vertex and names the changed body in its certificate."""
        newest = max(rows)
        vertex = decode_vertex(rows[newest])
        body = decode_body(vertex.body)
        members = (*body.members, replace(body.members[0], peer="mallory", name="mallory"))
        raw = encode(replace(body, members=members))
        assert vertex.certificate is not None
        rows[newest] = encode(Vertex(raw, replace(vertex.certificate, digest=vertex_id(raw))))

    for name, change, expected in (
        ("drop", drop, [(3, "missing")]),
        ("exchange", exchange, [(2, "misplaced"), (3, "misplaced")]),
        ("promote", promote, [(-1, "certificate")]),
    ):
        folder = Path(shutil.copytree(run, tmp_path / name))
        newest = told(folder, capsys)[1]["head"]
        rewrite(folder, change)
        status, answer = told(folder, capsys)
        assert status == 5 and found(answer) == [(newest if r == -1 else r, kind) for r, kind in expected]
    assert "its membership does not follow from its reports" in answer["problems"][0]["what"]


def test_checkpoints_are_listed_and_shown_as_the_vertices_have_them(folder: Path):
    """The newest state is in the folder under its hash; a round says who counted and who was missing."""
    rows = answer_of("checkpoint", "list", folder)
    assert [row["round"] for row in rows] == list(range(-1, len(rows) - 1))
    assert all(row["parent"] == before["vertex"] for before, row in pairwise(rows))
    newest = answer_of("checkpoint", "show", rows[-1]["round"], folder)
    assert newest == rows[-1]
    assert newest["size_bytes"] == (folder / "blobs" / newest["state"]).stat().st_size
    full = next(row for row in rows if row["contributors"] == ["ada", "bob"])
    assert full["missing"] == [] and full["voters"] == 2 and full["loss"] > 0 and full["votes"] == 2
    words = atoll("checkpoint", "list", folder).stdout.splitlines()
    assert newest["state"][:8] in words[-1] and len(words) <= 20
    shown = atoll("checkpoint", "show", str(full["round"]), folder).stdout
    seconds = full["time_s"] - rows[0]["time_s"]
    assert shown.startswith(f"history round {full['round']}, agreed {seconds_text(seconds)} after genesis, ")
    assert f"loss       {full['loss']:.4f} over {full['steps']} steps and" in shown and full["vertex"] in shown
    assert "counted    ada, bob\n" in shown and "agreed     2 of 2 voters, proposed by " in shown
    assert not {"_", "[", "{"} & set(shown) and "missing" not in shown and "None" not in shown
    here = atoll("checkpoint", "show", str(newest["round"]), folder).stdout
    assert atoll("checkpoint", "show", "-1", folder).stdout.startswith("genesis, 0 rounds trained\n")
    assert f"size       {bytes_text(newest['size_bytes'])}, in this folder" in here
    assert "E-CHK-01" in atoll("checkpoint", "show", "9999", folder).stderr
    assert answer_of("verify", folder, "--trusted", rows[2]["vertex"])["trusted_round"] == rows[2]["round"]


def test_a_trusted_vertex_is_looked_for(folder: Path, capsys: pytest.CaptureFixture[str]):
    ids: list[str] = []
    rewrite(folder, lambda rows: ids.append(vertex_id(decode_vertex(rows[2]).body).hex()))
    assert told(folder, capsys, trusted=ids[0])[1]["trusted_round"] == 2
    assert found(told(folder, capsys, trusted="00" * 32)[1]) == [(-1, "trusted")]
    refused = atoll("verify", folder, "--trusted", "xyz")
    assert refused.returncode == 2 and "E-VER-14" in refused.stderr


def test_folders_without_a_history_or_with_a_ruined_database_are_told_apart(run: Path, tmp_path: Path):
    assert "E-VER-12" in atoll("verify", tmp_path).stderr
    assert "--also" in atoll("verify", run, "--also", tmp_path).stderr
    (tmp_path / "kept.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4096))
    ruined = atoll("verify", tmp_path, "--json")
    assert ruined.returncode == 5 and json.loads(ruined.stderr)["error"] == "E-VER-13"


def test_the_record_of_a_run_becomes_a_picture(folder: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    drawn = answer_of("plot", folder, "--out", tmp_path / "picture.svg")
    assert drawn["rounds"] >= 3 and (tmp_path / "picture.svg").read_text().startswith("<?xml")


def test_an_agreed_model_is_exported_as_a_folder_with_a_filled_in_card(folder: Path, tmp_path: Path):
    """The tensors load into the model by name; the card names both peers and what the vertices say they gave."""
    newest = answer_of("checkpoint", "list", folder)[-1]["round"]
    gave = answer_of("verify", folder)["contributions"]
    answer_of("checkpoint", "export", str(newest), tmp_path / "model", folder, "--hf")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    model = build_model("gpt-nano", 1)
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    card = (tmp_path / "model" / "README.md").read_text()
    for one in gave.values():
        assert f"| {one['name']} | {one['rounds']} | {one['steps']:,} | {one['samples']:,} |" in card
    assert "trained together by 2 peers" in card and "data-parallel training would have sent" in card
    again = atoll("checkpoint", "export", str(newest), tmp_path / "model", folder, "--hf")
    assert again.returncode == 2 and "E-CHK-04" in again.stderr


def test_blame_compares_what_peers_reported_and_says_what_it_cannot_tell(folder: Path):
    told_of = answer_of("blame", folder, "--metric", "loss")
    assert {p["name"] for p in told_of["peers"]} == {"ada", "bob"} and "its own data" in told_of["cannot_tell"]
    assert told_of["updates"] == [] and "write keep.updates into run.toml" in atoll("blame", folder).stdout
    refused = atoll("blame", folder, "--metric", "hope")
    assert refused.returncode == 2
    refused = atoll("blame", folder, "--metric", "validation")
    assert refused.returncode == 2 and "E-BLM-08" in refused.stderr and "run.validate_every" in refused.stderr
