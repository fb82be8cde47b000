"""torch.distributed's gloo: what PyTorch itself uses on CPUs; no encryption, and one dead peer ends the group."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from systems import Done, Task, vector


class Gloo:
    def __init__(self, task: Task) -> None:
        self.task, self.x, self.me = task, vector(task), str(task.rank)

    def invite(self) -> str:
        return str(Path(self.task.folder) / "store")

    def enter(self, invitation: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(invitation, self.task.peers)
        dist.init_process_group("gloo", store=store, rank=self.task.rank, world_size=self.task.peers)

    def average(self) -> Done:
        dist.all_reduce(self.x)
        self.x /= self.task.peers
        return Done(self.task.peers)

    def leave(self) -> None:
        dist.destroy_process_group()
