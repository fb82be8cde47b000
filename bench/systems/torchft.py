"""torchft: a lighthouse agrees on a quorum before each step, gloo averages, every replica asks whether to commit.

All three are timed, because a user needs all three. No encryption. Rank 0's process also runs the lighthouse.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from systems import Task, vector

PATIENCE = timedelta(seconds=60)


class Torchft:
    def __init__(self, task: Task) -> None:
        self.task, self.x = task, vector(task)

    def invite(self) -> str:
        port = free_port()
        self.lighthouse = LighthouseServer(
            bind=f"127.0.0.1:{port}", min_replicas=self.task.peers, join_timeout_ms=10_000, quorum_tick_ms=100
        )
        return f"http://127.0.0.1:{port}"

    def enter(self, invitation: str) -> None:
        logging.disable(logging.WARNING)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        port = free_port()
        self.store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=self.task.peers,
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

    def average(self) -> None:
        self.manager.start_quorum()
        self.manager.allreduce(self.x).wait()
        if not self.manager.should_commit():
            raise RuntimeError(f"torchft did not commit: {self.manager.errored()}")
        if self.manager.num_participants() != self.task.peers:
            raise RuntimeError(f"torchft averaged {self.manager.num_participants()} of {self.task.peers}")

    def leave(self) -> None:
        self.manager.shutdown(wait=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
