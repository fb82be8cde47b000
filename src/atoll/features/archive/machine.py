"""State archive, one peer's side: it makes its own pieces, repairs lost ones and restores states.

    a vertex draws this peer  `EncodeErasurePieces` ─► own piece on disk, all pieces named ─► signed `PiecesStored`
    state is not here         fetch it whole or, once placed, any k pieces: `DecodeErasurePieces` ─► piece ─► report
    a state is sought         any k pieces ─► `DecodeErasurePieces` ─► the state, bit for bit

Pieces are made and fetched one by one, on ticks, while no round needs the network. Only a sought state is fetched
at full speed.

Invariants:
- No round waits for a piece.
- A fetched piece is checked against the digests that all holders reported, a rebuilt state against the vertex.
Not responsible for: which member holds which piece (`features/archive/policy.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from msgspec import UNSET

from atoll.base.errors import UNREADABLE
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import BLOB_MAX
from atoll.base.machine import Effect, Emit, Event, Persist, RunTask, Start, TaskDone, TaskFailed
from atoll.features.archive.download import ErasureDownload, ErasureDownloadFailed, PiecesGathered
from atoll.features.archive.policy import PieceSet, Placement, PlacementBook, PlacementLedger
from atoll.features.archive.reed_solomon import piece_bytes
from atoll.peer.events import ArchivedStateRebuildFailed, ArchivedStateRebuilt, ErasurePieceStored
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import DecodeErasurePieces, EncodeErasurePieces, RetainErasurePieces
from atoll.peer.verify.interface import Verifier
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.ledger import LedgerSet
from atoll.protocol.history.chain import VertexChain
from atoll.wire.messages.statements import PiecesStored

AGAIN_S = 10.0  # seconds until a failed piece is tried again and a report is repeated
AGAIN_MAX_S = 640.0  # each failure doubles the wait, up to this


class LocalPiece(msgspec.Struct, frozen=True):
    """A piece on the local disk."""

    round: int
    index: int
    names: PieceSet

    @property
    def piece(self) -> Digest:
        return self.names.pieces[self.index]


class PersistentArchiveIndex(msgspec.Struct, frozen=True):
    """Archive data that survives a restart."""

    book: PlacementBook
    mine: tuple[LocalPiece, ...]


_KEPT = msgspec.msgpack.Decoder(PersistentArchiveIndex)


def placed_rounds(kept: bytes) -> list[int]:
    """Rounds with a state that lies in pieces at the members, from a peer's stored `pieces`."""
    try:
        book = _KEPT.decode(kept).book
    except UNREADABLE:
        return []
    return [entry.round for entry in book.entries if entry.placed]


@dataclass
class PieceJob:
    """The piece or state in progress. `index` is None for a sought state."""

    entry: Placement
    index: int | None
    gather: ErasureDownload | None = None
    fetched: bool = False  # whether the whole state was fetched, since it was not here

    @property
    def goal(self) -> Digest:
        """Digest to rebuild."""
        names = self.entry.names
        return self.entry.state if self.index is None or names is None else names.pieces[self.index]


