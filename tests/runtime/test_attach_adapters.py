"""Adapters over a frozen base in the user's own loop, in real processes: what travels, who is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.training.exchange.layout import base_digest, layout_of

pytestmark = [pytest.mark.net]

MODEL = """
import json, os, sys, torch, atoll
from torch import nn

class Lora(nn.Module):
    def __init__(self, inner, rank=32):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x):
        return self.inner(x) + x @ self.lora_a.T @ self.lora_b.T

def network(own_seed):
    torch.manual_seed(0)  # the base that everybody has
    norm = nn.BatchNorm1d(128).requires_grad_(False).eval()
    layers = [nn.Linear(64, 128), norm, nn.ReLU(), nn.Linear(128, 4)]
    torch.manual_seed(own_seed)  # adapters of one's own, until the agreed ones come
    return nn.Sequential(Lora(layers[0]), *layers[1:3], Lora(layers[3]))

def sums(model):
    split = {True: 0.0, False: 0.0}
    for p in model.parameters():
        split[p.requires_grad] += float(p.detach().double().abs().sum())
    return split[True], split[False]
"""
JOINER = """
torch.set_num_threads(1)
model = network(7)
model[0].inner.weight.data[3, 5] += float(sys.argv[3])
run = atoll.join(sys.argv[1], folder=sys.argv[2])
before = sums(model)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
print("here", flush=True)
run.attach(model, optimizer)
with open(sys.argv[2] + ".part", "w") as told:
    json.dump({"before": before, "after": sums(model), "base": run.base}, told)
os.rename(sys.argv[2] + ".part", sys.argv[2] + ".json")
while True:
    x = torch.randn(16, 64)
    nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(16, 64)
    nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_adapters_travel_and_the_base_stays(tmp_path: Path, peers_in_threads: None):
    """A founder trains adapters. Who comes with another base is refused by the tensor's name; who comes with the
    same one is given the adapters. Then the founder unfreezes its base: it is told. Only adapters are exported."""
    own: dict[str, object] = {}
    exec(MODEL, own)
    model: nn.Module = own["network"](1)  # type: ignore[operator]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with atoll.found(folder=tmp_path / "one", inner_steps=4) as run:
        run.attach(model, optimizer)
        base = own["sums"](model)[1]  # type: ignore[operator]
        assert run.exchanged == 32 * (64 + 128) + 32 * (128 + 4) and len(run.base) == 64

        def joiner(name: str, change: float) -> subprocess.Popen[str]:
            words = [sys.executable, "-c", MODEL + JOINER, run.ticket, str(tmp_path / name), str(change)]
            return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        other, same, told = joiner("other", 0.5), joiner("same", 0.0), tmp_path / "same.json"
        until = time.monotonic() + 150  # only a failing test waits so long
        try:
            refused = other.communicate(timeout=120)[1]  # the run needs no step to refuse
            assert same.stdout is not None and same.stdout.readline() == "here\n"
            while not told.exists():
                step(model, optimizer)
                assert time.monotonic() < until and same.poll() is None
            model[3].inner.requires_grad_(True)
            with pytest.raises(atoll.UsageError, match=r"E-ATT-06 3\.inner\.weight.*requires_grad changed"):
                while time.monotonic() < until:
                    step(model, optimizer)
        finally:
            same.kill()
            other.kill()
            same.communicate()
            other.communicate()
    assert other.returncode == 1 and "E-ATT-07" in refused
    assert "base 0.inner.weight [128, 64] has other values here than there" in refused
    given = json.loads(told.read_text())
    assert given["after"][1] == given["before"][1] == base and given["base"] == run.base
    assert given["after"][0] != given["before"][0], "the run's adapters, not its own"

    checkpoint = [sys.executable, "-m", "atoll", "checkpoint"]
    listed = subprocess.run([*checkpoint, "list", str(tmp_path / "one"), "--json"], capture_output=True, check=True)
    newest = str(max(row["round"] for row in json.loads(listed.stdout) if row["size_bytes"]))
    subprocess.run([*checkpoint, "export", newest, tmp_path / "out", tmp_path / "one", "--hf"], check=True)
    adapters = load_file(tmp_path / "out" / "adapters.safetensors")
    assert sorted(adapters) == [f"{at}.lora_{ab}" for at in (0, 3) for ab in "ab"]
    assert base_digest(layout_of(model, only=list(adapters))).hex() == run.base
    assert "not a model" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "base.json").read_text())["base"] == run.base


def test_what_cannot_be_meant_is_said_before_anything_is_started(tmp_path: Path):
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4))
    run = atoll.found(folder=tmp_path / "one")
    with pytest.raises(atoll.UsageError, match=r"E-ATT-05 only=\['head.\*'\]: no parameter"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), only=["head.*"])
    with pytest.raises(atoll.UsageError, match=r"E-ATT-05 the optimizer trains 0\.weight, 0\.bias, which"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), only=["1.*"])
    assert not (tmp_path / "one").exists()
