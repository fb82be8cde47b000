"""TCP as the host uses it: addresses, sockets with the right congestion control, and `TcpConnection`, one
connection.

A wire moves bytes and judges none: a `WireChannel` hands out the memory that the kernel fills and is told how much
arrived. Whatever a channel raises about a stranger's bytes costs exactly that connection.
Promises: every byte is counted, a channel hears `ended` exactly once.
Never blocks, never copies what it receives, never keeps more unsent bytes than one write left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from ipaddress import ip_address
from typing import Protocol, TypeVar, cast

from atoll.base.errors import PeerFault
from atoll.crypto.seal import KeysExhausted
from atoll.wire.libp2p.multiaddr import DialEndpoint, text_of

T = TypeVar("T")

log = logging.getLogger(__name__)

BACKLOG = 256  # connections the kernel holds for us; a mesh that starts at once dials all at once
UNHEARD_S = 60.0  # bytes that nobody acknowledges for so long are lost; the kernel alone tries for a quarter hour
CONNECT_S = 3.0  # a TCP connection takes one round trip and at most one lost SYN (1 s)
UNPACED = "reno"  # between processes of one computer, where nothing is lost: BBR's timers cost a tenth of the CPU


async def connect(
    endpoint: DialEndpoint, congestion: str, may_dial: Callable[[str], bool] = lambda host: True
) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError, ConnectionRefusedError only if every address refused.

    `may_dial` is asked of every number that the endpoint's name stands for.
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
            if sock.getsockname() == sock.getpeername():  # nobody listens, and the kernel gave us the port we dial
                raise ConnectionRefusedError("connected to itself")
            return sock
        except OSError as why:  # TimeoutError is one too
            sock.close()
            troubles.append(why)
        except BaseException:
            sock.close()
            raise
    # one address that did not answer leaves hope: "refused" is said only when every one refused
    troubles.sort(key=lambda why: isinstance(why, ConnectionRefusedError))
    raise troubles[0] if troubles else OSError(f"{text_of(endpoint)} has no address")


async def listening(endpoint: DialEndpoint, congestion: str) -> socket.socket:
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


async def _resolved(endpoint: DialEndpoint) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    with contextlib.suppress(ValueError):  # a number needs no resolver, which would cost a thread
        family = socket.AF_INET6 if ip_address(endpoint.host).version == 6 else socket.AF_INET
        return [(family, (endpoint.host, endpoint.port))]
    found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return [
        (socket.AddressFamily(family), (str(address[0]), int(address[1]))) for family, _, _, _, address in found
    ]


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # gone before we could ask
        return ip_address(host).is_loopback
    return False


def _socket(family: socket.AddressFamily, host: str, congestion: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):  # Linux: a path that swallows everything must end the wire
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNHEARD_S * 1000))
    # before connect: BBR measures from the first round trip on. Not every kernel has it or lets us choose it
    with contextlib.suppress(OSError, AttributeError):
        chosen = UNPACED if _is_loopback(host) else congestion
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, chosen.encode())
    return sock


class WireChannel(Protocol):
    """What a wire carries at the moment: a handshake, control frames, or bulk records."""

    def began(self, wire: TcpConnection) -> None: ...

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        ...

    def received(self, count: int) -> None:
        """`count` bytes stand at the beginning of what `room` gave. Raises whatever a stranger's bytes deserve."""
        ...

    def writable(self) -> None:
        """All that was written has left for the kernel."""
        ...

    def ended(self, why: Exception | None) -> None:
        """The connection is gone; `why` is None when either end closed it in order."""
        ...


