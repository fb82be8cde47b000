"""The bulk lane to one peer: messages with payloads of up to 64 MiB, over one or several sealed connections.

A frame travels as records: its message, then slabs of its payload, each with a clear, authenticated head

    kind u8, 3 zero bytes, body bytes u32, payload bytes u32, slab index u32, frame number u64     (big endian)

so that the slabs of one frame may take different connections and are decrypted where they finally belong.
Promises: a length is judged before memory is taken; every byte of a delivered payload was written exactly once;
a connection lost in the middle of a frame starts that frame anew, three times at most. A `PayloadHasher` sees every
byte of a payload once, in order: as soon as it is opened, where slabs come in order.
Never blocks: what does not fit is dropped and counted. Sends may be lost by contract. A frame that still waits
gives its turn to a newer one of the same place, and is not sent at all once its round is long over.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from atoll.base.errors import PeerFault
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, MIB
from atoll.crypto.seal import TAG_BYTES
from atoll.runtime.network.buffer_pool import mapped
from atoll.runtime.network.file_slice import FileSlice
from atoll.runtime.network.secure_channel import RecordOpener, RecordSealer
from atoll.runtime.network.tcp import TcpConnection
from atoll.runtime.network.upload_limiter import UploadLimiter

HEAD = struct.Struct("!BxxxIIIQ")
MESSAGE, SLAB = 0, 1
NO_PAYLOAD = 2**32 - 1  # in the place of payload bytes: there is none, which is not the same as an empty one
SLAB_BYTES = MIB // 2  # sealed and plain together stay in a core's cache; 0.59 CPU-s/GB, at 128 kB 0.99
BODY_MAX = max(SLAB_BYTES, CONTROL_FRAME_MAX)  # bytes of one record
BOX_BYTES = HEAD.size + BODY_MAX + TAG_BYTES + HEAD.size  # a record, and the head of the next one behind it
BESIDE_SLAB_MAX = BODY_MAX - SLAB_BYTES - TAG_BYTES  # bytes of a message for which a box has room beside a slab
BOXES_KEPT = 4  # that nobody uses, when it is swept
PINNED_SLABS = 2  # shorter frames stay on one connection: spreading them would only make more of them wait
TURN_BYTES = MIB  # written before others on the loop get their turn: about a millisecond
PEEK_BYTES = 4096  # read when no head is known yet: a small message whole, never much of a slab to move
RESTARTS_MAX = 3  # of one frame whose connection broke
ABANDONED_MAX = 256  # frame numbers whose late slabs are thrown away; forgotten ones only cost memory until swept
STALLED_SWEEPS = 3  # a frame without a byte for so long gives its memory back; clocks run on while we stand still


class PayloadHasher(Protocol):
    """Hashes one payload on its way in: out of memory that was written long ago it costs five times as much."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


Deliver = Callable[[bytes, memoryview | None, bytes | None], None]
"""(message, payload, digest by the follower if there was one)"""

Body = memoryview | FileSlice  # bytes to be sent: in memory, or in a file until they are sealed


class RecordHeader(NamedTuple):
    """The head of a record, judged."""

    head: bytes
    kind: int
    body_bytes: int
    payload_bytes: int
    slab: int  # its index; 0 for a message
    number: int

    @property
    def sealed_bytes(self) -> int:
        """Behind its head."""
        return self.body_bytes + TAG_BYTES


class _OutgoingFrame:
    """A frame on its way out: which records are still to be made."""

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
        self.next = -1  # the message's record stands before slab 0
        self.carriers: set[BulkChannel] = set()
        self.restarts = 0

    @property
    def started(self) -> bool:
        return self.next >= 0

    @property
    def finished(self) -> bool:
        return self.next == self.slabs

    def record(self) -> tuple[bytes, Body]:
        index, self.next = self.next, self.next + 1
        payload_bytes = len(self.payload) if self.payload is not None else NO_PAYLOAD
        if index < 0:
            return HEAD.pack(MESSAGE, len(self.message), payload_bytes, 0, self.number), memoryview(self.message)
        assert self.payload is not None
        body = self.payload[index * SLAB_BYTES : (index + 1) * SLAB_BYTES]
        return HEAD.pack(SLAB, len(body), payload_bytes, index, self.number), body


