"""One blob from several peers, some of which lie, stall, forget or go; served from memory, counted in requests."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.base.ids import PeerId
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import Effect, Emit, Payload, Received, RunTask, Send, SetTimer, Start, TaskDone, TimerFired
from atoll.crypto.digest import BlobManifest, blob_id, digest
from atoll.protocol.transfer.download import (
    REQUESTS_MAX,
    TICK_S,
    WINDOW,
    BlobDownload,
    BlobFetched,
    CorruptBlobSourceDetected,
    DownloadSourceStalled,
    FetchFailed,
)
from atoll.protocol.transfer.serve import BlobServer
from atoll.protocol.transfer.tasks import BlobStoragePrepared, CloseBlob, PrepareBlobStorage, StoreChunk
from atoll.wire.messages.history import ChunkRequest, ChunkResponse, ManifestRequest, ManifestResponse

CHUNKS = 12
NAMES = tuple(PeerId(f"p{i}") for i in range(4))
PIECES = tuple(digest(bytes([i])) for i in range(CHUNKS))
MANIFEST = BlobManifest(CHUNKS * BLOB_CHUNK, PIECES)
BLOB = blob_id(MANIFEST)


class Library:
    """What each source does when asked: 'good', 'liar', 'silent', 'empty' or 'forger' (of the manifest)."""

    def __init__(self, habits: dict[PeerId, str], have: frozenset[int] = frozenset()) -> None:
        self.habits, self.have = habits, have
        self.fetch = BlobDownload(BLOB, tuple(habits))
        self.flying: list[Send] = []
        self.stored: list[int] = []
        self.asked: Counter[PeerId] = Counter()
        self.facts: list[object] = []
        self.now, self.stall_at, self.closed = 0.0, 0.0, False

    def run(self, until: float = 600.0, draw: random.Random | None = None, loss: float = 0.0) -> Library:
        self.do(self.fetch.handle(Start({}), self.now))
        while not self.fetch.over and self.now < until:
            while self.flying and not self.fetch.over:
                send = self.flying.pop(draw.randrange(len(self.flying)) if draw else 0)
                if draw is None or draw.random() >= loss:
                    self.answer(send)
            if not self.fetch.over:
                self.now = self.stall_at
                self.do(self.fetch.handle(TimerFired(f"fetch/{BLOB.hex()}/stall"), self.now))
        return self

    def answer(self, send: Send) -> None:
        habit = self.habits[send.to]
        match send.message:
            case _ if habit == "silent":
                return
            case ManifestRequest():
                shown = BlobManifest(MANIFEST.size_bytes, PIECES[::-1]) if habit == "forger" else MANIFEST
                message, payload = ManifestResponse(BLOB, None if habit == "empty" else shown), None
            case ChunkRequest(index=index):
                self.asked[send.to] += 1
                wrong = habit == "liar"
                payload = Payload(digest(b"lie") if wrong else PIECES[index], BLOB_CHUNK, b"")
                message = ChunkResponse(BLOB, index)
            case _:
                raise AssertionError(send)
        self.do(self.fetch.handle(Received(send.to, message, payload), self.now))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.flying.append(effect)
                case SetTimer(at=at) if at is not None:
                    self.stall_at = at
                case RunTask(job, PrepareBlobStorage()):
                    self.do(self.fetch.handle(TaskDone(job, BlobStoragePrepared(self.have)), self.now))
                case RunTask(job, StoreChunk(index=index, payload=payload)):
                    assert payload.digest == PIECES[index], "a lie was stored"
                    self.stored.append(index)
                    self.do(self.fetch.handle(TaskDone(job, None), self.now))
                case RunTask(job, CloseBlob()):
                    assert set(self.stored) | self.have == set(range(CHUNKS))
                    self.do(self.fetch.handle(TaskDone(job, None), self.now))
                case Emit(fact):
                    self.facts.append(fact)
                case _:
                    pass

    def told(self, kind: type) -> list:
        return [f for f in self.facts if isinstance(f, kind)]


def test_every_chunk_is_fetched_once_and_the_work_is_shared():
    library = Library(dict.fromkeys(NAMES, "good")).run()
    assert sorted(library.stored) == list(range(CHUNKS)) and library.now == 0.0
    assert library.told(BlobFetched)[0].sources == NAMES


def test_what_is_on_disk_already_is_not_asked_for():
    """A restart in the middle: ten of twelve chunks are here."""
    library = Library(dict.fromkeys(NAMES, "good"), have=frozenset(range(10))).run()
    assert sorted(library.stored) == [10, 11] and sum(library.asked.values()) == 2


def test_a_source_of_wrong_bytes_wastes_one_answer_and_is_named():
    library = Library({NAMES[0]: "liar", NAMES[1]: "good"}).run()
    assert library.told(BlobFetched) and {f.peer for f in library.told(CorruptBlobSourceDetected)} == {NAMES[0]}
    assert NAMES[0] not in library.told(BlobFetched)[0].sources


def test_a_forged_manifest_is_not_followed():
    library = Library({NAMES[0]: "forger", NAMES[1]: "good"}).run()
    assert library.told(BlobFetched) and library.told(CorruptBlobSourceDetected)[0].peer == NAMES[0]


@pytest.mark.parametrize("silent", NAMES)
def test_a_source_that_falls_silent_costs_seconds_and_not_the_blob(silent: PeerId):
    """Whatever its name: the first in the alphabet was once asked for the last chunk for ever."""
    library = Library(dict.fromkeys(NAMES, "good"))
    manifest_from = library.answer

    def answer(send: Send) -> None:  # it shows the manifest, then says nothing more
        library.habits[silent] = "silent" if isinstance(send.message, ChunkRequest) else "good"
        manifest_from(send)

    library.answer = answer  # type: ignore[method-assign]
    library.run()
    assert library.told(BlobFetched) and library.now <= 30.0
    assert silent not in library.told(BlobFetched)[0].sources


@pytest.mark.parametrize("silent", NAMES)
def test_a_stalling_source_costs_less_than_a_second(silent: PeerId):
    """The others answered at once, so it is late soon: what it owes is asked of somebody else too."""
    library = Library(dict.fromkeys(NAMES, "good"))
    answer = library.answer

    def answers(send: Send) -> None:
        if not (isinstance(send.message, ChunkRequest) and send.to == silent):
            library.now += 0.001
            answer(send)

    library.answer = answers  # type: ignore[method-assign]
    library.run()
    assert library.told(BlobFetched) and library.now < 1.0
    assert {f.peer for f in library.told(DownloadSourceStalled)} <= {silent}


def test_at_the_end_the_idle_help_the_slow():
    """One source owes the last chunk, the other answered long ago: it is asked too, without waiting for a tick."""
    fetch = BlobDownload(BLOB, NAMES[:2])
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(NAMES[0], ManifestResponse(BLOB, MANIFEST)), 0.0)
    fetch.handle(TaskDone(f"fetch/{BLOB.hex()}/open", BlobStoragePrepared(frozenset(range(2, CHUNKS)))), 0.0)
    (fast_chunk, (fast,)), (slow_chunk, (slow,)) = fetch.requested.items()
    assert fast != slow
    fetch.handle(
        Received(fast, ChunkResponse(BLOB, fast_chunk), Payload(PIECES[fast_chunk], BLOB_CHUNK, b"")), 0.01
    )
    effects = fetch.handle(TaskDone(f"fetch/{BLOB.hex()}/chunk/{fast_chunk}", None), 0.1)
    assert [(e.to, e.message) for e in effects if isinstance(e, Send)] == [(fast, ChunkRequest(BLOB, slow_chunk))]


def test_a_late_answer_still_counts_and_brings_its_source_back():
    """Both are slow once; what the late one sends is taken, though the chunk was asked of the other too."""
    fetch = BlobDownload(BLOB, NAMES[:2])
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(NAMES[0], ManifestResponse(BLOB, MANIFEST)), 0.0)
    fetch.handle(TaskDone(f"fetch/{BLOB.hex()}/open", BlobStoragePrepared(frozenset(range(1, CHUNKS)))), 0.0)
    ((index, asked),) = fetch.requested.items()
    (slow,) = asked
    (other,) = {*NAMES[:2]} - {slow}
    late = TimerFired(f"fetch/{BLOB.hex()}/stall")
    assert [type(e) for e in fetch.handle(late, 5.9)] == [SetTimer], (
        "who slept itself reads first what came meanwhile"
    )
    effects = fetch.handle(late, 6.0)
    assert [e.to for e in effects if isinstance(e, Send)] == [other]
    assert [e.fact for e in effects if isinstance(e, Emit)] == [
        DownloadSourceStalled(peer=slow, blob=BLOB, left=False)
    ]
    payload = Payload(PIECES[index], BLOB_CHUNK, b"")
    effects = fetch.handle(Received(slow, ChunkResponse(BLOB, index), payload), 6.1)
    assert any(isinstance(e, RunTask) and isinstance(e.work, StoreChunk) for e in effects)
    assert fetch.sources[slow].stalls == 0
    assert not fetch.handle(Received(other, ChunkResponse(BLOB, index), payload), 6.2), "stored twice"


def test_a_chunk_that_came_is_not_asked_for_once_more():
    """Both are late with it, so it is a probe of the first, to be asked for again; then it comes, and there is no
    room to ask for anything before it is stored."""
    fetch = BlobDownload(BLOB, NAMES[:2], requests_max=1)
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(NAMES[0], ManifestResponse(BLOB, MANIFEST)), 0.0)
    fetch.handle(TaskDone(f"fetch/{BLOB.hex()}/open", BlobStoragePrepared(frozenset(range(1, CHUNKS)))), 0.0)
    for late in (6.0, 12.0):
        fetch.handle(TimerFired(f"fetch/{BLOB.hex()}/stall"), late - TICK_S)
        (asked,) = [e for e in fetch.handle(TimerFired(f"fetch/{BLOB.hex()}/stall"), late) if isinstance(e, Send)]
    payload = Payload(PIECES[0], BLOB_CHUNK, b"")
    (store,) = fetch.handle(Received(asked.to, ChunkResponse(BLOB, 0), payload), 12.1)
    assert isinstance(store, RunTask)
    assert fetch.handle(TaskDone(store.job, None), 12.2) == [RunTask(f"fetch/{BLOB.hex()}/close", CloseBlob(BLOB))]


def test_who_was_left_is_asked_again_where_the_last_one_stalls_too():
    """It drops what it is asked for a while, as somebody with many askers does; the other one is always silent."""
    library = Library({NAMES[0]: "good", NAMES[1]: "silent"})
    answer = library.answer

    def drops(send: Send) -> None:
        if isinstance(send.message, ManifestRequest) or library.now > 160.0:
            answer(send)

    library.answer = drops  # type: ignore[method-assign]
    assert library.run(600.0).told(BlobFetched) and library.told(DownloadSourceStalled)[-1].left


def test_a_source_that_was_left_does_not_come_back_by_showing_the_manifest_again():
    """It would be a fresh source each time, be given eight requests, and answer none of them."""
    library = Library({NAMES[0]: "silent"} | dict.fromkeys(NAMES[1:], "good"))
    fetch = library.fetch
    library.do(fetch.handle(Start({}), 0.0))
    library.do(fetch.handle(Received(NAMES[0], ManifestResponse(BLOB, MANIFEST)), 0.0))
    index = next(iter(fetch.sources[NAMES[0]].asked))
    library.do(fetch.handle(Received(NAMES[0], ChunkResponse(BLOB, index)), 0.1))  # "I do not hold this one"
    library.do(fetch.handle(Received(NAMES[0], ManifestResponse(BLOB, MANIFEST)), 0.2))
    assert NAMES[0] not in fetch.sources


def test_nobody_who_was_not_asked_becomes_a_source():
    """A manifest is no secret: any stranger can show it."""
    library = Library(dict.fromkeys(NAMES, "good"))
    library.do(library.fetch.handle(Start({}), 0.0))
    library.do(library.fetch.handle(Received(PeerId("stranger"), ManifestResponse(BLOB, MANIFEST)), 0.0))
    assert PeerId("stranger") not in library.fetch.sources


def test_if_nobody_holds_it_that_is_said():
    assert "no peer" in Library(dict.fromkeys(NAMES, "empty")).run().told(FetchFailed)[0].why


def test_the_silent_do_not_hold_up_the_word_that_nobody_has_it():
    """Members that died a moment ago stay among those who are asked; the living have let go of it."""
    library = Library(dict(zip(NAMES, ["empty", "silent", "empty", "silent"], strict=True))).run(until=60.0)
    assert "no peer that answers" in library.told(FetchFailed)[0].why


def test_where_nobody_answers_at_all_the_asking_goes_on():
    library = Library(dict.fromkeys(NAMES, "silent")).run(until=60.0)
    assert not library.told(FetchFailed) and not library.fetch.over


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(["liar", "silent", "empty", "forger"]), max_size=3), st.integers(0, 2**32))
@example(["liar", "empty", "silent"], 600668)  # a late chunk waited for ever for a source that had been left
def test_one_good_source_is_enough_whatever_the_others_do(bad: list[str], seed: int):
    """Messages are lost and reordered; every lie is noticed before it is stored."""
    draw = random.Random(seed)
    names = draw.sample(NAMES, len(bad) + 1)
    library = Library(dict(zip(names, [*bad, "good"], strict=True))).run(3000.0, draw, loss=0.1)
    assert library.told(BlobFetched)
    assert {f.peer for f in library.told(CorruptBlobSourceDetected)} <= set(names[:-1])


def test_many_sources_together_send_no_more_than_fits_in_memory():
    """Two hundred fast sources and a slow disk: what was asked for and is not stored has a ceiling."""
    pieces = tuple(digest(k.to_bytes(4, "big")) for k in range(5000))
    manifest = BlobManifest(len(pieces) * BLOB_CHUNK, pieces)
    blob, sources = blob_id(manifest), tuple(PeerId(f"p{i}") for i in range(200))
    fetch = BlobDownload(blob, sources)
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(sources[0], ManifestResponse(blob, manifest)), 0.0)
    flying = deque(fetch.handle(TaskDone(f"fetch/{blob.hex()}/open", BlobStoragePrepared(frozenset())), 0.0))
    storing: list[RunTask] = []
    for _ in range(20_000):  # windows grow with every answer
        asked = [e for e in flying if isinstance(e, Send)]
        assert len(asked) + len(storing) <= REQUESTS_MAX
        if not asked:
            break
        flying.remove(send := asked[0])
        chunk = send.message
        assert isinstance(chunk, ChunkRequest)
        payload = Payload(pieces[chunk.index], BLOB_CHUNK, b"")
        effects = fetch.handle(Received(send.to, ChunkResponse(blob, chunk.index), payload), 0.01)
        storing += [e for e in effects if isinstance(e, RunTask)]
        flying += [e for e in effects if isinstance(e, Send)]
    assert len(storing) == REQUESTS_MAX
    effects = fetch.handle(TaskDone(storing.pop().job, None), 0.02)
    assert sum(isinstance(e, Send) for e in effects) == 1  # what was stored makes room


def test_answers_that_come_late_all_at_once_are_not_all_kept():
    """Sources stall, what they owe is asked of others, then all send everything: the disk is still busy."""
    pieces = tuple(digest(k.to_bytes(4, "big")) for k in range(3000))
    manifest = BlobManifest(len(pieces) * BLOB_CHUNK, pieces)
    blob, sources = blob_id(manifest), tuple(PeerId(f"p{i}") for i in range(100))
    fetch = BlobDownload(blob, sources)
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(sources[0], ManifestResponse(blob, manifest)), 0.0)
    sent = fetch.handle(TaskDone(f"fetch/{blob.hex()}/open", BlobStoragePrepared(frozenset())), 0.0)
    now = 0.0
    for _ in range(100):
        now += TICK_S
        sent += fetch.handle(TimerFired(f"fetch/{blob.hex()}/stall"), now)
    asked = {(e.to, e.message.index) for e in sent if isinstance(e, Send) and isinstance(e.message, ChunkRequest)}
    assert len({index for _, index in asked}) > REQUESTS_MAX
    storing: set[str] = set()
    for peer, index in sorted(asked):
        payload = Payload(pieces[index], BLOB_CHUNK, b"")
        effects = fetch.handle(Received(peer, ChunkResponse(blob, index), payload), now)
        storing |= {e.job for e in effects if isinstance(e, RunTask)}
    assert len(storing) <= REQUESTS_MAX


def test_a_blob_that_is_longer_than_its_asker_expects_is_refused_before_any_room_is_made():
    """Where a name is nobody's but the source's, such as an exhibit's: a manifest may promise 64 GiB."""
    library = Library({NAMES[0]: "good"})
    library.fetch = BlobDownload(BLOB, NAMES[:1], MANIFEST.size_bytes - 1)
    library.run(until=10.0)
    assert library.fetch.over and not library.stored
    assert [type(fact) for fact in library.facts] == [CorruptBlobSourceDetected, FetchFailed]
    library = Library({NAMES[0]: "good"})
    library.fetch = BlobDownload(BLOB, NAMES[:1], MANIFEST.size_bytes)
    assert isinstance(library.run().facts[-1], BlobFetched)


