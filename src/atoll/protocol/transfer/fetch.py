"""Fetch one blob by its name, in verified chunks, from several peers at once; serve chunks to others.

Each chunk is checked alone against the manifest, and the manifest against the blob's name, so a source can waste
one request and never more. A source that stalls loses its request after `STALL_S` to another one; a source that
sends wrong bytes is not asked again. Chunks already on disk are not fetched twice. Never blocks training: reads
and writes are jobs.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import (
    Ask,
    Done,
    Effect,
    Event,
    Fact,
    Failed,
    Lane,
    Payload,
    Received,
    Report,
    Send,
    SetTimer,
    Start,
    TimerFired,
)
from atoll.keys.digest import Manifest, blob_id
from atoll.protocol.transfer.work import BlobOpened, CloseBlob, OpenBlob, ReadChunk, ReadManifest, StoreChunk
from atoll.wire.messages.history import Chunk, ManifestIs, WantChunk, WantManifest

IN_FLIGHT_PER_SOURCE = 4  # requests; enough to hide a round trip of 100 ms at 40 MB/s per source
STALL_S = 5.0  # a request not answered by then goes to somebody else
SERVED_AT_ONCE = 64  # chunk reads in progress for others; more requests are dropped and asked again


class Fetched(Fact, frozen=True, kw_only=True):
    """The blob is here, complete and durable. `sources` gave at least one chunk each."""

    phase = "transfer"
    blob: Digest
    size_bytes: int
    sources: tuple[PeerId, ...]


class FetchFailed(Fact, frozen=True, kw_only=True):
    phase = "transfer"
    blob: Digest
    why: str


class BadSource(Fact, frozen=True, kw_only=True):
    """This peer sent bytes that are not what the name says."""

    phase = "transfer"
    peer: PeerId
    blob: Digest


class Fetch:
    """One blob on its way here."""

    def __init__(self, blob: Digest, sources: Sequence[PeerId]) -> None:
        self.blob = blob
        self.sources = list(sources)
        self.bad: set[PeerId] = set()
        self.gave: set[PeerId] = set()
        self.manifest: Manifest | None = None
        self.opened = self.closing = self.over = False
        self.todo: list[int] = []  # chunk indices nobody was asked for, or whose source stalled
        self.asked: dict[int, tuple[PeerId, Seconds]] = {}  # index -> (source, when)
        self.storing: set[int] = set()

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        if self.over:
            return []
        match event:
            case Start():
                return [*self._ask_manifest(), SetTimer(self._name("stall"), now + STALL_S)]
            case Received(sender, ManifestIs(blob=self.blob) as message):
                return self._open(sender, message.manifest, now)
            case Received(sender, Chunk(blob=self.blob) as message):
                return self._take(sender, message.index, event.payload, now)
            case TimerFired(name) if name == self._name("stall"):
                return self._again(now)
            case Done(job, result) if job == self._name("open"):
                assert isinstance(result, BlobOpened) and self.manifest is not None
                self.opened = True
                self.todo = [i for i in range(len(self.manifest.chunks)) if i not in result.have]
                return self._ask_chunks(now)
            case Done(job, _) if job.startswith(self._name("chunk/")):
                self.storing.discard(int(job.rsplit("/", 1)[1]))
                return self._ask_chunks(now)
            case Done(job, _) if job == self._name("close"):
                return self._finish()
            case Failed(job, why) if job.startswith(self._name("")):
                self.over = True
                return [Report(FetchFailed(blob=self.blob, why=why))]
            case _:
                return []

    def linked(self, peer: PeerId, now: Seconds) -> list[Effect]:
        """A connection came up: what was asked over the old one may never be answered."""
        if self.over or peer not in self.sources or peer in self.bad:
            return []
        if self.manifest is None:
            return [Send(peer, WantManifest(self.blob))]
        for index, (source, _) in list(self.asked.items()):
            if source == peer:
                del self.asked[index]
                self.todo.insert(0, index)
        return self._ask_chunks(now) if self.opened else []

    def offer(self, sources: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """More peers that hold the blob."""
        fresh = [p for p in sources if p not in self.sources]
        self.sources += fresh
        if self.manifest is None:
            return [Send(p, WantManifest(self.blob)) for p in fresh]
        return self._ask_chunks(now) if self.opened else []

    def _ask_manifest(self) -> list[Effect]:
        return [Send(p, WantManifest(self.blob)) for p in self.sources if p not in self.bad]

    def _open(self, sender: PeerId, manifest: Manifest | None, now: Seconds) -> list[Effect]:
        if manifest is None:
            if sender in self.sources:
                self.sources.remove(sender)
            return self._give_up_if_alone()
        try:
            manifest.check()
        except ValueError:
            return self._blame(sender)
        if blob_id(manifest) != self.blob:
            return self._blame(sender)
        if sender not in self.sources:
            self.sources.append(sender)
        if self.manifest is not None:
            return self._ask_chunks(now) if self.opened else []
        self.manifest = manifest
        return [Ask(self._name("open"), OpenBlob(self.blob, manifest))]

    def _take(self, sender: PeerId, index: int, payload: Payload | None, now: Seconds) -> list[Effect]:
        request = self.asked.get(index)
        if request is None or request[0] != sender or self.manifest is None:
            return []  # late, or never asked for
        del self.asked[index]
        if payload is None:
            self.todo.append(index)
            if sender in self.sources:
                self.sources.remove(sender)
            return [*self._give_up_if_alone(), *self._ask_chunks(now)]
        if payload.digest != self.manifest.chunks[index]:
            self.todo.append(index)
            return [*self._blame(sender), *self._ask_chunks(now)]
        self.gave.add(sender)
        self.storing.add(index)
        return [Ask(self._name(f"chunk/{index}"), StoreChunk(self.blob, index, payload)), *self._ask_chunks(now)]

    def _ask_chunks(self, now: Seconds) -> list[Effect]:
        if self.opened and not self.todo and not self.asked and not self.storing and not self.closing:
            self.closing = True
            return [Ask(self._name("close"), CloseBlob(self.blob))]
        load = {p: 0 for p in self.sources if p not in self.bad}
        for source, _ in self.asked.values():
            if source in load:
                load[source] += 1
        effects: list[Effect] = []
        while self.todo and load:
            source = min(load, key=load.__getitem__)  # of the least busy, the one that stalled longest ago
            if load[source] >= IN_FLIGHT_PER_SOURCE:
                break
            index = self.todo.pop(0)
            load[source] += 1
            self.asked[index] = (source, now)
            effects.append(Send(source, WantChunk(self.blob, index)))
        return effects

    def _again(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = [SetTimer(self._name("stall"), now + STALL_S)]
        if self.manifest is None:
            return [*self._ask_manifest(), *effects]
        for index, (source, since) in list(self.asked.items()):
            if now - since >= STALL_S:
                del self.asked[index]
                self.todo.append(index)
                if len(self.sources) > 1 and source in self.sources:  # to the back: others are asked first
                    self.sources.remove(source)
                    self.sources.append(source)
        return [*effects, *self._ask_chunks(now)]

    def _blame(self, sender: PeerId) -> list[Effect]:
        self.bad.add(sender)
        return [Report(BadSource(peer=sender, blob=self.blob)), *self._give_up_if_alone()]

    def _give_up_if_alone(self) -> list[Effect]:
        if any(p not in self.bad for p in self.sources):
            return []
        self.over = True
        return [Report(FetchFailed(blob=self.blob, why="nobody who was asked holds it"))]

    def _finish(self) -> list[Effect]:
        assert self.manifest is not None
        self.over = True
        size, sources = self.manifest.size_bytes, tuple(sorted(self.gave))
        return [
            SetTimer(self._name("stall"), None),
            Report(Fetched(blob=self.blob, size_bytes=size, sources=sources)),
        ]

    def _name(self, what: str) -> str:
        return f"fetch/{self.blob.hex()}/{what}"


class Serve:
    """The other side: answers requests for manifests and chunks from what is on disk."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[PeerId, WantManifest | WantChunk]] = {}
        self.count = 0

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Received(sender, (WantManifest() | WantChunk()) as wish):
                if len(self.jobs) >= SERVED_AT_ONCE:
                    return []  # the asker's patience ends, it asks somebody else
                self.count += 1
                job = f"serve/{self.count}"
                self.jobs[job] = (sender, wish)
                if isinstance(wish, WantManifest):
                    return [Ask(job, ReadManifest(wish.blob))]
                return [Ask(job, ReadChunk(wish.blob, wish.index))]
            case Done(job, result) if job in self.jobs:
                sender, wish = self.jobs.pop(job)
                if isinstance(wish, WantManifest):
                    manifest = result if isinstance(result, Manifest) else None
                    return [Send(sender, ManifestIs(wish.blob, manifest), Lane.BULK)]
                payload = result if isinstance(result, Payload) else None
                return [Send(sender, Chunk(wish.blob, wish.index), Lane.BULK, payload)]
            case Failed(job, _) if job in self.jobs:
                del self.jobs[job]
                return []
            case _:
                return []