class TcpConnection(asyncio.BufferedProtocol):
    """One TCP connection."""

    def __init__(self, channel: WireChannel, count: Callable[[int], None] = lambda written_bytes: None) -> None:
        self.channel = channel
        self._count = count  # is told of every byte given to the socket
        self.received_bytes = 0
        self.paused = False  # some written bytes are not with the kernel yet
        self.local = False  # both ends are on this computer: processors set the pace, not a network
        self.closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._written_bytes = 0
        self._fault: Exception | None = None

    # ---- what channels use ----

    def write(self, data: bytes | memoryview) -> None:
        assert self._transport is not None
        self._written_bytes += len(data)
        self._count(len(data))
        self._transport.write(data)

    @property
    def clear(self) -> bool:
        """A write would go straight to the kernel."""
        return self._transport is not None and not self.paused and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that may still be read from the memory given to `write`; 0 means that memory is free again."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def sent_bytes(self) -> int:
        return self._written_bytes - self.unsent_bytes

    @property
    def source(self) -> str:
        """The host at the other end, as the kernel sees it."""
        return self._peername()[0]

    @property
    def inside(self) -> bool:
        """The remote is on this computer: it sends from loopback, or from the address that answers it."""
        own = self._transport.get_extra_info("sockname") if self._transport else None
        return self.local or (own is not None and str(own[0]).split("%")[0] == self.source)

    @property
    def seen_at(self) -> str:
        """The same as a multiaddr, or empty."""
        host, port = self._peername()
        return text_of(DialEndpoint(host, port, "tcp", None)) if host else ""

    def _peername(self) -> tuple[str, int]:
        name = self._transport.get_extra_info("peername") if self._transport else None
        return (str(name[0]).split("%")[0], int(name[1])) if name else ("", 0)

    def close(self) -> None:
        """Let what was written leave, then close."""
        if self._transport:
            self._transport.close()

    def abort(self, why: Exception | None = None) -> None:
        self._fault = self._fault or why
        if self._transport:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.resume_reading()

    def guarded(self, work: Callable[[], None]) -> None:
        """Where strangers' bytes are judged and keys are used: whatever `work` raises ends this connection only."""
        try:
            work()
        except Exception as why:
            self._give_up(why)

    def _give_up(self, why: Exception) -> None:
        if isinstance(why, PeerFault | KeysExhausted | OSError):
            log.debug("closing a connection to %s: %r", self.source, why)
        else:  # ours: bytes led us where nobody thought
            log.warning("closing a connection to %s", self.source, exc_info=why)
        self.abort(why)

    def again(self) -> None:
        """Let the channel look once more at what it already has."""
        if self._transport and not self._transport.is_closing():
            self.guarded(lambda: self.channel.received(0))

    # ---- what the kernel knows ----

    @property
    def congestion(self) -> str:
        """Congestion control in use, read back; empty where the platform does not tell."""
        return _asked(self._transport, "TCP_CONGESTION", 16, lambda raw: raw.rstrip(b"\0").decode()) or ""

    @property
    def rtt_s(self) -> float | None:
        """The kernel's smoothed round trip. `struct tcp_info`: 8 bytes, then 32-bit words, rtt the 16th, in µs."""
        rtt_us = _asked(self._transport, "TCP_INFO", 72, lambda raw: struct.unpack_from("=I", raw, 68)[0])
        return rtt_us / 1e6 if rtt_us else None

    @property
    def acked_bytes(self) -> int:
        """What the other end has acknowledged (`tcpi_bytes_acked`, at 120); 0 where the kernel does not tell."""
        return _asked(self._transport, "TCP_INFO", 128, lambda raw: struct.unpack_from("=Q", raw, 120)[0]) or 0

    @property
    def waits(self) -> bool:
        """Whether something written has not left for the network, here or in the kernel (`tcpi_notsent_bytes`, at
        144): it takes a record of half a megabyte at once, however slow the link is."""
        if self.unsent_bytes:
            return True
        return bool(_asked(self._transport, "TCP_INFO", 148, lambda raw: struct.unpack_from("=I", raw, 144)[0]))

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        # what waits here can no longer be dropped or overtaken: let it wait in the channel's own queue instead
        transport.set_write_buffer_limits(high=0)
        self.local = _is_loopback(self.source)
        self.guarded(lambda: self.channel.began(self))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.channel.room()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        try:  # `guarded`, without a function for every read
            self.channel.received(nbytes)
        except Exception as why:
            self._give_up(why)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.guarded(self.channel.writable)

    def eof_received(self) -> bool:
        return False  # close: none of our conversations goes on in one direction only

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)
        self.channel.ended(self._fault or exc)


def _asked(transport: asyncio.Transport | None, option: str, size: int, read: Callable[[bytes], T]) -> T | None:
    sock = transport.get_extra_info("socket") if transport else None
    if sock is None or not hasattr(socket, option):
        return None
    with contextlib.suppress(OSError, struct.error):
        return read(sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, option), size))
    return None