class _IncomingFrame:
    """A frame on its way in: its memory, and which records are still missing."""

    def __init__(
        self,
        payload_bytes: int,
        allocate: Callable[[int], memoryview],
        follower: PayloadHasher | None,
    ) -> None:
        self.payload_bytes, self.follower = payload_bytes, follower
        size_bytes = 0 if payload_bytes == NO_PAYLOAD else payload_bytes
        self.payload = allocate(size_bytes)  # uninitialised: delivered only after every byte was written
        self.message: bytes | None = None
        self.missing = set(range(_slabs(size_bytes)))
        self.followed = 0  # slabs that the follower has seen
        self.carriers: set[BulkChannel] = set()
        self.quiet_sweeps = 0  # in a row, without a byte of it

    @property
    def held_bytes(self) -> int:
        """What it may take at most; counting a message as long as can be also bounds how many frames there are."""
        return _held_bytes(self.payload_bytes)

    def place_of(self, record: RecordHeader) -> memoryview:
        """Where this slab belongs. PeerFault if it does not."""
        at = record.slab * SLAB_BYTES
        if record.slab not in self.missing or record.body_bytes != min(SLAB_BYTES, record.payload_bytes - at):
            raise PeerFault("", f"slab {record.slab} of {record.body_bytes} bytes was not expected")
        return self.payload[at : at + record.body_bytes]

    def placed(self, index: int, slab: memoryview) -> None:
        """It stands there. Slabs that came before their turn are followed when it is theirs."""
        self.missing.discard(index)
        if self.follower is None or index != self.followed:
            return
        self.follower.update(slab)
        self.followed += 1
        while self.followed * SLAB_BYTES < len(self.payload) and self.followed not in self.missing:
            self.follower.update(self.payload[self.followed * SLAB_BYTES : (self.followed + 1) * SLAB_BYTES])
            self.followed += 1


