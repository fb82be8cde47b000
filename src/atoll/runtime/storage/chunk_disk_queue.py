"""Chunk pipeline between disk and network, without a thread, a wake-up or fresh memory per chunk.

Arriving chunks: a thread hashes each one and, if a download contains it, writes it while it is in the core's cache.
The manifest proves the chunk, so the machine learns of it afterwards. If the thread falls behind, the event loop
does the same with further chunks, so that a kill loses few bytes.

Requested chunks: most are in the system's page cache. A chunk hashed before (`ChunkVerificationCache`) stays there
until it is encrypted; any other is copied and checked on the loop, one per turn. Reads from disk use the thread.

Invariants:
- Every piece of work gets one reply, from the loop, never inside the call that requested it.
- Only bytes that a manifest names are written.
- At most `ARRIVING_MAX` unchecked chunks wait. Before more is read from the network, further ones are hashed, and
  written unless the disk is behind.
- The loop is held for at most one chunk in memory (0.5 ms). It waits for the disk only if memory was reclaimed in
  between, or if the system blocks writers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from atoll.base.ids import ZERO_DIGEST
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import Payload
from atoll.crypto.digest import Buffer, digest
from atoll.protocol.transfer.tasks import ReadChunk, StoreChunk
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.storage.store import NotInMemory, PeerStore
from atoll.runtime.storage.verified_chunks import PartialBlob
from atoll.wire.messages.history import ChunkResponse

ARRIVING_MAX = 2  # chunks of 1 MiB that wait for the thread; a kill loses them
AT_ONCE = 4  # chunks per turn of the thread; afterwards their memory is free and the machine is notified

Answer = Callable[[Any], None]  # called with the result or the exception


class AlreadyWrittenChunk(NamedTuple):
    """Stands for a chunk in the file of `opening`, as long as that download is current."""

    data: Buffer
    opening: PartialBlob


class ArrivingChunk(NamedTuple):
    chunk: ChunkResponse
    data: memoryview
    then: Callable[[Payload], None]


class ChunkDiskQueue:
    """Takes, stores and reads chunks for one peer. Used from one running loop."""

    def __init__(self, store: PeerStore, memory: Callable[[int], memoryview] | None = None) -> None:
        """`memory` allocates the buffers of chunks that are read."""
        self._store, self._memory = store, memory or BufferPool()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "chunks")
        self._arriving: deque[ArrivingChunk] = deque()
        self._to_read: deque[tuple[ReadChunk, Answer]] = deque()
        self._lock = Lock()  # guards state shared by the thread and the loop
        self._landing = self._closing = False

    def receive_chunk(self, chunk: ChunkResponse, data: memoryview, then: Callable[[Payload], None]) -> None:
        """Process an unchecked chunk; `then` is called with its bytes and digest."""
        if len(data) > BLOB_CHUNK:  # longer than any chunk; a frame may be 64 times as long
            then(Payload(ZERO_DIGEST, len(data), b""))
            return
        with self._lock:
            waits = len(self._arriving) < ARRIVING_MAX
            if waits:
                self._arriving.append(ArrivingChunk(chunk, data, then))
            begins = waits and not self._landing
            self._landing |= begins
        if begins:
            self._thread.submit(self._land_some)
        elif not waits and self._store.unfinished.is_behind(chunk.blob):
            then(Payload(digest(data), len(data), data))  # stored by a later task
        elif not waits:
            then(self._land(chunk, data))

    def run(self, work: StoreChunk | ReadChunk, answer: Answer) -> None:
        if isinstance(work, ReadChunk):
            self._to_read.append((work, answer))
            if len(self._to_read) == 1:
                self._loop.call_soon(self._read_one)
            return
        data = work.payload.data
        if not isinstance(data, AlreadyWrittenChunk):
            self._off_the_loop(self._store_one, (work, data), answer)
        elif data.opening is self._store.unfinished.opening(work.blob):
            self._loop.call_soon(self._then, answer, None)
        else:  # its file was replaced or removed
            self._off_the_loop(self._store_one, (work, data.data), answer)

    def close(self) -> None:
        """Finish started work and send no further reply."""
        self._closing = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---- to disk -------------------------------------------------------------------------------------------

    def _land_some(self) -> None:
        """One turn of the thread; schedules the next while chunks wait."""
        landed: list[tuple[Callable[[Payload], None], Payload]] = []
        more = False
        for _ in range(AT_ONCE):
            with self._lock:
                more = self._landing = bool(self._arriving)
                if not more:
                    break
                chunk, data, then = self._arriving.popleft()
            self._store.unfinished.catch_up(chunk.blob)
            landed.append((then, self._land(chunk, data)))
        if more:
            self._thread.submit(self._land_some)
        if not self._closing:  # `close` waits for the thread, then the loop may end
            self._loop.call_soon_threadsafe(self._tell, landed)

    def _land(self, chunk: ChunkResponse, data: memoryview) -> Payload:
        name = digest(data)
        opening: PartialBlob | None = None
        with suppress(Exception):  # the task that stores it reports the error; the thread goes on
            opening = self._store.unfinished.land(chunk.blob, chunk.index, name, data)
        return Payload(name, len(data), data if opening is None else AlreadyWrittenChunk(data, opening))

    def _tell(self, landed: list[tuple[Callable[[Payload], None], Payload]]) -> None:
        for then, payload in landed:
            self._loop.call_soon(self._then, then, payload)  # separate callbacks: an error in one spares the others

    def _store_one(self, what: tuple[StoreChunk, Buffer]) -> Exception | None:
        work, data = what
        try:
            self._store.unfinished.catch_up(work.blob)
            self._store.unfinished.store(work.blob, work.index, data)
        except Exception as why:
            return why
        return None

    # ---- from disk -----------------------------------------------------------------------------------------

    def _read_one(self) -> None:
        if self._closing:
            return
        work, answer = self._to_read.popleft()
        if self._to_read:
            self._loop.call_soon(self._read_one)
        try:
            result: Payload | Exception | None = self._store.read_chunk_at_hand(work.blob, work.index, self._memory)
        except NotInMemory:
            self._off_the_loop(self._read, work, partial(self._answer, work, answer))
            return
        except Exception as why:
            result = why
        self._answer(work, answer, result)

    def _answer(self, work: ReadChunk, answer: Answer, result: Any) -> None:
        if isinstance(result, Payload):
            self._store.note_served(work.blob)
        answer(result)

    def _read(self, work: ReadChunk) -> Payload | Exception | None:
        try:
            return self._store.read_chunk(work.blob, work.index, self._memory)
        except Exception as why:
            return why

    # ---- the thread ----------------------------------------------------------------------------------------

    def _off_the_loop(self, do: Callable[[Any], Any], what: object, then: Answer) -> None:
        def done(future: Future[Any]) -> None:
            if not self._closing and not future.cancelled():  # `close` waits for the thread, then the loop may end
                self._loop.call_soon_threadsafe(self._then, then, future.result())

        self._thread.submit(do, what).add_done_callback(done)

    def _then(self, then: Answer, result: Any) -> None:
        if not self._closing:
            then(result)
