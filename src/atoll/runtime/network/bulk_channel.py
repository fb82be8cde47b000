"""Bulk lane to one peer: messages with payloads of up to 64 MiB, over one or several sealed connections.

A frame travels as records (bulk_record.py): its message, then slabs of its payload. The slabs of one frame may
take different connections. Each is decrypted straight into its final place.

Invariants:
- Every byte of a delivered payload was written exactly once.
- A connection lost within a frame restarts that frame, at most three times.
- A `PayloadHasher` sees every byte of a payload once and in order, as early as the order of slabs allows.
- Nothing blocks: a frame that does not fit is dropped and counted, and sends may be lost by contract.
- A newer frame of the same place replaces a waiting one. A waiting frame is dropped once its round is long over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from atoll.base.errors import PeerFault
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, MIB
from atoll.crypto.seal import TAG_BYTES
from atoll.runtime.network.buffer_pool import mapped
from atoll.runtime.network.bulk_record import (
    BESIDE_SLAB_MAX,
    BOX_BYTES,
    HEAD,
    MESSAGE,
    NO_PAYLOAD,
    PEEK_BYTES,
    SLAB,
    SLAB_BYTES,
    RecordHeader,
    checked_header,
    next_read_bytes,
)
from atoll.runtime.network.file_slice import FileSlice
from atoll.runtime.network.secure_channel import RecordOpener, RecordSealer
from atoll.runtime.network.transport import Connection, reprocess_received, run_guarded
from atoll.runtime.network.upload_limiter import UploadLimiter

BOXES_KEPT = 4  # unused buffers that survive a sweep
PINNED_SLABS = 2  # shorter frames stay on one connection: spreading them makes more of them wait
TURN_BYTES = MIB  # written before other work on the loop runs: about a millisecond
RESTARTS_MAX = 3  # per frame, after broken connections
ABANDONED_MAX = 256  # frame numbers with late slabs to drop; forgotten ones cost memory until a sweep
STALLED_SWEEPS = 3  # sweeps without a byte after which a frame is dropped; clocks run on in a stopped process


class PayloadHasher(Protocol):
    """Hashes one payload as it arrives: hashing memory that left the cache costs five times as much."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


Deliver = Callable[[bytes, memoryview | None, bytes | None], None]
"""Called with message, payload and the payload's hash, if a hasher followed."""

Body = memoryview | FileSlice  # bytes to send: in memory, or in a file until they are sealed


class _OutgoingFrame:
    """A frame being sent, and its next record."""

    def __init__(
        self,
        number: int,
        message: bytes,
        payload: Body | None,
        place: Hashable = None,
        of_round: int | None = None,
    ) -> None:
        self.number, self.message, self.payload, self.place = number, message, payload, place
        self.of_round = of_round
        self.size_bytes = len(message) + (len(payload) if payload is not None else 0)
        self.slabs = _slabs(len(payload)) if payload is not None else 0
        self.next = -1  # index of the next slab; -1: the message, which precedes slab 0
        self.carriers: set[BulkChannel] = set()
        self.restarts = 0

    @property
    def is_started(self) -> bool:
        return self.next >= 0

    @property
    def is_finished(self) -> bool:
        return self.next == self.slabs

    def next_record(self) -> tuple[bytes, Body]:
        index, self.next = self.next, self.next + 1
        payload_bytes = len(self.payload) if self.payload is not None else NO_PAYLOAD
        if index < 0:
            return HEAD.pack(MESSAGE, len(self.message), payload_bytes, 0, self.number), memoryview(self.message)
        assert self.payload is not None
        body = self.payload[index * SLAB_BYTES : (index + 1) * SLAB_BYTES]
        return HEAD.pack(SLAB, len(body), payload_bytes, index, self.number), body