class ReceiveBudget:
    """Memory that all peers together may take for frames not yet complete."""

    def __init__(self, limit_bytes: int) -> None:
        assert limit_bytes >= CONTROL_FRAME_MAX + BULK_FRAME_MAX
        self._free_bytes = limit_bytes
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, size_bytes: int, later: Callable[[], None]) -> bool:
        """False: `later` is called when it is worth asking again."""
        if size_bytes > self._free_bytes:
            self._waiting.append(later)
            return False
        self._free_bytes -= size_bytes
        return True

    def give(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes
        while self._waiting:
            self._loop.call_soon(self._waiting.popleft())


class RecordBuffers:
    """Memory in which records are sealed and opened, shared by all connections: few have part of one in it at once.

    The one that was given back last is taken first: it may still be in a core's cache. Of those that nobody uses a
    few outlive a sweep; among many members that is no moment to give fresh pages back, box by box.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        return self._free.pop() if self._free else memoryview(mapped(BOX_BYTES))

    def give(self, box: memoryview) -> None:
        self._free.append(box)

    def sweep(self) -> None:
        """Let go of most of what nobody uses at the moment."""
        del self._free[:-BOXES_KEPT]


class BulkLimits(NamedTuple):
    queue_bytes: int
    receive_bytes: int  # of one peer's incomplete frames


class BulkLane:
    """Both directions of the bulk lane to one peer; outlives its connections."""

    def __init__(
        self,
        limits: BulkLimits,
        intake: ReceiveBudget,
        allocate: Callable[[int], memoryview],
        deliver: Deliver,
        detached: Callable[[], None] = lambda: None,
        follow: Callable[[], PayloadHasher | None] = lambda: None,
        boxes: RecordBuffers | None = None,
    ) -> None:
        self.boxes = boxes or RecordBuffers()
        self.channels: list[BulkChannel] = []
        self.dropped = 0  # frames we wanted to send
        self.lost = 0  # frames that came in part
        self.queued_bytes = 0
        self._closed_sent_bytes = self._closed_received_bytes = 0  # of connections that are gone
        self._limits, self._intake, self._allocate = limits, intake, allocate
        self._deliver, self._detached, self._follow = deliver, detached, follow
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_OutgoingFrame] = deque()
        self._places: dict[Hashable, _OutgoingFrame] = {}  # frames that wait, by what a newer one would replace
        self._shared: _OutgoingFrame | None = None  # long frame that every connection takes slabs from
        self._numbers = 0
        self._incoming: dict[int, _IncomingFrame] = {}
        self._receiving_bytes = 0
        self._abandoned: deque[int] = deque(maxlen=ABANDONED_MAX)
        self._kick_scheduled = False

    # ---- out ----

    def send(
        self, message: bytes, payload: Body | None, place: Hashable = None, of_round: int | None = None
    ) -> None:
        frame = _OutgoingFrame(self._number(), message, payload, place, of_round)
        self.queued_bytes += frame.size_bytes
        older = self._places.pop(place, None)
        if older is not None:
            self._queue[self._queue.index(older)] = frame
            self.queued_bytes -= older.size_bytes
        else:
            self._queue.append(frame)
        if place is not None:
            self._places[place] = frame
        # the oldest goes first: what is queued longest is the least useful by the time it would leave
        while self.queued_bytes > self._limits.queue_bytes and self._queue:
            self._drop(self._taken())
        if not self._kick_scheduled:
            self._kick_scheduled = True
            self._loop.call_soon(self._kick)

    def rounds_over(self, before: int) -> None:
        """Frames that wait, and were said in a round before this one, are not sent any more."""
        over = [frame for frame in self._queue if frame.of_round is not None and frame.of_round < before]
        for frame in over:
            self._queue.remove(frame)
            self.queued_bytes -= frame.size_bytes
            if self._places.get(frame.place) is frame:
                del self._places[frame.place]

    def records_for(self, channel: BulkChannel) -> list[tuple[bytes, Body]]:
        """What this connection should carry next: a record, or a message and the first slab of its payload.

        By itself a message would cost a system call here and wake the other end for nothing.
        """
        frame = channel.frame or self._shared
        if frame is None:
            if not self._queue:
                return []
            frame = self._taken()
            if frame.slabs > PINNED_SLABS:
                self._shared = frame
            else:
                channel.frame = frame
        frame.carriers.add(channel)
        alone = frame.started or not frame.slabs or len(frame.message) > BESIDE_SLAB_MAX
        records = [frame.record()] if alone else [frame.record(), frame.record()]
        if frame.finished:
            self.queued_bytes -= frame.size_bytes
            if channel.frame is frame:
                channel.frame = None
            else:
                self._shared = None
        return records

    @property
    def waits(self) -> bool:
        """Whether some of what it carries has not left for the network."""
        return self.queued_bytes > 0 or any(channel.waits for channel in self.channels)

    def attach(self, channel: BulkChannel) -> None:
        self.channels.append(channel)
        channel.pump()

    def detach(self, channel: BulkChannel) -> None:
        """The connection is gone: frames it carried in part start anew elsewhere, or are given up."""
        if channel in self.channels:
            self.channels.remove(channel)
            self._closed_sent_bytes += channel.wire.sent_bytes
            self._closed_received_bytes += channel.wire.received_bytes
        for frame in (channel.frame, self._shared):
            if frame is not None and channel in frame.carriers:
                self._restart(frame)
        if self._shared is not None and channel in self._shared.carriers:
            self._shared = None
        channel.frame = None
        for number in [n for n, frame in self._incoming.items() if channel in frame.carriers]:
            self._abandon(number)
        self._kick()
        self._detached()

    def hang_up(self) -> None:
        """Nobody is wanted there any more: what waits in either direction is dropped."""
        for frame in {*self._queue, self._shared, *(channel.frame for channel in self.channels)} - {None}:
            self._drop(frame)
        self._queue.clear()
        self._places.clear()
        self._shared = None
        for channel in self.channels:
            channel.frame = None
            channel.wire.abort()  # `close` would wait for a remote that may never read again
        for number in list(self._incoming):
            self._abandon(number)

    @property
    def sent_bytes(self) -> int:
        return self._closed_sent_bytes + sum(channel.wire.sent_bytes for channel in self.channels)

    @property
    def received_bytes(self) -> int:
        return self._closed_received_bytes + sum(channel.wire.received_bytes for channel in self.channels)

    def _taken(self) -> _OutgoingFrame:
        """The frame whose turn it is; nothing replaces it any more."""
        frame = self._queue.popleft()
        if self._places.get(frame.place) is frame:
            del self._places[frame.place]
        return frame

    def _number(self) -> int:
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
        anew = _OutgoingFrame(self._number(), frame.message, frame.payload)
        anew.restarts = frame.restarts + 1
        self._queue.appendleft(anew)

    def _drop(self, frame: _OutgoingFrame | None) -> None:
        assert frame is not None
        self.queued_bytes -= frame.size_bytes
        self.dropped += 1

    # ---- in ----

    def accept(self, channel: BulkChannel, record: RecordHeader, sealed: memoryview, opener: RecordOpener) -> bool:
        """Open one record where it belongs. False: no memory now, `channel.resume` will be called."""
        number, payload_bytes = record.number, record.payload_bytes
        frame = self._incoming.get(number)
        if frame is None:
            if number in self._abandoned:
                opener.open_into(sealed, memoryview(bytearray(record.body_bytes)), record.head)
                return True
            if not self._intake.take(_held_bytes(payload_bytes), channel.resume):
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
            frame.placed(record.slab, place)
        else:
            if frame.message is not None:
                raise PeerFault("", "a frame with two messages")
            message = bytearray(record.body_bytes)
            opener.open_into(sealed, memoryview(message), record.head)
            frame.message = bytes(message)
        if frame.message is not None and not frame.missing:
            self._release(number)
            payload = None if payload_bytes == NO_PAYLOAD else frame.payload
            digest = frame.follower.digest() if frame.follower is not None else None
            self._deliver(frame.message, payload, digest)
        return True

    def touch(self, number: int) -> None:
        """A part of this record is here: through a thin uplink one record alone may take longer than all sweeps."""
        if frame := self._incoming.get(number):
            frame.quiet_sweeps = 0

    def sweep(self) -> None:
        """Give back the memory of frames that stopped arriving.

        Called again and again, and once after a time in which this process, or its computer, stood still: bytes
        that nobody could send or read meanwhile are not late.
        """
        for number, frame in list(self._incoming.items()):
            if frame.quiet_sweeps == STALLED_SWEEPS:
                self._abandon(number)
            frame.quiet_sweeps += 1

    def _hold(self, number: int, frame: _IncomingFrame) -> None:
        self._incoming[number] = frame
        self._receiving_bytes += frame.held_bytes
        while self._receiving_bytes > self._limits.receive_bytes:
            self._abandon(next(iter(self._incoming)))  # the oldest; never the new one, a frame is below the limit

    def _release(self, number: int) -> _IncomingFrame:
        frame = self._incoming.pop(number)
        self._receiving_bytes -= frame.held_bytes
        self._intake.give(frame.held_bytes)
        return frame

    def _abandon(self, number: int) -> None:
        self._release(number)
        self._abandoned.append(number)
        self.lost += 1


class BulkChannel:
    """One connection of the lane: seals records into a socket, opens records out of it."""

    def __init__(
        self, wire: TcpConnection, lane: BulkLane, cap: UploadLimiter, sealer: RecordSealer, opener: RecordOpener
    ) -> None:
        self.wire = wire
        self.frame: _OutgoingFrame | None = None  # short frame that only this connection carries
        self._lane, self._cap, self._sealer, self._opener = lane, cap, sealer, opener
        self._loop = asyncio.get_running_loop()
        self._boxes = lane.boxes
        self._outbox: memoryview | None = None  # while something in it has not left for the kernel
        self._sealed = memoryview(b"")  # of it, what the cap has not let out yet
        self._inbox: memoryview | None = None  # while something in it waits for the rest
        self._begin = self._got = 0  # in it: where what waits begins, and where what came ends
        self._want = PEEK_BYTES  # where the next read ends at most
        self._coming: RecordHeader | None = None  # whose body stands at the beginning of the inbox, or will
        self._pump_scheduled = False
        self._waiting = False  # for memory

    @property
    def waits(self) -> bool:
        """Whether the cap, or the network, holds back something that it was given."""
        return bool(self._sealed) or self.wire.waits

    def pump(self) -> None:
        self.wire.guarded(self._pump)

    def _pump(self) -> None:
        """Seal and write until the kernel or the cap is full, nothing is left, or it is the others' turn."""
        self._pump_scheduled = False
        left, wire = TURN_BYTES, self.wire
        while left > 0 and wire.clear and (self._sealed or self._seal()):
            sealed = self._sealed
            size = self._cap.ask(len(sealed), self.pump)
            if size == 0:
                return
            wire.write(sealed[:size])
            self._sealed = sealed[size:]
            left -= size
        if self._outbox is not None and wire.clear and not self._sealed:  # nothing written is unsent
            self._boxes.give(self._outbox)
            self._outbox = None
        if left <= 0 and not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self.pump)

    def _seal(self) -> bool:
        """The next records stand in the outbox. False: there are none."""
        records = self._lane.records_for(self)
        if not records:
            return False
        box = self._outbox = self._outbox or self._boxes.take()
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
        """Bytes that came right behind the handshake."""
        assert self._inbox is None and len(data) <= BOX_BYTES
        self._inbox = self._boxes.take()
        self._inbox[: len(data)] = data
        self.received(len(data))

    def resume(self) -> None:
        """There may be memory again."""
        if self._waiting:
            self._waiting = False
            self.wire.resume_reading()
            self.wire.again()

    # ---- what the wire calls ----

    def began(self, wire: TcpConnection) -> None:
        raise AssertionError("a bulk channel takes over from a handshake")

    def room(self) -> memoryview:
        if self._inbox is None:
            self._inbox = self._boxes.take()
        return self._inbox[self._got : self._want]

    def received(self, count: int) -> None:
        inbox = self._inbox
        if inbox is None:
            return
        self._got += count
        at = self._begin
        while not self._waiting:
            record = self._coming
            if record is None:
                if self._got - at < HEAD.size:
                    break
                record = self._coming = _judged(bytes(inbox[at : at + HEAD.size]))
                at += HEAD.size
            end = at + record.sealed_bytes
            if end > self._got:
                break
            if not self._lane.accept(self, record, inbox[at:end], self._opener):
                self._waiting = True
                self.wire.pause_reading()
                break
            at, self._coming = end, None
        if self._coming is not None:
            self._lane.touch(self._coming.number)
        if at == self._got:
            self._boxes.give(inbox)
            self._inbox, at, self._got = None, 0, 0
        wanted_bytes = _worth_reading(self._coming)
        if at + wanted_bytes > BOX_BYTES:
            inbox[: self._got - at] = inbox[at : self._got]
            at, self._got = 0, self._got - at
        self._begin, self._want = at, at + wanted_bytes

    def writable(self) -> None:
        self._pump()

    def ended(self, why: Exception | None) -> None:
        self._lane.detach(self)


