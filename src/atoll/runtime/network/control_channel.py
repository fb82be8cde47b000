"""Control channel of one connection: the handshake, then control frames and messages.

A control frame is one `ControlFrameKind` byte and a body. Messages wait in the session's log (message_log.py) while
the connection is busy: they can still be dropped (oldest first), or leave on another connection.

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
from atoll.runtime.network.message_log import COUNT_BYTES, ResendQueue
from atoll.runtime.network.secure_channel import ChannelOpened, SecureSession, ServedNonMember
from atoll.runtime.network.transport import Connection, ConnectionCallbacks, run_guarded
from atoll.wire.libp2p.multiaddr import DialAddress

READ_BYTES = MIB // 16  # control frames are small; a long one arrives in several reads
SESSION_BYTES_MAX = MIB // 16  # given to the session at once: bytes there can no longer be dropped or overtaken


class ControlFrameKind(IntEnum):
    """Kind of a control frame."""

    MESSAGE = 0  # body: one message of the peer
    WELCOME = 1  # listener: this connection is the link; body: session to continue and count (u64), or empty
    REFUSED = 2  # listener: no link; body: the reason, for people
    RETIRE = 3  # another connection is preferred: nothing more is sent on this one
    MORE_BULK = 4  # listener: open this many (u8) bulk connections; only the dialer knows a way to the other side
    ACK = 5  # count (u64) of accepted messages of the session; empty: there is no such session here


class ControlChannelOwner(Protocol):
    def admit_connection(self, control: ControlChannel) -> None:
        """A stranger connected. An exception closes the connection at once."""
        ...

    def admit_guest(self, control: ControlChannel) -> None:
        """A foreign peer, served by the session alone. `on_opened` may still follow."""
        ...

    def on_opened(self, control: ControlChannel) -> None: ...

    def on_frame(self, control: ControlChannel, kind: ControlFrameKind, body: bytes) -> None: ...

    def on_control_ended(self, control: ControlChannel, why: Exception | None) -> None: ...


class ControlChannel:
    """A `ConnectionCallbacks`. `peer`, `lane` and `log` are set from `on_opened` on."""

    connection: Connection
    session: SecureSession
    peer: PeerId
    lane: Lane
    log: ResendQueue  # of the session

    def __init__(
        self,
        owner: ControlChannelOwner,
        make_session: Callable[[], SecureSession],
        *,
        deadline_s: Seconds,
        queue_bytes: int,
        endpoint: DialAddress | None = None,
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
        self._awaits_count = False  # the remote has not stated yet what it has accepted of an offered session
        self._deadline_s = deadline_s
        self._deadline: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._frames: deque[bytes] = deque()
        self._repeats: deque[bytes] = deque()  # messages to send again, ahead of those that wait in the log
        self._carries_messages = False
        self._number = 0  # of the next message that arrives here
        self._pump_scheduled = False
        self._finishing = False

    @property
    def is_dialed(self) -> bool:
        return self.endpoint is not None

    # ---- what the owner uses ----

    def carry_messages(self) -> None:
        """From now on, send the messages of the log."""
        self._carries_messages = True
        self.schedule_pump()

    def stop_messages(self) -> None:
        """Another connection carries the messages."""
        self._carries_messages = False
        self._repeats.clear()

    def welcome(self, log: ResendQueue | None) -> None:
        """Listener: this connection is the link. Offer to continue its session, if there is one."""
        body = b""
        if log is not None and log.can_continue:
            self.log, self._awaits_count = log, True
            body = log.session_id + self._state_count()
        self.send_frame(ControlFrameKind.WELCOME, body)

    def receive_welcome(self, body: bytes, log: ResendQueue | None) -> None:
        """Dialer: continue the session that the listener offers, if this end has it, too."""
        if not body:
            return
        if log is None or not log.can_continue or body[:-COUNT_BYTES] != log.session_id:
            return self.send_frame(ControlFrameKind.ACK)
        self.log, self._awaits_count = log, True
        self.receive_count(body[-COUNT_BYTES:])
        self.send_frame(ControlFrameKind.ACK, self._state_count())

    def receive_count(self, body: bytes) -> None:
        """Read how many messages the remote has accepted. Where a session continues, repeat the others once.

        No count: the remote does not have the offered session, so a new one begins.
        """
        if self._awaits_count and not body:
            self.log, self._number = ResendQueue(self.session.session_id, self._queue_bytes), 0
        elif len(body) != COUNT_BYTES:
            raise PeerFault(self.peer, "a count of another size", body[:16])
        elif self._awaits_count:
            self._repeats = self.log.repeat_from(int.from_bytes(body, "big"))
        else:
            self.log.acknowledge(int.from_bytes(body, "big"))
        self._awaits_count = False
        self.schedule_pump()

    def _state_count(self) -> bytes:
        """Number arriving messages from here on; the remote repeats from there."""
        self._number = self.log.received
        return self.log.state_count()

    def accept_message(self, body: bytes) -> bool:
        """True if the message is new in this session."""
        self._number += 1
        is_new = self.log.accept(self._number - 1, len(body))
        if not self.sent_retire and (ack := self.log.take_due_ack()) is not None:
            self.send_frame(ControlFrameKind.ACK, ack)
        return is_new

    def send_frame(self, kind: ControlFrameKind, body: bytes = b"") -> None:
        """Send a frame ahead of all waiting messages. Frames are never dropped."""
        self._frames.append(bytes((kind,)) + body)
        self.schedule_pump()

    def set_deadline(self, deadline_s: Seconds | None) -> None:
        """Replace the deadline of the handshake, or of the last one set; None: no deadline."""
        if self._deadline:
            self._deadline.cancel()
        if deadline_s is not None:
            self._deadline = self._loop.call_later(deadline_s, self._expire)

    def refuse(self, why: bytes) -> None:
        self.send_frame(ControlFrameKind.REFUSED, why)
        self.finish()

    def finish_dial(self) -> None:
        """The listener has decided: `ready` is done."""
        if not self.ready.done():
            self.ready.set_result(self.peer)

    def finish(self, within_s: Seconds = 10.0) -> None:
        """Send what waits, then close."""
        self._finishing = True
        self.set_deadline(within_s)
        self.schedule_pump()

    def hand_over(self, channel: ConnectionCallbacks) -> None:
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
                self.log = ResendQueue(self.session.session_id, self._queue_bytes)
                self._owner.on_opened(self)
            elif isinstance(item, ServedNonMember):
                self.peer = item.peer
                self._owner.admit_guest(self)
            elif not item or item[0] not in _KINDS:
                raise PeerFault(self.peer, "an empty or unknown control frame", item[:16])
            else:
                self._owner.on_frame(self, ControlFrameKind(item[0]), item[1:])
        if self._has_frame or self._finishing:
            self.schedule_pump()  # the remote may have made room

    def on_writable(self) -> None:
        self._pump()

    def on_ended(self, why: Exception | None) -> None:
        self.set_deadline(None)
        self._owner.on_control_ended(self, why)

    # ---- sending ----

    def schedule_pump(self) -> None:
        # frames of one turn of the loop leave together: one record, one system call
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._run_scheduled_pump)

    def _run_scheduled_pump(self) -> None:
        self._pump_scheduled = False
        run_guarded(self.connection, self._pump)

    def _pump(self) -> None:
        while self.connection.clear and self._has_frame:
            if self.session.waiting_bytes >= SESSION_BYTES_MAX:
                self._flush()
                if self.session.waiting_bytes >= SESSION_BYTES_MAX:
                    return  # until the remote makes room
            self.session.send(self._take_frame())
        self._flush()
        if self._finishing and self.connection.clear and not self.session.waiting_bytes:
            self.connection.close()

    def _flush(self) -> None:
        while self.connection.clear and (out := self.session.outgoing()):
            self.connection.write(out)

    @property
    def _has_frame(self) -> bool:
        has_message = self._carries_messages and not self._awaits_count and (self._repeats or self.log.waiting)
        return bool(self._frames or has_message)

    def _take_frame(self) -> bytes:
        if self._frames:
            return self._frames.popleft()
        message = self._repeats.popleft() if self._repeats else self.log.take()
        return bytes((ControlFrameKind.MESSAGE,)) + message

    def _expire(self) -> None:
        self.connection.abort(TimeoutError("the remote exceeded its deadline"))


_KINDS = frozenset(ControlFrameKind)
