"""WorkerContext: what the worker of a capability gets from the runtime, without importing it.

A capability offers `handlers(context, …)`: for each type of task one async function. The runtime builds the
context and merges these tables (`runtime/worker/capabilities.py`).
Not responsible for: choosing which capabilities a run has (genesis does), scheduling rounds (peer/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.crypto.digest import BlobManifest, Buffer
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState
from atoll.training.spec import TrainingSpec
from atoll.worker.shared_states import AgreedStateCache
from atoll.worker.trainer_commands import ContinueMeasurement, Look, LossesMeasured, TrainerCommandError

Handler = Callable[[Any], Awaitable[Any]]
"""Carries out one type of task and returns its answer. Raises AtollError, PeerFault or OSError."""
Handlers = Mapping[type, Handler]

T = TypeVar("T")


class BlobWriter(Protocol):
    """A blob that is written piece by piece and gets its name at the end."""

    def write(self, data: Buffer) -> None: ...
    def finish(self, goal: Digest | None = None) -> Digest | None: ...
    def drop(self) -> None: ...


class BlobStore(Protocol):
    """Blobs on this peer's disk by their digest."""

    @property
    def folder(self) -> Path: ...
    def has_blob(self, name: Digest) -> bool: ...
    def blob_path(self, name: Digest) -> Path: ...
    def read_blob(self, name: Digest) -> memoryview | None: ...
    def read_chunk(self, name: Digest, index: int) -> Payload | None: ...
    def manifest(self, name: Digest) -> BlobManifest | None: ...
    def put_blob(self, *pieces: Buffer) -> Digest: ...
    def new_blob(self) -> BlobWriter: ...
    def blobs_within(self, names: Sequence[Digest], bytes_max: int) -> set[Digest]: ...


class BlobPins(Protocol):
    """Blobs that stay on disk for a while, until a vertex or another part names them."""

    def put_blob(self, data: bytes) -> Digest: ...
    def pin_for_a_while(self, name: Digest) -> None: ...


class TrainedSteps(Protocol):
    """What a trainer answers to `train`."""

    @property
    def steps(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def seconds(self) -> float: ...


class Trainer(Protocol):
    """A trainer process, or the user's own loop behind the same interface. F: values of the exchanged vector."""

    async def train(
        self,
        steps: int,
        *,
        cursor: int,
        shard: int,
        shards: int,
        global_step: int,
        until: float | None = None,
        apart: bool = False,
    ) -> TrainedSteps: ...
    async def validate(self, work: Look | ContinueMeasurement, of_F: Tensor | None = None) -> LossesMeasured: ...
    def made(self) -> Tensor: ...
    def cancel(self) -> None: ...
    def read_x(self) -> Tensor: ...
    async def write_x(self, x_F: Tensor, counters: tuple[int, ...] = ()) -> None: ...


class TrainerAccess(Protocol):
    """The trainer and the locks under which it is used."""

    turn: asyncio.Lock  # held for every command
    looking: asyncio.Lock  # held for a whole loss measurement, batch by batch
    ready: bool  # the trainer runs and holds the live parameters
    lives: int  # times that it was started

    @property
    def trainer(self) -> Trainer: ...
    async def equipped(self) -> None: ...
    async def failed(self, why: TrainerCommandError) -> None: ...
    def rates(self, recipe: Recipe) -> dict[str, Any]: ...


@dataclass(frozen=True)
class WorkerContext:
    """The runtime's side of a capability's worker."""

    spec_of: Callable[[int], TrainingSpec]  # round -> spec with the numbers that hold in it
    genesis_spec: Callable[[], TrainingSpec]  # RunFailedError until genesis is known
    blobs: BlobStore
    pins: BlobPins
    states: AgreedStateCache
    trainer: TrainerAccess
    start_trainer: Callable[[], Awaitable[None]]  # makes the trainer ready; called within its turn
    wire_digest: Callable[[Buffer], Digest]  # name of an update's wire in commitments
    tensor_thread: Executor
    coding_thread: Executor  # jobs of seconds for which no round waits

    async def run_tensor_job(self, job: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.tensor_thread, job, *args)

    async def run_coding_job(self, job: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.coding_thread, job, *args)

    async def find_state(self, name: Digest, spec: TrainingSpec) -> SharedState | None:
        """The state of this name; None if it is not on this disk."""
        return await self.run_tensor_job(self.states.find, name, spec.layout)
