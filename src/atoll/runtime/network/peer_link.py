"""Link to one peer: its endpoints, its connections, and traffic counters that outlive them.

Not responsible for: decisions (connection_manager.py).
"""

from __future__ import annotations

import asyncio

import msgspec

from atoll.base.ids import PeerId
from atoll.runtime.network.bulk_channel import BulkLane
from atoll.runtime.network.control_channel import ControlChannel
from atoll.runtime.network.message_log import ResendQueue
from atoll.wire.libp2p.multiaddr import DialAddress


class LinkStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one link since it exists. Bytes are those on the connections, handshakes included."""

    up: bool
    control_sent_bytes: int
    control_received_bytes: int
    bulk_sent_bytes: int
    bulk_received_bytes: int
    bulk_queued_bytes: int
    bulk_connections: int
    control_dropped: int  # messages dropped from a full queue or a broken connection
    bulk_dropped: int  # frames dropped from a full queue or a broken connection
    bulk_lost: int  # frames received in part
    refused_sends: int  # messages larger than a frame may be
    rtt_s: float | None  # the kernel's estimate; None if unknown
    congestion: str  # in use, read back
    same_computer: bool  # the connection does not leave this computer


class PeerLink:
    """State of the link to one peer."""

    def __init__(self, peer: PeerId, bulk: BulkLane) -> None:
        self.peer, self.bulk = peer, bulk
        self.endpoints: tuple[DialAddress, ...] = ()  # empty: only the remote can dial
        self.control: ControlChannel | None = None
        self.log: ResendQueue | None = None  # of the session; outlives its connections until the link is down
        self.retiring: dict[ControlChannel, None] = {}  # oldest first
        self.up = False  # LinkUp was reported
        self.may_be_refused = False  # LinkDown was reported, and no redial was refused since
        self.down_timer: asyncio.TimerHandle | None = None  # set while a LinkDown is due but not reported
        self.redialer: asyncio.Task[None] | None = None
        self.wake_redialer = asyncio.Event()
        self.bulk_wanted = 0  # connections
        self.bulk_opener: asyncio.Task[None] | None = None
        self.refused_sends = 0
        self._sent_bytes = self._received_bytes = self._dropped = 0  # of connections and sessions that ended

    def owns(self, control: ControlChannel) -> bool:
        """True if this connection is the link's, in use or retiring."""
        return self.control is control or control in self.retiring

    def remove_control(self, control: ControlChannel) -> None:
        """Remove an ended connection; its traffic stays counted."""
        self._sent_bytes += control.connection.sent_bytes
        self._received_bytes += control.connection.received_bytes
        self.retiring.pop(control, None)
        if self.control is control:
            self.control = None

    def push(self, message: bytes) -> None:
        """Queue a control message. Without a connection it waits for one that resumes the session."""
        assert self.log is not None
        self.log.push(message)
        if self.control is not None:
            self.control.schedule_pump()

    def use_control(self, new: ControlChannel) -> ControlChannel | None:
        """Make this connection the link. Returns the one that it replaces."""
        old, self.control = self.control, new
        if old is not None:
            old.stop_messages()
        self.use_log(new.log)
        new.carry_messages()
        return old

    def use_log(self, log: ResendQueue) -> None:
        """Continue this session, or begin it. Messages that another one has not sent yet leave in this one."""
        if self.log is not None and self.log is not log:
            self.log.move_waiting(log)
            self.end_session()
        self.log = log

    def receive_count(self, control: ControlChannel, body: bytes) -> None:
        control.receive_count(body)
        if control is self.control:
            self.use_log(control.log)  # a new one, if the remote does not have the offered session

    def end_session(self) -> None:
        """Release the log. A connection that finishes may still send what waits there."""
        if self.log is not None:
            self._dropped += self.log.dropped + (0 if self.retiring else len(self.log.waiting))
            self.log = None

    def stats(self) -> LinkStats:
        live = [*self.retiring, self.control] if self.control else [*self.retiring]
        return LinkStats(
            up=self.control is not None,
            control_sent_bytes=self._sent_bytes + sum(control.connection.sent_bytes for control in live),
            control_received_bytes=self._received_bytes
            + sum(control.connection.received_bytes for control in live),
            bulk_sent_bytes=self.bulk.sent_bytes,
            bulk_received_bytes=self.bulk.received_bytes,
            bulk_queued_bytes=self.bulk.queued_bytes,
            bulk_connections=len(self.bulk.channels),
            control_dropped=self._dropped + (self.log.dropped if self.log else 0),
            bulk_dropped=self.bulk.dropped,
            bulk_lost=self.bulk.lost,
            refused_sends=self.refused_sends,
            rtt_s=self.control.connection.rtt_s if self.control else None,
            congestion=self.control.connection.congestion if self.control else "",
            same_computer=self.control.connection.is_same_computer if self.control else False,
        )

    def traffic(self) -> tuple[int, int]:
        """(sent, received) bytes on the connections of this link."""
        now = self.stats()
        sent = now.control_sent_bytes + now.bulk_sent_bytes
        return sent, now.control_received_bytes + now.bulk_received_bytes

    def is_member_on_this_computer(self) -> bool:
        """True if a peer that `contact` named is connected from this computer; strangers may be here, too."""
        return bool(self.endpoints) and self.control is not None and self.control.connection.is_same_computer