def test_a_source_is_asked_for_several_chunks_at_a_time():
    """A quarter of its window is free before it is filled again: requests that leave together cost one turn."""
    library = Library({NAMES[0]: "good"})
    fetch = library.fetch
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(NAMES[0], ManifestResponse(BLOB, MANIFEST)), 0.0)
    fetch.sources[NAMES[0]].window = WINDOW  # as after some answers
    assert len(fetch.handle(TaskDone(f"fetch/{BLOB.hex()}/open", BlobStoragePrepared(frozenset())), 0.0)) == WINDOW
    fetch.sources[NAMES[0]].window = 7  # an answer makes it eight, and one of them is free

    def chunk_came(index: int) -> int:
        payload = Payload(PIECES[index], BLOB_CHUNK, b"")
        effects = fetch.handle(Received(NAMES[0], ChunkResponse(BLOB, index), payload), 0.1)
        return sum(isinstance(e, Send) for e in effects)

    assert [chunk_came(0), chunk_came(1)] == [0, 3]


def test_one_source_is_asked_in_sequence():
    """Its disk reads ahead. Each time its window was full, the next chunk was once put off to the very end."""
    pieces = tuple(digest(k.to_bytes(4, "big")) for k in range(300))
    manifest = BlobManifest(len(pieces) * BLOB_CHUNK, pieces)
    blob = blob_id(manifest)
    fetch = BlobDownload(blob, NAMES[:1])
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(NAMES[0], ManifestResponse(blob, manifest)), 0.0)
    flying = deque(fetch.handle(TaskDone(f"fetch/{blob.hex()}/open", BlobStoragePrepared(frozenset())), 0.0))
    asked: list[int] = []
    while flying and isinstance(send := flying.popleft(), Send):
        assert isinstance(send.message, ChunkRequest)
        asked.append(index := send.message.index)
        payload = Payload(pieces[index], BLOB_CHUNK, b"")
        effects = fetch.handle(Received(NAMES[0], ChunkResponse(blob, index), payload), 0.01)
        effects += fetch.handle(TaskDone(f"fetch/{blob.hex()}/chunk/{index}", None), 0.01)
        flying += [effect for effect in effects if isinstance(effect, Send)]
    assert asked == list(range(300))


