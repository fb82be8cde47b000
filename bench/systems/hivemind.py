"""hivemind's DecentralizedAverager: peers find each other in a DHT, form a group per step, and average in parts.

Forming the group is timed, because a user waits for it too. Encrypted (Noise, in the p2pd daemon). The vector lies
in memory shared with the averager's own process, so the bench writes and reads it there.
"""

from __future__ import annotations

import multiprocessing

import hivemind
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

from systems import Done, Task, vector

PATIENCE_S = 60.0
MATCHMAKING_S = 1.0  # the most it waits for the group to fill; the default of 5 s would be slower
CHUNK_S = 5.0  # without a word from a peer before it counts as gone; the default is to wait for ever
CODECS = {"fp32": NoCompression, "fp16": Float16Compression, "int8": Uniform8BitQuantization}
LOCAL = ["/ip4/127.0.0.1/tcp/0"]


class Hivemind:
    def __init__(self, task: Task) -> None:
        multiprocessing.set_start_method("fork", force=True)  # its averager cannot be pickled
        self.task = task
        self.dht: hivemind.DHT | None = None

    def invite(self) -> str:
        if self.dht is None:
            self.dht = hivemind.DHT(host_maddrs=LOCAL, start=True)
        return " ".join(str(address) for address in self.dht.get_visible_maddrs())

    def enter(self, invitation: str) -> None:
        if self.dht is None:
            self.dht = hivemind.DHT(initial_peers=invitation.split(), host_maddrs=LOCAL, start=True)
        self.averager = hivemind.DecentralizedAverager(
            [vector(self.task)],
            self.dht,
            prefix="bench",
            target_group_size=self.task.peers,
            min_group_size=max(2, self.task.peers - self.task.losses),
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=MATCHMAKING_S / 2,
            compression=CODECS[self.task.codec](),
            allreduce_timeout=PATIENCE_S,
            next_chunk_timeout=CHUNK_S if self.task.losses else None,
            start=True,
        )
        self.me = str(self.averager.peer_id)
        with self.averager.get_tensors() as (x,):
            self.x = x

    def average(self) -> Done:
        group = self.averager.step(timeout=PATIENCE_S, allow_retries=True)
        named = tuple(str(peer) for peer in group or ())
        return Done(len(named), named)

    def leave(self) -> None:
        self.averager.shutdown()
        if self.dht is not None:
            self.dht.shutdown()
