"""Storage tasks of a training worker, on the disk thread: states, archived rows, pieces and finished blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.peer.tasks import (
    CheckStateStored,
    MovePartsToDisk,
    ReadRow,
    RetainArchivedRows,
    RetainErasurePieces,
    StoreArchivedRows,
)
from atoll.protocol.transfer.tasks import CloseBlob
from atoll.runtime.network.file_memory import file_memory
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.store import PeerStore, run_store_task
from atoll.worker.context import Handlers
from atoll.worker.state_store import StateStore

T = TypeVar("T")


def handlers(store: PeerStore, retention: BlobRetention, states: StateStore, disk: Executor) -> Handlers:
    async def run(job: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(disk, job, *args)

    async def find_state(work: CheckStateStored) -> bool:
        await run(retention.pin_state, work.state)
        return await run(states.is_recoverable, work.state)

    async def hold_pieces(work: RetainErasurePieces) -> tuple[Digest, ...]:
        return await run(retention.retain_pieces, work.pieces, work.whole)

    async def move_parts(work: MovePartsToDisk) -> tuple[Payload, ...]:
        return await run(_in_files, store.folder, work.parts)

    async def keep_rows(work: StoreArchivedRows) -> tuple[Digest, ...]:
        return await run(retention.rows.put, work.rows)

    async def hold_rows(work: RetainArchivedRows) -> tuple[Digest, ...]:
        return await run(retention.rows.hold, work.blobs)

    async def read_row(work: ReadRow) -> Payload | None:
        return await run(retention.rows.read, work.blob, work.digest)

    async def close_blob(work: CloseBlob) -> None:
        await run(run_store_task, store, work)
        retention.pin_for_a_while(work.blob)

    return {
        CheckStateStored: find_state,
        RetainErasurePieces: hold_pieces,
        MovePartsToDisk: move_parts,
        StoreArchivedRows: keep_rows,
        RetainArchivedRows: hold_rows,
        ReadRow: read_row,
        CloseBlob: close_blob,
    }


def _in_files(folder: Path, parts: tuple[Payload, ...]) -> tuple[Payload, ...]:
    """Copies in mapped files without a name. Raises RunFailedError if the disk is full."""
    rest = memoryview(file_memory(folder)(sum(part.size_bytes for part in parts)))
    moved: list[Payload] = []
    for part in parts:
        here, rest = rest[: part.size_bytes], rest[part.size_bytes :]
        here[:] = part.data
        moved.append(Payload(part.digest, part.size_bytes, here.toreadonly()))
    return tuple(moved)
