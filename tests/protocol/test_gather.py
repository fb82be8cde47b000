"""Any k pieces from holders that give, stall, lie, forget or are gone; served from memory, counted in requests."""

from __future__ import annotations

from collections import Counter

import pytest

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import Effect, Emit, Payload, Received, RunTask, Send, SetTimer, Start, TaskDone, TimerFired
from atoll.crypto.digest import BlobManifest, blob_id, digest
from atoll.features.archive.download import (
    GIVE_UP_S,
    PACED_CHUNKS,
    TICK_S,
    ErasureDownload,
    ErasureDownloadFailed,
    PiecesGathered,
)
from atoll.protocol.transfer.download import REQUESTS_MAX, CorruptBlobSourceDetected
from atoll.protocol.transfer.tasks import BlobStoragePrepared, CloseBlob, DropBlob, PrepareBlobStorage, StoreChunk
from atoll.wire.messages.history import ChunkRequest, ChunkResponse, ManifestRequest, ManifestResponse

K, N, CHUNKS = 3, 6, 4
GOAL = digest(b"what they make")
HOLDERS = tuple(PeerId(f"p{i}") for i in range(N))
MANIFESTS = tuple(
    BlobManifest(CHUNKS * BLOB_CHUNK, tuple(digest(bytes([i, j])) for j in range(CHUNKS))) for i in range(N)
)
PIECES = tuple(blob_id(m) for m in MANIFESTS)
SIZE = CHUNKS * BLOB_CHUNK


class Holders:
    """What each does when asked: good, liar, silent, empty, half (gives a manifest, then nothing)."""

    def __init__(
        self, *habits: str, have: frozenset[int] = frozenset(), gone: str = "", paced: bool = False
    ) -> None:
        self.habits = dict(zip(HOLDERS, habits, strict=True))
        dead = {p for p, habit in self.habits.items() if habit == gone}
        sources = [(p,) for p in HOLDERS]
        self.gather = ErasureDownload(GOAL, K, PIECES, sources, SIZE, lambda p: p in dead, have=have, paced=paced)
        self.timers: dict[str, float] = {}
        self.chunks: Counter[PeerId] = Counter()
        self.facts: list[object] = []
        self.dropped: set[Digest] = set()
        self.flying: list[Send] = []
        self.now = 0.0

    def run(self, until: float = 120.0) -> Holders:
        self.do(self.gather.handle(Start({}), self.now))
        while not self.gather.over and self.now < until:
            self.step()
        return self

    def step(self) -> None:
        """All that is on its way arrives; then the next timer fires."""
        while self.flying:
            send = self.flying.pop(0)
            index = send.message.index if isinstance(send.message, ChunkRequest) else None
            self.answer(send.to, send.message.blob, index)
        if self.gather.over:
            return
        name = min(self.timers, key=lambda n: self.timers[n])
        self.now = max(self.now, self.timers.pop(name))
        self.do(self.gather.handle(TimerFired(name), self.now))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, ManifestRequest() | ChunkRequest() as wish):
                    self.chunks[to] += isinstance(wish, ChunkRequest)
                    self.flying.append(effect)
                case SetTimer(name, None):
                    self.timers.pop(name, None)
                case SetTimer(name, at):
                    self.timers[name] = at
                case RunTask(job, PrepareBlobStorage()):
                    self.do(self.gather.handle(TaskDone(job, BlobStoragePrepared(frozenset())), self.now))
                case RunTask(job, StoreChunk() | CloseBlob()):
                    self.do(self.gather.handle(TaskDone(job, None), self.now))
                case RunTask(_, DropBlob(blob)):
                    self.dropped.add(blob)
                case Emit(fact):
                    self.facts.append(fact)
                case _:
                    raise AssertionError(effect)

    def answer(self, holder: PeerId, blob: Digest, index: int | None) -> None:
        habit, manifest = self.habits[holder], MANIFESTS[PIECES.index(blob)]
        if habit == "silent" or (habit == "half" and index is not None):
            return
        if index is None:
            message, payload = ManifestResponse(blob, None if habit == "empty" else manifest), None
        else:
            right = manifest.chunks[index]
            payload = Payload(digest(b"lie") if habit == "liar" else right, BLOB_CHUNK, b"")
            message = ChunkResponse(blob, index)
        self.do(self.gather.handle(Received(holder, message, payload), self.now))

    def ticks(self) -> list[str]:
        return [name for name in self.timers if name.startswith("gather/")]

    def told(self, kind: type) -> list:
        return [f for f in self.facts if isinstance(f, kind)]


