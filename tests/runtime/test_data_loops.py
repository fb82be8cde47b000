"""Loops that read the run's data set, with their peers in threads: overlap, early ends, and what is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import found_loop
from msgspec import UNSET
from test_data_kills import bodies_of, counted_in
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.base.errors import AtollError
from atoll.runtime.embed.messages import RunRequest
from atoll.runtime.embed.run import Run
from atoll.training.recipe.methods import pipelined, streaming

pytestmark = [pytest.mark.net]
SAMPLES = list(range(1000))


def train(run: atoll.Run, samples: list[int], stop: threading.Event | None = None) -> list[int]:
    """Reads until the run is over or is to stop; returns the samples of all steps."""
    model, found = nn.Linear(64, 64), list[int]()
    with run:
        data = run.data(samples, shards=20, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.attach(model, optimizer, batch=8)
        for batch in DataLoader(data, batch_size=8):
            model(batch[:, None] / 1000 * torch.ones(64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found += batch.tolist()
            if stop is not None and stop.is_set():
                break
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": streaming(rounds=4, inner_steps=6, fragments=1, overlap=2)},
        {"recipe": pipelined(rounds=8)},
        {"rounds": 6, "inner_steps": 30},
    ],
    ids=["overlap", "pipelined", "used up in the middle of a round"],
)
def test_no_sample_counts_twice_however_rounds_overlap(
    tmp_path: Path, peers_in_threads: None, options: dict[str, Any]
):
    """Steps that were taken ahead belong to the next round; a loop without a shard hands over what it has."""
    read = train(found_loop(folder=tmp_path / "one", **options), SAMPLES)
    bodies = bodies_of(tmp_path / "one")
    seen, data = counted_in(bodies), bodies[-1].data
    assert data is not UNSET and (data.dropped, data.repeated) == (0, 0) and set(seen.values()) == {1}
    assert len(read) >= data.counted >= 8 * bodies[-1].trained


def test_a_loop_with_another_data_set_is_refused_and_leaves(tmp_path: Path, peers_in_threads: None):
    """The first counted claims name the run's data. The other loop says farewell, so the founder goes on alone."""
    founder, stop = found_loop(folder=tmp_path / "one", rounds=10**6, inner_steps=4), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(train, founder, SAMPLES, stop)
        try:
            while founder.trained < 2 and not end.done():
                wait([end], 0.02)
            with pytest.raises(AtollError, match=r"E-DATA-07 .*reads the data set"):
                train(atoll.join(founder.ticket, folder=tmp_path / "two"), SAMPLES[:999])
        finally:
            stop.set()
        assert len(end.result()) > 8


def test_what_cannot_be_read_is_told_before_anything_starts():
    run = Run(RunRequest("nowhere"))
    for wrong, told in (([], "empty"), (iter([1]), "beginning"), ("no/such/file", "no data at")):
        with pytest.raises(atoll.UsageError, match=rf"E-DATA-02 run.data: .*{told}"):
            run.data(wrong)
    with pytest.raises(atoll.UsageError, match=r"E-ATT-05 .*before run.attach"):
        next(iter(run.data(SAMPLES)))
