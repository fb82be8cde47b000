"""Storage tasks of a training worker, on the disk thread: states, archived rows, pieces and finished blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.peer.tasks import FindState, HoldPieces, HoldRows, KeepRows, ReadRow
from atoll.protocol.transfer.tasks import CloseBlob
from atoll.runtime.storage.state_cache import StateCache
from atoll.runtime.storage.store import PeerStore, stored
from atoll.worker.context import Handlers

T = TypeVar("T")


def handlers(store: PeerStore, shelf: StateCache, disk: Executor) -> Handlers:
    async def run(job: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(disk, job, *args)

    async def find_state(work: FindState) -> bool:
        return await run(shelf.look_for, work.state)

    async def hold_pieces(work: HoldPieces) -> tuple[Digest, ...]:
        return await run(shelf.hold_pieces, work.pieces, work.whole)

    async def keep_rows(work: KeepRows) -> tuple[Digest, ...]:
        return await run(shelf.rows.put, work.rows)

    async def hold_rows(work: HoldRows) -> tuple[Digest, ...]:
        return await run(shelf.rows.hold, work.blobs)

    async def read_row(work: ReadRow) -> Payload | None:
        return await run(shelf.rows.read, work.blob, work.digest)

    async def close_blob(work: CloseBlob) -> None:
        await run(stored, store, work)
        shelf.hold_a_while(work.blob)

    return {
        FindState: find_state,
        HoldPieces: hold_pieces,
        KeepRows: keep_rows,
        HoldRows: hold_rows,
        ReadRow: read_row,
        CloseBlob: close_blob,
    }
