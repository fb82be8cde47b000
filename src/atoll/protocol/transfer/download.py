"""Multi-source download of one blob in verified chunks.

Driving contract: pass `Start` first, then `Received`, `TimerFired`, `TaskDone` and `TaskFailed`, in any order.
Call `on_link_up` and `on_link_down` when a connection opens or ends, `add_sources` or `add_candidates` for new
sources, and `set_allowance` for a request budget.
The driver must run each `RunTask` outside the event loop, and return its result under the same job name.
The download ends with `BlobFetched` or `FetchFailed`.

Each source has a window of requests. It begins with two, grows while the source responds quickly, and falls to one
when it is late: a slow downlink would fill with chunks that then look late and come twice. The fastest
source is used first. A late chunk is requested from one more source, and the first response counts, so a stalling
source delays no download. If the connection to a source ends, its chunks are requested from the others at once.
A downloading peer is a partial source: it serves its chunks, and is asked again which it holds. Whole sources send
the rarest chunks, with ties in an order that differs per peer. Peers that download together thus take different
chunks and exchange the rest.

Invariants:
- Each chunk is checked against the manifest, and the manifest against the blob's name. A source can waste one
  response at most.
- A source of wrong bytes is reported and not used again. A stalling source is reported, and dropped after repeated
  stalls.
- Chunks on disk are not fetched twice, also after a crash.
- Reads and writes are tasks and never block training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
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
    BlobStoragePrepared,
    CloseBlob,
    PrepareBlobStorage,
    StoreChunk,
)
from atoll.wire.messages.history import ChunkRequest, ChunkResponse, ManifestRequest, ManifestResponse

# requests in flight at one source: at first, as a helper, at most. 8 hide 100 ms at 80 MB/s, 32 at 320 MB/s
WINDOW_FIRST, WINDOW, WINDOW_MAX = 2, 8, 32
REFILL_DIVISOR = 4  # a window is refilled when this fraction (1/4) of it is free
REQUESTS_MAX = 128  # requests at all sources plus chunks not yet on disk: 128 MiB, 1.2 GB/s over 100 ms
PATIENCE = 4.0  # multiple of a source's usual response time after which one more source is asked for a chunk
PATIENCE_S = (0.25, 5.0)  # seconds, least and most patience (or twice the usual time); the most before any response
TICK_S = 0.25  # seconds between checks for late requests
QUEUED_S = 1.0  # seconds; a slower response was queued at the source, where more requests would wait longer
INVENTORY_S = 1.0  # seconds between inventory requests to partial sources
INVENTORIES_MAX = 8  # inventory requests at a time, in turns
STARVED_S = 10.0  # seconds without a chunk and without a whole source: the partial sources lack the rest
MANIFEST_REQUESTS_MAX = (
    6  # manifest requests, each with the most patience, once some peers have responded without it
)
STALLS_MAX = 5  # stalls in a row, each twice as long, before a source is dropped if there is another one


class BlobFetched(Fact, frozen=True, kw_only=True, tag="BlobFetched"):
    """The blob is complete and durable. Each of `sources` sent at least one chunk."""

    phase = "transfer"
    blob: Digest
    size_bytes: int
    sources: tuple[PeerId, ...]


class FetchFailed(Fact, frozen=True, kw_only=True, tag="FetchFailed"):
    """The download was given up, for the reason in `why`. `local`: the local disk refused it, not the sources."""

    phase = "transfer"
    blob: Digest
    why: str
    local: bool = False


class CorruptBlobSourceDetected(Fact, frozen=True, kw_only=True, tag="CorruptBlobSourceDetected"):
    """This peer sent bytes that do not match the blob's name."""

    phase = "transfer"
    peer: PeerId
    blob: Digest


class DownloadSourceStalled(Fact, frozen=True, kw_only=True, tag="DownloadSourceStalled"):
    """This peer offered the blob and does not respond. `left`: it is not used any more."""

    phase = "transfer"
    peer: PeerId
    blob: Digest
    left: bool


