"""Bytes that are named on a thread may be ready when their sender is gone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import LinkDown, LinkUp, Received
from atoll.peer.membership.admission import DesiredRole
from atoll.runtime.bootstrap import identity_of
from atoll.runtime.driver import Driver, PeerStartParameters
from atoll.runtime.storage.chunk_disk_queue import ChunkDiskQueue
from atoll.runtime.storage.store import PeerStore, fresh
from atoll.wire.codec import encode
from atoll.wire.messages.history import ChunkResponse
from atoll.wire.messages.round import PartResponse

BOB = PeerId("bob")


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("message", [PartResponse(3, 0, "", ZERO_DIGEST), ChunkResponse(ZERO_DIGEST, 0)])
def test_nothing_of_a_peer_comes_after_its_link_is_gone(
    message: PartResponse | ChunkResponse, gone: bool, tmp_path: Path
):
    """The thread finds the name once the link is down: the peer would be taken for alive. Else it is heard."""
    heard, free, done = list[object](), threading.Event(), asyncio.Event()

    class Machine:
        def __init__(self):
            self.linked = set()

        def handle(self, event, now):
            heard.append(type(event))
            {LinkUp: self.linked.add, LinkDown: self.linked.discard}.get(type(event), lambda peer: None)(
                event.sender if isinstance(event, Received) else event.peer
            )
            return []

    class Island:
        def digest_of(self, message, payload):
            free.wait(10)
            return Digest(bytes(32))

    async def story() -> None:
        store = PeerStore(tmp_path)
        driver = Driver(
            PeerStartParameters(store, identity_of(store), Digest(bytes(32)), DesiredRole("trainer", "ada")),
            Island(),
        )
        driver.machine, driver.hash_on_loop_bytes = Machine(), 0
        driver._chunks = ChunkDiskQueue(store, fresh)
        land = driver._chunks._land
        driver._chunks._land = lambda *what: (free.wait(10), land(*what))[1]
        named = driver._named
        driver._named = lambda *what: (named(*what), done.set())
        driver.handle(LinkUp(BOB))
        driver._on_message(BOB, encode(message), memoryview(b"some bytes"), None)
        if gone:
            driver.handle(LinkDown(BOB, refused=True))
        free.set()
        await asyncio.wait_for(done.wait(), 10)
        driver._chunks.close()
        driver.record.close()
        store.close()

    asyncio.run(story())
    assert heard == [LinkUp, LinkDown] if gone else [LinkUp, Received]
