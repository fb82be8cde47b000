"""Many who fetch one blob of one source whose uplink is the bottleneck give each other what they have already.

Machines of both sides on a wire of uplinks and distance, without bytes: a chunk is its digest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from math import inf

import pytest

from atoll.base.ids import PeerId
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Payload,
    Received,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TimerFired,
)
from atoll.crypto.digest import BlobManifest, blob_id, digest
from atoll.protocol.transfer.download import (
    BlobDownload,
    BlobFetched,
    CorruptBlobSourceDetected,
    FetchFailed,
)
from atoll.protocol.transfer.serve import BlobServer
from atoll.protocol.transfer.tasks import (
    BlobStoragePrepared,
    CloseBlob,
    PartialManifest,
    PrepareBlobStorage,
    ReadChunk,
    ReadManifest,
    StoreChunk,
)
from atoll.wire.messages.history import ChunkResponse, ManifestResponse

CHUNKS = 128
PIECES = tuple(digest(i.to_bytes(2, "big")) for i in range(CHUNKS))
MANIFEST = BlobManifest(CHUNKS * BLOB_CHUNK, PIECES)
BLOB = blob_id(MANIFEST)
FOUNDER = PeerId("founder")
JOINERS = tuple(PeerId(f"joiner {i}") for i in range(8))
UPLINK_BYTES_S, DISTANCE_S = 25e6, 0.02
Lie = Callable[[Send], Send]


def honest(send: Send) -> Send:
    return send


def bits(indices: set[int]) -> bytes:
    return sum(1 << i for i in indices).to_bytes(-(-CHUNKS // 8), "little")


class Peer:
    def __init__(
        self, me: PeerId, has: set[int], lie: Lie = honest, sources: Sequence[PeerId] = (FOUNDER,)
    ) -> None:
        self.me, self.has, self.lie = me, has, lie
        self.opened = self.whole = len(has) == CHUNKS
        self.serve, self.fetch = BlobServer(), None if self.whole else BlobDownload(BLOB, sources, me=me)
        self.uplink_free = self.downlink_free = 0.0
        self.downlink_bytes_s = inf
        self.facts: list[object] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        return self.serve.handle(event, now) + (self.fetch.handle(event, now) if self.fetch is not None else [])

    def work(self, work: object) -> object:
        match work:
            case PrepareBlobStorage():
                self.opened = True
                return BlobStoragePrepared(frozenset(self.has))
            case StoreChunk(index=index, payload=payload):
                assert payload.digest == PIECES[index]
                self.has.add(index)
            case CloseBlob():
                self.whole = len(self.has) == CHUNKS
            case ReadManifest(partly=partly):
                here = PartialManifest(MANIFEST, bits(self.has)) if partly and self.opened and self.has else None
                return MANIFEST if self.whole else here
            case ReadChunk(index=index):
                return Payload(PIECES[index], BLOB_CHUNK, b"") if index in self.has else None
            case _:
                raise AssertionError(work)
        return None


class Wire:
    def __init__(self, *peers: Peer) -> None:
        self.peers = {peer.me: peer for peer in peers}
        self.given: Counter[PeerId] = Counter()  # chunks
        self.now, self.order = 0.0, count()
        self.queue: list[tuple[float, int, Peer, Event]] = []

    def run(self, until: float = 300.0) -> Wire:
        for peer in self.peers.values():
            self.carry_out(peer, peer.handle(Start({}), 0.0))
        while self.queue and self.queue[0][0] <= until:
            self.now, _, peer, event = heapq.heappop(self.queue)
            self.carry_out(peer, peer.handle(event, self.now))
        return self

    def carry_out(self, peer: Peer, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.send(peer, peer.lie(effect))
                case SetTimer(name=name, at=at) if at is not None:
                    self.at(at, peer, TimerFired(name))
                case RunTask(job=job, work=work):
                    self.at(self.now, peer, TaskDone(job, peer.work(work)))
                case Emit(fact):
                    peer.facts.append(fact)
                case _:
                    pass

    def send(self, peer: Peer, send: Send) -> None:
        leaves = self.now
        if send.payload is not None:
            self.given[peer.me] += 1
            leaves = peer.uplink_free = max(self.now, peer.uplink_free) + BLOB_CHUNK / UPLINK_BYTES_S
        if send.to in self.peers:
            to, comes = self.peers[send.to], leaves + DISTANCE_S
            if send.payload is not None:
                comes = to.downlink_free = max(comes, to.downlink_free) + BLOB_CHUNK / to.downlink_bytes_s
            self.at(comes, to, Received(peer.me, send.message, send.payload))

    def at(self, when: float, peer: Peer, event: Event) -> None:
        heapq.heappush(self.queue, (when, next(self.order), peer, event))


def together(lies: dict[PeerId, Lie] | None = None) -> Wire:
    joiners = [Peer(name, set(), (lies or {}).get(name, honest)) for name in JOINERS]
    for joiner in joiners:
        assert joiner.fetch is not None
        joiner.fetch.add_candidates([name for name in JOINERS if name != joiner.me])
    return Wire(Peer(FOUNDER, set(range(CHUNKS))), *joiners)


def test_eight_joiners_cost_one_founder_less_than_two_and_a_half_copies():
    """Eight copies, where they do not know of each other."""
    wire = together().run()
    assert all(peer.whole for peer in wire.peers.values())
    assert CHUNKS <= wire.given[FOUNDER] < 2.5 * CHUNKS
    assert all(wire.given[name] > CHUNKS / 4 for name in JOINERS)
    alone = together()
    for joiner in alone.peers.values():
        if joiner.fetch is not None:
            joiner.fetch.candidates.clear()
    assert alone.run().given[FOUNDER] >= 8 * CHUNKS


@pytest.mark.parametrize("mbit", [4, 10, 50])
def test_a_slow_downlink_is_not_filled_with_chunks_that_come_twice(mbit: int):
    """Requests beyond what it carries in some seconds would look late, and be sent to the other source as well."""
    sources = [Peer(PeerId(name), set(range(CHUNKS))) for name in ("one", "two")]
    joiner = Peer(JOINERS[0], set(), sources=[source.me for source in sources])
    joiner.downlink_bytes_s = mbit * 1e6 / 8
    wire = Wire(*sources, joiner).run(1000.0)
    assert joiner.whole
    assert wire.given.total() <= 1.05 * CHUNKS


def test_who_says_that_it_has_what_it_has_not_costs_little():
    """Two of eight: one answers none of the chunks that it says it has, the other with nothing."""

    def boast(send: Send) -> Send:
        if isinstance(send.message, ManifestResponse):
            return Send(send.to, ManifestResponse(BLOB, MANIFEST, bits(set(range(CHUNKS)))), send.lane)
        return send

    def silent(send: Send) -> Send:
        send = boast(send)
        return Send(PeerId("nobody"), send.message) if isinstance(send.message, ChunkResponse) else send

    def empty(send: Send) -> Send:
        send = boast(send)
        return Send(send.to, send.message) if isinstance(send.message, ChunkResponse) else send

    wire = together({JOINERS[0]: silent, JOINERS[5]: empty}).run()
    assert all(peer.whole for peer in wire.peers.values())
    assert wire.given[FOUNDER] < 3.5 * CHUNKS


def test_a_book_of_another_length_than_the_blob_is_a_fault_and_so_are_wrong_bytes():
    def longer(send: Send) -> Send:
        told = isinstance(send.message, ManifestResponse) and send.message.here
        return Send(send.to, ManifestResponse(BLOB, None, bytes(99)), send.lane) if told else send

    wire = together({JOINERS[3]: longer}).run()
    assert all(peer.whole for peer in wire.peers.values())
    bad = {
        fact.peer
        for peer in wire.peers.values()
        for fact in peer.facts
        if isinstance(fact, CorruptBlobSourceDetected)
    }
    assert bad == {JOINERS[3]}


def test_where_the_only_whole_source_lets_go_of_it_nobody_waits_for_the_rest_for_ever():
    """It says that it has it no more when half of it is out: what came stays, and a newer one can be asked for."""
    wire = together()
    founder = wire.peers[FOUNDER]
    give = founder.work

    def work(asked: object) -> object:
        gone = wire.given[FOUNDER] >= CHUNKS // 2
        return None if gone else give(asked)

    founder.work = work  # type: ignore[method-assign]
    wire.run(60.0)
    joiners = [wire.peers[name] for name in JOINERS]
    assert all(any(isinstance(fact, FetchFailed) for fact in joiner.facts) for joiner in joiners)
    assert not any(isinstance(fact, BlobFetched) for joiner in joiners for fact in joiner.facts)
    assert 0 < len(set.union(*(joiner.has for joiner in joiners))) < CHUNKS
