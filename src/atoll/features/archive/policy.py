"""Placement of archived pieces: which member holds which piece of which older state, from vertices alone.

The vertex that closes every `every_rounds`-th round, once the run trains, draws n holders for the n pieces of its
state. Each holder reports that its piece is on its disk, and the digests of all pieces. A state is *placed* once
all n holders have reported the same digests. From then on no member has to hold it whole, and the digests are
final.

The next vertex replaces a holder that is expelled, away for longer than `lost_s` of run time, or as long without a
report. It also replaces a holder with other digests than more than half of the holders, if these are more than may
lie: its copy is damaged, or it lies. If there are fewer than n voting members, the remaining pieces have no holder
yet, and the state stays whole.

Invariants:
- Every peer that holds the same vertices gets the same placement.
- A member holds at most one piece of a state.
- The newest `CODED_STATES_MAX` states are followed, no more.
Not responsible for: requesting pieces, disks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UnsetType

from atoll.base.draw import shuffled
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, Seconds
from atoll.base.limits import BLOB_MAX, CODED_STATES_MAX, MIB
from atoll.crypto.digest import digest
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.ledger import CapabilityLedger
from atoll.policy.plan import QuorumRule
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import PiecesStored
from atoll.wire.messages.vertex import VertexBody

NOBODY = PeerId("")
FORMER_MAX = 2  # former holders of one piece that may still come back with it
REPAIR_BYTES_S = MIB  # least bytes of the state per second of repair: a polite one takes up to 8 MiB/s


class PieceSet(msgspec.Struct, frozen=True, array_like=True):
    """Digests of the pieces of one state."""

    size_bytes: int  # of the state
    pieces: tuple[Digest, ...]


class Placement(msgspec.Struct):
    """One state: holders of its pieces, and their reports."""

    round: int
    state: Digest
    holders: list[PeerId]  # of each piece; the empty id: too few members
    since_s: list[Seconds]  # time of each draw
    drawn: list[int]  # round of the vertex that drew each
    said: list[Digest | None]  # digest of the names that each current holder reported
    former: list[list[PeerId]]  # replaced holders of each piece, until the next one reports that it has the piece
    names: PieceSet | None = None  # final digests, once all holders reported the same

    @property
    def placed(self) -> bool:
        """True if no member has to hold this state whole, also while a lost piece is made again."""
        return self.names is not None

    @property
    def here(self) -> int:
        """Number of pieces at their holders."""
        return sum(word is not None for word in self.said)

    def index_of(self, peer: PeerId) -> int | None:
        return self.holders.index(peer) if peer in self.holders else None

    def keeps(self, peer: PeerId, index: int) -> bool:
        """True if this peer may not drop the piece: it is or was the holder, and no later holder has the piece."""
        return self.holders[index] == peer or peer in self.former[index]

    def sources(self, index: int) -> tuple[PeerId, ...]:
        """Peers that may send this piece."""
        now = (self.holders[index],) if self.said[index] is not None else ()
        return (*now, *self.former[index])


class PlacementBook(msgspec.Struct):
    """Placements stored across restarts: old vertices are not read again."""

    head: int = -2
    entries: list[Placement] = []
    away_since_s: dict[PeerId, Seconds] = {}
    # whether vertices with entries are missing; reports are then accepted as other voters judged them
    lacks: bool = False


class PlacementLedger(CapabilityLedger[PiecesStored]):
    """The placement as of the newest vertex applied."""

    report, duty = PiecesStored, "hold pieces"

    def __init__(
        self, coded: ErasureParams | None, rule: QuorumRule = "majority", book: PlacementBook | None = None
    ) -> None:
        self.coded, self.book = coded, book or PlacementBook()
        self.rule: QuorumRule = rule
        self.changed = False  # since the book was last written

    @property
    def entries(self) -> Sequence[Placement]:
        return self.book.entries

    def entry(self, round: int) -> Placement | None:
        return next((e for e in self.book.entries if e.round == round), None)

    def entry_of(self, state: Digest) -> Placement | None:
        return next((e for e in self.book.entries if e.state == state), None)

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Apply the vertices up to the head that are new here."""
        if self.coded is None or head <= self.book.head:
            return
        fresh = sorted(r for r in bodies if self.book.head < r <= head)
        self.book.lacks |= self.book.head == -2 and fresh != list(range(-1, head + 1))
        for round in fresh:
            self._take_in(self.coded, ids[round], bodies[round])
        self.book.head = head

    def problem(self, by: PeerId, report: PiecesStored) -> str | None:
        """None if this report may stand in the next vertex, as far as local vertices show."""
        flaw = self._malformed(report)
        return flaw if flaw is not None or self.book.lacks else self.unknown(by, report)

    def problem_to_propose(self, by: PeerId, report: PiecesStored) -> str | None:
        """Like `problem`; if vertices are missing here, other members must judge the report."""
        return self.unknown(by, report)

    def lose(self, round: int) -> None:
        """Entries may be missing: reports about pieces are accepted as other voters judged them."""
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
        """None if this well-formed report follows from local vertices, so that the local peer may propose it."""
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
            if b"PiecesStored" not in signed.body:  # its tag; most reports are not opened
                continue
            word = statement_in(signed)
            if isinstance(word, PiecesStored):
                self._hear(signed.signer, word)
        self._watch_members(body)
        for entry in self.book.entries:  # run time goes back if a vertex corrected it
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
        """Holders that are not waited for any more."""
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
        """Find a holder for every piece without one, or with one that must be replaced."""
        usual = _usual(entry.said, liars)
        patience_s = coded.lost_s + (entry.names.size_bytes / REPAIR_BYTES_S if entry.names is not None else 0.0)
        for index, holder in enumerate(entry.holders):
            said = entry.said[index]
            silent = said is None and body.time_s - entry.since_s[index] >= patience_s
            if holder == NOBODY or holder in gone or silent or (usual is not None and said not in (None, usual)):
                taken = {*entry.holders, *(p for former in entry.former for p in former)}
                free = [p for p in able if p not in taken]
                # former holders, with the missing piece
                back = [p for p in able if p in entry.former[index] and p != holder]
                drawn = (back or shuffled(vertex, f"holder of piece {index} of round {entry.round}", free))[:1]
                if drawn or holder in gone or said is not None:
                    if said is not None and (usual is None or said == usual):
                        entry.former[index] = [*entry.former[index], holder][-FORMER_MAX:]
                    entry.holders[index] = drawn[0] if drawn else NOBODY
                    entry.since_s[index], entry.drawn[index], entry.said[index] = body.time_s, body.round, None
                    self.changed = True


def _usual(said: Sequence[Digest | None], liars: int) -> Digest | None:
    """Digest that more than half of all holders report, and more than may lie: one of them is honest."""
    words = Counter(word for word in said if word is not None)
    most = max(words, key=lambda word: words[word], default=None)
    return most if most is not None and words[most] > max(len(said) // 2, liars) else None