class _IncomingFrame:
    """A frame being received: its memory and its missing records."""

    def __init__(
        self,
        payload_bytes: int,
        allocate: Callable[[int], memoryview],
        follower: PayloadHasher | None,
    ) -> None:
        self.payload_bytes, self.follower = payload_bytes, follower
        size_bytes = 0 if payload_bytes == NO_PAYLOAD else payload_bytes
        self.payload = allocate(size_bytes)  # uninitialized: delivered only after every byte was written
        self.message: bytes | None = None
        self.missing = set(range(_slabs(size_bytes)))
        self.followed = 0  # slabs that the hasher has seen
        self.carriers: set[BulkChannel] = set()
        self.quiet_sweeps = 0  # consecutive sweeps without a byte

    @property
    def held_bytes(self) -> int:
        """Upper bound of its memory. The longest message is counted, which also bounds the number of frames."""
        return _held_bytes(self.payload_bytes)

    def place_of(self, record: RecordHeader) -> memoryview:
        """Memory of this slab. Raises PeerFault for a slab that is not missing or has another length."""
        at = record.slab * SLAB_BYTES
        if record.slab not in self.missing or record.body_bytes != min(SLAB_BYTES, record.payload_bytes - at):
            raise PeerFault("", f"slab {record.slab} of {record.body_bytes} bytes was not expected")
        return self.payload[at : at + record.body_bytes]

    def mark_placed(self, index: int, slab: memoryview) -> None:
        """Record that a slab is in place. The hasher sees slabs in order, early ones later."""
        self.missing.discard(index)
        if self.follower is None or index != self.followed:
            return
        self.follower.update(slab)
        self.followed += 1
        while self.followed * SLAB_BYTES < len(self.payload) and self.followed not in self.missing:
            self.follower.update(self.payload[self.followed * SLAB_BYTES : (self.followed + 1) * SLAB_BYTES])
            self.followed += 1


class ReceiveBudget:
    """Memory that the incomplete frames of all peers together may hold."""

    def __init__(self, limit_bytes: int) -> None:
        assert limit_bytes >= CONTROL_FRAME_MAX + BULK_FRAME_MAX
        self._free_bytes = limit_bytes
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], None]] = deque()

    def reserve(self, size_bytes: int, retry: Callable[[], None]) -> bool:
        """False: not enough is free; `retry` is called once that may have changed."""
        if size_bytes > self._free_bytes:
            self._waiting.append(retry)
            return False
        self._free_bytes -= size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes
        while self._waiting:
            self._loop.call_soon(self._waiting.popleft())


