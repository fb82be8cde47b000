"""Adapters over a frozen base in the user's own loop: what travels, who is refused."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.cli.main import main
from atoll.training.exchange.layout import base_digest, layout_of

pytestmark = [pytest.mark.net]


class Lora(nn.Module):
    def __init__(self, inner: nn.Linear, rank: int = 32) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.lora_a.T @ self.lora_b.T


def network(own_seed: int) -> nn.Sequential:
    torch.manual_seed(0)  # the base that everybody has
    norm = nn.BatchNorm1d(128).requires_grad_(False).eval()
    layers = [nn.Linear(64, 128), norm, nn.ReLU(), nn.Linear(128, 4)]
    torch.manual_seed(own_seed)  # adapters of one's own, until the agreed ones come
    return nn.Sequential(Lora(layers[0]), *layers[1:3], Lora(layers[3]))


def sums(model: nn.Module) -> tuple[float, float]:
    """Of what is trained, and of the base."""
    split = {True: 0.0, False: 0.0}
    for p in model.parameters():
        split[p.requires_grad] += float(p.detach().double().abs().sum())
    return split[True], split[False]


def adapters_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(16, 64)
    nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def typed(*words: str) -> str:
    """What a command prints, in this process, which has imported torch already."""
    with redirect_stdout(io.StringIO()) as told, pytest.raises(SystemExit) as ended:
        main(list(words))
    assert not ended.value.code
    return told.getvalue()


def test_adapters_travel_and_the_base_stays(tmp_path: Path, peers_in_threads: None):
    """A founder trains adapters. Who comes with another base is refused by the tensor's name; who comes with the
    same one is given the adapters. Then the founder unfreezes its base: it is told. Only adapters are exported."""
    model, other, same = network(1), network(7), network(7)
    other[0].inner.weight.data[3, 5] += 0.5
    own, base = sums(same)
    until = time.monotonic() + 150  # only a failing test waits so long
    with atoll.found(folder=tmp_path / "one", inner_steps=4) as run, ThreadPoolExecutor(1) as pool:
        run.attach(model, optimizer := adapters_of(model))
        assert run.exchanged == 32 * (64 + 128) + 32 * (128 + 4) and len(run.base) == 64
        with pytest.raises(atoll.AtollError, match="E-ATT-07") as refused:  # the run needs no step to refuse
            atoll.join(run.ticket, folder=tmp_path / "other").attach(other, adapters_of(other))
        assert "base 0.inner.weight [128, 64] has other values here than there" in str(refused.value)
        with atoll.join(run.ticket, folder=tmp_path / "same") as joined:
            here = pool.submit(joined.attach, same, adapters_of(same))
            while not here.done():
                step(model, optimizer)
                assert time.monotonic() < until
            here.result()
            given, their_base = sums(same)
            assert their_base == base == sums(model)[1] and joined.base == run.base
            assert given != own, "the run's adapters, not its own"
        model[3].inner.requires_grad_(True)
        with pytest.raises(atoll.UsageError, match=r"E-ATT-06 3\.inner\.weight.*requires_grad changed"):
            while time.monotonic() < until:
                step(model, optimizer)

    listed = typed("checkpoint", "list", str(tmp_path / "one"), "--json")
    newest = str(max(row["round"] for row in json.loads(listed) if row["size_bytes"]))
    typed("checkpoint", "export", newest, str(tmp_path / "out"), str(tmp_path / "one"), "--hf")
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
