"""A member with a loop over the run's data set, in one process: its peer is a thread of it, so a kill ends both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import atoll

SAMPLES, SHARDS, BATCH = 1000, 20, 8


def train(folder: str, ticket: str, rounds: int, peers: int, tell: Callable[[object], None]) -> None:
    """Tells the samples of every step, before it is taken. Rounds begin when as many `peers` are there."""
    torch.manual_seed(1)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if ticket:
        run = atoll.join(ticket, folder=folder)
    else:
        run = atoll.found(folder=folder, rounds=rounds, inner_steps=4, start_peers=peers)
    with run:
        samples = run.data(list(range(SAMPLES)), shards=SHARDS, seed=3)
        run.attach(model, optimizer, batch=BATCH)
        for batch in DataLoader(samples, batch_size=BATCH):
            tell(batch.tolist())
            model(batch[:, None] / SAMPLES * torch.ones(64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        tell("over")


def live(folder: str, ticket: str, rounds: int, peers: int, pipe) -> None:
    """In a process that was forked after all imports. A founder tells its ticket first."""
    sys.path[:0] = [str(Path(__file__).parent)]
    from loops import start_in_thread

    from atoll.runtime import bootstrap
    from atoll.runtime.embed import run
    from atoll.runtime.embed.peer_channel import PeerChannel

    torch.set_num_threads(1)
    PeerChannel.start = start_in_thread  # type: ignore[method-assign]
    bootstrap.prepare_folder = lambda folder: folder.mkdir(parents=True, exist_ok=True)
    run.print_invitation = lambda ticket, request: pipe.send(ticket)
    train(folder, ticket, rounds, peers, pipe.send)
