"""TCP transport: sockets with the right congestion control, and `TcpConnection`.

Invariants:
- No received byte is copied: the kernel fills the channel's memory.
- The connection queues at most one write beyond what the kernel took.
Not responsible for: retries, encryption, the meaning of the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import cast

from atoll.runtime.network.transport import (
    Connection,
    ConnectionCallbacks,
    TransportOptions,
    fail_connection,
    run_guarded,
)
from atoll.runtime.system import (
    acknowledged_bytes,
    choose_congestion,
    congestion_of,
    kernel_unsent_bytes,
    limit_silence,
    round_trip_us,
)
from atoll.wire.libp2p.multiaddr import DialAddress, text_of

BACKLOG = 256  # connections that wait in the kernel; in a mesh that starts at once, all peers dial at once
UNHEARD_S = 60.0  # unacknowledged bytes are lost after this time; the kernel alone retries for 15 minutes
RESOLVE_S = 5.0  # a resolver without a network tries for 40 s
CONNECT_S = 3.0  # a TCP connection takes one round trip and at most one lost SYN (1 s)
UNPACED = "reno"  # between processes of one computer, where nothing is lost: BBR's timers cost 10 % of the CPU


class TcpTransport:
    """`Transport` over TCP."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options

    async def dial(
        self, endpoint: DialAddress, may_dial: Callable[[str], bool] = lambda host: True
    ) -> TcpConnection:
        sock = await connect(endpoint, self._options.congestion, may_dial)
        return TcpConnection(self._options.on_written, sock)

    async def listen(
        self, endpoint: DialAddress, accept: Callable[[Connection], ConnectionCallbacks]
    ) -> TcpListener:
        def make_connection() -> TcpConnection:
            connection = TcpConnection(self._options.on_written)
            connection.channel = accept(connection)
            return connection

        sock = await listening(endpoint, self._options.congestion)
        host, port = sock.getsockname()[:2]
        server = await asyncio.get_running_loop().create_server(make_connection, sock=sock, backlog=BACKLOG)
        return TcpListener(server, DialAddress.of_host(host, port))


class TcpListener:
    """An open listening socket."""

    def __init__(self, server: asyncio.Server, endpoint: DialAddress) -> None:
        self.endpoint = endpoint
        self.close, self.wait_closed = server.close, server.wait_closed


