"""Foreign libp2p peers: they may use served protocols, identify and ping among them, and nothing else."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from islands import PATIENCE_S, Island, closed, story, stranger

from atoll.crypto.identity import Identity
from atoll.crypto.noise_pattern import CLASSICAL, HandshakeRole
from atoll.runtime.network.stream_handlers import SERVED_STREAMS_MAX, IncomingStream, ServedStream, StreamHandler
from atoll.wire.libp2p import identify, ping
from atoll.wire.libp2p.connection import CONTROL_PROTOCOL, Libp2pConnection, Libp2pTerms
from atoll.wire.libp2p.events import (
    ConnectionEvent,
    ConnectionReady,
    StreamData,
    StreamHalfClosed,
    StreamOpened,
    StreamReset,
)

pytestmark = pytest.mark.net

JS = Path(__file__).parent.parent / "wire" / "libp2p" / "interop"
VISITOR_JS = """
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { patient } from './patient.mjs'
const node = await createLibp2p({
  transports: [tcp()], connectionEncrypters: [noise()], streamMuxers: [yamux()], ...patient
})
const identified = new Promise(resolve => node.addEventListener('peer:identify', e => resolve(e.detail)))
const connection = await node.dial(multiaddr(process.argv[1]))
const { agentVersion, protocols, listenAddrs, observedAddr } = await identified
const rtt = await node.services.ping.ping(connection.remotePeer)
console.log(JSON.stringify({
  peer: connection.remotePeer.toString(), agent: agentVersion, protocols, listens: listenAddrs.map(String),
  observed: String(observedAddr), rtt
}))
await node.stop()
process.exit(0)
"""


class Visitor(Libp2pConnection):
    """A peer without a post-quantum identity, as all of libp2p outside Atoll is."""

    def _allowed_suites(self) -> tuple[str, ...]:
        return (CLASSICAL.protocol,)


@story
async def test_a_guest_is_answered_and_never_becomes_a_link():
    """Identify and ping are answered; the control stream, which is for members, costs the guest its connection."""
    ada = await Island("ada").open()
    reader, writer = await stranger(ada)
    me = Identity.from_seeds(b"v" * 32, b"V" * 32)
    visitor = Visitor(HandshakeRole.INITIATOR, Libp2pTerms(me, b"", foreign=True))

    async def until(kind: type[ConnectionEvent]) -> ConnectionEvent:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                writer.writelines(visitor.take_outgoing())
                for event in visitor.receive(await reader.read(65536)):
                    if isinstance(event, kind):
                        return event

    ready = await until(ConnectionReady)
    assert ready.established.peer == ada.name
    visitor.open_stream(identify.PROTOCOL)
    (answer,) = identify.frames().receive((await until(StreamData)).data)
    assert identify.decode(answer).dialable() == (ada.address,)
    stream = visitor.open_stream(ping.PROTOCOL)
    await until(StreamOpened)
    visitor.send(stream, b"p" * 32)
    assert (await until(StreamData)).data == b"p" * 32
    visitor.open_stream(CONTROL_PROTOCOL)
    writer.writelines(visitor.take_outgoing())
    async with asyncio.timeout(PATIENCE_S):
        try:
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass
    writer.close()
    assert ada.events == [] and ada.links.stats() == {}
    await closed(ada)


class Guest:
    """A foreign peer with a connection to an island."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        identity = Identity.from_seeds(b"v" * 32, b"V" * 32)
        self.connection = Visitor(HandshakeRole.INITIATOR, Libp2pTerms(identity, b"", foreign=True))
        self.reader, self.writer = reader, writer
        self._events: list[ConnectionEvent] = []

    async def event(self) -> ConnectionEvent:
        """The next one."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._events:
                self.writer.writelines(self.connection.take_outgoing())
                self._events += self.connection.receive(await self.reader.read(65536))
        return self._events.pop(0)

    async def open(self, protocol: str) -> int:
        stream = self.connection.open_stream(protocol)
        assert stream is not None and await self.event() == StreamOpened(stream, protocol, by_remote=False)
        return stream


async def guest_of(island: Island) -> Guest:
    guest = Guest(*await stranger(island))
    assert isinstance(await guest.event(), ConnectionReady)
    return guest


@story
async def test_a_registered_protocol_is_served_to_a_guest():
    """`/x/upper/1` answers in capitals, knows who asks, is announced by identify, and costs no link."""
    requests = list[IncomingStream]()

    def open_upper(request: IncomingStream) -> ServedStream:
        requests.append(request)
        return ServedStream(b"ready", bytes.upper)

    ada = await Island("ada").open()
    ada.security.handlers.register("/x/upper/1", StreamHandler(open_upper, streams_max=2))
    with pytest.raises(ValueError, match="/x/upper/1 has a handler already"):
        ada.security.handlers.register("/x/upper/1", StreamHandler(open_upper, streams_max=2))
    guest = await guest_of(ada)
    stream = await guest.open("/x/upper/1")
    assert await guest.event() == StreamData(stream, b"ready")
    guest.connection.send(stream, b"hello")
    assert await guest.event() == StreamData(stream, b"HELLO")
    asked = await guest.open(identify.PROTOCOL)
    answer = await guest.event()
    assert isinstance(answer, StreamData) and answer.stream == asked
    assert "/x/upper/1" in identify.decode(identify.frames().receive(answer.data)[0]).protocols
    (request,) = requests
    assert not request.is_member and request.remote_address.startswith("/ip4/127.0.0.1/tcp/")
    guest.writer.close()
    assert ada.events == [] and ada.links.stats() == {}
    await closed(ada)


@story
async def test_streams_of_a_guest_are_bounded_and_its_connection_outlives_the_bound():
    """Two of one protocol, sixteen in all; what is for members only is reset. A stream that ends makes room."""
    ada = await Island("ada").open()
    for n in range(SERVED_STREAMS_MAX):
        ada.security.handlers.register(f"/x/{n}", StreamHandler(lambda _: ServedStream(b"", bytes), streams_max=2))
    ada.security.handlers.register(
        "/x/members", StreamHandler(lambda _: ServedStream(b"never", None), streams_max=9, members_only=True)
    )
    guest = await guest_of(ada)

    async def refused(protocol: str) -> None:
        stream, event = guest.connection.open_stream(protocol), await guest.event()
        if isinstance(event, StreamOpened):  # unless the reset overtook the agreement
            event = await guest.event()
        assert isinstance(event, StreamReset) and event.stream == stream

    await refused("/x/members")
    first = await guest.open("/x/0")
    await guest.open("/x/0")
    await refused("/x/0")
    for n in range(2, SERVED_STREAMS_MAX):
        await guest.open(f"/x/{n}")
    await refused("/x/1")
    guest.connection.close(first)
    assert await guest.event() == StreamHalfClosed(first)
    last = await guest.open("/x/1")
    guest.connection.send(last, b"still here")
    assert await guest.event() == StreamData(last, b"still here")
    guest.writer.close()
    await closed(ada)


@pytest.mark.skipif(
    not (JS / "node_modules" / ".package-lock.json").exists(), reason="js-libp2p is not installed, or not yet"
)
@story
async def test_js_libp2p_identifies_and_pings_us():
    """The implementation in every browser, dialling over TCP with its own Noise."""
    ada = await Island("ada").open()
    node = JS / "node_modules" / ".bin" / "node"
    process = await asyncio.create_subprocess_exec(
        str(node) if node.exists() else "node",
        *("--input-type=module", "-e", VISITOR_JS, f"{ada.address}/p2p/{ada.name}"),
        cwd=JS,
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        said, _ = await process.communicate()
    heard = json.loads(said)
    assert heard["peer"] == ada.name and heard["agent"] == "atoll"
    assert heard["listens"] == [ada.address] and heard["observed"].startswith("/ip4/127.0.0.1/tcp/")
    assert {identify.PROTOCOL, ping.PROTOCOL, CONTROL_PROTOCOL} <= set(heard["protocols"])
    assert ada.events == []
    await closed(ada)
