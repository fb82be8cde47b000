"""hivemind's DecentralizedAverager: peers find each other in a DHT, form a group per step, and average in parts.

Forming the group is timed, because a user waits for it too. Encrypted (Noise, in the p2pd daemon). The vector lies
in memory shared with the averager's own process, so the bench writes and reads it there.
"""

from __future__ import annotations

import multiprocessing

import hivemind
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

from systems import Task, vector

PATIENCE_S = 60.0
MATCHMAKING_S = 1.0  # the most it waits for the group to fill; the default of 5 s would be slower
CODECS = {"fp32": NoCompression, "fp16": Float16Compression, "int8": Uniform8BitQuantization}
LOCAL = ["/ip4/127.0.0.1/tcp/0"]


class Hivemind:
    def __init__(self, task: Task) -> None:
        multiprocessing.set_start_method("fork", force=True)  # its averager cannot be pickled
        self.task = task

    def invite(self) -> str:
        self.root = hivemind.DHT(host_maddrs=LOCAL, start=True)
        return " ".join(str(address) for address in self.root.get_visible_maddrs())

    def enter(self, invitation: str) -> None:
        self.dht = hivemind.DHT(initial_peers=invitation.split(), host_maddrs=LOCAL, start=True)
        self.averager = hivemind.DecentralizedAverager(
            [vector(self.task)],
            self.dht,
            prefix="bench",
            target_group_size=self.task.peers,
            min_group_size=self.task.peers,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=MATCHMAKING_S / 2,
            compression=CODECS[self.task.codec](),
            allreduce_timeout=PATIENCE_S,
            start=True,
        )
        with self.averager.get_tensors() as (x,):
            self.x = x

    def average(self) -> None:
        group = self.averager.step(timeout=PATIENCE_S, allow_retries=True)
        if group is None or len(group) != self.task.peers:
            raise RuntimeError(f"hivemind averaged {len(group or ())} of {self.task.peers}")

    def leave(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()
        if self.task.rank == 0:
            self.root.shutdown()
