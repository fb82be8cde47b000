"""Atoll's all-reduce group: encrypted, tolerates dead peers, says who counted."""

from __future__ import annotations

import atoll.reduce
from atoll.training.codec.compiled import native
from systems import Done, Task, vector

PATIENCE_S = 60.0
REMEMBERED = "remembered"


class Atoll:
    def __init__(self, task: Task) -> None:
        self.task, self.x = task, vector(task)
        self.group: atoll.reduce.Group | None = None
        self.owed = atoll.reduce.ErrorFeedback() if task.way_back == REMEMBERED else None

    def invite(self) -> str:
        if self.group is None:
            rules = self.task.system.partition("+")[2] or "mean+private"
            statistic, _, trust = rules.rpartition("+")  # a statistic may have one, too
            remembers = self.task.way_back == REMEMBERED
            self.group = atoll.reduce.found(
                peers=self.task.peers,
                codec=self.task.codec,
                topology=self.task.topology,
                timeout_s=PATIENCE_S,
                statistic=statistic,
                trust=trust,
                options=atoll.reduce.ReduceOptions(
                    way_back="" if remembers else self.task.way_back, remembered=remembers
                ),
            )
        return self.group.ticket

    def enter(self, invitation: str) -> None:
        if self.group is None:
            self.group = atoll.reduce.join(invitation)
        self.me = str(self.group.me)
        native.load()  # or the first large call would begin to, beside whatever is being measured

    def average(self) -> Done:
        done = self.group.all_reduce([self.x], error_feedback=self.owed)
        named = tuple(str(peer) for peer in done.contributors)
        parts = tuple((lo, hi, tuple(str(peer) for peer in names)) for (lo, hi), names in done.parts if hi > lo)
        return Done(len(named), named, tuple(str(peer) for peer in done.partly), parts)

    def leave(self) -> None:
        self.group.close()
