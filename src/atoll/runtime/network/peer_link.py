"""One link: what we know about one peer, what connects us, and what that has carried so far.

A link outlives its connections: their figures are added up when they go. Decides nothing; `links` does.
"""

from __future__ import annotations

import asyncio

import msgspec

from atoll.base.ids import PeerId
from atoll.runtime.network.bulk_channel import BulkLane
from atoll.runtime.network.control_channel import ControlChannel
from atoll.wire.libp2p.multiaddr import DialEndpoint


class LinkStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one link has done since it exists. Bytes are those on the socket, handshakes included."""

    up: bool
    control_sent_bytes: int
    control_received_bytes: int
    bulk_sent_bytes: int
    bulk_received_bytes: int
    bulk_queued_bytes: int
    bulk_connections: int
    control_dropped: int  # messages dropped from a full queue or a broken connection
    bulk_dropped: int  # the same, frames
    bulk_lost: int  # frames that came in part
    refused_sends: int  # larger than a frame may be
    rtt_s: float | None  # the kernel's estimate, where it tells
    congestion: str  # in use, read back


class PeerLink:
    """One peer: what we know about it and what connects us."""

    def __init__(self, peer: PeerId, bulk: BulkLane) -> None:
        self.peer, self.bulk = peer, bulk
        self.endpoints: tuple[DialEndpoint, ...] = ()  # empty: we cannot dial, only be dialled
        self.control: ControlChannel | None = None
        self.retiring: dict[ControlChannel, None] = {}  # oldest first
        self.up = False  # LinkUp was told
        self.down_owed: asyncio.TimerHandle | None = None  # the connection broke; LinkDown is not told yet
        self.redialler: asyncio.Task[None] | None = None
        self.nudge = asyncio.Event()  # wakes the redialler
        self.bulk_wanted = 0  # connections
        self.bulk_opener: asyncio.Task[None] | None = None
        self.refused_sends = 0
        self._sent_bytes = self._received_bytes = self._dropped = 0  # of controls that are gone

    def holds(self, control: ControlChannel) -> bool:
        """It is one of ours, in use or on its way out."""
        return self.control is control or control in self.retiring

    def let_go(self, control: ControlChannel) -> None:
        """This connection is over; what it carried stays counted."""
        self._sent_bytes += control.wire.sent_bytes
        self._received_bytes += control.wire.received_bytes
        self._dropped += control.dropped
        self.retiring.pop(control, None)
        if self.control is control:
            self.control = None

    def stats(self) -> LinkStats:
        live = [*self.retiring, self.control] if self.control else [*self.retiring]
        return LinkStats(
            up=self.control is not None,
            control_sent_bytes=self._sent_bytes + sum(control.wire.sent_bytes for control in live),
            control_received_bytes=self._received_bytes + sum(control.wire.received_bytes for control in live),
            bulk_sent_bytes=self.bulk.sent_bytes,
            bulk_received_bytes=self.bulk.received_bytes,
            bulk_queued_bytes=self.bulk.queued_bytes,
            bulk_connections=len(self.bulk.channels),
            control_dropped=self._dropped + sum(control.dropped for control in live),
            bulk_dropped=self.bulk.dropped,
            bulk_lost=self.bulk.lost,
            refused_sends=self.refused_sends,
            rtt_s=self.control.wire.rtt_s if self.control else None,
            congestion=self.control.wire.congestion if self.control else "",
        )

    def traffic(self) -> tuple[int, int]:
        """(sent, received) bytes on the sockets of this link."""
        now = self.stats()
        sent = now.control_sent_bytes + now.bulk_sent_bytes
        return sent, now.control_received_bytes + now.bulk_received_bytes
