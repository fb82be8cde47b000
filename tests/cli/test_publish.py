"""`atoll publish`, `atoll evaluate` and `--state-from` among real processes: one run, from its first state to after
its end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import SMALL, Peer, answer_of, atoll, peers
from safetensors.torch import load_file
from test_plot import words_in

from atoll.training.data import load_data, validation
from atoll.training.models import build_model, loss_of

pytestmark = [pytest.mark.net]
THREE = ("--set", "run.start_peers=3", "--set", "run.rounds=3", "--uses", "2")


def held_out_loss(model_file: Path, samples: int) -> float:
    model = build_model("gpt-nano", 5)
    model.load_state_dict(load_file(model_file))
    batches = list(validation(load_data("stdlib"), samples, samples, 32))
    with torch.no_grad():
        return float(loss_of(model.eval(), batches[0]))


def test_a_run_is_published_evaluated_and_joined_from_what_was_published(tmp_path: Path):
    """Ada waits for two members. Bob takes the first state from what she published; Cid is lied to by a copy of it
    and asks the members. After the end, her state is lost and comes back from there."""
    a, store, lies = tmp_path / "ada", tmp_path / "store", tmp_path / "lies"
    with peers(Peer("up", "--dir", a, "--name", "ada", *SMALL, *THREE)) as running:
        ada = running[0]
        ticket = ada.until_fact("Opened")["ticket"]
        ada.until_fact("LocalStateCaughtUp")
        first = answer_of("publish", store, a, "--once")["latest"]
        assert all((store / name).stat().st_size == size for name, size in first["files"].items())
        early = answer_of("evaluate", a, "--once", "--samples", "32", "--length", "8", "--prompt", "def ")
        (found,) = early["evaluations"]
        assert found["loss"] == pytest.approx(held_out_loss(store / first["model"] / "model.safetensors", 32), 1e-5)
        assert (found["state"], found["text"][:4]) == (first["state"], "def ")
        assert answer_of("status", "--dir", a)["evaluated"] == found
        assert f"evaluated after 0 rounds: held-out loss {found['loss']:.4f}" in atoll("status", "--dir", a).stdout

        shutil.copytree(store, lies)
        (wrong := lies / "states" / first["state"]).write_bytes(b"x" * wrong.stat().st_size)
        running.append(Peer("join", ticket, "--dir", tmp_path / "bob", "--state-from", store))
        running.append(Peer("join", ticket, "--dir", tmp_path / "cid", "--state-from", f"file://{lies}"))
        came = running[1].until_fact("PublishedStateFetched")
        assert (came["state"], came["place"]) == (first["state"], str(store))
        assert "not those that the members agreed on" in running[2].until_fact("PublishedStateNotFetched")["why"]
        for peer in running:
            peer.until_fact("RunOver")
        assert [peer.ends() for peer in running] == [0, 0, 0]

    last = answer_of("publish", store, a)["latest"]
    assert (first["model"], last["model"]) == (
        f"checkpoints/genesis-{first['state'][:6]}",
        f"checkpoints/round-{last['round']:06}-{last['state'][:6]}",
    )
    assert last["trained"] == 3 and (store / first["model"] / "model.safetensors").exists()
    assert "or a newer one" in atoll("publish", store, a).stdout
    assert [c["sent"] for c in answer_of("publish", store, tmp_path / "bob")["checkpoints"]] == [False]
    late = answer_of("evaluate", a, "--samples", "32")["evaluations"]
    exported = held_out_loss(store / last["model"] / "model.safetensors", 32)
    assert [one["loss"] for one in late] == [pytest.approx(exported, 1e-5)]
    assert answer_of("plot", a, "--out", tmp_path / "a.svg") and "held-out loss" in words_in(tmp_path / "a.svg")

    (a / "blobs" / last["state"]).unlink()
    with peers(Peer("up", "--dir", a, "--set", f"node.state_from={store}")) as (again,):
        assert again.until_fact("PublishedStateFetched")["state"] == last["state"]
        again.until_fact("RunOver")
        assert again.ends() == 0


def test_what_cannot_be_published_or_evaluated_is_told(tmp_path: Path):
    """Before anything is sent."""
    for words, code in (
        (("publish", "s3://me:secret@bucket/x"), "E-PUB-01"),
        (("publish", "ftp://example.org/x"), "E-PUB-02"),
        (("publish", "https://example.org/x"), "E-PUB-02"),
        (("publish", tmp_path / "store", tmp_path, "--once"), "E-VER-12"),
        (("evaluate", tmp_path), "E-VER-12"),
        (("join", "ATOLL1:any", "--state-from", "nowhere://x"), "E-TKT-02"),
    ):
        refused = atoll(*words)
        assert (refused.returncode, refused.stderr[: len(code)]) == (2, code), refused.stderr
        assert "secret" not in refused.stderr
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "latest.json").write_text(json.dumps({"format": "another"}))
    assert "E-PUB-06" in atoll("publish", tmp_path / "store", tmp_path).stderr
