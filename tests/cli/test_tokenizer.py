"""A run over tokens: its founder has the tokenizer, every member who takes the model is given it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import Peer, answer_of, atoll, peers

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

WORDS = (
    "run.rounds=0",
    "run.start_peers=2",
    "model.name=gpt:d=32,l=1,h=2,t=16,v=40",
    "train.batch=2",
    "train.inner_steps=6",
)


def test_members_and_visitors_are_given_the_tokenizer(tmp_path: Path):
    """Ada has records and a tokenizer of 34 words; Bob has neither, trains with her and exports both, as does a
    visitor. A model that knows too few tokens is refused before anything begins."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(34)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    texts = [" ".join(f"w{(i * j) % 34}" for j in range(40)) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    (tmp_path / "run.toml").write_text(
        '[data]\nsource = "a.jsonl"\ncolumn = "body"\ntokenizer = "tokenizer.json"\n'  # beside the file
    )
    ada, bob, words = tmp_path / "ada", tmp_path / "bob", [w for word in WORDS for w in ("--set", word)]
    few = atoll(
        "up",
        tmp_path / "run.toml",
        "--dir",
        tmp_path / "few",
        *words,
        "--set",
        "model.name=gpt:d=32,l=1,h=2,t=16,v=20",
    )
    assert few.returncode == 2 and "E-RUN-13" in few.stderr and "v=34" in few.stderr
    with peers(Peer("up", tmp_path / "run.toml", "--dir", ada, *words)) as running:
        ticket = running[0].until_fact("Opened")["ticket"]
        running.append(Peer("join", ticket, "--dir", bob))
        running[0].trained_with(2)
        answer_of("checkpoint", "pull", ticket, "--to", tmp_path / "pulled")
        newest = answer_of("checkpoint", "list", bob)[-1]["round"]
        answer_of("checkpoint", "export", str(newest), tmp_path / "exported", bob, "--hf")
    for folder in ("pulled", "exported"):
        assert (tmp_path / folder / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
