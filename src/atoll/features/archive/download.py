"""Erasure download: any k of the pieces of a blob, fetched at once from the peers that hold them.

Driving contract: pass `Start` first, then messages, timers and finished tasks, also those of the piece downloads.
After `PiecesGathered`, `ErasureDownloadFailed` or `stop`, `handle` does nothing.

Each piece is a blob of its own with few sources, mostly one, fetched and checked by `BlobDownload`. Pieces of
reachable holders come first. If a piece does not begin soon or its holder stalls, a further piece is begun. The
first k whole pieces count. A holder of wrong bytes is reported and loses its piece. A paced download requests a few
chunks per tick, and only while the line is free: it is not urgent.

Invariants:
- No blob is fetched twice at a time.
- Pieces that were begun and are not needed are dropped.
Not responsible for: joining pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Fact,
    RunTask,
    SetTimer,
    Start,
    TimerFired,
)
from atoll.protocol.transfer.download import REQUESTS_MAX, BlobDownload, BlobFetched
from atoll.protocol.transfer.tasks import DropBlob

TICK_S = 0.25
SPARE_S = 2.0  # seconds without a manifest, after which a spare piece is begun
GIVE_UP_S = 30.0  # seconds without data from any holder, though the line was free and the disk idle
REQUESTS_MIN = 4  # least chunk requests under way per piece; together the pieces have about those of one blob
PACED_CHUNKS = 2  # chunks per tick, of all pieces together: 8 MiB/s


class PiecesGathered(Fact, frozen=True, kw_only=True, tag="PiecesGathered"):
    """Enough pieces to make `goal` are on this disk."""

    phase = "transfer"
    goal: Digest
    indices: tuple[int, ...]
    sources: tuple[PeerId, ...]  # holders that sent data


class ErasureDownloadFailed(Fact, frozen=True, kw_only=True, tag="ErasureDownloadFailed"):
    phase = "transfer"
    goal: Digest
    why: str


class ErasureDownload:
    """`goal` is the blob to make; `sources` of each piece, empty if it must not be requested."""

    def __init__(
        self,
        goal: Digest,
        k: int,
        pieces: Sequence[Digest],
        sources: Sequence[Sequence[PeerId]],
        bytes_max: int,
        gone: Callable[[PeerId], bool],
        have: frozenset[int] = frozenset(),
        paced: bool = False,
    ) -> None:
        self.goal, self.k, self.pieces, self.bytes_max, self.gone = goal, k, tuple(pieces), bytes_max, gone
        self.sources: dict[Digest, list[PeerId]] = {}
        for name, peers in zip(pieces, sources, strict=True):
            self.sources.setdefault(name, []).extend(peers)  # parts of a state that never change give equal pieces
        self.whole: set[Digest] = {pieces[i] for i in have}
        self.todo = [name for name, peers in self.sources.items() if peers and name not in self.whole]
        self.fetches: dict[Digest, BlobDownload] = {}
        self.begun: dict[Digest, Seconds] = {}
        self.gave: set[PeerId] = set()
        self.paced, self.quiet = paced, not paced
        self.requests_max = max(REQUESTS_MIN, REQUESTS_MAX // k)
        self.silent_ticks = 0  # in a row, while the line was free
        self.over = False

    @property
    def here(self) -> tuple[int, ...]:
        """Pieces that are on this disk, by number."""
        return tuple(i for i, name in enumerate(self.pieces) if name in self.whole)

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        if self.over:
            return []
        match event:
            case Start():
                return [*self._go_on(now), *([] if self.over else [self._tick(now)])]
            case TimerFired(name) if name == self._name():
                self.silent_ticks += self.quiet and not self._disk_works()
                return [*self._pace(now), *self._go_on(now), *([] if self.over else [self._tick(now)])]
            case _:
                pass
        effects = [e for fetch in list(self.fetches.values()) for e in fetch.handle(event, now)]
        if any(
            isinstance(effect, RunTask) for effect in effects
        ):  # data arrived; messages without data do not count
            self.silent_ticks = 0
        return effects + self._go_on(now, effects)

    def linked(self, peer: PeerId, now: Seconds) -> list[Effect]:
        return [e for fetch in self.fetches.values() for e in fetch.on_link_up(peer, now)]

    def stop(self) -> list[Effect]:
        """Stop: the blob is no longer needed."""
        self.over = True
        effects: list[Effect] = [SetTimer(self._name(), None)]
        for name in [name for name in self.begun if name not in self.whole]:  # also pieces that failed half way
            effects += [
                SetTimer(f"fetch/{name.hex()}/stall", None),
                RunTask(f"gather/drop/{name.hex()}", DropBlob(name)),
            ]
        self.fetches.clear()
        return effects

    # ---- steps ---------------------------------------------------------------------------------------------

    def _go_on(self, now: Seconds, told: Sequence[Effect] = ()) -> list[Effect]:
        """Note whole and failed pieces, begin missing ones, and end if enough are here."""
        for effect in told:
            if isinstance(effect, Emit) and isinstance(effect.fact, BlobFetched):
                self.whole.add(effect.fact.blob)
                self.gave.update(effect.fact.sources)
        self.fetches = {name: fetch for name, fetch in self.fetches.items() if not fetch.over}
        effects: list[Effect] = []
        while not self._enough(now) and self.todo:
            name = min(self.todo, key=self._wait)
            self.todo.remove(name)
            fetch = BlobDownload(
                name, self.sources[name], self.bytes_max, 0 if self.paced else None, self.requests_max
            )
            self.fetches[name], self.begun[name] = fetch, now
            effects += fetch.handle(Start({}), now)
        here = self.here
        if len(here) >= self.k:
            sources = tuple(sorted(self.gave))
            return [
                *effects,
                *self.stop(),
                Emit(PiecesGathered(goal=self.goal, indices=here[: self.k], sources=sources)),
            ]
        silent = self.silent_ticks * TICK_S >= GIVE_UP_S
        if not self.fetches or silent:
            why = f"{len(here)} of {self.k} pieces could be had from those who hold them"
            return [*effects, *self.stop(), Emit(ErasureDownloadFailed(goal=self.goal, why=why))]
        return effects

    def _enough(self, now: Seconds) -> bool:
        """True if enough pieces are here or likely to arrive."""
        coming = {name for name, fetch in self.fetches.items() if self._looks_good(name, fetch, now)}
        return sum(name in coming or name in self.whole for name in self.pieces) >= self.k

    def _looks_good(self, name: Digest, fetch: BlobDownload, now: Seconds) -> bool:
        if fetch.manifest is None:
            return now - self.begun[name] < SPARE_S
        return any(source.stalls == 0 for source in fetch.sources.values())

    def _disk_works(self) -> bool:
        """The disk works on arrived data: no holder has to send any meanwhile."""
        opening = any(fetch.manifest is not None and not fetch.opened for fetch in self.fetches.values())
        return opening or any(fetch.storing or fetch.closing for fetch in self.fetches.values())

    def _wait(self, name: Digest) -> tuple[bool, int]:
        """Sort key: pieces of reachable holders first, among them the data itself, which needs no arithmetic."""
        return all(self.gone(peer) for peer in self.sources[name]), self.pieces.index(name)

    def _pace(self, now: Seconds) -> list[Effect]:
        """Request a few more chunks, if the line is free."""
        if not self.paced:
            return []
        effects: list[Effect] = []
        left = PACED_CHUNKS if self.quiet else 0
        for fetch in list(self.fetches.values()):
            effects += fetch.set_allowance(left, now)
            left = fetch.allowance or 0
            fetch.allowance = 0
        return effects

    def _tick(self, now: Seconds) -> SetTimer:
        return SetTimer(self._name(), now + TICK_S)

    def _name(self) -> str:
        return f"gather/{self.goal.hex()}"