def test_a_chunk_of_another_length_than_its_place_is_not_stored():
    """The namer of a blob may put the digest of 64 MiB into a manifest of 100 bytes: it is blamed."""
    manifest = BlobManifest(100, (PIECES[0],))
    blob = blob_id(manifest)
    fetch = BlobDownload(blob, [NAMES[0]])
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(NAMES[0], ManifestResponse(blob, manifest)), 0.0)
    fetch.handle(TaskDone(f"fetch/{blob.hex()}/open", BlobStoragePrepared(frozenset())), 0.0)
    effects = fetch.handle(
        Received(NAMES[0], ChunkResponse(blob, 0), Payload(PIECES[0], 64 * BLOB_CHUNK, b"")), 0.1
    )
    assert [type(e.fact) for e in effects if isinstance(e, Emit)] == [CorruptBlobSourceDetected, FetchFailed]
    assert not any(isinstance(e, RunTask) for e in effects)


def test_whoever_asks_for_everything_at_once_leaves_room_for_others():
    """A thousand requests of one peer, and nothing is read yet: those of another joiner are begun all the same."""
    serve, blob = BlobServer(), digest(b"blob")
    flood = [serve.handle(Received(PeerId("greedy"), ChunkRequest(blob, i)), 0.0) for i in range(1000)]
    other = [serve.handle(Received(PeerId("joiner"), ChunkRequest(blob, i)), 0.0) for i in range(8)]
    assert 0 < sum(map(len, flood)) < 1000 and all(isinstance(effect, RunTask) for (effect,) in other)