def _worth_reading(coming: RecordHeader | None) -> int:
    """Bytes behind its head: exactly to the end of this record and the next one's head, so nothing large is ever
    moved. Behind a message stands the first slab of its payload, and both are one read, as they were one write."""
    if coming is None:
        return PEEK_BYTES
    wanted_bytes = coming.sealed_bytes + HEAD.size
    if coming.kind == MESSAGE and coming.payload_bytes != NO_PAYLOAD and coming.body_bytes <= BESIDE_SLAB_MAX:
        wanted_bytes += min(SLAB_BYTES, coming.payload_bytes) + TAG_BYTES + HEAD.size
    return wanted_bytes


def _judged(head: bytes) -> RecordHeader:
    """What the head of a record says, if it keeps the limits; raises PeerFault for any other."""
    kind, body_bytes, payload_bytes, index, number = HEAD.unpack(head)
    if kind not in (MESSAGE, SLAB) or (kind == SLAB and payload_bytes == NO_PAYLOAD):
        raise PeerFault("", f"a bulk record of kind {kind}")
    if body_bytes > (SLAB_BYTES if kind == SLAB else CONTROL_FRAME_MAX):
        raise PeerFault("", f"a bulk record of {body_bytes} bytes")
    if payload_bytes != NO_PAYLOAD and payload_bytes > BULK_FRAME_MAX:
        raise PeerFault("", f"a payload of {payload_bytes} bytes")
    return RecordHeader(head, kind, body_bytes, payload_bytes, index, number)


def _held_bytes(payload_bytes: int) -> int:
    return CONTROL_FRAME_MAX + (0 if payload_bytes == NO_PAYLOAD else payload_bytes)


def _slabs(payload_bytes: int) -> int:
    return -(-payload_bytes // SLAB_BYTES)