def test_k_pieces_are_fetched_once_and_no_more():
    holders = Holders(*["good"] * N).run()
    (gathered,) = holders.told(PiecesGathered)
    assert gathered.indices == (0, 1, 2) and gathered.sources == HOLDERS[:3]
    assert holders.chunks == Counter(dict.fromkeys(HOLDERS[:3], CHUNKS)) and holders.now == 0.0


def test_pieces_on_this_disk_are_not_fetched():
    holders = Holders(*["good"] * N, have=frozenset({4, 5})).run()
    assert holders.told(PiecesGathered)[0].indices == (0, 4, 5) and holders.chunks.total() == CHUNKS


def test_a_holder_of_wrong_bytes_is_named_and_another_piece_takes_its_place():
    holders = Holders("liar", *["good"] * 5).run()
    assert holders.told(PiecesGathered)[0].indices == (1, 2, 3)
    assert {f.peer for f in holders.told(CorruptBlobSourceDetected)} == {HOLDERS[0]} and holders.now == 0.0


@pytest.mark.parametrize("habit", ["silent", "half", "empty"])
def test_three_holders_that_give_nothing_cost_seconds(habit: str):
    """N - K of them: silent from the start, silent after the manifest, or without their piece."""
    holders = Holders(habit, "good", habit, "good", "good", habit).run()
    assert holders.told(PiecesGathered)[0].indices == (1, 3, 4) and holders.now <= 10.0
    assert holders.dropped <= {PIECES[0], PIECES[2], PIECES[5]} and not holders.ticks()


def test_who_is_known_to_be_gone_is_asked_last():
    holders = Holders("silent", "good", "silent", "good", "good", "silent", gone="silent").run()
    assert holders.told(PiecesGathered)[0].indices == (1, 3, 4) and holders.now == 0.0


def test_where_fewer_than_k_give_anything_it_ends_and_says_how_many():
    for habit, until in (("empty", 0.0), ("liar", 0.0), ("silent", GIVE_UP_S + 10)):
        holders = Holders("good", "good", *[habit] * 4).run()
        (failed,) = holders.told(ErasureDownloadFailed)
        assert failed.why.startswith("2 of 3 pieces") and holders.now <= until and not holders.ticks()


def test_a_holder_that_was_cut_off_goes_on_when_it_is_linked_again():
    holders = Holders("good", "good", "silent", "silent", "silent", "silent")
    holders.do(holders.gather.handle(Start({}), 0.0))
    while holders.now < 5.0:
        holders.step()
    holders.habits[HOLDERS[4]] = "good"
    holders.do(holders.gather.linked(HOLDERS[4], holders.now))
    while not holders.gather.over:
        holders.step()
    assert holders.told(PiecesGathered)[0].indices == (0, 1, 4)


