"""A whole training script of somebody's own. Imports no more than such a script does: processes run it, too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
from torch import nn

import atoll


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 4))


class Draws(torch.utils.data.IterableDataset):
    def __init__(self, run: atoll.Run) -> None:
        self.run = run

    def __iter__(self) -> Iterator[torch.Tensor]:
        draw = torch.Generator().manual_seed(self.run.shard_index)
        while True:
            yield torch.randn(16, 64, generator=draw)


def train(run: atoll.Run, model: nn.Module, forks: bool = False, leaves: bool = False, where: str = "cpu") -> dict:
    """A whole training script: a scheduler, accumulated gradients, and a GradScaler that skips every fifth step."""
    optimizer = torch.optim.AdamW(model.to(where).parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scaler = torch.amp.GradScaler(where, init_scale=2.0**4)
    first = list(model.parameters())
    run.attach(model, optimizer, batch=32)
    if forks and not os.fork():
        sys.exit()  # which is no farewell
    batches = iter(torch.utils.data.DataLoader(Draws(run), batch_size=None, num_workers=int(forks)))
    skipped = steps = 0
    while not run.done and not (leaves and run.trained):
        for _ in range(2):  # gradient accumulation: two backward passes, one step
            x = next(batches).to(where)
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
            scaler.scale(loss).backward()
        if steps % 5 == 3:
            next(model.parameters()).grad.fill_(float("inf"))  # this step must not be counted
            skipped += 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        run.report(loss.item())
        steps += 1
    total = float(sum(p.detach().double().sum() for p in model.parameters()))
    end = {"total": total, "trained": run.trained, "members": run.members, "skipped": skipped, "steps": steps}
    return end | {"same_objects": all(a is b for a, b in zip(first, model.parameters(), strict=True))}