# ---- connections that end ----------------------------------------------------------------------------------


def opened(sources: tuple[PeerId, ...], missing: int, unlinked: tuple[PeerId, ...] = ()) -> BlobDownload:
    """A download of which the last source has shown the manifest; the first `missing` chunks are not here."""
    fetch = BlobDownload(BLOB, sources, linked={*sources} - {*unlinked})
    fetch.handle(Start({}), 0.0)
    fetch.handle(Received(sources[-1], ManifestResponse(BLOB, MANIFEST)), 0.0)
    for source in fetch.sources.values():
        source.window = WINDOW  # as after some answers
    fetch.handle(TaskDone(f"fetch/{BLOB.hex()}/open", BlobStoragePrepared(frozenset(range(missing, CHUNKS)))), 0.0)
    return fetch


def chunks_asked(effects: list[Effect]) -> set[tuple[PeerId, int]]:
    return {(e.to, e.message.index) for e in effects if isinstance(e, Send) and isinstance(e.message, ChunkRequest)}


@pytest.mark.parametrize("killed", NAMES[:2])
def test_when_a_connection_ends_its_chunks_are_asked_of_another_source_at_once(killed: PeerId):
    """No answer came yet, so the most patience, 5 s, was spent on the dead source before."""
    fetch = opened(NAMES[:2], missing=6)
    owed = {index for index, asked in fetch.requested.items() if killed in asked}
    (other,) = {*NAMES[:2]} - {killed}
    assert owed and chunks_asked(fetch.on_link_down(killed, 0.1)) == {(other, index) for index in owed}


