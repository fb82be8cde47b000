"""Real runs of models that fill less than a part for each member."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from loops import found_loop
from torch import Tensor, nn

import atoll
from atoll.training.recipe.methods import sparseloco


def trained(run: atoll.Run, inputs: int, seed: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(inputs, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(seed)
    with run:
        run.attach(model, optimizer, validate=lambda: float(model.weight.square().sum()))
        while not run.done:
            x = torch.randn(8, inputs, generator=draws)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            run.report(loss)
            optimizer.step()
    return [model.weight.detach(), torch.tensor(run.trained)]


@pytest.mark.parametrize(
    ("inputs", "peers", "wish"),
    [
        (1, 3, {"rounds": 3, "inner_steps": 2}),
        (3, 2, {"recipe": sparseloco(rounds=3, inner_steps=2)}),
        (2, 4, {"rounds": 3, "inner_steps": 2, "trust": "community"}),
    ],
    ids=["one value", "clipped and gathered", "openings and distances"],
)
def test_members_train_a_model_of_a_few_values(
    tmp_path: Path,
    peers_in_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    inputs: int,
    peers: int,
    wish: dict,
):
    """Most owners own an empty part, and all end with the same bits. Below 4,096 values a run was refused once.

    Where `atoll.local` starts all members, no ticket is shown.
    """
    monkeypatch.setenv("ATOLL_TICKET_USES", str(peers))
    founder = found_loop(folder=tmp_path / "0", start_peers=peers, **wish)
    with ThreadPoolExecutor(peers) as pool:
        ends = [pool.submit(trained, founder, inputs, 0)]
        while not founder.ticket and not ends[0].done():
            wait(ends, 0.02)
        for k in range(1, peers):
            ends.append(pool.submit(trained, atoll.join(founder.ticket, folder=tmp_path / str(k)), inputs, k))
        first, *others = [end.result() for end in ends]
    assert int(first[1]) == 3
    assert "others join with" not in capsys.readouterr().out
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(first, other, strict=True))
