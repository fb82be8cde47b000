"""Conformance of transports: the same promises for every registered one and for one in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from islands import PATIENCE_S, Island, closed, story
from memory_transport import MemoryNetwork

from atoll.base.errors import NetworkError, UsageError
from atoll.base.limits import MIB
from atoll.base.machine import Lane, LinkDown, LinkUp
from atoll.runtime.network.transport import Connection, Listener, Transport, TransportFactory, TransportOptions
from atoll.runtime.network.transports import TRANSPORTS
from atoll.wire.libp2p.multiaddr import endpoint

pytestmark = pytest.mark.net

MakeFactory = Callable[[], TransportFactory]
EVERY: dict[str, MakeFactory] = {name: lambda name=name: TRANSPORTS[name] for name in TRANSPORTS}
EVERY["memory"] = lambda: MemoryNetwork().transport
LISTENING = {"tcp": "/ip4/127.0.0.1/tcp/0", "memory": "/memory/ada"}  # where the listener of each test is
READ_BYTES = 65536


class Recorder:
    """A channel that keeps what it receives."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.received = bytearray()
        self.ends: list[Exception | None] = []
        self.writable = 0
        self.fault: Exception | None = None  # raised by the next bytes
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._news = asyncio.Event()

    def on_started(self, connection: Connection) -> None:
        self.connection = connection
        self._news.set()

    def read_buffer(self) -> memoryview:
        return self._buffer

    def on_received(self, count: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.received += self._buffer[:count]
        self._news.set()

    def on_writable(self) -> None:
        self.writable += 1
        self._news.set()

    def on_ended(self, why: Exception | None) -> None:
        self.ends.append(why)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@dataclass
class Ends:
    """A dialed connection, and the listener's channels."""

    transport: Transport
    listener: Listener
    ours: Connection
    dialer: Recorder
    accepted: list[Recorder] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    @property
    def other(self) -> Recorder:
        return self.accepted[0]

    @property
    def theirs(self) -> Connection:
        assert self.other.connection is not None
        return self.other.connection

    async def close(self) -> None:
        self.listener.close()
        for connection in (self.ours, *(each.connection for each in self.accepted)):
            assert connection is not None
            connection.abort()
            await connection.closed
        await self.listener.wait_closed()


async def opened(name: str) -> Ends:
    accepted, written = list[Recorder](), list[int]()

    def accept(connection: Connection) -> Recorder:
        accepted.append(Recorder())
        return accepted[-1]

    transport = EVERY[name]()(TransportOptions("cubic", written.append))
    listener = await transport.listen(endpoint(LISTENING[name]), accept)
    dialer, ours = Recorder(), await transport.dial(listener.endpoint)
    await ours.start(dialer)
    async with asyncio.timeout(PATIENCE_S):
        while not (accepted and accepted[0].connection):
            await asyncio.sleep(0)
    return Ends(transport, listener, ours, dialer, accepted, written)


def over_every_transport(test: Callable[[Ends], object]) -> Callable[[str], None]:
    @pytest.mark.parametrize("name", EVERY)
    def run(name: str) -> None:
        async def whole() -> None:
            ends = await opened(name)
            await test(ends)  # pyright: ignore[reportGeneralTypeIssues]
            await ends.close()

        story(whole)()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@over_every_transport
async def test_bytes_arrive_in_order_in_both_directions(ends: Ends):
    """A thousand small writes at each end, interleaved; every one is counted at both ends and by the options."""
    words = [b"%d," % n for n in range(1000)]
    for word in words:
        ends.ours.write(word)
        ends.theirs.write(word)
    whole = b"".join(words)
    await ends.other.until(lambda: len(ends.other.received) == len(whole))
    await ends.dialer.until(lambda: len(ends.dialer.received) == len(whole))
    assert ends.other.received == ends.dialer.received == whole
    assert ends.ours.sent_bytes == ends.theirs.received_bytes == len(whole)
    assert sum(ends.written) == 2 * len(whole)


@over_every_transport
async def test_a_write_larger_than_every_buffer_arrives_whole(ends: Ends):
    """32 MiB from one memory, which is free again once no byte of it is unsent."""
    data = os.urandom(32 * MIB)
    ends.ours.write(memoryview(data))
    await ends.other.until(lambda: len(ends.other.received) == len(data))
    assert ends.other.received == data
    await ends.dialer.until(lambda: ends.ours.unsent_bytes == 0 and ends.ours.clear)
    assert not 0 < ends.ours.acked_bytes < len(data)  # TCP also counts its SYN
    assert not ends.ours.has_unsent


@over_every_transport
async def test_a_receiver_that_stops_reading_holds_the_sender_back(ends: Ends):
    """The sender is not clear before 64 MiB are written; it is told once the receiver reads again."""
    ends.theirs.pause_reading()
    piece, sent = bytes(MIB), 0
    while ends.ours.clear:
        ends.ours.write(piece)
        sent += MIB
        await asyncio.sleep(0)
        assert sent < 64 * MIB
    assert ends.dialer.writable == 0 and ends.ours.has_unsent
    ends.theirs.resume_reading()
    await ends.dialer.until(lambda: ends.dialer.writable)
    assert ends.ours.clear
    await ends.other.until(lambda: len(ends.other.received) == sent)


@over_every_transport
async def test_close_delivers_what_was_written_and_then_ends_both_sides_once(ends: Ends):
    """4 MiB are half written when the dialer closes: they arrive whole before the end does."""
    data = os.urandom(4 * MIB)
    ends.ours.write(data)
    ends.ours.close()
    assert ends.ours.is_closing and not ends.ours.clear
    await ends.other.until(lambda: ends.other.ends)
    assert ends.other.received == data
    await ends.ours.closed
    assert ends.dialer.ends == ends.other.ends == [None]


@over_every_transport
async def test_the_accepting_side_closes_too(ends: Ends):
    ends.theirs.write(b"goodbye")
    ends.theirs.close()
    await ends.dialer.until(lambda: ends.dialer.ends)
    assert ends.dialer.received == b"goodbye"
    await ends.theirs.closed
    assert ends.dialer.ends == ends.other.ends == [None]


@over_every_transport
async def test_both_sides_may_close_at_once(ends: Ends):
    ends.ours.close()
    ends.theirs.close()
    await asyncio.gather(ends.ours.closed, ends.theirs.closed)
    assert len(ends.dialer.ends) == len(ends.other.ends) == 1


@over_every_transport
async def test_abort_reports_its_reason_here_and_an_end_there(ends: Ends):
    why = TimeoutError("no heartbeat")
    ends.ours.write(bytes(16 * MIB))
    ends.ours.abort(why)
    await ends.ours.closed
    await ends.other.until(lambda: ends.other.ends)
    assert ends.dialer.ends == [why] and len(ends.other.ends) == 1


@over_every_transport
async def test_an_exception_of_a_channel_ends_its_connection_only(ends: Ends):
    """A second connection of the same listener goes on."""
    second = await ends.transport.dial(ends.listener.endpoint)
    recorder = Recorder()
    await second.start(recorder)
    ends.other.fault = OSError("what a remote deserves")
    ends.ours.write(b"x")
    await ends.dialer.until(lambda: ends.dialer.ends)
    assert ends.other.ends == [ends.other.fault]
    second.write(b"still here")
    async with asyncio.timeout(PATIENCE_S):
        while len(ends.accepted) < 2 or ends.accepted[1].received != b"still here":
            await asyncio.sleep(0.001)
    second.close()
    await second.closed


@over_every_transport
async def test_a_connection_that_never_started_can_be_given_up(ends: Ends):
    unused = await ends.transport.dial(ends.listener.endpoint)
    assert unused.is_closing and not unused.clear
    unused.abort()
    await unused.closed
    with pytest.raises(OSError, match="closed before it started"):
        await unused.start(Recorder())
    async with asyncio.timeout(PATIENCE_S):
        while len(ends.accepted) < 2 or not ends.accepted[1].ends:
            await asyncio.sleep(0.001)


@over_every_transport
async def test_dialing_an_address_without_a_listener_is_refused(ends: Ends):
    """One that listened before."""
    ends.listener.close()
    with pytest.raises(ConnectionRefusedError):
        await ends.transport.dial(ends.listener.endpoint)


# ---- connection managers over another transport ------------------------------------------------------------


async def islands_in_memory() -> tuple[Island, Island]:
    """Two peers without a socket; their addresses have no host."""
    transports = {"memory": MemoryNetwork().transport}
    ada, bob = Island("ada", transports=transports), Island("bob", transports=transports)
    for name, island in (("ada", ada), ("bob", bob)):
        (island.address,) = await island.links.listen([f"/memory/{name}"])
    return ada, bob


@story
async def test_two_connection_managers_talk_over_memory():
    """Noise, both lanes, goodbye: no layer above the transport knows the difference."""
    ada, bob = await islands_in_memory()
    told = ("/", "/memory/" + 200 * "é", "/ip4/127.0.0.1/tcp/1", bob.address)  # only the last can be dialed here
    ada.links.contact(bob.name, told)
    await asyncio.gather(ada.up(bob), bob.up(ada))
    payload = os.urandom(3 * MIB + 17)
    assert ada.links.send(bob.name, b"hello")
    assert bob.links.send(ada.name, b"part", Lane.BULK, payload)
    assert ada.links.send(bob.name, bytes(MIB))
    await bob.until(lambda: len(bob.heard) == 2)
    await ada.until(lambda: ada.heard == [(bob.name, b"part", len(payload))])
    assert ada.payloads == [payload]
    assert ada.links.stats()[bob.name].bulk_received_bytes > len(payload)
    await bob.links.close()
    await ada.until(lambda: LinkDown(bob.name, refused=True) in ada.events)
    await closed(ada)


@story
async def test_a_dial_over_memory_fails_in_words():
    """No peer there; and an address of a transport that this peer does not have."""
    ada, bob = await islands_in_memory()
    assert await ada.links.dial(bob.address) == bob.name
    assert ada.events == [LinkUp(bob.name)]
    with pytest.raises(NetworkError, match="E-NET-12 no peer listens at"):
        await ada.links.dial("/memory/cyd")
    with pytest.raises(UsageError, match=r"E-NET-10 .*needs transport tcp"):
        await ada.links.dial("/ip4/192.0.2.1/tcp/999")
    await closed(ada, bob)


@story
async def test_a_place_on_this_computer_is_not_dialed_on_a_members_word():
    """Another program may listen at a place that a member names: only a peer that has a place itself dials it."""
    network, came = MemoryNetwork(), list[Connection]()

    def accept(connection: Connection) -> Recorder:
        came.append(connection)
        return Recorder()

    service = await network.transport(TransportOptions("", list[int]().append)).listen(
        endpoint("/memory/service"), accept
    )
    ada, eve = Island("ada", transports={"memory": network.transport, **TRANSPORTS}), Island("eve")
    await ada.links.listen(["/ip4/127.0.0.1/tcp/0"])
    ada.links.contact(eve.name, ("/memory/service", "/ip4/127.0.0.1/tcp/1"))
    assert not ada.links._may_dial("") and not came
    await ada.links.listen(["/memory/ada"])
    ada.links.contact(eve.name, ("/memory/service",))
    async with asyncio.timeout(PATIENCE_S):
        while not came:
            await asyncio.sleep(0.001)
    service.close()
    await closed(ada, eve)