async def connect(
    endpoint: DialAddress, congestion: str, may_dial: Callable[[str], bool] = lambda host: True
) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError, ConnectionRefusedError only if every address refused.

    `may_dial` is called with every numeric address that the endpoint's host resolves to.
    """
    troubles: list[OSError] = []
    for family, address in await _resolved(endpoint):
        if not may_dial(address[0]):
            troubles.append(OSError(f"{address[0]} is another machine at every member, so it is not dialed"))
            continue
        sock = _socket(family, address[0], congestion)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, address)
            if sock.getsockname() == sock.getpeername():  # no listener, and the kernel chose the dialed port
                raise ConnectionRefusedError("connected to itself")
            return sock
        except OSError as why:  # TimeoutError is one too
            sock.close()
            troubles.append(why)
        except BaseException:
            sock.close()
            raise
    # "refused" means that every address refused: an address without a reply may still be the peer's
    troubles.sort(key=lambda why: isinstance(why, ConnectionRefusedError))
    raise troubles[0] if troubles else OSError(f"{text_of(endpoint)} has no address")


async def listening(endpoint: DialAddress, congestion: str) -> socket.socket:
    """A bound, non-blocking socket; accepted connections inherit its congestion control (Linux)."""
    family, address = (await _resolved(endpoint))[0]
    sock = _socket(family, address[0], congestion)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolved(endpoint: DialAddress) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    with contextlib.suppress(ValueError):  # a numeric host needs no resolver, which would cost a thread
        family = socket.AF_INET6 if ip_address(endpoint.host).version == 6 else socket.AF_INET
        return [(family, (endpoint.host, endpoint.port))]
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                endpoint.host, endpoint.port, type=socket.SOCK_STREAM
            )
    except TimeoutError:
        raise OSError(f"no name server knew {endpoint.host} within {RESOLVE_S:.0f} s") from None
    return [
        (socket.AddressFamily(family), (str(address[0]), int(address[1]))) for family, _, _, _, address in found
    ]


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # empty if the connection is already gone
        return ip_address(host).is_loopback
    return False


def _socket(family: socket.AddressFamily, host: str, congestion: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit_silence(sock, UNHEARD_S)  # a path that drops everything must end the connection
    # before connect: BBR measures from the first round trip on
    choose_congestion(sock, UNPACED if _is_loopback(host) else congestion)
    return sock


class TcpConnection(asyncio.BufferedProtocol):
    """`Connection` over TCP: a connected socket, then an asyncio transport once it has a channel."""

    channel: ConnectionCallbacks

    def __init__(
        self, on_written: Callable[[int], None] = lambda written_bytes: None, sock: socket.socket | None = None
    ) -> None:
        """`sock` is a dialed socket, which waits for `start`; None for an accepted connection."""
        self._on_written = on_written
        self._sock = sock
        self.received_bytes = 0
        self.is_loopback = False
        self.closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._paused = False  # written bytes wait outside the kernel
        self._written_bytes = 0
        self._fault: Exception | None = None

    # ---- what channels use ----

    async def start(self, channel: ConnectionCallbacks) -> None:
        self.channel = channel
        sock, self._sock = self._sock, None
        if sock is None:
            raise ConnectionAbortedError("the connection was closed before it started")
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def write(self, data: bytes | memoryview) -> None:
        assert self._transport is not None
        self._written_bytes += len(data)
        self._on_written(len(data))
        self._transport.write(data)

    @property
    def clear(self) -> bool:
        return not self._paused and not self.is_closing

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def sent_bytes(self) -> int:
        return self._written_bytes - self.unsent_bytes

    @property
    def source(self) -> str:
        return self._remote()[0]

    @property
    def is_same_computer(self) -> bool:
        """The remote sends from loopback, or from the local address of this connection."""
        local = self._transport.get_extra_info("sockname") if self._transport else None
        return self.is_loopback or (local is not None and str(local[0]).split("%")[0] == self.source)

    @property
    def remote_address(self) -> str:
        host, port = self._remote()
        return text_of(DialAddress.of_host(host, port)) if host else ""

    def _remote(self) -> tuple[str, int]:
        """Host and port of the remote; empty once the connection is gone."""
        name = None
        if self._transport:
            name = self._transport.get_extra_info("peername")
        elif self._sock:
            with contextlib.suppress(OSError):
                name = self._sock.getpeername()
        return (str(name[0]).split("%")[0], int(name[1])) if name else ("", 0)

    def close(self) -> None:
        if self._transport:
            self._transport.close()
        else:
            self.abort()

    def abort(self, why: Exception | None = None) -> None:
        self._fault = self._fault or why
        if self._transport:
            self._transport.abort()
        elif self._sock:
            self._sock.close()
            self._sock = None
            self.closed.set_result(None)

    def pause_reading(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- what the kernel measures ----

    @property
    def congestion(self) -> str:
        """Congestion control in use, read back from the kernel; empty if the platform cannot tell."""
        return congestion_of(self._kernel_socket) if self._kernel_socket else ""

    @property
    def rtt_s(self) -> float | None:
        """The kernel's smoothed round trip; None if the platform cannot tell."""
        rtt_us = round_trip_us(self._kernel_socket) if self._kernel_socket else 0
        return rtt_us / 1e6 if rtt_us else None

    @property
    def acked_bytes(self) -> int:
        """Bytes that the other end has acknowledged; 0 if the platform cannot tell."""
        return acknowledged_bytes(self._kernel_socket) if self._kernel_socket else 0

    @property
    def has_unsent(self) -> bool:
        """Also asks the kernel, which takes a 512 KiB record at once on any link."""
        return bool(self.unsent_bytes) or bool(self._kernel_socket and kernel_unsent_bytes(self._kernel_socket))

    @property
    def _kernel_socket(self) -> socket.socket | None:
        return self._transport.get_extra_info("socket") if self._transport else None

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        # bytes in asyncio's buffer can no longer be dropped or overtaken: they wait in the channel's queue instead
        transport.set_write_buffer_limits(high=0)
        self.is_loopback = _is_loopback(self.source)
        run_guarded(self, lambda: self.channel.on_started(self))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.channel.read_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        try:  # `run_guarded`, without a closure for every read
            self.channel.on_received(nbytes)
        except Exception as why:
            fail_connection(self, why)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        run_guarded(self, self.channel.on_writable)

    def eof_received(self) -> bool:
        return False  # close: no channel goes on in one direction only

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)
        self.channel.on_ended(self._fault or exc)
