"""Yamux stream multiplexer over one ordered byte stream (libp2p/specs yamux/README.md, `/yamux/1.0.0`).

Driving contract: pass received bytes to `receive` in order. Then write what `take_outgoing` returns.
After PeerFault the session is over.

Frames are created when the driver requests them, not on `send`. `take_outgoing` first returns small frames
(pongs, resets, window updates), then one data frame per stream in turn. Thus a long message delays a heartbeat by
one frame.

Invariants:
- No window is overrun in either direction.
- The remote can cause at most `STREAMS_MAX` streams, `UNREAD_MAX` unread bytes and `REPLIES_MAX` queued replies.
- Received data is not held: it is returned in the pieces in which it arrives.
Not responsible for: timing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from atoll.base.errors import PeerFault
from atoll.base.limits import MIB
from atoll.wire.libp2p.events import (
    GoAwayReceived,
    MuxerEvent,
    PingAnswered,
    StreamData,
    StreamHalfClosed,
    StreamReset,
    UnnegotiatedStreamOpened,
)
from atoll.wire.libp2p.varint import Bytes
from atoll.wire.libp2p.yamux_frame import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER_BYTES,
    PING,
    RST,
    SESSION,
    SYN,
    WINDOW_UPDATE,
    YamuxHeader,
    pack,
    unpack,
)

PROTOCOL = "/yamux/1.0.0"
WINDOW = (
    256 * 1024
)  # bytes; spec "Flow Control": both sides assume it. Never enlarged here: control traffic is small
WINDOW_MAX = 2**32 - 1  # bytes that a remote may grant: sums of a 32-bit field stay inside it
FRAME_DATA_MAX = 65535 - 16 - HEADER_BYTES  # a full data frame with its header is exactly one Noise record
STREAMS_MAX = 256  # in each direction; spec "ACK backlog": at least 256 inbound ones should be buffered
UNREAD_MAX = (
    16 * MIB
)  # bytes returned but not consumed, over all streams; 256 full windows would be 64 MiB per peer
REPLIES_MAX = 1024  # queued pongs and resets, 12 bytes each; an honest peer causes a handful
REORDER_MAX = 64  # stream ids that may arrive after a higher one: go-yamux numbers and sends in two steps
QUEUED_STREAM_MAX = 4 * MIB  # bytes of one stream that wait for the remote's window: two of the largest messages
QUEUED_MAX = 16 * MIB  # bytes of all streams that wait, a limit for remotes that never read


@dataclass(slots=True)
class _YamuxStream:
    opening: int  # SYN or ACK flag for the first frame; then 0
    send_window: int = WINDOW  # bytes that may still be sent
    receive_window: int = WINDOW  # bytes that the remote may still send; plus unread and credit always WINDOW
    unread: int = 0  # bytes returned, not consumed
    credit: int = 0  # bytes consumed, not yet granted to the remote again
    queue: deque[memoryview] = field(default_factory=deque[memoryview])
    queued: int = 0  # bytes in `queue`
    closing: bool = False  # whether `close` was called: FIN follows the queue
    closed_here: bool = False  # whether FIN was sent
    closed_there: bool = False  # whether FIN was received


class YamuxMuxer:
    """One end of a session. The dialer opens odd stream ids, the listener even ones."""

    def __init__(self, dialer: bool, who: str = "") -> None:
        self._who = who
        self._own_parity = 1 if dialer else 0
        self._next_id = 1 if dialer else 2
        self._newest = 0 if dialer else -1  # highest stream id that the remote has opened
        self._skipped: set[int] = set()  # unused ids at most REORDER_MAX below it
        self._streams: dict[int, _YamuxStream] = {}
        self._own_count = self._unread = self._queued = 0
        self._replies: deque[bytes] = deque()  # small frames about the session or closed streams
        self._grants: dict[int, None] = {}  # streams with a due window update, oldest first
        self._ready: dict[int, None] = {}  # streams that can send now, in turn
        self._head = bytearray()  # incomplete header
        self._body = 0  # missing bytes of the data frame being received
        self._body_of = YamuxHeader(DATA, 0, SESSION, 0)  # header of that frame
        self._pings: set[int] = set()
        self._gone_away = False

    # ---- calls of the user ----------------------------------------------------------------------------------

    def open(self) -> int | None:
        """Open a stream; None if the remote went away or too many local streams are open."""
        if self._gone_away or self._own_count >= STREAMS_MAX or self._next_id > WINDOW_MAX:
            return None
        name, self._next_id = self._next_id, self._next_id + 2
        self._streams[name] = _YamuxStream(SYN)
        self._own_count += 1
        self._ready[name] = None
        return name

    def room(self, name: int) -> int:
        """Number of bytes that `send` accepts now."""
        stream = self._streams.get(name)
        if stream is None or stream.closing:
            return 0
        return max(0, min(QUEUED_STREAM_MAX - stream.queued, QUEUED_MAX - self._queued))

    def send(self, name: int, data: Bytes) -> bool:
        """Queue all of `data` without copying it (leave it unchanged); False if the remote does not read."""
        if not len(data):
            return name in self._streams
        if len(data) > self.room(name):
            return False
        stream = self._streams[name]
        stream.queue.append(memoryview(data))
        stream.queued += len(data)
        self._queued += len(data)
        self._wake(name, stream)
        return True

    def close(self, name: int) -> None:
        """Close the local direction of this stream after the queued data."""
        if (stream := self._streams.get(name)) is not None and not stream.closing:
            stream.closing = True
            self._wake(name, stream)

    def reset(self, name: int) -> None:
        """Reset the stream at once, in both directions."""
        if (stream := self._streams.get(name)) is not None:
            self._remove_stream(name, stream)
            if stream.opening != SYN:  # otherwise the remote does not know the stream
                self._replies.append(pack(WINDOW_UPDATE, RST, name, 0))

    def consumed(self, name: int, count: int) -> None:
        """Report `count` consumed bytes: the remote may send as many again."""
        stream = self._streams.get(name)
        if stream is None:
            return  # reset meanwhile
        assert 0 <= count <= stream.unread
        stream.unread -= count
        self._unread -= count
        stream.credit += count
        if stream.credit >= WINDOW // 2 and not stream.closed_there:
            self._grants[name] = None  # half a window at a time: 12 bytes per 128 KiB, and the sender never starves
        self._remove_if_closed(name, stream)

    def ping(self, value: int) -> None:
        self._pings.add(value)
        self._replies.append(pack(PING, SYN, SESSION, value))

    def go_away(self, reason: int) -> None:
        """Announce that no more streams follow; existing ones may still end in good order."""
        self._replies.append(pack(GO_AWAY, 0, SESSION, reason))

    # ---- bytes out ------------------------------------------------------------------------------------------

    def take_outgoing(self, budget: int) -> list[Bytes]:
        """Return about `budget` bytes of frames, most urgent first; an empty list if nothing is queued."""
        frames: list[Bytes] = []
        while self._replies and budget > 0:
            frames.append(self._replies.popleft())
            budget -= HEADER_BYTES
        while self._grants and budget > 0:
            name = next(iter(self._grants))
            del self._grants[name]
            stream = self._streams[name]
            frames.append(pack(WINDOW_UPDATE, self._flags(stream), name, stream.credit))
            stream.receive_window += stream.credit
            stream.credit = 0
            budget -= HEADER_BYTES
        while self._ready and budget > 0:
            name = next(iter(self._ready))
            del self._ready[name]
            budget -= self._append_frame(name, self._streams[name], frames)
        return frames

    def _append_frame(self, name: int, stream: _YamuxStream, frames: list[Bytes]) -> int:
        """Append one frame of one stream: data, or the frame that opens or closes it. Returns its size in bytes."""
        size = min(FRAME_DATA_MAX, stream.send_window, stream.queued)
        if size:
            frames.append(pack(DATA, self._flags(stream), name, size))
            stream.send_window -= size
            stream.queued -= size
            self._queued -= size
            missing = size
            while missing:
                piece = stream.queue.popleft()
                if len(piece) > missing:
                    stream.queue.appendleft(piece[missing:])
                    piece = piece[:missing]
                frames.append(piece)
                missing -= len(piece)
        elif stream.closing and not stream.queued:
            # a frame of its own: js-libp2p acts on FIN before it reads the body of the same frame
            frames.append(pack(WINDOW_UPDATE, self._flags(stream) | FIN, name, 0))
            stream.closed_here = True
            self._remove_if_closed(name, stream)
        elif stream.opening == SYN:
            frames.append(pack(WINDOW_UPDATE, self._flags(stream), name, 0))
        if name in self._streams:
            self._wake(name, stream)
        return HEADER_BYTES + size

    @staticmethod
    def _flags(stream: _YamuxStream) -> int:
        flags, stream.opening = stream.opening, 0
        return flags

    # ---- bytes in -------------------------------------------------------------------------------------------

    def receive(self, data: Bytes) -> list[MuxerEvent]:
        events: list[MuxerEvent] = []
        view = memoryview(data)
        while len(view):
            if self._body:
                piece, view = view[: self._body], view[self._body :]
                self._body -= len(piece)
                self._deliver(piece, events)
            else:
                missing = HEADER_BYTES - len(self._head)
                self._head += view[:missing]
                view = view[missing:]
                if len(self._head) == HEADER_BYTES:
                    header = unpack(self._head, self._who)
                    self._head.clear()
                    self._handle(header, events)
        return events

    def _handle(self, header: YamuxHeader, events: list[MuxerEvent]) -> None:
        kind, flags, name, length = header
        if len(self._replies) > REPLIES_MAX:
            raise PeerFault(self._who, f"causes replies faster than it reads them: {REPLIES_MAX} are queued")
        if kind == PING:
            self._on_ping(flags, length, events)
        elif kind == GO_AWAY:
            self._gone_away = True
            events.append(GoAwayReceived(length))
        else:
            if flags & SYN:
                self._accept_stream(name, events)
            elif name % 2 == self._own_parity and name >= self._next_id:
                raise PeerFault(self._who, f"frame on stream {name}, which is not open yet")
            stream = self._streams.get(name)
            if stream is not None and flags & RST:
                self._remove_stream(name, stream)
                events.append(StreamReset(name, "the remote reset it"))
                stream = None
            if kind == DATA:
                self._begin_body(header, stream, events)
            elif stream is not None:
                self._grow_window(name, stream, length)
                if flags & FIN:
                    self._close_remote_side(name, stream, events)

    def _on_ping(self, flags: int, value: int, events: list[MuxerEvent]) -> None:
        if flags & SYN:
            self._replies.append(pack(PING, ACK, SESSION, value))
        elif flags & ACK and value in self._pings:
            self._pings.remove(value)
            events.append(PingAnswered(value))
        else:
            raise PeerFault(self._who, "pong without a ping")

    def _accept_stream(self, name: int, events: list[MuxerEvent]) -> None:
        if name % 2 == self._own_parity:  # "The client side should use odd ID's, and the server even"
            raise PeerFault(self._who, f"opens stream {name}, an id of the other end")
        if name > self._newest:
            oldest = name - 2 * REORDER_MAX
            self._skipped = {late for late in self._skipped if late >= oldest}
            self._skipped.update(range(max(self._newest + 2, oldest), name, 2))
            self._newest = name
        elif name in self._skipped:
            self._skipped.remove(name)
        else:  # with a reused id, `consumed` of the old stream would count for the new one
            raise PeerFault(self._who, f"opens stream {name} twice")
        if len(self._streams) - self._own_count >= STREAMS_MAX:
            self._replies.append(pack(WINDOW_UPDATE, RST, name, 0))
            return  # the frame's body and later frames belong to an unknown stream and are skipped
        self._streams[name] = _YamuxStream(ACK)
        events.append(UnnegotiatedStreamOpened(name))

    def _begin_body(self, header: YamuxHeader, stream: _YamuxStream | None, events: list[MuxerEvent]) -> None:
        window = WINDOW if stream is None else stream.receive_window  # late data for a reset stream is skipped
        if header.length > window:
            raise PeerFault(self._who, f"sends {header.length} bytes into a window of {window}")
        if stream is not None:
            if stream.closed_there and header.length:
                raise PeerFault(self._who, f"sends data on stream {header.stream} after closing it")
            stream.receive_window -= header.length
        self._body, self._body_of = header.length, header
        if not header.length:
            self._end_body(events)

    def _deliver(self, piece: memoryview, events: list[MuxerEvent]) -> None:
        name = self._body_of.stream
        stream = self._streams.get(name)
        if stream is not None:
            stream.unread += len(piece)
            self._unread += len(piece)
            events.append(StreamData(name, bytes(piece)))
            if self._unread > UNREAD_MAX:
                self._reset_largest_reader(events)
        if not self._body:
            self._end_body(events)

    def _end_body(self, events: list[MuxerEvent]) -> None:
        header = self._body_of
        stream = self._streams.get(header.stream)
        if stream is not None and header.flags & FIN:
            self._close_remote_side(header.stream, stream, events)

    def _reset_largest_reader(self, events: list[MuxerEvent]) -> None:
        """Reset the stream with the most unread bytes: an honest peer loses one slow stream, not the link."""
        name = max(self._streams, key=lambda each: self._streams[each].unread)
        self.reset(name)
        events.append(StreamReset(name, f"more than {UNREAD_MAX} bytes of this connection are unread"))

    def _grow_window(self, name: int, stream: _YamuxStream, growth: int) -> None:
        stream.send_window += growth
        if stream.send_window > WINDOW_MAX:
            raise PeerFault(self._who, f"grants a window of {stream.send_window} bytes")
        self._wake(name, stream)

    def _close_remote_side(self, name: int, stream: _YamuxStream, events: list[MuxerEvent]) -> None:
        if stream.closed_there:
            return
        stream.closed_there = True
        self._grants.pop(name, None)
        events.append(StreamHalfClosed(name))
        self._remove_if_closed(name, stream)

    # ---- bookkeeping ----------------------------------------------------------------------------------------

    def _wake(self, name: int, stream: _YamuxStream) -> None:
        if stream.closed_here:
            return
        if (
            (stream.queued and stream.send_window)
            or stream.opening == SYN
            or (stream.closing and not stream.queued)
        ):
            self._ready.setdefault(name)

    def _remove_if_closed(self, name: int, stream: _YamuxStream) -> None:
        # a stream with unread bytes is kept: they count against its window and UNREAD_MAX until they are consumed
        if stream.closed_here and stream.closed_there and not stream.unread:
            self._remove_stream(name, stream)

    def _remove_stream(self, name: int, stream: _YamuxStream) -> None:
        del self._streams[name]
        self._own_count -= name % 2 == self._own_parity
        self._unread -= stream.unread
        self._queued -= stream.queued
        self._grants.pop(name, None)
        self._ready.pop(name, None)
