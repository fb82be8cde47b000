"""Atoll's all-reduce group: encrypted, tolerates dead peers, says who counted."""

from __future__ import annotations

import atoll.reduce

from systems import Task, vector

PATIENCE_S = 60.0


class Atoll:
    def __init__(self, task: Task) -> None:
        self.task, self.x = task, vector(task)

    def invite(self) -> str:
        self.group = atoll.reduce.found(
            peers=self.task.peers, codec=self.task.codec, topology=self.task.topology, timeout_s=PATIENCE_S
        )
        return self.group.ticket

    def enter(self, invitation: str) -> None:
        if self.task.rank != 0:
            self.group = atoll.reduce.join(invitation)

    def average(self) -> None:
        done = self.group.all_reduce([self.x])
        if done.missing or done.partly or len(done.contributors) != self.task.peers:
            raise RuntimeError(f"atoll averaged {len(done.contributors)} of {self.task.peers}: {done}")

    def leave(self) -> None:
        self.group.close()
