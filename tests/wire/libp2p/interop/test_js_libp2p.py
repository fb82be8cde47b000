"""js-libp2p, the implementation in every browser, as a real peer over real TCP: it dials us, and we dial it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from driver import Link, Stream

from atoll.base.draw import draw_bytes
from atoll.base.machine import Lane
from atoll.crypto import noise
from atoll.crypto.identity import Identity, ed25519_of, libp2p_public_key
from atoll.crypto.noise_pattern import CLASSICAL, HandshakeRole
from atoll.wire.libp2p import identify, multiaddr, ping
from atoll.wire.libp2p.connection import CONTROL_PROTOCOL, Libp2pConnection, Libp2pTerms
from atoll.wire.libp2p.yamux import PROTOCOL as YAMUX

pytestmark = [pytest.mark.net, pytest.mark.timeout(600)]  # npm may have to install first

HERE = Path(__file__).parent
WHOLE = HERE / "node_modules" / ".package-lock.json"  # npm writes it last
ECHO = "/echo/1"
SPOKEN = (identify.PROTOCOL, ping.PROTOCOL, ECHO, CONTROL_PROTOCOL)
PATIENCE_S = 60
IDENTITY = Identity.from_seeds(b"i" * 32, b"I" * 32)
TERMS = Libp2pTerms(identity=IDENTITY, network=b"interop", foreign=True, speaks=SPOKEN.__contains__)


@pytest.fixture(scope="session")
def node() -> str:
    """A Node of version 22 or newer that sees js-libp2p, installed once into the ignored node_modules."""
    npm = shutil.which("npm")
    fcntl = pytest.importorskip("fcntl")  # POSIX
    if npm is None:
        pytest.skip("js-libp2p needs Node and npm, which are not on this computer")
    bundled = HERE / "node_modules" / ".bin" / "node"  # the npm package `node`: js-libp2p needs 22
    with (HERE / "package.json").open() as only_one:  # of several test processes installs, the others wait
        fcntl.flock(only_one, fcntl.LOCK_EX)
        if not WHOLE.exists():
            asked = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund"]
            try:
                done = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, timeout=400)
            except subprocess.TimeoutExpired:
                pytest.skip("npm install did not end within 400 s")
            if done.returncode:
                pytest.skip(f"npm install failed: {done.stderr[-300:]}")
    for candidate in (bundled, shutil.which("node")):
        if candidate and Path(candidate).exists():
            version = subprocess.run([candidate, "--version"], capture_output=True, text=True).stdout
            if version.startswith("v") and int(version[1:].split(".")[0]) >= 22:
                return str(candidate)
    pytest.skip("js-libp2p needs Node 22, and npm could not bring it")


@pytest.fixture(params=["yes", "no"])
def early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Do both ends announce their multiplexers inside Noise, or does neither?"""
    monkeypatch.setenv("EARLY_MUXERS", request.param)
    if request.param == "no":
        announcing = noise.classical
        monkeypatch.setattr(noise, "classical", lambda *a, **named: announcing(*a, **{**named, "muxers": ()}))
    return request.param == "yes"


def peer(node: str, *words: str):
    return asyncio.create_subprocess_exec(
        node, "peer.mjs", *words, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 20
    )


async def said(process: asyncio.subprocess.Process) -> dict[str, object]:
    assert process.stdout is not None
    return json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))


def about_us(writer: asyncio.StreamWriter) -> bytes:
    def text(name: str) -> bytes:
        host, port = writer.get_extra_info(name)[:2]
        return multiaddr.to_bytes(f"/ip4/{host}/tcp/{port}")

    return identify.encode(
        identify.IdentifyMessage(
            public_key=libp2p_public_key(IDENTITY.public.ed25519),
            listen_addresses=(text("sockname"),),
            observed_address=text("peername"),
            protocols=SPOKEN,
            protocol_version="atoll/1",
            agent_version="atoll/test",
        )
    )


def server(writer: asyncio.StreamWriter):
    async def serve(stream: Stream, protocol: str) -> None:
        if protocol == identify.PROTOCOL:
            await stream.write(about_us(writer))
        else:
            echo = ping.PingResponder()
            while data := await stream.read():
                await stream.write(echo.receive(data) if protocol == ping.PROTOCOL else data)
        await stream.close()

    return serve


