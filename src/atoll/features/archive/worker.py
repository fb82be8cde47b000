"""Erasure-coded pieces of states on this disk: cut from a state, or joined to a state or to a lost piece.

Invariants:
- A file gets its name only once it is whole, durable and has the expected digest.
- A blob that this disk damaged is set aside, so that it is fetched from other members.
- Memory stays at some MiB, however large the state is: work goes stripe by stripe.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import BinaryIO

from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer
from atoll.features.archive.policy import PieceSet
from atoll.features.archive.reed_solomon import cut, rebuild
from atoll.peer.tasks import DecodeErasurePieces, EncodeErasurePieces
from atoll.worker.context import BlobStore, Handlers, WorkerContext
from atoll.worker.state_store import MissingStateError, StateStore


def handlers(context: WorkerContext) -> Handlers:
    blobs, hold = context.blobs, context.pins.pin_for_a_while

    async def cut_pieces(work: EncodeErasurePieces) -> PieceSet | None:
        return await context.run_coding_job(cut_state, context.states.store, blobs, work, hold)

    async def rebuild_state(work: DecodeErasurePieces) -> bool:
        return await context.run_coding_job(rebuild_blob, blobs, work, hold)

    return {EncodeErasurePieces: cut_pieces, DecodeErasurePieces: rebuild_state}


def cut_state(
    states: StateStore, store: BlobStore, work: EncodeErasurePieces, hold: Callable[[Digest], None]
) -> PieceSet | None:
    """Write the requested piece and return the names of all; None if the state is not here, byte for byte.

    `hold` gets the piece's name before the piece is on disk, so that no cleanup deletes it.
    """
    piece = store.new_blob()

    def keep(index: int, unit: bytes) -> None:
        if index == work.index:
            piece.write(unit)

    try:
        view = states.view(work.state)
        read: Callable[[int, int], Buffer] = lambda at, count: view[at : at + count]  # noqa: E731
        names = PieceSet(len(view), cut(read, len(view), work.k, work.n, keep))
        hold(names.pieces[work.index])
        piece.finish()
        return names
    except MissingStateError:
        piece.drop()
        return None
    except BaseException:
        piece.drop()
        raise


def rebuild_blob(store: BlobStore, work: DecodeErasurePieces, hold: Callable[[Digest], None]) -> bool:
    """Write the state or the piece. False if a piece is not here, or if the digest is another one.

    `hold` gets the name before the blob is on disk.
    """
    if store.has_blob(work.goal):
        return True
    paths = {index: store.blob_path(name) for index, name in work.pieces}
    if not all(path.exists() for path in paths.values()):
        return False
    made = store.new_blob()
    try:
        with ExitStack() as stack:
            files = {index: stack.enter_context(path.open("rb")) for index, path in paths.items()}
            read: Callable[[int, int, int], bytes] = lambda i, at, count: _at(files[i], at, count)  # noqa: E731
            for data in rebuild(read, list(paths), work.size_bytes, work.k, work.n, work.index):
                made.write(data)
        hold(work.goal)
        if made.finish(work.goal) is not None:
            return True
    except BaseException:
        made.drop()
        raise
    for _, name in work.pieces:
        manifest = store.manifest(name)
        for index in range(len(manifest.chunks)) if manifest is not None else ():
            if store.read_chunk(name, index) is None:  # this disk damaged it after it was checked: it is set aside
                break
    return False


def _at(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    data = file.read(count)
    return data.ljust(count, b"\0")  # a truncated file: its digest will not match
