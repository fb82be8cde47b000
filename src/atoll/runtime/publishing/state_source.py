"""Published checkpoints as a further source of agreed states: asked first, by digest, before any member.

Invariants:
- The place is not trusted: bytes that do not hash to the name of the state are thrown away.
- A place that is unreachable, slow, wrong or without the state costs a bounded time and one fact; then members are
  asked as if there were no place.
- The event loop never waits for the place.
Not responsible for: which state is agreed (vertices), blobs other than states.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from threading import Thread
from typing import Any

from atoll.base.errors import AtollError
from atoll.base.ids import Digest
from atoll.base.limits import BLOB_CHUNK
from atoll.base.machine import Fact
from atoll.peer.tasks import CheckStateStored, RestoreState
from atoll.runtime.publishing.places import CheckpointPlace, place_at, reason_of
from atoll.runtime.publishing.published import state_file
from atoll.runtime.storage.store import NewBlob, PeerStore
from atoll.runtime.training_peer import TrainingPeer
from atoll.training.exchange.layout import ModelLayout

STALL_S = 10.0  # seconds without a byte after which the place is slow
RATE_BYTES_S = 250_000  # least mean speed after that time: members of a home link have more
LOOK_S = 0.2  # seconds between two looks at a download
AGAIN_S = 60.0  # seconds until a state that did not come is requested again
SLACK_BYTES = 2**20  # header of a state file, at most


class PublishedStateFetched(Fact, frozen=True, kw_only=True, tag="PublishedStateFetched"):
    """An agreed state came from this place of published checkpoints, checked by its digest."""

    phase = "transfer"
    state: Digest
    place: str
    size_bytes: int


class PublishedStateNotFetched(Fact, frozen=True, kw_only=True, tag="PublishedStateNotFetched"):
    """A place of published checkpoints did not send an agreed state; members are asked."""

    phase = "transfer"
    state: Digest
    place: str
    why: str


class _WrongState(Exception):
    """The bytes are another state than the requested one, or longer than any."""


class StateDownload:
    """One state from a place to a blob, in a thread that may be left alone."""

    def __init__(self, place: CheckpointPlace, store: PeerStore, state: Digest, bytes_max: int) -> None:
        self.place, self.store, self.state, self.bytes_max = place, store, state, bytes_max
        self.size_bytes = 0
        self.trouble: BaseException | None = None
        self.abandoned = False
        self._thread = Thread(target=self._run, name="published state", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            aside = self.store.folder / "blobs" / f"{self.state.hex()}.published.new"
            self._take_into(NewBlob(self.store, aside, True))
        except Exception as why:
            self.trouble = why.with_traceback(None)  # its frames hold the connection

    def _take_into(self, blob: NewBlob) -> None:
        rest = bytearray()
        try:
            with closing(self.place.read(state_file(self.state))) as pieces:
                for piece in pieces:
                    self.size_bytes += len(piece)
                    rest += piece
                    if self.abandoned or self.size_bytes > self.bytes_max:
                        raise _WrongState("it sends more bytes than the state has")
                    whole = len(rest) // BLOB_CHUNK * BLOB_CHUNK
                    blob.write(bytes(rest[:whole]))
                    del rest[:whole]
            blob.write(bytes(rest))
            if self.abandoned or blob.finish(self.state) is None:
                raise _WrongState("its bytes are not those that the members agreed on")
        except BaseException:
            blob.drop()
            raise


class PublishedStateFetcher:
    """Source of states at one place. `tell` takes facts, on the event loop."""

    def __init__(self, place: CheckpointPlace, store: PeerStore, tell: Callable[[Fact], None]) -> None:
        self.place, self.store, self.tell = place, store, tell
        self._again_at: dict[Digest, float] = {}  # states that did not come -> next request
        self.leftover: StateDownload | None = None  # abandoned; its thread may still wait for the place

    async def fetch(self, state: Digest, bytes_max: int) -> bool:
        """Whether the state is on this disk now. Never raises."""
        if self.store.has_blob(state):
            return True
        if self._again_at.get(state, 0.0) > time.monotonic():
            return False
        if self.leftover is not None and not self.leftover.is_over:
            return False  # one request hangs already
        download = StateDownload(self.place, self.store, state, bytes_max)
        try:
            why = await self._wait_for(download)
        except asyncio.CancelledError:
            download.abandoned = True
            raise
        if not why:
            self.tell(PublishedStateFetched(state=state, place=self.place.shown, size_bytes=download.size_bytes))
            return True
        self._again_at = {state: time.monotonic() + AGAIN_S}
        self.tell(PublishedStateNotFetched(state=state, place=self.place.shown, why=why))
        return False

    async def _wait_for(self, download: StateDownload) -> str:
        """Why the state did not come; empty if it did."""
        began = moved_at = time.monotonic()
        size_bytes = 0
        while not download.is_over:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if download.size_bytes > size_bytes:
                size_bytes, moved_at = download.size_bytes, now
            if now - moved_at > STALL_S or (now - began > STALL_S and size_bytes < RATE_BYTES_S * (now - began)):
                download.abandoned, self.leftover = True, download
                return f"it is slow: {size_bytes:,} bytes in {now - began:.0f} s"
        match download.trouble:
            case None:
                return ""
            case FileNotFoundError():
                return "it does not have this state"
            case AtollError(what=what):
                return what
            case why:
                return reason_of(why)


def ask_published_first(peer: TrainingPeer, url: str) -> None:
    """Let a peer look for states at this place of published checkpoints. UsageError if there is no such place."""
    island = peer.island

    def tell(fact: Fact) -> None:
        for listener in peer.listeners:
            listener(fact)

    source = PublishedStateFetcher(place_at(url), peer.store, tell)

    async def fetch(state: Digest) -> bool:
        learning = island.learning
        if learning is None or not await source.fetch(state, _bytes_max(learning.layout)):
            return False
        island.retention.pin_for_a_while(state)
        return True

    def restoring(handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def restore(work: RestoreState) -> Any:
            found = await handler(work)
            if found is None and await fetch(work.state):  # the settlement of an abandoned round is passed on once
                return await handler(RestoreState(work.round, work.vertex, work.state))
            return found

        return restore

    def checking(handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def check(work: CheckStateStored) -> bool:
            return await handler(work) or await fetch(work.state)

        return check

    island.wrap(RestoreState, restoring)
    island.wrap(CheckStateStored, checking)


def _bytes_max(layout: ModelLayout) -> int:
    """Bound of a state's size: anchor, two moments and counters."""
    return 4 * layout.floats + 8 * layout.parameters + 8 * layout.counters + SLACK_BYTES
