"""Transport interface: dials and accepts connections, and what a channel may do with a connection.

A connection moves bytes and interprets none. Its channel provides the memory that arriving bytes fill.

Invariants:
- Bytes arrive complete and in order, or the connection ends.
- A connection reports its end to its channel exactly once.
- An exception in a channel ends that connection and nothing else.
Not responsible for: encryption (secure_channel.py), retries (connection_manager.py), addresses (dialer.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from atoll.base.errors import PeerFault
from atoll.crypto.seal import ConnectionKeysExhausted
from atoll.wire.libp2p.multiaddr import DialAddress

log = logging.getLogger(__name__)


class ConnectionCallbacks(Protocol):
    """Content of a connection at the moment: a handshake, control frames or bulk records."""

    def on_started(self, connection: Connection) -> None: ...

    def read_buffer(self) -> memoryview:
        """Memory for the next bytes; never empty."""
        ...

    def on_received(self, count: int) -> None:
        """`count` bytes are at the start of `read_buffer`. An exception from here ends the connection."""
        ...

    def on_writable(self) -> None:
        """All written bytes have left."""
        ...

    def on_ended(self, why: Exception | None) -> None:
        """The connection is gone. `why` is None if either end closed it in order."""
        ...


class Connection(Protocol):
    """One connection, made by a `Transport`. Used inside one event loop."""

    channel: ConnectionCallbacks
    closed: asyncio.Future[None]  # done once the connection is gone
    received_bytes: int

    async def start(self, channel: ConnectionCallbacks) -> None:
        """Carry `channel` on a dialed connection. Nothing was read before. Raises OSError."""
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Send `data` after everything written before. Its memory may change again once `unsent_bytes` is 0.

        Data is also taken while `clear` is False. A channel waits for `on_writable` then, so that little queues up.
        """
        ...

    def close(self) -> None:
        """Send what was written, then close."""
        ...

    def abort(self, why: Exception | None = None) -> None:
        """Close at once. Unsent bytes are lost."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    @property
    def clear(self) -> bool:
        """True if a write would leave at once."""
        ...

    @property
    def is_closing(self) -> bool:
        """True from `close` or `abort` on, and before `start`."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Written bytes that still occupy the caller's memory."""
        ...

    @property
    def sent_bytes(self) -> int: ...

    @property
    def acked_bytes(self) -> int:
        """Bytes that the remote acknowledged; 0 if the transport cannot tell; its rate then stays unknown."""
        ...

    @property
    def has_unsent(self) -> bool:
        """True if written bytes wait anywhere in this computer, kernel buffers included; False if unknown."""
        ...

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round-trip time; None if unknown."""
        ...

    @property
    def congestion(self) -> str:
        """Congestion control in use; empty if unknown."""
        ...

    @property
    def source(self) -> str:
        """IP address of the remote; empty for a remote on this computer that has none."""
        ...

    @property
    def remote_address(self) -> str:
        """Multiaddr of the remote, or empty."""
        ...

    @property
    def is_loopback(self) -> bool:
        """True if processors set the pace, not a network."""
        ...

    @property
    def is_same_computer(self) -> bool:
        """True if the remote is on this computer, through whatever interface."""
        ...


class Listener(Protocol):
    """An open listening address."""

    endpoint: DialAddress  # as bound: a numeric host and a port other than 0, or a place on this computer

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class Transport(Protocol):
    """One way to reach a peer."""

    async def dial(self, endpoint: DialAddress, may_dial: Callable[[str], bool] = ...) -> Connection:
        """A connection that waits for `start`. Raises OSError.

        ConnectionRefusedError means that every address refused, or that no such place is on this computer.
        `may_dial` is called with every numeric address that the endpoint's host resolves to. An endpoint without a
        host needs no call: `dial_any` asked.
        """
        ...

    async def listen(self, endpoint: DialAddress, accept: Callable[[Connection], ConnectionCallbacks]) -> Listener:
        """Accept connections; `accept` returns the channel of each. Raises OSError."""
        ...


class TransportOptions(NamedTuple):
    """Settings that every transport receives."""

    congestion: str
    on_written: Callable[[int], None]  # called with the length of every write


TransportFactory = Callable[[TransportOptions], Transport]
Transports = Mapping[str, TransportFactory]
"""Factories by `DialAddress.transport`: "tcp" dials /ip4/192.0.2.7/tcp/7071, "unix" would dial /unix/%2Frun%2Fx."""


def run_guarded(connection: Connection, work: Callable[[], None]) -> None:
    """Call `work`; an exception ends this connection only."""
    try:
        work()
    except Exception as why:
        fail_connection(connection, why)


def fail_connection(connection: Connection, why: Exception) -> None:
    """Abort after an exception. Errors that no remote can cause are logged with their traceback."""
    if isinstance(why, PeerFault | ConnectionKeysExhausted | OSError):
        log.debug("closing a connection to %s: %r", connection.source, why)
    else:
        log.warning("closing a connection to %s", connection.source, exc_info=why)
    connection.abort(why)


def reprocess_received(connection: Connection) -> None:
    """Let the channel process bytes it already holds."""
    if not connection.is_closing:
        run_guarded(connection, lambda: connection.channel.on_received(0))
