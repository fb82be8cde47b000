"""Agreed states of a run, as Python code gets them: own models are evaluated and published, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.cli.plot import evaluations_of
from atoll.cli.status import status
from atoll.cli.stored.evaluate import evaluate
from atoll.cli.stored.publish import publish


def test_a_loops_states_are_loaded_reported_and_published(
    tmp_path: Path, peers_in_threads: None, capsys: pytest.CaptureFixture[str]
):
    """The loop trains two rounds; another program may read beside it, and reads after it ended."""
    torch.manual_seed(1)
    model, folder, seen = nn.Linear(8, 1), tmp_path / "run", list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.found(folder=folder, rounds=2, inner_steps=2) as run:
        run.attach(model, optimizer)
        while not run.done:
            seen += [found.round for found in atoll.checkpoints(folder, once=True)]
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
    assert seen[0] == -1
    (last,) = atoll.checkpoints(folder)
    other = nn.Linear(8, 1)
    last.load_into(other)
    assert torch.equal(other.weight, model.weight) and torch.equal(last.tensors()["bias"], model.bias)
    last.report(loss=other(torch.ones(4, 8)).square().mean(), text="a\nb")
    assert [trained for trained, _ in evaluations_of(folder / "facts.jsonl")] == [2]
    capsys.readouterr()
    status(folder, json=True)
    found = json.loads(capsys.readouterr().out)["evaluated"]
    assert (found["trained"], found["state"], found["text"], found["accuracy"]) == (2, last.state, "a b", None)
    with pytest.raises(atoll.UsageError, match="E-EVA-05"):
        last.load_into(nn.Linear(4, 1))
    with pytest.raises(atoll.UsageError, match="E-EVA-06"):
        last.report(loss=torch.ones(2))
    with pytest.raises(atoll.UsageError, match=r"(?s)E-EVA-01 .*help\(atoll.checkpoints\)"):
        evaluate(folder)
    publish(str(tmp_path / "store"), folder)
    (model_file,) = (tmp_path / "store").rglob("model.safetensors")
    assert torch.equal(load_file(model_file)["weight"], model.weight)


def test_a_folder_without_a_run_has_no_checkpoints(tmp_path: Path):
    with pytest.raises(atoll.UsageError, match="E-VER-12"):
        next(atoll.checkpoints(tmp_path))
