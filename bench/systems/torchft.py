"""torchft: a lighthouse agrees on a quorum before each step, gloo averages, every replica asks whether to commit.

All three are timed, because a user needs all three. No encryption. Rank 0's process also runs the lighthouse, so
it must not die. After a failed step the vector is spoilt: where losses are allowed, one is kept to try again.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from systems import Done, Task, vector

PATIENCE = timedelta(seconds=60)
GLOO_PATIENCE = timedelta(
    seconds=5
)  # as in its own example train_ddp.py; who is not next to the dead waits so long


class Torchft:
    def __init__(self, task: Task) -> None:
        self.task, self.x, self.me = task, vector(task), str(task.rank)
        self.least = task.peers - task.losses
        self.where = ""

    def invite(self) -> str:
        if not self.where:
            port = free_port()
            self.where = f"http://127.0.0.1:{port}"
            self.lighthouse = LighthouseServer(
                bind=f"127.0.0.1:{port}", min_replicas=self.least, join_timeout_ms=10_000, quorum_tick_ms=100
            )
        return self.where

    def enter(self, invitation: str) -> None:
        self.where = invitation
        logging.disable(logging.WARNING)
        socket.gethostname = lambda: (
            "localhost"
        )  # what it serves to newcomers is named by the host, unknown in here
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        port = free_port()
        self.store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=GLOO_PATIENCE),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=self.least,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse_addr=invitation,
            replica_id=f"replica-{self.task.rank}",
            hostname="127.0.0.1",
            init_sync=False,
        )

    def average(self) -> Done:
        kept = self.x.clone() if self.task.losses else None
        while True:
            self.manager.start_quorum()
            self.manager.allreduce(self.x).wait()
            if self.manager.should_commit():
                return Done(self.manager.num_participants())
            if kept is None:
                raise RuntimeError(f"torchft did not commit: {self.manager.errored()}")
            self.x.copy_(kept)

    def leave(self) -> None:
        self.manager.shutdown(wait=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
