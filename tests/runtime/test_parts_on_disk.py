"""Combined parts of closed rounds in files of the peer's folder."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.base.machine import Payload
from atoll.crypto.digest import digest
from atoll.peer.tasks import MovePartsToDisk
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.worker.storage_tasks import handlers


def test_parts_keep_their_bytes_and_leave_no_file(tmp_path: Path):
    store = PeerStore(tmp_path)
    datas = [bytes([n]) * (1000 * n) for n in range(4)]  # the first part is empty
    parts = tuple(Payload(digest(data), len(data), memoryview(bytearray(data))) for data in datas)
    with ThreadPoolExecutor(1) as disk:
        move = handlers(store, None, None, disk)[MovePartsToDisk]
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        moved = asyncio.run(move(MovePartsToDisk(parts)))
    assert [bytes(part.data) for part in moved] == datas
    assert [(part.digest, part.size_bytes) for part in moved] == [(part.digest, part.size_bytes) for part in parts]
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files
    store.close()
