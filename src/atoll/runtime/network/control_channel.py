"""Control channel of one connection: the handshake, then control frames and messages.

A control frame is one `ControlFrame` byte and a body. While the connection is busy, messages wait here: they can
still be dropped (oldest first) or move to another connection.

Invariants:
- The owner learns of no frame before the remote's identity is known.
- The owner learns of the end exactly once.
Not responsible for: decisions (connection_manager.py).
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
from atoll.runtime.network.transport import Connection, ConnectionChannel, run_guarded
from atoll.wire.libp2p.multiaddr import DialEndpoint

READ_BYTES = MIB // 16  # control frames are small; a long one arrives in several reads
SESSION_BYTES_MAX = MIB // 16  # given to the session at once: bytes there can no longer be dropped or overtaken


class ControlFrame(IntEnum):
    """Kind of a control frame."""

    MESSAGE = 0  # body: one message of the peer
    WELCOME = 1  # listener: this connection is the link from now on
    REFUSED = 2  # listener: no link; body: the reason, for people
    RETIRE = 3  # another connection is preferred: nothing more is sent on this one
    MORE_BULK = 4  # listener: open this many (u8) bulk connections; only the dialer knows a way to the other side


class ControlChannelOwner(Protocol):
    def admit_connection(self, control: ControlChannel) -> None:
        """A stranger connected. An exception closes the connection at once."""
        ...

    def admit_guest(self, control: ControlChannel) -> None:
        """A foreign peer, served by the session alone. `on_opened` may still follow."""
        ...

    def on_opened(self, control: ControlChannel) -> None: ...

    def on_frame(self, control: ControlChannel, kind: ControlFrame, body: bytes) -> None: ...

    def on_control_ended(self, control: ControlChannel, why: Exception | None) -> None: ...


class ControlChannel:
    """A `ConnectionChannel`. `peer` and `lane` are set from `on_opened` on."""

    connection: Connection
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
        self.endpoint = endpoint  # dialed endpoint; None if the remote dialed
        self.expected = expected
        self.ready = self._loop.create_future()  # the dialer waits here for the listener's decision
        self.linked_at: Seconds = 0.0  # time at which this connection became the link
        self.sent_retire = False
        self.received_retire = False
        self.dropped = 0
        self._deadline_s = deadline_s
        self._deadline: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._frames: deque[bytes] = deque()
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._pump_scheduled = False
        self._finishing = False

    @property
    def is_dialed(self) -> bool:
        return self.endpoint is not None

    # ---- what the owner uses ----

    def send(self, message: bytes) -> None:
        self._messages.append(bytes((ControlFrame.MESSAGE,)) + message)
        self._waiting_bytes += len(message) + 1
        while self._waiting_bytes > self._queue_bytes:
            self._take_message()
            self.dropped += 1
        self._schedule_pump()

    def send_frame(self, kind: ControlFrame, body: bytes = b"") -> None:
        """Send a frame ahead of all waiting messages. Frames are never dropped."""
        self._frames.append(bytes((kind,)) + body)
        self._schedule_pump()

    def move_messages(self, other: ControlChannel) -> None:
        while self._messages:
            other.send(self._take_message()[1:])

    def set_deadline(self, deadline_s: Seconds | None) -> None:
        """Replace the deadline of the handshake, or of the last one set; None: no deadline."""
        if self._deadline:
            self._deadline.cancel()
        if deadline_s is not None:
            self._deadline = self._loop.call_later(deadline_s, self._expire)

    def finish(self, within_s: Seconds = 10.0) -> None:
        """Send what waits, then close."""
        self._finishing = True
        self.set_deadline(within_s)
        self._schedule_pump()

    def hand_over(self, channel: ConnectionChannel) -> None:
        """The handshake was for another lane: send its last bytes, then give the connection to `channel`."""
        self.set_deadline(None)
        while out := self.session.outgoing():
            self.connection.write(out)
        self.connection.channel = channel

    # ---- what the connection calls ----

    def on_started(self, connection: Connection) -> None:
        self.connection = connection
        self.set_deadline(self._deadline_s)
        if not self.is_dialed:
            self._owner.admit_connection(self)
        self.session = self._make_session()
        self.session.start(connection.remote_address)
        self._flush()

    def read_buffer(self) -> memoryview:
        return self._buffer

    def on_received(self, count: int) -> None:
        items = self.session.receive(self._buffer[:count])
        self._flush()  # the last bytes of the handshake precede the first record of a bulk lane
        for item in items if not self._finishing else ():  # else: sent before the remote knew of the end
            if isinstance(item, ChannelOpened):
                self.peer, self.lane = item
                self._owner.on_opened(self)
            elif isinstance(item, ForeignPeer):
                self.peer = item.peer
                self._owner.admit_guest(self)
            elif not item or item[0] not in _KINDS:
                raise PeerFault(self.peer, "an empty or unknown control frame", item[:16])
            else:
                self._owner.on_frame(self, ControlFrame(item[0]), item[1:])
        if self._frames or self._messages or self._finishing:
            self._schedule_pump()  # the remote may have made room

    def on_writable(self) -> None:
        self._pump()

    def on_ended(self, why: Exception | None) -> None:
        self.set_deadline(None)
        self.dropped += len(self._messages)
        self._messages.clear()
        self._waiting_bytes = 0
        self._owner.on_control_ended(self, why)

    # ---- sending ----

    def _schedule_pump(self) -> None:
        # frames of one turn of the loop leave together: one record, one system call
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._run_scheduled_pump)

    def _run_scheduled_pump(self) -> None:
        self._pump_scheduled = False
        run_guarded(self.connection, self._pump)

    def _pump(self) -> None:
        while self.connection.clear and (self._frames or self._messages):
            if self.session.waiting_bytes >= SESSION_BYTES_MAX:
                self._flush()
                if self.session.waiting_bytes >= SESSION_BYTES_MAX:
                    return  # until the remote makes room
            self.session.send(self._frames.popleft() if self._frames else self._take_message())
        self._flush()
        if self._finishing and self.connection.clear and not self.session.waiting_bytes:
            self.connection.close()

    def _flush(self) -> None:
        while self.connection.clear and (out := self.session.outgoing()):
            self.connection.write(out)

    def _take_message(self) -> bytes:
        message = self._messages.popleft()
        self._waiting_bytes -= len(message)
        return message

    def _expire(self) -> None:
        self.connection.abort(TimeoutError("the remote exceeded its deadline"))


_KINDS = frozenset(ControlFrame)
