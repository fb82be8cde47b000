"""In-memory transport: connections are pairs of queues on the event loop, found by place in one `MemoryNetwork`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from atoll.runtime.network.transport import (
    Connection,
    ConnectionCallbacks,
    TransportOptions,
    fail_connection,
    run_guarded,
)
from atoll.wire.libp2p.multiaddr import DialAddress, text_of

WINDOW_BYTES = 256 * 1024  # in flight in one direction; beyond it, a connection is not clear


class MemoryNetwork:
    """All listeners of one test, at addresses like /memory/ada. `transport` is a `TransportFactory`."""

    def __init__(self) -> None:
        self.listeners: dict[DialAddress, MemoryListener] = {}

    def transport(self, options: TransportOptions) -> MemoryTransport:
        return MemoryTransport(self, options)


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, options: TransportOptions) -> None:
        self._network, self._options = network, options

    async def dial(
        self, endpoint: DialAddress, may_dial: Callable[[str], bool] = lambda host: True
    ) -> MemoryConnection:
        listener = self._network.listeners.get(place := endpoint._replace(peer=None))
        if listener is None:
            raise ConnectionRefusedError(f"no peer listens at {text_of(place)}")
        ours = MemoryConnection(self._options, text_of(place))
        theirs = MemoryConnection(listener.options, "")
        ours.remote, theirs.remote = theirs, ours
        theirs.channel = listener.accept(theirs)
        theirs.begin()
        return ours

    async def listen(
        self, endpoint: DialAddress, accept: Callable[[Connection], ConnectionCallbacks]
    ) -> MemoryListener:
        if endpoint in self._network.listeners:
            raise OSError(f"{text_of(endpoint)} is in use")
        listener = MemoryListener(self._network, endpoint, accept, self._options)
        self._network.listeners[endpoint] = listener
        return listener


class MemoryListener:
    def __init__(
        self,
        network: MemoryNetwork,
        endpoint: DialAddress,
        accept: Callable[[Connection], ConnectionCallbacks],
        options: TransportOptions,
    ) -> None:
        self.endpoint = endpoint
        self.accept, self.options, self._network = accept, options, network

    def close(self) -> None:
        self._network.listeners.pop(self.endpoint, None)

    async def wait_closed(self) -> None:
        return


class MemoryConnection:
    """One end. Bytes on their way to it lie in its queue until its channel reads them."""

    channel: ConnectionCallbacks
    remote: MemoryConnection
    congestion, rtt_s, is_loopback, is_same_computer, source = "", 0.0, False, False, ""

    def __init__(self, options: TransportOptions, remote_address: str) -> None:
        self._on_written, self.remote_address = options.on_written, remote_address
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        self.received_bytes = self._written_bytes = 0
        self._queue: deque[memoryview | None] = deque()  # None: the remote closed behind these bytes
        self._queued_bytes = 0
        self._started = self._reading = self._closing = self._delivering = False
        self._is_blocked = False  # `on_writable` is due
        self._fault: Exception | None = None

    async def start(self, channel: ConnectionCallbacks) -> None:
        if self._closing:
            raise ConnectionAbortedError("closed before it started")
        self.channel = channel
        self.begin()

    def begin(self) -> None:
        self._started = self._reading = True
        run_guarded(self, lambda: self.channel.on_started(self))
        self._schedule()

    # ---- sending ----

    def write(self, data: bytes | memoryview) -> None:
        self._written_bytes += len(data)
        self._on_written(len(data))
        if not self.is_closing:
            self.remote._put(memoryview(bytes(data)))
            self._is_blocked = not self.clear

    @property
    def clear(self) -> bool:
        return not self.is_closing and self.remote._queued_bytes < WINDOW_BYTES

    @property
    def is_closing(self) -> bool:
        return self._closing or not self._started

    @property
    def unsent_bytes(self) -> int:
        return 0  # `write` copies

    @property
    def sent_bytes(self) -> int:
        return self._written_bytes

    @property
    def acked_bytes(self) -> int:
        return self._written_bytes - self.remote._queued_bytes

    @property
    def has_unsent(self) -> bool:
        return self.remote._queued_bytes > 0

    # ---- the end ----

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.remote._put(None)
            self._loop.call_soon(self._end)

    def abort(self, why: Exception | None = None) -> None:
        self._fault = self._fault or why
        self._queue.clear()
        self.remote._queue.clear()
        self.remote._queued_bytes = 0
        self.close()

    def _end(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
            self._queue.clear()
            if self._started:
                self.channel.on_ended(self._fault)

    # ---- receiving ----

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._schedule()

    def _put(self, data: memoryview | None) -> None:
        if not self.closed.done():
            self._queue.append(data)
            self._queued_bytes += len(data) if data is not None else 0
            self._schedule()

    def _schedule(self) -> None:
        if self._started and not self._delivering:
            self._delivering = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """One read, then other work on the loop: as much as the channel has memory for."""
        self._delivering = False
        if not self._queue or not self._reading or self.closed.done():
            return
        data = self._queue.popleft()
        if data is None:
            self._closing = True
            return self._end()
        room = self.channel.read_buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        if count < len(data):
            self._queue.appendleft(data[count:])
        self._queued_bytes -= count
        self.received_bytes += count
        if self.remote._is_blocked and self.remote.clear:
            self.remote._is_blocked = False
            self._loop.call_soon(self.remote._report_writable)
        try:
            self.channel.on_received(count)
        except Exception as why:
            fail_connection(self, why)
        self._schedule()

    def _report_writable(self) -> None:
        if not self.is_closing:
            run_guarded(self, self.channel.on_writable)
