"""Plain TCP round a ring: no mean at all, only the bytes that an all-reduce of fp32 cannot avoid.

Each peer sends 2(n−1)/n of its vector's bytes to the next and takes as many from the one before, both at once
(Patarasuk & Yuan 2009, Theorem 1: the least any all-reduce sends per process). Its time is the bound that the
other systems' times are divided by.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from torch.distributed import FileStore

from systems import Done, Task, vector

READ_BYTES = 2**20  # the received bytes go nowhere: a buffer that stays in a core's cache is the cheapest place


class Tcp:
    def __init__(self, task: Task) -> None:
        self.task, self.x, self.me = task, vector(task), str(task.rank)
        self.bytes = 2 * (task.peers - 1) * self.x.nbytes // task.peers

    def invite(self) -> str:
        return str(Path(self.task.folder) / "store")

    def enter(self, invitation: str) -> None:
        rank, peers = self.task.rank, self.task.peers
        store = FileStore(invitation, peers)
        server = socket.create_server(("127.0.0.1", 0))
        store.set(str(rank), str(server.getsockname()[1]))
        self.next = socket.create_connection(("127.0.0.1", int(store.get(str((rank + 1) % peers)))))
        self.last, _ = server.accept()
        server.close()

    def average(self) -> Done:
        taking = threading.Thread(target=self._take)
        taking.start()
        left, view = self.bytes, memoryview(self.x.numpy()).cast("B")
        while left > 0:
            self.next.sendall(view[: min(left, len(view))])
            left -= len(view)
        taking.join()
        return Done(self.task.peers)

    def _take(self) -> None:
        left, buffer = self.bytes, memoryview(bytearray(READ_BYTES))
        while left > 0:
            got = self.last.recv_into(buffer, min(left, READ_BYTES))
            if got == 0:
                return  # the coordinator ends the group
            left -= got

    def leave(self) -> None:
        self.next.close()
        self.last.close()
