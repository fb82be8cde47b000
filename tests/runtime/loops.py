"""User loops as the trainers of workers: threads, with the real messages over a socket."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from members import PEERS, Members
from torch import nn

import atoll
from atoll.runtime.embed.attached_trainer import AttachedTrainer
from atoll.runtime.embed.messages import AttachLoopRequest, RunFinishedNotice, RunRequest, mailbox_room_bytes
from atoll.runtime.embed.options import RunOptions
from atoll.runtime.embed.peer_channel import PeerChannel
from atoll.runtime.embed.peer_process import _run_start, serve
from atoll.runtime.embed.run import Run
from atoll.runtime.trainer import TrainerSpec
from atoll.runtime.trainer.protocol import LENGTH
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.runtime.training_spec import RunStart
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.data import batch, load_data
from atoll.training.exchange.layout import flatten, layout_of
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.recipes import Recipe, for_custom_loop

BATCH, SEQ_LEN = 2, 16  # of every step


def found_loop(**wish) -> Run:
    """Found a run; options among the arguments become its `RunOptions`."""
    options = {key: wish.pop(key) for key in list(wish) if key in RunOptions.__dataclass_fields__}
    return atoll.found(**wish, options=RunOptions(**options))


def start_in_thread(channel: PeerChannel, memory: int) -> None:
    """Start the peer of this loop, complete, but as a thread of this process."""
    channel._socket, theirs = socket.socketpair()
    fd, here = theirs.detach(), os.dup(memory)
    os.close(memory)

    def whole() -> None:
        asyncio.run(serve(fd, here))
        os.close(here)

    peer = threading.Thread(target=whole, daemon=True)
    peer.start()
    channel._process = SimpleNamespace(wait=lambda timeout=None: peer.join(timeout) or 0, returncode=0)
    channel._owner_pid = os.getpid()


class ThreadChannel(PeerChannel):
    """Channel to a peer that the test runs in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def start(self, memory: int) -> None:
        self._socket, self.theirs = socket.socketpair()
        self.memory, self._process = os.dup(memory), SimpleNamespace(wait=lambda timeout=0.0: 0, returncode=0)
        self._owner_pid = os.getpid()
        os.close(memory)
        self.begun.set()


class Loop(AttachedTrainer):
    """A PyTorch loop with two lines added, over its share of a book: data and model of the built-in trainer."""

    held_out: Callable[[nn.Module], float] | None = None  # the loss that it measures as a validator

    def __init__(self, book: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.data, self.model, self.steps = load_data(book), build_model("gpt-nano", 0), 0
        self.optimizer, self.channel = make(self.model), ThreadChannel()
        self.run = Run(RunRequest("nowhere", "of the run that the test founds"))
        self.run._channel = self.channel
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self._trains)
        super().__init__(None, None, None)  # type: ignore[arg-type]  # once the loop has attached
        self.layout = layout_of(self.model)

    def _trains(self) -> None:
        try:
            with self.run as run:
                looks = self.held_out and (lambda: self.held_out(self.model))
                run.attach(self.model, self.optimizer, batch=BATCH, validate=looks)
                while not run.done:
                    self.step(self.batch())
                    self.optimizer.zero_grad()
        except BaseException as why:  # told by the test's own thread
            self.failed = why
            self.channel.begun.set()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps += 1
        cursor = (self.steps - 1) * BATCH
        return batch(self.data, self.run.shard_index, self.run.shard_count, cursor, BATCH, SEQ_LEN, 0)

    def step(self, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        loss = loss_of(self.model, found)
        loss.backward()
        self.run.report(loss)
        self.optimizer.step()

    async def start(self, spec: TrainerSpec):
        if self._mailbox is None:
            self.thread.start()
            await asyncio.to_thread(self.channel.begun.wait)
            if self.failed is not None:
                raise self.failed
            self._reader, self._writer = await asyncio.open_connection(sock=self.channel.theirs)
            self._mailbox = SharedMailbox(self.channel.memory, self.layout.floats, mailbox_room_bytes(self.layout))
            os.close(self.channel.memory)
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            await self._reader.readexactly(size)  # its AttachLoopRequest
            self.hearing = asyncio.create_task(self.read_messages())
        return await super().start(spec)

    async def end(self) -> None:
        if self._mailbox is not None:
            self.send(RunFinishedNotice(0))
            await asyncio.to_thread(self.thread.join)
            await self.hearing
            self._writer.close()


class Loops(Members):
    """`make` gives each its optimizer."""

    def __init__(self, base: Path, recipe: Recipe, book: str, make: Callable[[nn.Module], torch.optim.Optimizer]):
        self.make = make
        super().__init__(base, recipe, book)

    async def anew(self, index: int) -> TrainingWorker:
        """The same member with another loop, and a disk that lost what was private."""
        await self.islands[index].close()
        await self.trainers[index].end()
        for ahead in (False, True):
            self.stores[index].private.write(b"", ahead=ahead)
        self.trainers[index] = self.trainer()
        self.islands[index] = self.island(index)
        return self.islands[index]

    def island(self, index: int) -> TrainingWorker:
        self.trainers[index].recipe = self.learning.recipe
        return super().island(index)

    def beginning(self, recipe: Recipe, book: str) -> RunStart:
        model = build_model("gpt-nano", 0)
        layout = layout_of(model)
        request = RunRequest("", recipe=for_custom_loop(recipe), start_peers=PEERS)
        wish = AttachLoopRequest(request, layout, batch=BATCH)
        return _run_start(wish, flatten(model, layout)[0])[0]

    def trainer(self) -> Loop:
        return Loop(self.book, self.make)

    async def close(self) -> None:
        for trainer in self.trainers:
            await trainer.end()
        await super().close()
        for trainer in self.trainers:
            if trainer.failed is not None:
                raise trainer.failed
