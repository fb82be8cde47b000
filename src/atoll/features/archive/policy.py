"""Who holds which piece of which older state: a pure function of the vertices, the same at every peer.

The vertex that closes every `every_rounds`-th round, once the run trains, draws n holders for the n pieces of
its state. Each of them says in a report that its piece lies on its disk and what all pieces are called
(`Placed`). A state is *placed* once all n holders have named the same pieces: from then on nobody has to hold
it whole, and these names stand for good.
A holder that is expelled, away for longer than `lost_s` of run time, or silent about its piece for so long is
replaced by a member that the next vertex draws; so is whoever names other pieces than more than half of the
holders, if these are more than may lie: its copy of the state is damaged, or it lies. Where there are fewer
than n voting members the rest of the pieces is nobody's yet, and the state stays whole.
Promises: one member holds one piece of a state at most; the newest `CODED_STATES_MAX` states are followed, no more.
Never asks anybody and never looks at a disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import UnsetType

from atoll.base.arguments import Count
from atoll.base.draw import shuffled
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, Seconds
from atoll.base.limits import BLOB_MAX, CODED_PIECES_MAX, CODED_STATES_MAX, MIB, WINDOW_MOST_S
from atoll.crypto.digest import digest
from atoll.policy.ledger import Ledger
from atoll.policy.plan import QuorumRule
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import PiecesStored
from atoll.wire.messages.vertex import VertexBody

NOBODY = PeerId("")
FORMER_MAX = 2  # former holders of one piece that may still come back with it
REPAIR_BYTES_S = (
    MIB  # of the state, at the least, where a piece is made of others: a polite repair takes up to 8 MiB/s
)


class ErasureParams(msgspec.Struct, frozen=True):
    """How a run keeps its older states; fixed in genesis, since everybody must draw the same holders."""

    k: Annotated[int, msgspec.Meta(ge=1, lt=CODED_PIECES_MAX)]  # pieces that make the state again
    n: Annotated[int, msgspec.Meta(ge=2, le=CODED_PIECES_MAX)]
    every_rounds: Count = 20  # the state of every so many rounds is kept for long
    lost_s: Annotated[float, msgspec.Meta(ge=0, le=WINDOW_MOST_S)] = 3600.0
    """Away for longer: another member makes its pieces anew."""


class PieceSet(msgspec.Struct, frozen=True, array_like=True):
    """What the pieces of one state are called."""

    size_bytes: int  # of the state
    pieces: tuple[Digest, ...]


class Placement(msgspec.Struct):
    """One state: who holds its pieces, and what they have said."""

    round: int
    state: Digest
    holders: list[PeerId]  # of each piece; NOBODY: there were not members enough
    since_s: list[Seconds]  # when each was drawn
    drawn: list[int]  # by the vertex of which round
    said: list[Digest | None]  # by the holder of now: the digest of its Names
    former: list[list[PeerId]]  # who had each piece and was replaced, until the next one says that it has it
    names: PieceSet | None = None  # once all holders named the same: for good

    @property
    def placed(self) -> bool:
        """Nobody has to hold this state whole. True also while a lost piece is made anew."""
        return self.names is not None

    @property
    def here(self) -> int:
        """Pieces that lie where they should."""
        return sum(word is not None for word in self.said)

    def index_of(self, peer: PeerId) -> int | None:
        return self.holders.index(peer) if peer in self.holders else None

    def keeps(self, peer: PeerId, index: int) -> bool:
        """It may not drop this piece: it is its holder, or was, and nobody has it since."""
        return self.holders[index] == peer or peer in self.former[index]

    def sources(self, index: int) -> tuple[PeerId, ...]:
        """Who may give this piece."""
        now = (self.holders[index],) if self.said[index] is not None else ()
        return (*now, *self.former[index])


class PlacementBook(msgspec.Struct):
    """What is remembered across restarts: vertices of long ago are not read again."""

    head: int = -2
    entries: list[Placement] = []
    away_since_s: dict[PeerId, Seconds] = {}
    lacks: bool = False  # vertices that entries might have come from: others' words are taken as others judged them


class PlacementLedger(Ledger[PiecesStored]):
    """Who holds which piece, as of the newest vertex taken in."""

    report, duty = PiecesStored, "hold pieces"

    def __init__(
        self, coded: ErasureParams | None, rule: QuorumRule = "majority", book: PlacementBook | None = None
    ) -> None:
        self.coded, self.book = coded, book or PlacementBook()
        self.rule: QuorumRule = rule
        self.changed = False  # since somebody last wrote the book down

    @property
    def entries(self) -> Sequence[Placement]:
        return self.book.entries

    def entry(self, round: int) -> Placement | None:
        return next((e for e in self.book.entries if e.round == round), None)

    def entry_of(self, state: Digest) -> Placement | None:
        return next((e for e in self.book.entries if e.state == state), None)

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Take in the vertices up to the head that were not known yet."""
        if self.coded is None or head <= self.book.head:
            return
        fresh = sorted(r for r in bodies if self.book.head < r <= head)
        self.book.lacks |= self.book.head == -2 and fresh != list(range(-1, head + 1))
        for round in fresh:
            self._take_in(self.coded, ids[round], bodies[round])
        self.book.head = head

    def problem(self, by: PeerId, report: PiecesStored) -> str | None:
        """None if this may stand in the next vertex, as far as I can know."""
        flaw = self._malformed(report)
        return flaw if flaw is not None or self.book.lacks else self.unknown(by, report)

    def problem_to_propose(self, by: PeerId, report: PiecesStored) -> str | None:
        """Where vertices are missing here, other members must judge the report."""
        return self.unknown(by, report)

    def lose(self, round: int) -> None:
        """Entries may be missing: reports about pieces are believed as other voters judged them."""
        del round
        self.book.lacks = True

    def _malformed(self, word: PiecesStored) -> str | None:
        if self.coded is None:
            return "is about pieces, which this run does not have"
        if (
            not 0 <= word.index < self.coded.n
            or len(word.pieces) != self.coded.n
            or any(len(name) != DIGEST_BYTES for name in word.pieces)
            or not 0 <= word.size_bytes <= BLOB_MAX
        ):
            return "names pieces that no state of this run has"
        return None

    def unknown(self, by: PeerId, word: PiecesStored) -> str | None:
        """None if this well-formed word follows from the vertices that I have: I may propose it."""
        entry = self.entry(word.round)
        if entry is None:
            return "is about a state that is not kept in pieces"
        if entry.holders[word.index] != by:
            return "is not by the holder of that piece"
        if entry.said[word.index] is not None:
            return "was said already"
        if (entry.round if isinstance(word.since, UnsetType) else word.since) != entry.drawn[word.index]:
            return "is of an earlier time that it held this piece"
        if entry.names is not None and entry.names != PieceSet(word.size_bytes, word.pieces):
            return "names other pieces than those agreed on"
        return None

    # ---- one vertex ----------------------------------------------------------------------------------------

    def _take_in(self, coded: ErasureParams, vertex: Digest, body: VertexBody) -> None:
        for signed in body.reports:
            if b"Placed" not in signed.body:  # its tag: most reports are not opened
                continue
            word = statement_in(signed)
            if isinstance(word, PiecesStored):
                self._hear(signed.signer, word)
        self._watch_members(body)
        for entry in self.book.entries:  # the time goes back where it was set right
            since = [min(since_s, body.time_s) for since_s in entry.since_s]
            self.changed |= since != entry.since_s
            entry.since_s = since
        newest = self.book.entries[-1].state if self.book.entries else None
        if body.trained and (body.round + 1) % coded.every_rounds == 0 and body.state != newest:
            round, n = body.round, coded.n
            times = [body.time_s] * n, [round] * n
            entry = Placement(round, body.state, [NOBODY] * n, *times, [None] * n, [[] for _ in range(n)])
            self.book.entries = [*self.book.entries[-CODED_STATES_MAX + 1 :], entry]
            self.changed = True
        able = [m.peer for m in body.members if m.votes]
        gone = self._gone(coded, body)
        liars = (len(able) - 1) // 3 if self.rule == "two-thirds" else 0
        for entry in self.book.entries:
            self._draw(coded, entry, vertex, body, able, gone, liars)

    def _hear(self, by: PeerId, word: PiecesStored) -> None:
        entry = self.entry(word.round)
        if entry is None or (self._malformed(word) or self.unknown(by, word)) is not None:
            return
        self.changed = True
        names = PieceSet(word.size_bytes, word.pieces)
        name = entry.said[word.index] = digest(msgspec.msgpack.encode(names))
        entry.former[word.index] = []
        if entry.names is None and all(said == name for said in entry.said):
            entry.names = names

    def _watch_members(self, body: VertexBody) -> None:
        away = {m.peer for m in body.members if m.standing == "away"}
        since = {p: min(self.book.away_since_s.get(p, body.time_s), body.time_s) for p in sorted(away)}
        self.changed |= since != self.book.away_since_s
        self.book.away_since_s = since

    def _gone(self, coded: ErasureParams, body: VertexBody) -> set[PeerId]:
        """Holders that will not be waited for any more."""
        known = {m.peer for m in body.members if m.standing != "expelled"}
        for_long = {p for p, at in self.book.away_since_s.items() if body.time_s - at >= coded.lost_s}
        return {p for e in self.book.entries for p in e.holders if p not in known or p in for_long} - {NOBODY}

    def _draw(
        self,
        coded: ErasureParams,
        entry: Placement,
        vertex: Digest,
        body: VertexBody,
        able: Sequence[PeerId],
        gone: set[PeerId],
        liars: int,
    ) -> None:
        """Find a holder for every piece that has none, or whose holder must be replaced."""
        usual = _usual(entry.said, liars)
        patience_s = coded.lost_s + (entry.names.size_bytes / REPAIR_BYTES_S if entry.names is not None else 0.0)
        for index, holder in enumerate(entry.holders):
            said = entry.said[index]
            silent = said is None and body.time_s - entry.since_s[index] >= patience_s
            if holder == NOBODY or holder in gone or silent or (usual is not None and said not in (None, usual)):
                taken = {*entry.holders, *(p for former in entry.former for p in former)}
                free = [p for p in able if p not in taken]
                back = [p for p in able if p in entry.former[index] and p != holder]  # with what is lacking
                drawn = (back or shuffled(vertex, f"holder of piece {index} of round {entry.round}", free))[:1]
                if drawn or holder in gone or said is not None:
                    if said is not None and (usual is None or said == usual):
                        entry.former[index] = [*entry.former[index], holder][-FORMER_MAX:]
                    entry.holders[index] = drawn[0] if drawn else NOBODY
                    entry.since_s[index], entry.drawn[index], entry.said[index] = body.time_s, body.round, None
                    self.changed = True


def _usual(said: Sequence[Digest | None], liars: int) -> Digest | None:
    """What more than half of all holders call the pieces, and more than may lie: one of them is honest."""
    words = Counter(word for word in said if word is not None)
    most = max(words, key=lambda word: words[word], default=None)
    return most if most is not None and words[most] > max(len(said) // 2, liars) else None
