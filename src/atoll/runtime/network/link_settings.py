"""Settings and callbacks of a connection manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, MIB
from atoll.base.machine import LinkDown, LinkUp


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Behavior of links. The defaults suit a home connection and a data center alike."""

    congestion: str = "bbr"  # at 100 ms and 1 % loss bbr moves 150 of 200 Mbit/s, cubic 1
    bulk_connections: int = 1  # where the kernel grants that congestion control
    bulk_connections_lossy: int = 8  # where it does not: 8 cubic connections carry ten times one at 1 % loss
    lossy_rtt_s: Seconds = 0.005  # nearer peers lose nothing worth several connections
    control_queue_bytes: int = 16 * MIB  # seconds of votes and heartbeats; older ones are stale anyway
    bulk_queue_bytes: int = 1024 * MIB  # keep above one whole update; counts payloads that the caller still holds
    receive_bytes: int = 4 * (BULK_FRAME_MAX + CONTROL_FRAME_MAX)  # one peer's incomplete frames
    receive_total_bytes: int = 4096 * MIB  # all peers' incomplete frames; beyond it reading waits
    upload_bytes_s: int = 0  # all links together, 0: no cap; bulk waits for it, control messages only count
    handshake_s: Seconds = 10.0  # three round trips and two signatures, on a slow day


@dataclass(frozen=True)
class LinkCallbacks:
    """What the manager reports to its owner, and what it asks for."""

    on_event: Callable[[LinkUp | LinkDown], None]
    on_message: Callable[[PeerId, bytes, memoryview | None, bytes | None], None]
    """Called with sender, message, payload and the payload's hash by `follow`."""
    on_fault: Callable[[PeerFault], None] = lambda fault: None
    allow: Callable[[PeerId], bool] = lambda peer: True
