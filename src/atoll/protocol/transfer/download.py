"""Fetch one blob by its name, in verified chunks, from several peers at once; serve chunks to others.

Each chunk is checked alone against the manifest, and the manifest against the blob's name, so a source can waste
one answer and never more. Every source has a window of requests that grows while it answers and falls to one when
it is late; the fastest is asked first. A chunk that is late is asked of one more source, whichever answers first
counts, so a stalling source holds nobody up: it is named, and left when it stalls again and again. A source of
wrong bytes is named and not asked again. Chunks already on disk are not fetched twice, also after a crash.
Whoever fetches serves what it has: it says which chunks, and is asked again as they grow. What such a source has
is asked of it, and the whole ones give what fewest have, ties in an order of each peer's own, so that many who
fetch from one take different chunks from it and the rest from each other. Never blocks training: reads and writes
are jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from atoll.base.draw import draw_below, shuffled
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import BLOB_MAX
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Fact,
    Lane,
    Payload,
    Received,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
)
from atoll.crypto.digest import BlobManifest, blob_id
from atoll.protocol.transfer.tasks import (
    BlobOpened,
    CloseBlob,
    OpenBlob,
    PartialManifest,
    ReadChunk,
    ReadManifest,
    StoreChunk,
)
from atoll.wire.messages.history import ChunkRequest, ChunkResponse, ManifestRequest, ManifestResponse

WINDOW, WINDOW_MAX = 8, 32  # requests in flight at one source: 8 hide 100 ms at 80 MB/s, 32 at 320 MB/s
HUNGRY = 4  # part of a window that is free before it is filled again
REQUESTS_MAX = 128  # in flight at all sources, and answers not yet on disk: 128 MiB, 1.2 GB/s over 100 ms
PATIENCE = 4.0  # times the usual time to answer, after which a chunk is asked of one more source
PATIENCE_S = (0.25, 5.0)  # never less, never more; the latter also while nobody has answered yet
TICK_S = 0.25  # how often it is looked for what is late
QUEUED_S = 1.0  # of an answer: more wait there than distance explains, and more requests would wait longer
NEWS_S = 1.0  # how often those that do not hold it whole are asked what they have
NEWS_MAX = 8  # of them at a time, in turns
STARVED_S = 10.0  # without a chunk, nobody asked holding it whole: those that have parts will not get the rest
ASKS_MAX = 6  # for the manifest, each with the longest patience, where others said that they have nothing
STALLS_MAX = 5  # late in a row, each time twice as long: this source is left, if there is another one
SERVED_AT_ONCE = 64  # chunk reads in progress for others; more requests are dropped and asked again
SERVED_TO_ONE = WINDOW_MAX  # of these, for one asker: whoever floods leaves the other half to the others


class BlobFetched(Fact, frozen=True, kw_only=True, tag="Fetched"):
    """The blob is here, complete and durable. `sources` gave at least one chunk each."""

    phase = "transfer"
    blob: Digest
    size_bytes: int
    sources: tuple[PeerId, ...]


class FetchFailed(Fact, frozen=True, kw_only=True, tag="FetchFailed"):
    phase = "transfer"
    blob: Digest
    why: str


class BadSource(Fact, frozen=True, kw_only=True, tag="BadSource"):
    """This peer sent bytes that are not what the name says."""

    phase = "transfer"
    peer: PeerId
    blob: Digest


class StallingSource(Fact, frozen=True, kw_only=True, tag="StallingSource"):
    """This peer promised the blob and does not answer; `left`: it is not asked any more."""

    phase = "transfer"
    peer: PeerId
    blob: Digest
    left: bool


@dataclass
class BlobSource:
    """What is known about one peer that may hold the blob."""

    window: int = WINDOW
    asked: dict[int, Seconds] = field(default_factory=dict[int, Seconds])  # chunk -> when, still in time
    usual_s: Seconds = 0.0  # smoothed time to answer; 0: it has not yet
    stalls: int = 0  # in a row
    here: bytes | None = None  # chunks that it has, one bit each; None: the whole blob
    offers: deque[int] = field(default_factory=deque[int])  # of these, what I lack, the rarest first

    def has(self, index: int) -> bool:
        return self.here is None or bool(self.here[index // 8] >> index % 8 & 1)

    def answered(self, took_s: Seconds) -> None:
        self.usual_s = took_s if self.usual_s == 0.0 else 0.8 * self.usual_s + 0.2 * took_s
        self.stalls = 0
        self.window = min(WINDOW_MAX, self.window + 1) if self.usual_s < QUEUED_S else max(2, self.window - 1)

    @property
    def patience_s(self) -> Seconds:
        least, most = PATIENCE_S
        return (min(most, max(least, PATIENCE * self.usual_s)) if self.usual_s else most) * 2**self.stalls

    @property
    def hungry(self) -> bool:
        """Worth asking: several requests that leave together cost both ends one turn, and a quarter of the window
        is not missed meanwhile."""
        return self.window - len(self.asked) >= max(1, self.window // HUNGRY)

    @property
    def wait_s(self) -> tuple[int, Seconds]:
        """What one more request would wait, for those who stalled after those who did not."""
        return self.stalls, (len(self.asked) + 1) / self.window * (self.usual_s or 0.001)


class BlobDownload:
    """One blob on its way here."""

    def __init__(
        self,
        blob: Digest,
        sources: Sequence[PeerId],
        bytes_max: int = BLOB_MAX,
        allowance: int | None = None,
        requests_max: int = REQUESTS_MAX,
        me: PeerId | None = None,
    ) -> None:
        """`bytes_max`: a longer one is refused, where its name is nobody's but the source's. `allowance`:
        chunks that may be asked for until `allow` is called again; None: as fast as it goes. `requests_max`:
        fewer on their way, where several blobs are fetched at once. `me`: who fetches, where others may do so, too;
        left out where it is wanted of these sources alone."""
        self.me = me
        self.allowance, self.requests_max = allowance, requests_max
        self.blob, self.bytes_max = blob, bytes_max
        self.prefix = f"fetch/{blob.hex()}/"
        self.sources = {peer: BlobSource() for peer in sources}
        self.bad: set[PeerId] = set()
        self.left: dict[PeerId, BlobSource] = {}  # for stalling; a new connection is a new beginning
        self.maybe: set[PeerId] = set()  # had nothing of it, or was not asked yet
        self.told: dict[PeerId, bool] = {}  # whom it was asked last what it has, and whether it answered
        self.gave: set[PeerId] = set()
        self.manifest: BlobManifest | None = None
        self.opened = self.closing = self.over = False
        self.asks = 0  # for the manifest
        self.asked_at: Seconds = 0.0  # the last of them
        self.fed_at: Seconds = 0.0  # the last chunk that came
        self.news_at: Seconds = 0.0  # when it was last asked who has what
        self.turn = 0  # of whom
        self.tick_at: Seconds = 0.0  # when it is looked next for what is late
        self.spared = False  # nobody was judged last time
        self.news = False  # somebody has more than it had
        self.rank: list[int] = []  # of each chunk, where as many have it as have another
        self.todo: deque[int] = deque()  # chunks to be asked for; of late ones, once more
        self.waiting: dict[int, dict[PeerId, Seconds]] = {}  # chunk -> whom it was asked of, and when
        self.came: set[int] = set()  # a probe's chunk, and a late one, may still stand in `todo`
        self.storing: set[int] = set()  # of these, not yet on disk

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        if self.over:
            return []
        match event:
            case Start():
                return [*self._ask_manifest(now), self._tick(now)]
            case Received(sender, ManifestResponse(blob=self.blob) as message):
                return self._open(sender, message, now)
            case Received(sender, ChunkResponse(blob=self.blob) as message):
                return self._take(sender, message.index, event.payload, now)
            case TimerFired(name) if name == self._name("stall"):
                return self._look_for_late_ones(now)
            case TaskDone(job, result) if (
                job == self._name("open") and self.manifest is not None and not self.opened
            ):
                assert isinstance(result, BlobOpened)
                self.opened = True
                self.fed_at, self.news_at = now, now
                count = len(self.manifest.chunks)
                first = draw_below(self.blob, self.me, count) if self.me and count else 0
                self.todo = deque(i for i in [*range(first, count), *range(first)] if i not in result.have)
                self._order()
                return self._ask_chunks(now)
            case TaskDone(job, _) if job.startswith(self._name("chunk/")):
                self.storing.discard(int(job.rsplit("/", 1)[1]))
                return self._ask_chunks(now)
            case TaskDone(job, _) if job == self._name("close") and self.closing:
                return self._finish()
            case TaskFailed(job, why) if job.startswith(self._name("")):
                self.over = True
                return [Emit(FetchFailed(blob=self.blob, why=why))]
            case _:
                return []

    def linked(self, peer: PeerId, now: Seconds) -> list[Effect]:
        """A connection came up: what was asked over the old one may never be answered."""
        if peer in self.left:
            self.sources[peer] = BlobSource(here=self.left.pop(peer).here)
        source = self.sources.get(peer)
        if self.over or source is None:
            return []
        if self.manifest is None:
            return [self._ask_what_is_here(peer)]
        source.stalls, source.usual_s = 0, 0.0
        source.asked.clear()
        self._forget_requests(peer)
        return self._ask_chunks(now) if self.opened else []

    def allow(self, chunks: int, now: Seconds) -> list[Effect]:
        """So many more chunks may be asked for; what was allowed before and not used is not saved up."""
        self.allowance = chunks
        return self._ask_chunks(now) if self.opened and not self.over else []

    def offer(self, sources: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """More peers that hold the blob."""
        fresh = [p for p in sources if p not in self.sources and p not in self.bad]
        self.sources.update((p, BlobSource()) for p in fresh)
        if self.manifest is None:
            return [self._ask_what_is_here(p) for p in fresh]
        return self._ask_chunks(now) if self.opened else []

    def suppose(self, peers: Sequence[PeerId]) -> None:
        """These may fetch it, too; asked where it is not wanted of certain peers alone."""
        if self.me is None:
            return
        self.maybe.update(p for p in peers if not (p in self.sources or p in self.bad or p in self.left))

    # ---- the manifest, and who has what --------------------------------------------------------------------

    def _ask_manifest(self, now: Seconds) -> list[Effect]:
        self.asks, self.asked_at = self.asks + 1, now
        return [self._ask_what_is_here(p) for p in self.sources]

    def _ask_what_is_here(self, peer: PeerId) -> Send:
        self.told[peer] = False
        return Send(peer, ManifestRequest(self.blob, known=self.manifest is not None))

    def _open(self, sender: PeerId, message: ManifestResponse, now: Seconds) -> list[Effect]:
        manifest, here = message.manifest, None if message.here is UNSET else message.here
        if (sender not in self.sources and sender not in self.maybe) or self.told.get(sender, True):
            return []  # not asked, or left: a manifest is no secret
        self.told[sender] = True
        if manifest is None and here is None:
            self.maybe.add(sender)
            return self._leave(sender)
        known = manifest or self.manifest
        if known is None:
            return []
        if manifest is not None and not self._is_right(manifest):
            return self._blame(sender)
        if here is not None and len(here) != -(-len(known.chunks) // 8):
            return self._blame(sender)
        self.maybe.discard(sender)
        self.sources.setdefault(sender, BlobSource()).here = here
        self.news = True
        if self.manifest is not None:
            return self._ask_chunks(now) if self.opened else []
        self.manifest = known
        return [RunTask(self._name("open"), OpenBlob(self.blob, known))]

    def _is_right(self, manifest: BlobManifest) -> bool:
        try:
            manifest.check()
        except ValueError:
            return False
        return blob_id(manifest) == self.blob and manifest.size_bytes <= self.bytes_max

    def _ask_for_news(self, now: Seconds) -> list[Effect]:
        """Whoever has not all of it may have more by now."""
        if not self.opened or self.closing or now - self.news_at < NEWS_S:
            return []
        self.news_at = now
        peers = [*(p for p, s in self.sources.items() if s.here is not None), *sorted(self.maybe)]
        if len(peers) > NEWS_MAX:
            first = self.turn = (self.turn + NEWS_MAX) % len(peers)
            peers = (peers * 2)[first : first + NEWS_MAX]
        return [self._ask_what_is_here(peer) for peer in peers]

    def _order(self) -> None:
        """What is lacking, by how many have it."""
        self.news = False
        assert self.manifest is not None
        partial = [s for s in self.sources.values() if s.here is not None]
        if not partial:
            return
        if not self.rank:
            self.rank = shuffled(self.blob, self.me or "", range(len(self.manifest.chunks)))
        had = {index: sum(s.has(index) for s in partial) for index in self.todo}
        self.todo = deque(sorted(self.todo, key=lambda index: (had[index], self.rank[index])))
        for source in partial:
            source.offers = deque(index for index in self.todo if source.has(index))

    # ---- chunks --------------------------------------------------------------------------------------------

    def _take(self, sender: PeerId, index: int, payload: Payload | None, now: Seconds) -> list[Effect]:
        asked_at = self.waiting.get(index, {}).get(sender)
        if asked_at is None or self.manifest is None:
            return []  # never asked for, or somebody else was faster
        if payload is None:
            return [*self._leave(sender), *self._ask_chunks(now)]
        # in length, too: whoever names a blob may put the digest of 64 MiB into a manifest of one
        if (payload.digest, payload.size_bytes) != (self.manifest.chunks[index], self.manifest.chunk_bytes(index)):
            return [*self._blame(sender), *self._ask_chunks(now)]
        if (
            len(self.storing) >= self.requests_max
        ):  # so many at once are late ones: asked again when the disk is ready
            if sender in self.sources:
                self.sources[sender].asked.pop(index, None)
            del self.waiting[index][sender]
            self._settle(index)
            return []
        for peer in self.waiting.pop(index):
            if peer in self.sources:
                self.sources[peer].asked.pop(index, None)
        self.sources.setdefault(sender, BlobSource()).answered(now - asked_at)
        self.gave.add(sender)
        self.came.add(index)
        self.storing.add(index)
        self.fed_at = now
        return [
            RunTask(self._name(f"chunk/{index}"), StoreChunk(self.blob, index, payload)),
            *self._ask_chunks(now),
        ]

    def _ask_chunks(self, now: Seconds) -> list[Effect]:
        while self.todo and self.todo[0] in self.came:
            self.todo.popleft()
        if not (self.todo or self.waiting or self.storing or self.closing) and self.opened and not self.over:
            self.closing = True
            return [RunTask(self._name("close"), CloseBlob(self.blob))]
        effects: list[Effect] = []
        effects += self._ask_those_with_parts(now)
        room = self._room() + len(effects)
        hungry = {p: s for p, s in self.sources.items() if s.here is None and s.hungry}
        for _ in range(len(self.todo) if hungry else 0):
            if len(effects) >= room:
                break
            index = self.todo.popleft()
            asked = self.waiting.get(index, {})
            if index in self.came:
                continue
            free = {p: s for p, s in hungry.items() if len(s.asked) < s.window and p not in asked}
            if not free and asked:
                self.todo.append(index)  # its turn comes again
                continue
            if not free:
                self.todo.appendleft(index)  # in sequence: their disks read ahead
                break  # all are busy
            peer = min(free, key=lambda p: free[p].wait_s)
            effects.append(self._ask_chunk(peer, index, now))
            if self.sources[peer].stalls and len(self.sources) > 1:
                self.todo.append(index)  # a probe: nobody relies on it
        return effects if self.todo else [*effects, *self._help_out(now)]

    def _ask_those_with_parts(self, now: Seconds) -> list[Effect]:
        """Before the whole ones, which give meanwhile what only they have."""
        effects: list[Effect] = []
        room = self._room()
        for peer, source in self.sources.items():
            while source.offers and len(source.asked) < source.window and len(effects) < room:
                index = source.offers.popleft()
                if index not in self.todo or index in self.came or peer in self.waiting.get(index, {}):
                    continue
                if not source.stalls:
                    self.todo.remove(index)
                effects.append(self._ask_chunk(peer, index, now))
        return effects

    def _room(self) -> int:
        """How many more chunks may be on their way."""
        room = self.requests_max - len(self.storing) - sum(len(s.asked) for s in self.sources.values())
        return room if self.allowance is None else min(room, self.allowance)

    def _ask_chunk(self, peer: PeerId, index: int, now: Seconds) -> Send:
        self.sources[peer].asked[index] = now
        self.waiting.setdefault(index, {})[peer] = now
        if self.allowance is not None:
            self.allowance -= 1
        return Send(peer, ChunkRequest(self.blob, index))

    def _help_out(self, now: Seconds) -> list[Effect]:
        """Nothing is left to ask for: who is idle fetches what others are slow with, each chunk at most twice."""
        effects: list[Effect] = []
        room = self._room()
        helpers = {p: s for p, s in self.sources.items() if s.usual_s and not s.stalls and len(s.asked) < WINDOW}
        least_s = min((2 * s.usual_s for s in helpers.values()), default=0.0)
        for index, asked in self.waiting.items() if helpers else ():
            if len(effects) >= room:
                break
            if len(asked) != 1:
                continue
            ((slow, since),) = asked.items()
            if now - since <= least_s:
                continue  # none of them could do it sooner
            idle = {
                p: s.usual_s
                for p, s in helpers.items()
                if p != slow and s.has(index) and len(s.asked) < WINDOW and now - since > 2 * s.usual_s
            }
            if idle:
                peer = min(idle, key=idle.__getitem__)
                effects.append(self._ask_chunk(peer, index, now))
        return effects

    def _look_for_late_ones(self, now: Seconds) -> list[Effect]:
        # who slept itself finds answers in its own buffers: it reads them first, and judges at the next tick
        self.spared = now - self.tick_at > TICK_S and not self.spared
        effects: list[Effect] = [self._tick(now)]
        effects += self._ask_for_news(now)
        if self.manifest is None:
            late = now - self.asked_at >= PATIENCE_S[1]
            if late and self.asks >= ASKS_MAX and any(self.told.values()):
                return self._give_up("those who answer do not hold it")
            return [*self._ask_manifest(now), *effects] if late else effects
        if self.opened and self._starves(now):
            return self._give_up("those who have some of it lack the rest")
        if self.opened and self.news:
            self._order()
        usual = sorted(s.usual_s for s in self.sources.values() if s.usual_s)
        for peer, source in list(self.sources.items()) if not self.spared else ():
            patience_s = source.patience_s
            if not source.usual_s and usual:  # the others have answered long ago
                others_s = max(PATIENCE_S[0], 2 * PATIENCE * usual[len(usual) // 2])
                patience_s = min(patience_s, others_s * 2**source.stalls)
            late = [index for index, at in source.asked.items() if now - at >= patience_s]
            if late:
                effects += self._stalled(peer, source, late)
        return [*effects, *self._ask_chunks(now)]

    def _stalled(self, peer: PeerId, source: BlobSource, late: list[int]) -> list[Effect]:
        """It gets one request at a time from now on, and what it owes is asked of somebody else too."""
        source.window, source.stalls = 1, source.stalls + 1
        for index in late:
            del source.asked[index]
            self._settle(index)
        left = source.stalls >= STALLS_MAX and len(self.sources) > 1
        effects: list[Effect] = []
        if source.stalls == 1 or left:
            effects.append(Emit(StallingSource(peer=peer, blob=self.blob, left=left)))
        if left:
            self.left[peer] = source
            effects += self._leave(peer)
        elif source.stalls >= STALLS_MAX:  # those that were left for it were no worse
            self.sources.update((p, BlobSource(here=s.here)) for p, s in self.left.items())
            self.left.clear()
        return effects

    def _settle(self, index: int) -> None:
        """If nobody owes this chunk in time, it is to be asked for again; late answers still count."""
        asked = self.waiting.get(index)
        if asked is None or any(index in self.sources[p].asked for p in asked if p in self.sources):
            return
        if self._whole() <= asked.keys():
            del self.waiting[index]  # everybody had its chance: begin anew
        if index not in self.todo:
            self.todo.appendleft(index)

    # ---- leaving sources -----------------------------------------------------------------------------------

    def _blame(self, sender: PeerId) -> list[Effect]:
        self.bad.add(sender)
        self.maybe.discard(sender)
        return [Emit(BadSource(peer=sender, blob=self.blob)), *self._leave(sender)]

    def _leave(self, peer: PeerId) -> list[Effect]:
        if self.sources.pop(peer, None) is None:
            return []
        self._forget_requests(peer)
        return self._give_up_if_alone()

    def _forget_requests(self, peer: PeerId) -> None:
        for index, asked in list(self.waiting.items()):  # also what was to be asked of this peer next
            asked.pop(peer, None)
            self._settle(index)

    def _give_up_if_alone(self) -> list[Effect]:
        if self.sources:
            return []
        return self._give_up("nobody who was asked holds it")

    def _give_up(self, why: str) -> list[Effect]:
        self.over = True
        return [Emit(FetchFailed(blob=self.blob, why=why))]

    def _starves(self, now: Seconds) -> bool:
        if self._whole() or self.closing or self.storing or self.allowance == 0:
            return False
        return now - self.fed_at > STARVED_S

    def _whole(self) -> set[PeerId]:
        return {p for p, s in self.sources.items() if s.here is None}

    def _finish(self) -> list[Effect]:
        assert self.manifest is not None
        self.over = True
        size, sources = self.manifest.size_bytes, tuple(sorted(self.gave))
        return [
            SetTimer(self._name("stall"), None),
            Emit(BlobFetched(blob=self.blob, size_bytes=size, sources=sources)),
        ]

    def _tick(self, now: Seconds) -> SetTimer:
        self.tick_at = now + TICK_S
        return SetTimer(self._name("stall"), self.tick_at)

    def _name(self, what: str) -> str:
        return self.prefix + what


class BlobServer:
    """The other side: answers requests for manifests and chunks from what is on disk."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[PeerId, ManifestRequest | ChunkRequest]] = {}
        self.count = 0

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Received(sender, (ManifestRequest() | ChunkRequest()) as wish):
                theirs = sum(asker == sender for asker, _ in self.jobs.values())
                if len(self.jobs) >= SERVED_AT_ONCE or theirs >= SERVED_TO_ONE:
                    return []  # the asker's patience ends, it asks somebody else
                self.count += 1
                job = f"serve/{self.count}"
                self.jobs[job] = (sender, wish)
                if isinstance(wish, ManifestRequest):
                    return [RunTask(job, ReadManifest(wish.blob, partly=wish.known is not UNSET))]
                return [RunTask(job, ReadChunk(wish.blob, wish.index))]
            case TaskDone(job, result) if job in self.jobs:
                sender, wish = self.jobs.pop(job)
                if isinstance(wish, ManifestRequest):
                    return [Send(sender, _told(wish, result), Lane.BULK)]
                payload = result if isinstance(result, Payload) else None
                return [Send(sender, ChunkResponse(wish.blob, wish.index), Lane.BULK, payload)]
            case TaskFailed(job, _) if job in self.jobs:
                del self.jobs[job]
                return []
            case _:
                return []


def _told(wish: ManifestRequest, found: object) -> ManifestResponse:
    match found:
        case BlobManifest():
            return ManifestResponse(wish.blob, found)
        case PartialManifest(manifest, here):
            return ManifestResponse(wish.blob, None if wish.known is True else manifest, here)
        case _:
            return ManifestResponse(wish.blob, None)