class ArchiveMachine:
    """`gone` reports unreachable peers. Effects go to the driver, `own_reports` to the members."""

    def __init__(
        self,
        me: PeerId,
        coded: ErasureParams,
        history: VertexChain,
        ledgers: LedgerSet,
        gone: Callable[[PeerId], bool],
    ) -> None:
        self.me, self.coded, self.history, self.gone = me, coded, history, gone
        self.ledger = ledgers.get(PlacementLedger)
        self.mine: dict[int, LocalPiece] = {}  # by round
        self.making: PieceJob | None = None
        self.sought: dict[Digest, int] = {}  # sought states and their rounds, in order of request
        self.again_at: dict[int, Seconds] = {}  # earliest time of the next try, by round
        self.wait_s: dict[int, Seconds] = {}  # wait after the next failure
        self.said_at: dict[int, Seconds] = {}
        self.held: tuple[tuple[Digest, ...], tuple[Digest, ...]] | None = None
        # whether the book was ever written: without it a restart lacks vertices that are not in memory
        self.written = False

    def restore(self, kept: dict[str, bytes]) -> None:
        """Restore stored data. An unreadable book costs work, not agreement: reports are then accepted
        unchecked."""
        try:
            before = _KEPT.decode(kept.get("pieces", b""))
        except UNREADABLE:
            return
        self.ledger.book, self.written = before.book, True
        self.mine = {mine.round: mine for mine in before.mine}

    def begin(self) -> list[Effect]:
        """Tell the disk what to keep, before anything else."""
        return self._hold()

    def on_vertex(self) -> list[Effect]:
        """Apply a new vertex that the ledger has taken in."""
        for mine in list(self.mine.values()):
            entry = self.ledger.entry(mine.round)
            if entry is None or not entry.keeps(self.me, mine.index):
                del self.mine[mine.round]  # another member has it now, or the state is too old
                self.ledger.changed = True
        for told in (self.again_at, self.wait_s, self.said_at):
            for round in [r for r in told if self.ledger.entry(r) is None]:
                del told[round]
        stopped = self._stop() if self._is_replaced() else []
        return [*stopped, *self._write_down(force=not self.written)]

    def own_reports(self, now: Seconds) -> list[PiecesStored]:
        """Reports of the local peer that no vertex holds yet."""
        out: list[PiecesStored] = []
        for round, mine in self.mine.items():
            entry = self.ledger.entry(round)
            if entry is None or entry.holders[mine.index] != self.me or entry.said[mine.index] is not None:
                continue
            if now >= self.said_at.get(round, -1e9) + AGAIN_S:
                self.said_at[round] = now
                since = entry.drawn[mine.index]
                later = UNSET if since == round else since
                out.append(PiecesStored(round, mine.index, mine.names.size_bytes, mine.names.pieces, later))
        return out

    def on_heartbeat(self, at: int, now: Seconds) -> list[Effect]:
        """At every heartbeat: begin the next piece. `at` is the round of the state held here."""
        if self.making is not None:
            return []
        for entry in self.ledger.entries:
            index = entry.index_of(self.me)
            has = (mine := self.mine.get(entry.round)) is not None and mine.index == index
            if index is None or has or at < entry.round or now < self.again_at.get(entry.round, -1e9):
                continue
            self.making = PieceJob(entry, index)
            cut = EncodeErasurePieces(entry.state, self.coded.k, self.coded.n, index)
            return [RunTask(f"pieces/cut/{entry.round}/{index}", cut)]
        return []

    def rebuild(self, state: Digest, now: Seconds) -> list[Effect] | None:
        """Rebuild this state from pieces before anything else; None if it does not lie in pieces (yet).

        `ArchivedStateRebuilt` or `ArchivedStateRebuildFailed` reports the outcome.
        """
        entry = self.ledger.entry_of(state)
        if entry is None or not self.is_placed(state):
            return None
        self.sought.setdefault(state, entry.round)
        return self._seek_next(now)

    def is_placed(self, state: Digest) -> bool:
        """True if the state can be rebuilt once enough holders are reachable."""
        entry = self.ledger.entry_of(state)
        return entry is not None and entry.placed

    def on_download_event(self, event: Event, quiet: bool, now: Seconds) -> list[Effect]:
        """Handle downloads from holders. `quiet`: no round needs the network."""
        making = self.making
        if making is None or making.gather is None:
            return []
        making.gather.quiet = quiet or not making.gather.paced
        return self._gathered(making, making.gather.handle(event, now), now)

    def on_peer_connected(self, peer: PeerId, now: Seconds) -> list[Effect]:
        return self.making.gather.linked(peer, now) if self.making and self.making.gather else []

    def on_task_done(self, event: TaskDone | TaskFailed, reach: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Handle the result of an own job."""
        result = event.result if isinstance(event, TaskDone) else None
        kind, _, name = event.job.removeprefix("pieces/").partition("/")
        if kind == "hold":
            missing = set(cast("Sequence[Digest]", result or ()))
            lost = [mine.round for mine in self.mine.values() if mine.piece in missing]
            for round in lost:  # this disk lost the piece and only the local peer knows: it makes the piece again
                del self.mine[round]
            return self._write_down(force=bool(lost))
        making = self.making
        if making is None:
            return []
        if kind == "cut" and name == f"{making.entry.round}/{making.index}" and making.index is not None:
            # a fault of this disk or this library: pieces of others would not help
            if isinstance(event, TaskFailed):
                return self._fail(making, event.why, now)
            return self._was_cut(making, making.index, result, reach, now)
        if kind == "make" and name == making.goal.hex():
            return self._was_made(making, bool(result), event.why if isinstance(event, TaskFailed) else "", now)
        return []

    # ---- one piece -----------------------------------------------------------------------------------------

    def _was_cut(
        self, making: PieceJob, index: int, names: object, reach: Sequence[PeerId], now: Seconds
    ) -> list[Effect]:
        entry = making.entry
        if isinstance(names, PieceSet):
            if entry.names is not None and names != entry.names:
                return self._fail(making, "its pieces are not those that its holders named", now)
            return self._keep(making, index, names, repaired=making.fetched, now=now)
        if entry.names is not None:
            return self._gather(making, entry.names, now)
        if making.fetched or not reach:
            return self._fail(making, "the state is not here and no member sends it", now)
        making.fetched = True
        making.gather = ErasureDownload(
            entry.state, 1, (entry.state,), (tuple(reach),), BLOB_MAX, self.gone, paced=True
        )
        return self._gathered(making, making.gather.handle(Start({}), now), now)

    def _gather(self, making: PieceJob, names: PieceSet, now: Seconds) -> list[Effect]:
        """Gather any k pieces; an own one is here already."""
        entry, size = making.entry, piece_bytes(names.size_bytes, self.coded.k)
        mine = self.mine.get(entry.round)
        have = frozenset({mine.index} if mine is not None else ())
        sources = [tuple(p for p in entry.sources(i) if p != self.me) for i in range(self.coded.n)]
        paced = making.index is not None
        heard = len(have) + sum(any(not self.gone(p) for p in each) for each in sources)
        if paced and heard < self.coded.k:  # a failed fetch is repeated the next time
            return self._fail(making, f"{heard} of {self.coded.k} holders are heard", now)
        making.gather = ErasureDownload(
            making.goal, self.coded.k, names.pieces, sources, size, self.gone, have=have, paced=paced
        )
        return self._gathered(making, [*self._hold(), *making.gather.handle(Start({}), now)], now)

    def _gathered(self, making: PieceJob, effects: list[Effect], now: Seconds) -> list[Effect]:
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            match effect:
                case Emit(PiecesGathered(indices=indices)):
                    out += self._join(making, indices)
                case Emit(ErasureDownloadFailed(why=why)):
                    out += self._fail(making, why, now)
                case _:
                    pass
        return out

    def _join(self, making: PieceJob, indices: tuple[int, ...]) -> list[Effect]:
        names, entry, coded = making.entry.names, making.entry, self.coded
        if making.fetched and making.index is not None:  # the whole state arrived
            making.gather = None
            cut = EncodeErasurePieces(entry.state, coded.k, coded.n, making.index)
            return [RunTask(f"pieces/cut/{entry.round}/{making.index}", cut)]
        assert names is not None
        of = tuple((i, names.pieces[i]) for i in indices)
        work = DecodeErasurePieces(making.goal, names.size_bytes, coded.k, coded.n, of, making.index)
        return [RunTask(f"pieces/make/{making.goal.hex()}", work)]

    def _was_made(self, making: PieceJob, whole: bool, why: str, now: Seconds) -> list[Effect]:
        if not whole:
            self.held = None  # this disk may have damaged an own piece: check again which are here
            return self._fail(making, why or "the pieces that its holders named do not make it", now)
        names, index, entry = making.entry.names, making.index, making.entry
        if index is not None and names is not None:
            return self._keep(making, index, names, repaired=True, now=now)
        sources = tuple(sorted(making.gather.gave)) if making.gather is not None else ()
        del self.sought[entry.state]
        told = Emit(
            ArchivedStateRebuilt(of=entry.round, state=entry.state, sources=sources, round=self.history.head)
        )
        return [*self._end(), told, *self._seek_next(now)]

    def _keep(self, making: PieceJob, index: int, names: PieceSet, repaired: bool, now: Seconds) -> list[Effect]:
        entry = making.entry
        self.mine[entry.round] = LocalPiece(entry.round, index, names)
        size = piece_bytes(names.size_bytes, self.coded.k)
        fact = ErasurePieceStored(
            of=entry.round, index=index, size_bytes=size, repaired=repaired, round=self.history.head
        )
        self.making = None
        return [*self._write_down(force=True), Emit(fact), *self._seek_next(now)]

    def _fail(self, making: PieceJob, why: str, now: Seconds) -> list[Effect]:
        entry = making.entry
        if making.index is None:
            del self.sought[entry.state]
        else:
            wait_s = self.wait_s.get(entry.round, AGAIN_S)
            self.again_at[entry.round], self.wait_s[entry.round] = now + wait_s, min(AGAIN_MAX_S, 2 * wait_s)
        fact = ArchivedStateRebuildFailed(of=entry.round, state=entry.state, why=why, round=self.history.head)
        return [*self._end(), Emit(fact), *self._seek_next(now)]

    def _seek_next(self, now: Seconds) -> list[Effect]:
        """A sought state comes before own pieces."""
        if not self.sought or (self.making is not None and self.making.index is None):
            return []
        state, round = next(iter(self.sought.items()))
        stopped, entry = self._stop(), self.ledger.entry_of(state)
        if entry is None or entry.names is None:
            del self.sought[state]
            why = "it is too old by now: no member keeps its pieces"
            told = Emit(ArchivedStateRebuildFailed(of=round, state=state, why=why, round=self.history.head))
            return [*stopped, told, *self._seek_next(now)]
        self.making = PieceJob(entry, None)
        return [*stopped, *self._gather(self.making, entry.names, now)]

    def _stop(self) -> list[Effect]:
        gather = self.making.gather if self.making is not None else None
        return [*(gather.stop() if gather is not None and not gather.over else []), *self._end()]

    def _end(self) -> list[Effect]:
        self.making = None
        return self._hold()

    # ---- what stays ----------------------------------------------------------------------------------------

    def _is_replaced(self) -> bool:
        """True if another member was drawn for the piece in progress, or its state is too old."""
        making = self.making
        if making is None or making.index is None:
            return False
        entry = self.ledger.entry(making.entry.round)
        return entry is None or entry.holders[making.index] != self.me

    def _hold(self) -> list[Effect]:
        """Tell the disk what is needed, if that has changed."""
        gather = self.making.gather if self.making is not None else None
        fetched = {name for name in gather.pieces} if gather is not None else set[Digest]()
        pieces = tuple(sorted({mine.piece for mine in self.mine.values()} | fetched))
        genesis = self.history.bodies[-1].state
        whole = *(entry.state for entry in reversed(self.ledger.entries) if not entry.placed), genesis
        if (pieces, whole) == self.held:
            return []
        self.held = pieces, whole
        return [RunTask("pieces/hold", RetainErasurePieces(pieces, whole))]

    def _write_down(self, force: bool = False) -> list[Effect]:
        if not (self.ledger.changed or force):
            return []
        self.ledger.changed, self.written = False, True
        kept = PersistentArchiveIndex(self.ledger.book, tuple(self.mine.values()))
        return [Persist("pieces", msgspec.msgpack.encode(kept)), *self._hold()]


def _ledger_of(settings: RunSettings) -> PlacementLedger | None:
    coded = settings.kept_coded
    return PlacementLedger(coded, settings.round.quorum) if coded is not None else None


ARCHIVE = Verifier("archive", _ledger_of)
"""A ledger beside those of checks; it is no check itself."""