@dataclass
class BlobSource:
    """State of one peer that may hold the blob."""

    window: int = WINDOW_FIRST
    asked: dict[int, Seconds] = field(default_factory=dict[int, Seconds])  # chunk -> request time, if not late
    usual_s: Seconds = 0.0  # smoothed response time; 0 before the first response
    stalls: int = 0  # stalls in a row
    inventory: bytes | None = None  # held chunks, one bit each; None: the whole blob
    offers: deque[int] = field(default_factory=deque[int])  # held chunks that are missing here, rarest first

    def has(self, index: int) -> bool:
        return self.inventory is None or bool(self.inventory[index // 8] >> index % 8 & 1)

    def answered(self, took_s: Seconds) -> None:
        self.usual_s = took_s if self.usual_s == 0.0 else 0.8 * self.usual_s + 0.2 * took_s
        self.stalls = 0
        self.window = min(WINDOW_MAX, self.window + 1) if self.usual_s < QUEUED_S else max(1, self.window - 1)

    @property
    def patience_s(self) -> Seconds:
        least, most = PATIENCE_S
        usual_s = min(max(most, 2 * self.usual_s), max(least, PATIENCE * self.usual_s)) if self.usual_s else most
        return usual_s * 2**self.stalls

    @property
    def has_window(self) -> bool:
        """Whether a quarter of the window is free: requests sent together cost both ends one turn."""
        return self.window - len(self.asked) >= max(1, self.window // REFILL_DIVISOR)

    @property
    def wait_s(self) -> tuple[int, Seconds]:
        """Sort key for the next request: stalls, then the expected wait in seconds."""
        return self.stalls, (len(self.asked) + 1) / self.window * (self.usual_s or 0.001)


class BlobDownload:
    """Download of one blob."""

    def __init__(
        self,
        blob: Digest,
        sources: Sequence[PeerId],
        bytes_max: int = BLOB_MAX,
        allowance: int | None = None,
        requests_max: int = REQUESTS_MAX,
        me: PeerId | None = None,
        linked: Set[PeerId] | None = None,
    ) -> None:
        """Create a download of `blob` from `sources`.

        `bytes_max`: largest accepted blob, in bytes; a limit for names that only the source vouches for.
        `allowance`: chunks that may be requested until the next `allow`; None: no limit.
        `requests_max`: requests in flight, lower if several blobs are fetched at once.
        `me`: the local peer, if other peers may download the blob too; None: only `sources` are used.
        `linked`: connected peers at the start; None: all sources are.
        """
        self.me = me
        self.allowance, self.requests_max = allowance, requests_max
        self.blob, self.bytes_max = blob, bytes_max
        self.prefix = f"fetch/{blob.hex()}/"
        self.sources = {peer: BlobSource() for peer in sources}
        self.bad: set[PeerId] = set()
        # peers without a connection: not asked for chunks until it is back
        self.unlinked = set[PeerId]() if linked is None else set(sources) - linked
        self.dropped_sources: dict[
            PeerId, BlobSource
        ] = {}  # sources dropped for stalling; a new connection readmits them
        self.candidates: set[PeerId] = set()  # peers that had nothing of the blob, or were not asked yet
        self.inventory_answered: dict[
            PeerId, bool
        ] = {}  # peer -> whether it has answered the last inventory request
        self.contributors: set[PeerId] = set()  # peers that sent at least one chunk
        self.manifest: BlobManifest | None = None
        self.opened = self.closing = self.over = False
        self.manifest_requests = 0  # manifest requests sent
        self.manifest_asked_at: Seconds = 0.0  # time of the last manifest request
        self.last_chunk_at: Seconds = 0.0  # time of the last received chunk
        self.inventories_at: Seconds = 0.0  # time of the last inventory requests
        self.inventory_turn = 0  # index of the peer that is asked next for its inventory
        self.check_at: Seconds = 0.0  # time of the next check for late requests
        self.skipped_check = False  # whether the last check was skipped
        self.has_new_inventory = False  # whether an inventory has grown
        self.rank: list[int] = []  # chunk -> tie-break among equally rare chunks
        self.queue: deque[int] = deque()  # chunks to request; late ones once more
        self.requested: dict[int, dict[PeerId, Seconds]] = {}  # chunk -> peers it was requested from, and when
        self.received: set[int] = set()  # received chunks; chunks of probes and late ones may still be in `queue`
        self.storing: set[int] = set()  # received chunks that are not yet on disk

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        if self.over:
            return []
        match event:
            case Start():
                return [*self._request_manifest(now), self._schedule_check(now)]
            case Received(sender, ManifestResponse(blob=self.blob) as message):
                return self._receive_manifest(sender, message, now)
            case Received(sender, ChunkResponse(blob=self.blob) as message):
                return self._receive_chunk(sender, message.index, event.payload, now)
            case TimerFired(name) if name == self._name("stall"):
                return self._check_progress(now)
            case TaskDone(job, result) if (
                job == self._name("open") and self.manifest is not None and not self.opened
            ):
                assert isinstance(result, BlobStoragePrepared)
                self.opened = True
                self.last_chunk_at, self.inventories_at = now, now
                count = len(self.manifest.chunks)
                first = draw_below(self.blob, self.me, count) if self.me and count else 0
                self.queue = deque(i for i in [*range(first, count), *range(first)] if i not in result.have)
                self._sort_by_rarity()
                return self._request_chunks(now)
            case TaskDone(job, _) if job.startswith(self._name("chunk/")):
                self.storing.discard(int(job.rsplit("/", 1)[1]))
                return self._request_chunks(now)
            case TaskDone(job, _) if job == self._name("close") and self.closing:
                return self._finish()
            case TaskFailed(job, why) if job.startswith(self._name("")):
                self.over = True
                return [Emit(FetchFailed(blob=self.blob, why=why, local=True))]
            case _:
                return []

    def on_link_up(self, peer: PeerId, now: Seconds) -> list[Effect]:
        """Handle a new connection: requests on the old one may never be answered."""
        self.unlinked.discard(peer)
        if peer in self.dropped_sources:
            self.sources[peer] = BlobSource(inventory=self.dropped_sources.pop(peer).inventory)
        source = self.sources.get(peer)
        if not self.over and source is None and peer in self.candidates:
            return [self._request_inventory(peer)]
        if self.over or source is None:
            return []
        if self.manifest is None:
            return [self._request_inventory(peer)]
        source.stalls, source.usual_s = 0, 0.0
        source.asked.clear()
        self._forget_requests(peer)
        return self._request_chunks(now) if self.opened else []

    def on_link_down(self, peer: PeerId, now: Seconds) -> list[Effect]:
        """Handle the end of a connection: the other sources get what this one was asked for."""
        self.unlinked.add(peer)
        source = self.sources.get(peer)
        if self.over or source is None:
            return []
        source.asked.clear()
        self._forget_requests(peer)
        if not self._linked_sources():
            self._readmit_dropped()
        return self._request_chunks(now) if self.opened else []

    def set_allowance(self, chunks: int, now: Seconds) -> list[Effect]:
        """Allow `chunks` more chunk requests. An unused earlier allowance is not carried over."""
        self.allowance = chunks
        return self._request_chunks(now) if self.opened and not self.over else []

    def add_sources(self, sources: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Add peers that hold the blob."""
        fresh = [p for p in sources if p not in self.sources and p not in self.bad]
        self.sources.update((p, BlobSource()) for p in fresh)
        if self.manifest is None:
            return [self._request_inventory(p) for p in fresh]
        return self._request_chunks(now) if self.opened else []

    def add_candidates(self, peers: Sequence[PeerId]) -> None:
        """Add peers that may be downloading the blob too. Ignored if only the given sources are used."""
        if self.me is None:
            return
        self.candidates.update(
            p for p in peers if not (p in self.sources or p in self.bad or p in self.dropped_sources)
        )

    # ---- manifest and inventories --------------------------------------------------------------------------

    def _request_manifest(self, now: Seconds) -> list[Effect]:
        self.manifest_requests, self.manifest_asked_at = self.manifest_requests + 1, now
        return [self._request_inventory(p) for p in self.sources]

    def _request_inventory(self, peer: PeerId) -> Send:
        self.inventory_answered[peer] = False
        return Send(peer, ManifestRequest(self.blob, known=self.manifest is not None))

    def _receive_manifest(self, sender: PeerId, message: ManifestResponse, now: Seconds) -> list[Effect]:
        manifest, here = message.manifest, None if message.here is UNSET else message.here
        if (sender not in self.sources and sender not in self.candidates) or self.inventory_answered.get(
            sender, True
        ):
            return []  # unsolicited, or from a dropped source
        self.inventory_answered[sender] = True
        if manifest is None and here is None:
            self.candidates.add(sender)
            return self._drop_source(sender)
        known = manifest or self.manifest
        if known is None:
            return []
        if manifest is not None and not self._is_valid(manifest):
            return self._ban_source(sender)
        if here is not None and len(here) != -(-len(known.chunks) // 8):
            return self._ban_source(sender)
        self.candidates.discard(sender)
        self.sources.setdefault(sender, BlobSource()).inventory = here
        self.has_new_inventory = True
        if self.manifest is not None:
            return self._request_chunks(now) if self.opened else []
        self.manifest = known
        return [RunTask(self._name("open"), PrepareBlobStorage(self.blob, known))]

    def _is_valid(self, manifest: BlobManifest) -> bool:
        try:
            manifest.check()
        except ValueError:
            return False
        return blob_id(manifest) == self.blob and manifest.size_bytes <= self.bytes_max

    def _refresh_inventories(self, now: Seconds) -> list[Effect]:
        """Ask partial sources and candidates again which chunks they hold."""
        if not self.opened or self.closing or now - self.inventories_at < INVENTORY_S:
            return []
        self.inventories_at = now
        peers = [*(p for p, s in self.sources.items() if s.inventory is not None), *sorted(self.candidates)]
        if len(peers) > INVENTORIES_MAX:
            first = self.inventory_turn = (self.inventory_turn + INVENTORIES_MAX) % len(peers)
            peers = (peers * 2)[first : first + INVENTORIES_MAX]
        return [self._request_inventory(peer) for peer in peers]

    def _sort_by_rarity(self) -> None:
        """Sort the missing chunks by how many partial sources hold them, rarest first."""
        self.has_new_inventory = False
        assert self.manifest is not None
        partial = [s for s in self.sources.values() if s.inventory is not None]
        if not partial:
            return
        if not self.rank:
            self.rank = shuffled(self.blob, self.me or "", range(len(self.manifest.chunks)))
        had = {index: sum(s.has(index) for s in partial) for index in self.queue}
        self.queue = deque(sorted(self.queue, key=lambda index: (had[index], self.rank[index])))
        for source in partial:
            source.offers = deque(index for index in self.queue if source.has(index))

    # ---- chunks --------------------------------------------------------------------------------------------

    def _receive_chunk(self, sender: PeerId, index: int, payload: Payload | None, now: Seconds) -> list[Effect]:
        asked_at = self.requested.get(index, {}).get(sender)
        if asked_at is None or self.manifest is None:
            return []  # unsolicited, or another source was faster
        if payload is None:
            return [*self._drop_source(sender), *self._request_chunks(now)]
        # check the length too: the author of a blob could put the digest of a 64 MiB chunk into a 1 MiB manifest
        if (payload.digest, payload.size_bytes) != (self.manifest.chunks[index], self.manifest.chunk_bytes(index)):
            return [*self._ban_source(sender), *self._request_chunks(now)]
        if len(self.storing) >= self.requests_max:  # a burst of late chunks: request again when the disk is ready
            if sender in self.sources:
                self.sources[sender].asked.pop(index, None)
            del self.requested[index][sender]
            self._requeue_chunk(index)
            return []
        for peer in self.requested.pop(index):
            if peer in self.sources:
                self.sources[peer].asked.pop(index, None)
        self.sources.setdefault(sender, BlobSource()).answered(now - asked_at)
        self.contributors.add(sender)
        self.received.add(index)
        self.storing.add(index)
        self.last_chunk_at = now
        return [
            RunTask(self._name(f"chunk/{index}"), StoreChunk(self.blob, index, payload)),
            *self._request_chunks(now),
        ]

    def _request_chunks(self, now: Seconds) -> list[Effect]:
        while self.queue and self.queue[0] in self.received:
            self.queue.popleft()
        if not (self.queue or self.requested or self.storing or self.closing) and self.opened and not self.over:
            self.closing = True
            return [RunTask(self._name("close"), CloseBlob(self.blob))]
        effects: list[Effect] = []
        effects += self._request_from_partial(now)
        room = self._requests_left() + len(effects)
        ready = {p: s for p, s in self._linked_sources().items() if s.inventory is None and s.has_window}
        for _ in range(len(self.queue) if ready else 0):
            if len(effects) >= room:
                break
            index = self.queue.popleft()
            asked = self.requested.get(index, {})
            if index in self.received:
                continue
            free = {p: s for p, s in ready.items() if len(s.asked) < s.window and p not in asked}
            if not free and asked:
                self.queue.append(index)  # retried after the other chunks
                continue
            if not free:
                self.queue.appendleft(index)  # keeps the sequence, since source disks read ahead
                break  # all sources are busy
            peer = min(free, key=lambda p: free[p].wait_s)
            effects.append(self._request_chunk(peer, index, now))
            if self.sources[peer].stalls and len(self.sources) > 1:
                self.queue.append(index)  # a probe: the chunk is requested from another source too
        return effects if self.queue else [*effects, *self._request_slow_chunks(now)]

    def _request_from_partial(self, now: Seconds) -> list[Effect]:
        """Request chunks from partial sources first, so whole sources send what only they hold."""
        effects: list[Effect] = []
        room = self._requests_left()
        for peer, source in self._linked_sources().items():
            while source.offers and len(source.asked) < source.window and len(effects) < room:
                index = source.offers.popleft()
                if index not in self.queue or index in self.received or peer in self.requested.get(index, {}):
                    continue
                if not source.stalls:
                    self.queue.remove(index)
                effects.append(self._request_chunk(peer, index, now))
        return effects

    def _requests_left(self) -> int:
        """Number of further chunk requests allowed now."""
        room = self.requests_max - len(self.storing) - sum(len(s.asked) for s in self.sources.values())
        return room if self.allowance is None else min(room, self.allowance)

    def _request_chunk(self, peer: PeerId, index: int, now: Seconds) -> Send:
        self.sources[peer].asked[index] = now
        self.requested.setdefault(index, {})[peer] = now
        if self.allowance is not None:
            self.allowance -= 1
        return Send(peer, ChunkRequest(self.blob, index))

    def _request_slow_chunks(self, now: Seconds) -> list[Effect]:
        """Endgame: request slow chunks from idle sources too, each chunk from at most two."""
        effects: list[Effect] = []
        room = self._requests_left()
        sources = self._linked_sources()
        helpers = {p: s for p, s in sources.items() if s.usual_s and not s.stalls and len(s.asked) < WINDOW}
        least_s = min((2 * s.usual_s for s in helpers.values()), default=0.0)
        for index, asked in self.requested.items() if helpers else ():
            if len(effects) >= room:
                break
            if len(asked) != 1:
                continue
            ((slow, since),) = asked.items()
            if now - since <= least_s:
                continue  # no helper would be faster
            idle = {
                p: s.usual_s
                for p, s in helpers.items()
                if p != slow and s.has(index) and len(s.asked) < WINDOW and now - since > 2 * s.usual_s
            }
            if idle:
                peer = min(idle, key=idle.__getitem__)
                effects.append(self._request_chunk(peer, index, now))
        return effects

    def _check_progress(self, now: Seconds) -> list[Effect]:
        # after a pause of this process, responses may wait in its buffers: read them first, judge at the next tick
        self.skipped_check = now - self.check_at > TICK_S and not self.skipped_check
        effects: list[Effect] = [self._schedule_check(now)]
        effects += self._refresh_inventories(now)
        if self.manifest is None:
            late = now - self.manifest_asked_at >= PATIENCE_S[1]
            if late and self.manifest_requests >= MANIFEST_REQUESTS_MAX and any(self.inventory_answered.values()):
                return self._fail("no peer that answers holds it")
            return [*self._request_manifest(now), *effects] if late else effects
        if self.opened and self._is_starved(now):
            return self._fail("the sources hold only some of its chunks")
        if self.opened and self.has_new_inventory:
            self._sort_by_rarity()
        usual = sorted(s.usual_s for s in self.sources.values() if s.usual_s)
        for peer, source in list(self.sources.items()) if not self.skipped_check else ():
            patience_s = source.patience_s
            if not source.usual_s and usual:  # no response yet, while other sources have responded
                others_s = max(PATIENCE_S[0], 2 * PATIENCE * usual[len(usual) // 2])
                patience_s = min(patience_s, others_s * 2**source.stalls)
            late = [index for index, at in source.asked.items() if now - at >= patience_s]
            if late:
                effects += self._mark_stalled(peer, source, late)
        return [*effects, *self._request_chunks(now)]

    def _mark_stalled(self, peer: PeerId, source: BlobSource, late: list[int]) -> list[Effect]:
        """Shrink the window of a stalling source to one request, and request its late chunks elsewhere too."""
        source.window, source.stalls = 1, source.stalls + 1
        for index in late:
            del source.asked[index]
            self._requeue_chunk(index)
        left = source.stalls >= STALLS_MAX and len(self._linked_sources()) > 1
        effects: list[Effect] = []
        if source.stalls == 1 or left:
            effects.append(Emit(DownloadSourceStalled(peer=peer, blob=self.blob, left=left)))
        if left:
            self.dropped_sources[peer] = source
            effects += self._drop_source(peer)
        elif source.stalls >= STALLS_MAX:  # the only source stalls: readmit the dropped ones, which were no worse
            self._readmit_dropped()
        return effects

    def _readmit_dropped(self) -> None:
        self.sources.update((p, BlobSource(inventory=s.inventory)) for p, s in self.dropped_sources.items())
        self.dropped_sources.clear()

    def _requeue_chunk(self, index: int) -> None:
        """Queue this chunk again if no request for it is in time. Late responses still count."""
        asked = self.requested.get(index)
        if asked is None or any(index in self.sources[p].asked for p in asked if p in self.sources):
            return
        if self._whole_sources() <= asked.keys():
            del self.requested[index]  # every whole source was asked: start over
        if index not in self.queue:
            self.queue.appendleft(index)

    # ---- leaving sources -----------------------------------------------------------------------------------

    def _ban_source(self, sender: PeerId) -> list[Effect]:
        self.bad.add(sender)
        self.candidates.discard(sender)
        return [Emit(CorruptBlobSourceDetected(peer=sender, blob=self.blob)), *self._drop_source(sender)]

    def _drop_source(self, peer: PeerId) -> list[Effect]:
        if self.sources.pop(peer, None) is None:
            return []
        self._forget_requests(peer)
        return self._fail_without_sources()

    def _forget_requests(self, peer: PeerId) -> None:
        for index, asked in list(self.requested.items()):
            asked.pop(peer, None)
            self._requeue_chunk(index)

    def _fail_without_sources(self) -> list[Effect]:
        if self.sources:
            return []
        return self._fail("no peer that was asked holds it")

    def _fail(self, why: str) -> list[Effect]:
        self.over = True
        return [Emit(FetchFailed(blob=self.blob, why=why))]

    def _is_starved(self, now: Seconds) -> bool:
        if self._whole_sources() or self.closing or self.storing or self.allowance == 0:
            return False
        if not self._linked_sources():
            return False  # the next connection asks its peer at once
        return now - self.last_chunk_at > STARVED_S

    def _whole_sources(self) -> set[PeerId]:
        return {p for p, s in self._linked_sources().items() if s.inventory is None}

    def _linked_sources(self) -> dict[PeerId, BlobSource]:
        return {p: s for p, s in self.sources.items() if p not in self.unlinked}

    def _finish(self) -> list[Effect]:
        assert self.manifest is not None
        self.over = True
        size, sources = self.manifest.size_bytes, tuple(sorted(self.contributors))
        return [
            SetTimer(self._name("stall"), None),
            Emit(BlobFetched(blob=self.blob, size_bytes=size, sources=sources)),
        ]

    def _schedule_check(self, now: Seconds) -> SetTimer:
        self.check_at = now + TICK_S
        return SetTimer(self._name("stall"), self.check_at)

    def _name(self, what: str) -> str:
        return self.prefix + what