def test_js_libp2p_dials_us(node: str, early: bool):
    """It identifies us, pings twice, gets 16 MB back unchanged, and is told that we do not speak /chess/1."""

    async def story() -> None:
        links: list[Link] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            links.append(Link(Libp2pConnection(HandshakeRole.RESPONDER, TERMS), reader, writer, server(writer)))
            await links[-1].run()

        listener = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        process = await peer(node, "dial", f"/ip4/127.0.0.1/tcp/{port}/p2p/{IDENTITY.peer}")
        report = await said(process)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        listener.close()
        (link,) = links
        ready = link.ready.result()
        assert (ready.lane, ready.established.suite) == (Lane.CONTROL, CLASSICAL)
        assert ready.established.muxers == ((YAMUX,) if early else ())
        assert ready.established.peer == report["peer"]
        who = report["identified"]
        assert (who["peer"], who["agent"]) == (IDENTITY.peer, "atoll/test")
        assert who["listens"] == [f"/ip4/127.0.0.1/tcp/{port}"]
        assert set(who["protocols"]) == set(SPOKEN)
        assert len(report["rtts"]) == 2
        assert (report["bytes"], report["same"]) == (16 * 1024 * 1024, True)
        assert report["refused"] == "UnsupportedProtocolError"

    asyncio.run(story())


def test_we_dial_js_libp2p(node: str, early: bool):
    """The same the other way round, with the muxer agreed inside Noise and by multistream-select."""

    async def story() -> None:
        process = await peer(node, "listen")
        hello = await said(process)
        where = multiaddr.endpoint(hello["listening"][0])
        assert where.peer == hello["peer"]
        reader, writer = await asyncio.open_connection(where.host, where.port)
        link = Link(
            Libp2pConnection(HandshakeRole.INITIATOR, TERMS, expected=where.peer), reader, writer, server(writer)
        )
        running = asyncio.ensure_future(link.run())
        ready = await asyncio.wait_for(link.ready, PATIENCE_S)
        assert (ready.established.peer, ready.established.suite) == (where.peer, CLASSICAL)
        assert ready.established.muxers == ((YAMUX,) if early else ())

        stream = await link.open(identify.PROTOCOL)
        frames, bodies = identify.frames(where.peer), []
        while data := await stream.read():
            bodies += frames.receive(data)
        await stream.close()
        them = identify.decode(b"".join(bodies), where.peer)
        assert them.public_key == libp2p_public_key(ed25519_of(where.peer))
        assert f"/ip4/127.0.0.1/tcp/{where.port}" in them.dialable()
        assert {identify.PROTOCOL, ping.PROTOCOL, ECHO} <= set(them.protocols)
        seen = multiaddr.endpoint(multiaddr.from_bytes(them.observed_address))
        assert (seen.host, seen.port) == writer.get_extra_info("sockname")
        assert seen.peer == IDENTITY.peer

        stream = await link.open(ping.PROTOCOL)
        for payload in (bytes(range(32)), os.urandom(32)):
            await stream.write(payload)
            answer = b""
            while len(answer) < ping.PAYLOAD_BYTES:
                answer += await stream.read()
            assert answer == payload
        await stream.close()

        question = draw_bytes(b"", "question", 16 * 1024 * 1024)
        stream, began = await link.open(ECHO), time.monotonic()
        asking = asyncio.ensure_future(_write_all(stream, question))
        answer = hashlib.sha256()
        while data := await asyncio.wait_for(stream.read(), PATIENCE_S):
            answer.update(data)
        await asking
        print(f"16 MB echoed at {32 / (time.monotonic() - began):.0f} MB/s, both directions counted")
        assert answer.digest() == hashlib.sha256(question).digest()

        with pytest.raises(ConnectionError, match="speaks none"):
            await link.open("/chess/1")
        identified = (await said(process))["identified"]
        assert identified["peer"] == IDENTITY.peer
        assert set(identified["protocols"]) == set(SPOKEN)
        process.stdin.close()
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(story())


async def _write_all(stream: Stream, data: bytes) -> None:
    for at in range(0, len(data), 1 << 18):
        await stream.write(data[at : at + (1 << 18)])
    await stream.close()