class RecordBuffers:
    """Buffers for sealing and opening records, shared by all connections: few hold part of a record at once.

    The buffer released last is reused first: it may still be in a core's cache. Some unused buffers survive a
    sweep, since giving pages back one buffer at a time is expensive with many members.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def acquire(self) -> memoryview:
        return self._free.pop() if self._free else memoryview(mapped(BOX_BYTES))

    def release(self, box: memoryview) -> None:
        self._free.append(box)

    def sweep(self) -> None:
        """Free most unused buffers."""
        del self._free[:-BOXES_KEPT]


class BulkLimits(NamedTuple):
    queue_bytes: int
    receive_bytes: int  # incomplete frames of one peer


class BulkLane:
    """Both directions of the bulk lane to one peer; outlives its connections."""

    def __init__(
        self,
        limits: BulkLimits,
        budget: ReceiveBudget,
        allocate: Callable[[int], memoryview],
        deliver: Deliver,
        on_detached: Callable[[], None] = lambda: None,
        follow: Callable[[], PayloadHasher | None] = lambda: None,
        boxes: RecordBuffers | None = None,
    ) -> None:
        self.boxes = boxes or RecordBuffers()
        self.channels: list[BulkChannel] = []
        self.dropped = 0  # outgoing frames
        self.lost = 0  # frames received in part
        self.queued_bytes = 0
        self._closed_sent_bytes = self._closed_received_bytes = 0  # of connections that ended
        self._limits, self._budget, self._allocate = limits, budget, allocate
        self._deliver, self._on_detached, self._follow = deliver, on_detached, follow
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_OutgoingFrame] = deque()
        self._places: dict[
            Hashable, _OutgoingFrame
        ] = {}  # waiting frames, by the place in which a newer one replaces them
        self._shared: _OutgoingFrame | None = None  # long frame; every connection sends slabs of it
        self._numbers = 0
        self._incoming: dict[int, _IncomingFrame] = {}
        self._receiving_bytes = 0
        self._abandoned: deque[int] = deque(maxlen=ABANDONED_MAX)
        self._kick_scheduled = False

    # ---- out ----

    def send(
        self, message: bytes, payload: Body | None, place: Hashable = None, of_round: int | None = None
    ) -> None:
        frame = _OutgoingFrame(self._next_number(), message, payload, place, of_round)
        self.queued_bytes += frame.size_bytes
        older = self._places.pop(place, None)
        if older is not None:
            self._queue[self._queue.index(older)] = frame
            self.queued_bytes -= older.size_bytes
        else:
            self._queue.append(frame)
        if place is not None:
            self._places[place] = frame
        # the oldest is dropped first: it would be the least useful by the time it leaves
        while self.queued_bytes > self._limits.queue_bytes and self._queue:
            self._drop(self._pop_frame())
        if not self._kick_scheduled:
            self._kick_scheduled = True
            self._loop.call_soon(self._kick)

    def drop_rounds(self, before: int) -> None:
        """Drop waiting frames of rounds before this one."""
        over = [frame for frame in self._queue if frame.of_round is not None and frame.of_round < before]
        for frame in over:
            self._queue.remove(frame)
            self.queued_bytes -= frame.size_bytes
            if self._places.get(frame.place) is frame:
                del self._places[frame.place]

    def records_for(self, channel: BulkChannel) -> list[tuple[bytes, Body]]:
        """Next records of this connection: one, or a message with the first slab of its payload.

        A message alone would cost a system call here and a useless wake-up at the remote.
        """
        frame = channel.frame or self._shared
        if frame is None:
            if not self._queue:
                return []
            frame = self._pop_frame()
            if frame.slabs > PINNED_SLABS:
                self._shared = frame
            else:
                channel.frame = frame
        frame.carriers.add(channel)
        is_alone = frame.is_started or not frame.slabs or len(frame.message) > BESIDE_SLAB_MAX
        records = [frame.next_record()] if is_alone else [frame.next_record(), frame.next_record()]
        if frame.is_finished:
            self.queued_bytes -= frame.size_bytes
            if channel.frame is frame:
                channel.frame = None
            else:
                self._shared = None
        return records

    @property
    def has_unsent(self) -> bool:
        """True if queued bytes have not left for the network."""
        return self.queued_bytes > 0 or any(channel.has_unsent for channel in self.channels)

    def attach(self, channel: BulkChannel) -> None:
        self.channels.append(channel)
        channel.pump()

    def detach(self, channel: BulkChannel) -> None:
        """The connection ended: restart frames it sent in part, abandon frames it received in part."""
        if channel in self.channels:
            self.channels.remove(channel)
            self._closed_sent_bytes += channel.connection.sent_bytes
            self._closed_received_bytes += channel.connection.received_bytes
        for frame in (channel.frame, self._shared):
            if frame is not None and channel in frame.carriers:
                self._restart(frame)
        if self._shared is not None and channel in self._shared.carriers:
            self._shared = None
        channel.frame = None
        for number in [n for n, frame in self._incoming.items() if channel in frame.carriers]:
            self._abandon(number)
        self._kick()
        self._on_detached()

    def hang_up(self) -> None:
        """Abort all connections and drop what waits in either direction."""
        for frame in {*self._queue, self._shared, *(channel.frame for channel in self.channels)} - {None}:
            self._drop(frame)
        self._queue.clear()
        self._places.clear()
        self._shared = None
        for channel in self.channels:
            channel.frame = None
            channel.connection.abort()  # `close` would wait for a remote that may never read again
        for number in list(self._incoming):
            self._abandon(number)

    @property
    def sent_bytes(self) -> int:
        return self._closed_sent_bytes + sum(channel.connection.sent_bytes for channel in self.channels)

    @property
    def received_bytes(self) -> int:
        return self._closed_received_bytes + sum(channel.connection.received_bytes for channel in self.channels)

    def _pop_frame(self) -> _OutgoingFrame:
        """The oldest waiting frame. No newer frame replaces it from here on."""
        frame = self._queue.popleft()
        if self._places.get(frame.place) is frame:
            del self._places[frame.place]
        return frame

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _kick(self) -> None:
        self._kick_scheduled = False
        for channel in list(self.channels):
            channel.pump()

    def _restart(self, frame: _OutgoingFrame) -> None:
        if frame.restarts == RESTARTS_MAX:
            self._drop(frame)
            return
        anew = _OutgoingFrame(self._next_number(), frame.message, frame.payload)
        anew.restarts = frame.restarts + 1
        self._queue.appendleft(anew)

    def _drop(self, frame: _OutgoingFrame | None) -> None:
        assert frame is not None
        self.queued_bytes -= frame.size_bytes
        self.dropped += 1

    # ---- in ----

    def accept(self, channel: BulkChannel, record: RecordHeader, sealed: memoryview, opener: RecordOpener) -> bool:
        """Decrypt one record into its place. False: no memory now; `channel.resume` is called later."""
        number, payload_bytes = record.number, record.payload_bytes
        frame = self._incoming.get(number)
        if frame is None:
            if number in self._abandoned:
                opener.open_into(sealed, memoryview(bytearray(record.body_bytes)), record.head)
                return True
            if not self._budget.reserve(_held_bytes(payload_bytes), channel.resume):
                return False
            follower = self._follow() if payload_bytes != NO_PAYLOAD else None
            frame = _IncomingFrame(payload_bytes, self._allocate, follower)
            self._hold(number, frame)
        if frame.payload_bytes != payload_bytes:
            raise PeerFault("", "two records of one frame disagree about its size")
        frame.carriers.add(channel)
        frame.quiet_sweeps = 0
        if record.kind == SLAB:
            place = frame.place_of(record)
            opener.open_into(sealed, place, record.head)
            frame.mark_placed(record.slab, place)
        else:
            if frame.message is not None:
                raise PeerFault("", "a frame with two messages")
            message = bytearray(record.body_bytes)
            opener.open_into(sealed, memoryview(message), record.head)
            frame.message = bytes(message)
        if frame.message is not None and not frame.missing:
            self._remove(number)
            payload = None if payload_bytes == NO_PAYLOAD else frame.payload
            digest = frame.follower.digest() if frame.follower is not None else None
            self._deliver(frame.message, payload, digest)
        return True

    def touch(self, number: int) -> None:
        """Part of a record arrived: through a slow uplink, one record may take longer than all sweeps."""
        if frame := self._incoming.get(number):
            frame.quiet_sweeps = 0

    def sweep(self) -> None:
        """Free the memory of frames that stopped arriving. Called every `SWEEP_S`.

        After a suspension of this process it is called once: bytes that could not move meanwhile are not late.
        """
        for number, frame in list(self._incoming.items()):
            if frame.quiet_sweeps == STALLED_SWEEPS:
                self._abandon(number)
            frame.quiet_sweeps += 1

    def _hold(self, number: int, frame: _IncomingFrame) -> None:
        self._incoming[number] = frame
        self._receiving_bytes += frame.held_bytes
        while self._receiving_bytes > self._limits.receive_bytes:
            self._abandon(
                next(iter(self._incoming))
            )  # the oldest; a frame is below the limit, so never the new one

    def _remove(self, number: int) -> _IncomingFrame:
        frame = self._incoming.pop(number)
        self._receiving_bytes -= frame.held_bytes
        self._budget.release(frame.held_bytes)
        return frame

    def _abandon(self, number: int) -> None:
        self._remove(number)
        self._abandoned.append(number)
        self.lost += 1


class BulkChannel:
    """One connection of the lane: seals outgoing records and opens arriving ones."""

    def __init__(
        self,
        connection: Connection,
        lane: BulkLane,
        limiter: UploadLimiter,
        sealer: RecordSealer,
        opener: RecordOpener,
    ) -> None:
        self.connection = connection
        self.frame: _OutgoingFrame | None = None  # short frame that only this connection sends
        self._lane, self._limiter, self._sealer, self._opener = lane, limiter, sealer, opener
        self._loop = asyncio.get_running_loop()
        self._boxes = lane.boxes
        self._outbox: memoryview | None = None  # buffer with bytes that have not left; None otherwise
        self._sealed = memoryview(b"")  # bytes of the outbox that wait for the upload limiter
        self._inbox: memoryview | None = None  # buffer with an incomplete record; None otherwise
        self._begin = self._got = 0  # start and end of the unprocessed bytes in the inbox
        self._want = PEEK_BYTES  # end of the next read, at most
        self._coming: RecordHeader | None = None  # record with its body next in the inbox
        self._pump_scheduled = False
        self._waits_for_memory = False

    @property
    def has_unsent(self) -> bool:
        """True if the upload limiter or the network holds bytes back."""
        return bool(self._sealed) or self.connection.has_unsent

    def pump(self) -> None:
        run_guarded(self.connection, self._pump)

    def _pump(self) -> None:
        """Seal and write until the connection or the limiter is full, nothing is left, or the turn ends."""
        self._pump_scheduled = False
        left, connection = TURN_BYTES, self.connection
        while left > 0 and connection.clear and (self._sealed or self._seal()):
            sealed = self._sealed
            size = self._limiter.acquire(len(sealed), self.pump)
            if size == 0:
                return
            connection.write(sealed[:size])
            self._sealed = sealed[size:]
            left -= size
        if self._outbox is not None and connection.clear and not self._sealed:  # nothing written is unsent
            self._boxes.release(self._outbox)
            self._outbox = None
        if left <= 0 and not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self.pump)

    def _seal(self) -> bool:
        """Seal the next records into the outbox. False: there are none."""
        records = self._lane.records_for(self)
        if not records:
            return False
        box = self._outbox = self._outbox or self._boxes.acquire()
        end = 0
        for head, body in records:
            begin, end = end, end + HEAD.size + len(body) + TAG_BYTES
            box[begin : begin + HEAD.size] = head
            place = box[begin + HEAD.size : end]
            plain = body.read_into(place) if isinstance(body, FileSlice) else body
            self._sealer.seal_into(plain, place, head)
        self._sealed = box[:end]
        return True

    def feed(self, data: bytes) -> None:
        """Process bytes that arrived right behind the handshake."""
        assert self._inbox is None and len(data) <= BOX_BYTES
        self._inbox = self._boxes.acquire()
        self._inbox[: len(data)] = data
        self.on_received(len(data))

    def resume(self) -> None:
        """Retry after a wait for memory."""
        if self._waits_for_memory:
            self._waits_for_memory = False
            self.connection.resume_reading()
            reprocess_received(self.connection)

    # ---- what the connection calls ----

    def on_started(self, connection: Connection) -> None:
        raise AssertionError("a bulk channel takes over from a handshake")

    def read_buffer(self) -> memoryview:
        if self._inbox is None:
            self._inbox = self._boxes.acquire()
        return self._inbox[self._got : self._want]

    def on_received(self, count: int) -> None:
        inbox = self._inbox
        if inbox is None:
            return
        self._got += count
        at = self._begin
        while not self._waits_for_memory:
            record = self._coming
            if record is None:
                if self._got - at < HEAD.size:
                    break
                record = self._coming = checked_header(bytes(inbox[at : at + HEAD.size]))
                at += HEAD.size
            end = at + record.sealed_bytes
            if end > self._got:
                break
            if not self._lane.accept(self, record, inbox[at:end], self._opener):
                self._waits_for_memory = True
                self.connection.pause_reading()
                break
            at, self._coming = end, None
        if self._coming is not None:
            self._lane.touch(self._coming.number)
        if at == self._got:
            self._boxes.release(inbox)
            self._inbox, at, self._got = None, 0, 0
        wanted_bytes = next_read_bytes(self._coming)
        if at + wanted_bytes > BOX_BYTES:
            inbox[: self._got - at] = inbox[at : self._got]
            at, self._got = 0, self._got - at
        self._begin, self._want = at, at + wanted_bytes

    def on_writable(self) -> None:
        self._pump()

    def on_ended(self, why: Exception | None) -> None:
        self._lane.detach(self)


def _held_bytes(payload_bytes: int) -> int:
    return CONTROL_FRAME_MAX + (0 if payload_bytes == NO_PAYLOAD else payload_bytes)


def _slabs(payload_bytes: int) -> int:
    return -(-payload_bytes // SLAB_BYTES)
