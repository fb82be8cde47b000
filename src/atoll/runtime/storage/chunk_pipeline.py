"""Chunks of blobs between disk and network, without a thread, a wake-up or fresh memory for each of them.

A chunk that arrives is hashed on a thread and, if a blob that is being fetched is made of it, written in the same
breath, while it is in the core's cache: it proves itself by the manifest, so the disk need not wait for the
machine, which hears of it afterwards. The thread takes what has arrived meanwhile without being told; where it does
not keep up the loop does the same with what comes, so that next to nothing lies in memory, which a kill would take.
What is asked for lies in the system's page cache more often than not. If it was hashed before
(`store.VerifiedChunks`) it
stays there until it is encrypted; else it is copied and checked on the loop, one chunk a turn. Only what must come
from disk waits for the thread.
Promises: every piece of work is answered once, from the loop, never inside the call that asked for it; nothing is
written that is not what a manifest says.
Never keeps more than `ARRIVING_MAX` unjudged chunks: what comes then is hashed, and written unless the disk is
behind, before more is read from the network. Never holds the loop for longer than one chunk in memory takes
(0.5 ms); for the disk only where memory ran out between the question and the answer, or the system makes whoever
writes wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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

ARRIVING_MAX = 2  # chunks that wait for the thread, a megabyte each: a kill loses them, its own and the loop's
AT_ONCE = 4  # chunks of one turn of the thread: their memory is free again, and the machine hears of them, after it

Answer = Callable[[Any], None]  # is given the result, or the exception


class ChunkOnDisk(NamedTuple):
    """In the place of a chunk's bytes: they are in their file already, if this is still its opening."""

    data: Buffer
    opening: PartialBlob


class ArrivingChunk(NamedTuple):
    chunk: ChunkResponse
    data: memoryview
    then: Callable[[Payload], None]


class ChunkPipeline:
    """Takes, stores and reads chunks for one peer. Used from one running loop."""

    def __init__(self, store: PeerStore, memory: Callable[[int], memoryview] | None = None) -> None:
        """`memory`: where chunks that are read are put."""
        self._store, self._memory = store, memory or BufferPool()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "chunks")
        self._arriving: deque[ArrivingChunk] = deque()
        self._to_read: deque[tuple[ReadChunk, Answer]] = deque()
        self._lock = Lock()  # of what the thread and the loop both change
        self._landing = self._closing = False

    def take(self, chunk: ChunkResponse, data: memoryview, then: Callable[[Payload], None]) -> None:
        """A chunk came, nobody knows yet whether it is one: `then` is given its bytes by their name."""
        if len(data) > BLOB_CHUNK:  # no chunk of anything, though a frame may be 64 times as long
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
            then(Payload(digest(data), len(data), data))  # to be stored when its turn comes
        elif not waits:
            then(self._land(chunk, data))

    def do(self, work: StoreChunk | ReadChunk, answer: Answer) -> None:
        if isinstance(work, ReadChunk):
            self._to_read.append((work, answer))
            if len(self._to_read) == 1:
                self._loop.call_soon(self._read_one)
            return
        data = work.payload.data
        if not isinstance(data, ChunkOnDisk):
            self._off_the_loop(self._store_one, (work, data), answer)
        elif data.opening is self._store.unfinished.opening(work.blob):
            self._loop.call_soon(self._then, answer, None)
        else:  # the file that it went to is gone
            self._off_the_loop(self._store_one, (work, data.data), answer)

    def close(self) -> None:
        """Nothing is answered any more; what was begun ends."""
        self._closing = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---- to disk -------------------------------------------------------------------------------------------

    def _land_some(self) -> None:
        """The thread's turn. There is another one as long as something is there for it."""
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
        with suppress(Exception):  # whoever asks for it to be stored is told why; the thread goes on
            opening = self._store.unfinished.land(chunk.blob, chunk.index, name, data)
        return Payload(name, len(data), data if opening is None else ChunkOnDisk(data, opening))

    def _tell(self, landed: list[tuple[Callable[[Payload], None], Payload]]) -> None:
        for then, payload in landed:
            self._loop.call_soon(self._then, then, payload)  # one after the other: none falls with another

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
            self._off_the_loop(self._read, work, answer)
            return
        except Exception as why:
            result = why
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