def test_a_source_without_a_connection_is_not_asked_for_chunks():
    """It was killed before the download began, and the record still names it as a member."""
    fetch = opened(NAMES[:2], missing=6, unlinked=NAMES[:1])
    assert {peer for asked in fetch.requested.values() for peer in asked} == {NAMES[1]}


def test_when_the_only_source_is_gone_the_next_one_that_connects_is_asked_at_once():
    fetch = opened(NAMES[:2], missing=1, unlinked=NAMES[:1])
    assert not chunks_asked(fetch.on_link_down(NAMES[1], 0.1))
    assert not chunks_asked(fetch.handle(TimerFired(f"fetch/{BLOB.hex()}/stall"), 0.2)) and not fetch.over
    assert chunks_asked(fetch.on_link_up(NAMES[0], 0.3)) == {(NAMES[0], 0)}


def test_before_any_manifest_the_next_source_that_connects_is_asked_at_once():
    fetch = BlobDownload(BLOB, NAMES[:2])
    fetch.handle(Start({}), 0.0)
    assert not fetch.on_link_down(NAMES[0], 0.1) and not fetch.on_link_down(NAMES[1], 0.1)
    assert [(e.to, e.message) for e in fetch.on_link_up(NAMES[1], 0.2) if isinstance(e, Send)] == [
        (NAMES[1], ManifestRequest(BLOB, known=False))
    ]


def test_a_source_that_stalled_is_asked_again_when_the_last_other_one_is_gone():
    """Only on_link_up brought it back before; its own connection never ended."""
    fetch = opened(NAMES[:2], missing=1)
    fetch.dropped_sources[NAMES[0]] = fetch.sources.pop(NAMES[0])
    assert {to for to, _ in chunks_asked(fetch.on_link_down(NAMES[1], 0.1))} == {NAMES[0]}