def test_a_paced_gather_asks_for_a_few_chunks_a_tick_and_for_none_while_a_round_needs_the_line():
    """Twelve chunks at two a tick; for twenty seconds of it the line is busy."""
    holders = Holders(*["good"] * N, paced=True)
    holders.gather.quiet = False
    holders.do(holders.gather.handle(Start({}), 0.0))
    while holders.now < 20.0:
        holders.step()
    assert holders.chunks.total() == 0 and not holders.gather.over
    holders.gather.quiet = True
    asked: Counter[float] = Counter()
    while not holders.gather.over:
        before = holders.chunks.total()
        holders.step()
        asked[holders.now // TICK_S] += holders.chunks.total() - before
    assert max(asked.values()) <= PACED_CHUNKS and sum(asked.values()) == K * CHUNKS
    assert holders.now <= 20.0 + TICK_S * (K * CHUNKS / PACED_CHUNKS + 2)


def test_equal_pieces_are_fetched_once():
    """A state whose parts never change has pieces of the same bytes, thus of the same name."""
    pieces = (PIECES[0], PIECES[0], PIECES[2])
    holders = Holders(*["good"] * N)
    holders.gather = ErasureDownload(
        GOAL, K, pieces, [(HOLDERS[0],), (HOLDERS[1],), (HOLDERS[2],)], SIZE, lambda p: False
    )
    holders.run()
    assert holders.told(PiecesGathered)[0].indices == (0, 1, 2) and holders.chunks.total() == 2 * CHUNKS


def test_a_piece_that_is_longer_than_it_can_be_is_refused():
    holders = Holders(*["good"] * N)
    holders.gather = ErasureDownload(GOAL, K, PIECES, [(p,) for p in HOLDERS], SIZE - 1, lambda p: False)
    holders.run()
    assert len(holders.told(CorruptBlobSourceDetected)) == N and holders.told(ErasureDownloadFailed)


def test_strangers_who_talk_do_not_keep_alive_what_nobody_gives():
    """None of the holders answers; somebody who was never asked sends a manifest and chunks, again and again."""
    holders = Holders(*["silent"] * N)
    holders.do(holders.gather.handle(Start({}), 0.0))
    stranger = PeerId("mallory")
    while not holders.gather.over and holders.now < 5 * GIVE_UP_S:
        holders.step()
        for message in (ManifestResponse(PIECES[0], MANIFESTS[0]), ChunkResponse(PIECES[0], 0)):
            payload = Payload(digest(b"lie"), BLOB_CHUNK, b"") if isinstance(message, ChunkResponse) else None
            holders.do(holders.gather.handle(Received(stranger, message, payload), holders.now))
    assert holders.told(ErasureDownloadFailed) and holders.now <= GIVE_UP_S + 10


def test_what_was_begun_and_failed_leaves_nothing_on_the_disk():
    """A holder gives two chunks and then says that it has none: no part of that piece stays."""
    holders = Holders(*["good"] * N)
    holders.gather.handle(Start({}), 0.0)
    holders.do([Send(HOLDERS[0], ManifestRequest(PIECES[0]))])
    gather = holders.gather
    holders.do(gather.handle(Received(HOLDERS[0], ManifestResponse(PIECES[0], MANIFESTS[0])), 0.0))
    for index in range(2):
        holders.answer(HOLDERS[0], PIECES[0], index)
    holders.do(gather.handle(Received(HOLDERS[0], ChunkResponse(PIECES[0], 2)), 0.0))
    assert PIECES[0] not in gather.fetches
    holders.do(gather.stop())
    assert PIECES[0] in holders.dropped


def test_all_pieces_together_have_no_more_on_their_way_than_one_blob():
    """Thirty-one pieces of forty chunks each, all at once: what waits for the disk fits in memory."""
    many = 31
    manifests = [
        BlobManifest(40 * BLOB_CHUNK, tuple(digest(bytes([i, j])) for j in range(40))) for i in range(many)
    ]
    names, peers = [blob_id(m) for m in manifests], [PeerId(f"p{i}") for i in range(many)]
    gather = ErasureDownload(GOAL, many, names, [(p,) for p in peers], 40 * BLOB_CHUNK, lambda p: False)
    gather.handle(Start({}), 0.0)
    asked: list[Effect] = []
    for peer, name, manifest in zip(peers, names, manifests, strict=True):
        asked += gather.handle(Received(peer, ManifestResponse(name, manifest)), 0.0)
        asked += gather.handle(TaskDone(f"fetch/{name.hex()}/open", BlobStoragePrepared(frozenset())), 0.0)
    for _ in range(20):  # everybody answers, and the disk writes nothing
        wants = [e for e in asked if isinstance(e, Send) and isinstance(e.message, ChunkRequest)]
        asked = []
        for want in wants:
            blob, index = want.message.blob, want.message.index
            right = manifests[names.index(blob)].chunks[index]
            asked += gather.handle(
                Received(want.to, ChunkResponse(blob, index), Payload(right, BLOB_CHUNK, b"")), 0.0
            )
    storing = sum(len(fetch.storing) for fetch in gather.fetches.values())
    assert 0 < storing <= 2 * REQUESTS_MAX
