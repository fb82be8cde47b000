"""One connection from its first byte on: the handshake, then the words and messages of the control lane.

A control frame is one `Word` and its body. Messages wait here, not in the transport, while the kernel is busy:
what waits here can still be dropped (oldest first) or move to another connection.
Promises: nothing reaches the owner before the remote's identity is known; the owner hears `over` exactly once.
Never decides anything: `links.py` does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import MIB
from atoll.base.machine import Lane
from atoll.runtime.network.secure_channel import ChannelOpened, ForeignPeer, SecureSession
from atoll.runtime.network.tcp import TcpConnection, WireChannel
from atoll.wire.libp2p.multiaddr import DialEndpoint

READ_BYTES = MIB // 16  # control frames are small; a long one comes in several reads
SESSION_BYTES_MAX = MIB // 16  # given to it at once: what waits there can no longer be dropped or overtaken


class ControlFrame(IntEnum):
    """What a control frame says."""

    MESSAGE = 0  # body: one message of the peer's own
    WELCOME = 1  # listener: this connection is our link from now on
    REFUSED = 2  # listener: go away; body: why, for people
    RETIRE = 3  # we have another connection that both prefer: nothing more will come on this one
    MORE_BULK = 4  # listener: please open this many (u8) bulk connections; you know how to reach me, not I you


class ControlChannelOwner(Protocol):
    def admit(self, control: ControlChannel) -> None:
        """A stranger connected; raises to close the connection at once."""
        ...

    def visited(self, control: ControlChannel) -> None:
        """A foreign peer that the session serves by itself; it may still be `opened` later."""
        ...

    def opened(self, control: ControlChannel) -> None: ...

    def heard(self, control: ControlChannel, word: ControlFrame, body: bytes) -> None: ...

    def over(self, control: ControlChannel, why: Exception | None) -> None: ...


class ControlChannel:
    """A channel of `tcp.TcpConnection`. `peer` and `lane` hold from `opened` on."""

    wire: TcpConnection
    session: SecureSession
    peer: PeerId
    lane: Lane

    def __init__(
        self,
        owner: ControlChannelOwner,
        make_session: Callable[[], SecureSession],
        *,
        deadline_s: Seconds,
        queue_bytes: int,
        endpoint: DialEndpoint | None = None,
        expected: PeerId | None = None,
    ) -> None:
        self._owner, self._make_session, self._queue_bytes = owner, make_session, queue_bytes
        self._loop = asyncio.get_running_loop()
        self.endpoint = endpoint  # that we dialled; None: they dialled us
        self.expected = expected
        self.ready = self._loop.create_future()  # the dialer waits here for the listener's word
        self.since: Seconds = 0.0  # when this connection became the link
        self.retired = False  # we said RETIRE
        self.left = False  # they said RETIRE
        self.dropped = 0
        self._deadline_s = deadline_s
        self._deadline: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._words: deque[bytes] = deque()
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._pump_scheduled = False
        self._finishing = False

    @property
    def dialled(self) -> bool:
        return self.endpoint is not None

    # ---- what the owner uses ----

    def send(self, message: bytes) -> None:
        self._messages.append(bytes((ControlFrame.MESSAGE,)) + message)
        self._waiting_bytes += len(message) + 1
        while self._waiting_bytes > self._queue_bytes:
            self._take_message()
            self.dropped += 1
        self._schedule()

    def say(self, word: ControlFrame, body: bytes = b"") -> None:
        """Words overtake waiting messages and are never dropped."""
        self._words.append(bytes((word,)) + body)
        self._schedule()

    def move_messages(self, other: ControlChannel) -> None:
        while self._messages:
            other.send(self._take_message()[1:])

    def settled(self, deadline_s: Seconds | None = None) -> None:
        """The handshake's deadline no longer counts; a new one may."""
        if self._deadline:
            self._deadline.cancel()
        if deadline_s is not None:
            self._deadline = self._loop.call_later(deadline_s, self._expire)

    def finish(self, within_s: Seconds = 10.0) -> None:
        """Let what waits leave, then close."""
        self._finishing = True
        self.settled(within_s)
        self._schedule()

    def hand_over(self, channel: WireChannel) -> None:
        """The handshake was for another lane: its last words leave, then the wire is the channel's."""
        self.settled()
        while out := self.session.outgoing():
            self.wire.write(out)
        self.wire.channel = channel

    # ---- what the wire calls ----

    def began(self, wire: TcpConnection) -> None:
        self.wire = wire
        self.settled(self._deadline_s)
        if not self.dialled:
            self._owner.admit(self)
        self.session = self._make_session()
        self.session.start(wire.seen_at)
        self._flush()

    def room(self) -> memoryview:
        return self._buffer

    def received(self, count: int) -> None:
        came = self.session.receive(self._buffer[:count])
        self._flush()  # the handshake's last word stands before the first record of a bulk lane
        for item in came if not self._finishing else ():  # else: what they sent before they knew
            if isinstance(item, ChannelOpened):
                self.peer, self.lane = item
                self._owner.opened(self)
            elif isinstance(item, ForeignPeer):
                self.peer = item.peer
                self._owner.visited(self)
            elif not item or item[0] not in _WORDS:
                raise PeerFault(self.peer, "an empty or unknown control frame", item[:16])
            else:
                self._owner.heard(self, ControlFrame(item[0]), item[1:])
        if self._words or self._messages or self._finishing:
            self._schedule()  # the remote may have made room

    def writable(self) -> None:
        self._pump()

    def ended(self, why: Exception | None) -> None:
        self.settled()
        self.dropped += len(self._messages)
        self._messages.clear()
        self._waiting_bytes = 0
        self._owner.over(self, why)

    # ---- inside ----

    def _schedule(self) -> None:
        # what is said in one turn of the loop leaves in one piece: one record, one system call
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._scheduled_pump)

    def _scheduled_pump(self) -> None:
        self._pump_scheduled = False
        self.wire.guarded(self._pump)

    def _pump(self) -> None:
        while self.wire.clear and (self._words or self._messages):
            if self.session.waiting_bytes >= SESSION_BYTES_MAX:
                self._flush()
                if self.session.waiting_bytes >= SESSION_BYTES_MAX:
                    return  # until the remote makes room
            self.session.send(self._words.popleft() if self._words else self._take_message())
        self._flush()
        if self._finishing and self.wire.clear and not self.session.waiting_bytes:
            self.wire.close()

    def _flush(self) -> None:
        while self.wire.clear and (out := self.session.outgoing()):
            self.wire.write(out)

    def _take_message(self) -> bytes:
        message = self._messages.popleft()
        self._waiting_bytes -= len(message)
        return message

    def _expire(self) -> None:
        self.wire.abort(TimeoutError("the other end took too long"))


_WORDS = frozenset(ControlFrame)
