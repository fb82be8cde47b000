"""Row archive: rows of past rounds that the local peer keeps, shows and requests (specs/blame.md).

    on_round_closed   rows of own results and of the own update ─► `StoreArchivedRows` ─► where each row lies
    on_row_request    `RowRequest` for a past round ─► `ReadRow` ─► row bytes
    gather            a command examines a round: `RowRequest` to its peers ─► `AttributionRowsGathered`

The messages are those of a round. A round waits for none of this.

Invariants:
- A row is taken only if it was requested and matches the commitment in the vertex.
- The record of a row goes when the row leaves the disk.
Not responsible for: what a row did (`features/attribution/worker.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import msgspec

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import PART_GIVEN_MAX
from atoll.base.machine import Effect, Emit, Lane, Payload, Persist, RunTask, Send, TaskDone, TaskFailed
from atoll.crypto.digest import merkle_holds, merkle_tree
from atoll.peer.events import AttributionRowsGathered
from atoll.peer.round.owned_results import OwnedResults
from atoll.peer.tasks import ArchivedRow, ReadRow, RetainArchivedRows, StoreArchivedRows
from atoll.peer.verify.interface import Verifier, VerifierMachine
from atoll.protocol.allreduce.buffers import ComputedResult
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import RowRequest, RowResponse
from atoll.wire.messages.statements import Commitment, SignedStatement
from atoll.wire.messages.vertex import VertexBody

AT_ONCE = 16  # rows in progress: read for another peer, or awaited from one
REMEMBERED = 64  # rows of others that may arrive before the index is written
BEATS = 6  # heartbeats without a row, each with another source; after them the missing rows are gone

Place = tuple[int, PeerId]  # part and author


class RowLocation(msgspec.Struct, frozen=True, array_like=True):
    """Place of a row on disk."""

    part: int
    peer: PeerId
    path: tuple[Digest, ...]
    digest: Digest  # digest that its author committed to
    blob: Digest


@dataclass
class ArchivedRowFetch:
    """Requested rows of one past round."""

    round: int
    commits: Mapping[PeerId, Commitment]
    sources: Mapping[Place, tuple[PeerId, ...]]
    lacking: dict[Place, None]
    # sources requested since the last heartbeat
    waiting: dict[Place, PeerId] = field(default_factory=dict[Place, PeerId])
    came: int = 0
    beats: int = 0  # heartbeats so far; each requests the next source of each row, so a silent one delays nothing
    quiet_beats: int = 0  # heartbeats since the last row arrived

    def source_of(self, place: Place) -> PeerId | None:
        sources = self.sources[place]
        return sources[self.beats % len(sources)] if sources else None


def worth_keeping(
    body: VertexBody, made: Iterable[ComputedResult], me: PeerId, mine: tuple[Payload, ...] | None
) -> tuple[ArchivedRow, ...]:
    """Rows worth keeping: those combined here and the own update, if this vertex holds commitments to them.

    The vertex may be of an earlier attempt than the local one at its arrival.
    """
    agreed = {signed.signer: signed.body for signed in body.commits}
    rows: dict[Place, ArchivedRow] = {}
    for one in made:
        for row in one.rows:
            signed, part = row.statement, one.answered.part
            if signed is not None and agreed.get(signed.signer) == signed.body:
                rows[part, signed.signer] = ArchivedRow(part, signed.signer, row.path, row.payload)
    commit = commits_in(body).get(me)
    if mine and commit is not None:
        tree = merkle_tree([payload.digest for payload in mine])
        # otherwise the process before a restart committed to it, and its bytes are lost
        if tree.root == commit.root:
            rows |= {(n, me): ArchivedRow(n, me, tree.path(n), payload) for n, payload in enumerate(mine)}
    return tuple(rows.values())


def commits_in(body: VertexBody) -> dict[PeerId, Commitment]:
    """Commitments of the contributors."""
    read = ((s.signer, decode_statement(s.body, s.signer)) for s in body.commits)
    return {peer: commit for peer, commit in read if isinstance(commit, Commitment)}


class RowArchive(VerifierMachine):
    """`rounds`: number of rounds with rows kept here; 0: none are kept and none are shown."""

    def __init__(self, me: PeerId, rounds: int) -> None:
        self.me, self.rounds = me, rounds
        self.here: dict[int, dict[Place, RowLocation]] = {}
        self.given: Counter[tuple[int, Place, PeerId]] = Counter()
        # job -> requesting peer, and the response to send with the payload
        self.reading: dict[str, tuple[PeerId, RowResponse]] = {}
        self.writing: dict[str, tuple[int, tuple[ArchivedRow, ...]]] = {}
        self.search: ArchivedRowFetch | None = None
        self.looked_at: int | None = None  # round under investigation: its rows stay, however old it is

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """Load the index of the process before a restart."""
        for name, data in kept.items():
            if name.startswith("rows/"):
                self.here[int(name[5:])] = _read(data)
        return self._hold() if self.here else []

    @property
    def keeps_rows(self) -> bool:
        return self.rounds > 0

    # ---- keeping -------------------------------------------------------------------------------------------

    def on_round_closed(self, body: VertexBody, results: OwnedResults) -> list[Effect]:
        """Keep the local rows of a closed round."""
        rows = worth_keeping(body, results.made.values(), self.me, results.mine) if self.rounds else ()
        return self._write(f"rows/keep/{body.round}", body.round, rows) if rows else self._forget(body.round)

    def _write(self, job: str, round: int, rows: tuple[ArchivedRow, ...]) -> list[Effect]:
        self.writing[job] = round, rows
        return [RunTask(job, StoreArchivedRows(rows))]

    def _kept(self, round: int, rows: tuple[ArchivedRow, ...], blobs: tuple[Digest, ...]) -> None:
        here = self.here.setdefault(round, {})
        for row, blob in zip(rows, blobs, strict=True):
            here[row.part, row.peer] = RowLocation(row.part, row.peer, row.path, row.payload.digest, blob)

    def _remember(self, round: int) -> list[Effect]:
        """Pin a round's rows; also after a restart."""
        lies = list(self.here.get(round, {}).values())
        return [Persist(f"rows/{round}", msgspec.msgpack.encode(lies)), *self._forget(round)]

    def _forget(self, round: int) -> list[Effect]:
        """Forget rounds that are too old after this one, except the one under investigation."""
        old = [r for r in self.here if r <= round - self.rounds and r != self.looked_at]
        for r in old:
            del self.here[r]
        self.given = Counter({key: times for key, times in self.given.items() if key[0] in self.here})
        return [*(Persist(f"rows/{r}", None) for r in old), *(self._hold() if old or round in self.here else [])]

    def _hold(self) -> list[Effect]:
        newest = sorted(self.here, key=lambda r: (r != self.looked_at, -r))
        return [
            RunTask(
                "rows/hold", RetainArchivedRows(tuple(lies.blob for r in newest for lies in self.here[r].values()))
            )
        ]

    # ---- showing -------------------------------------------------------------------------------------------

    def on_row_request(self, sender: PeerId, wish: RowRequest, body: VertexBody | None) -> list[Effect]:
        """Send a row of a past round, with the commitment in its vertex `body`."""
        place = wish.part, wish.peer
        lies, slot = self.here.get(wish.round, {}).get(place), (wish.round, place, sender)
        signed = _signed_by(wish.peer, body)
        job = f"rows/read/{wish.round}/{wish.part}/{wish.peer}/{sender}"
        busy = job in self.reading or sum(asker == sender for asker, _ in self.reading.values()) >= AT_ONCE
        if lies is None or signed is None or busy or self.given[slot] >= PART_GIVEN_MAX:
            return []
        self.given[slot] += 1
        answer = RowResponse(wish.round, wish.attempt, wish.trace, wish.part, lies.path, signed)
        self.reading[job] = sender, answer
        return [RunTask(job, ReadRow(lies.blob, lies.digest))]

    # ---- asking --------------------------------------------------------------------------------------------

    def gather(self, body: VertexBody, sources: Mapping[Place, tuple[PeerId, ...]]) -> list[Effect]:
        """Gather these rows, each from one of its sources. `AttributionRowsGathered` reports the outcome."""
        lacking = dict.fromkeys(place for place in sources if place not in self.here.get(body.round, {}))
        self.search, self.looked_at = ArchivedRowFetch(body.round, commits_in(body), sources, lacking), body.round
        if self._forgotten(body.round):
            self.search.quiet_beats = BEATS
        return self._go_on(self.search)

    def _forgotten(self, round: int) -> bool:
        """True if the local peer kept these rows and dropped them. Others keep as many rounds, so a request is
        useless.
        """
        return bool(self.here) and round not in self.here and round <= max(self.here) - self.rounds

    def retransmit(self) -> list[Effect]:
        """At every heartbeat: request each missing row from its next source."""
        if self.search is None:
            return []
        self.search.beats += 1
        self.search.quiet_beats += 1
        self.search.waiting.clear()
        return self._go_on(self.search)

    def _go_on(self, search: ArchivedRowFetch) -> list[Effect]:
        if not search.lacking or search.quiet_beats >= BEATS:
            self.search = None
            told = AttributionRowsGathered(of=search.round, came=search.came, gone=tuple(search.lacking))
            return [*(self._remember(search.round) if search.came else []), Emit(told)]
        busy, effects = Counter(search.waiting.values()), list[Effect]()
        for place in search.lacking:
            source = search.source_of(place)
            if source is None or place in search.waiting or busy[source] >= AT_ONCE:
                continue
            search.waiting[place] = source
            busy[source] += 1
            effects.append(Send(source, RowRequest(search.round, 0, "", *place)))
        return effects

    def on_row(self, sender: PeerId, message: RowResponse, payload: Payload | None) -> list[Effect] | None:
        """Take a row from a peer. PeerFault if it is not the committed one."""
        search, place = self.search, (message.part, message.statement.signer)
        if search is None or search.round != message.round:
            return None
        if place not in search.sources or payload is None:
            return []
        job, commit = f"rows/came/{search.round}/{place[0]}/{place[1]}", search.commits[place[1]]
        if place not in search.lacking or job in self.writing:
            return []  # requested from two sources
        if not merkle_holds(commit.root, payload.digest, message.part, commit.parts, message.path):
            raise PeerFault(sender, f"showed a row of part {message.part} that {place[1]} did not commit to")
        search.quiet_beats = 0
        return self._write(job, search.round, (ArchivedRow(*place, message.path, payload),))

    # ---- jobs ----------------------------------------------------------------------------------------------

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """If the disk refuses a row, it is not kept. The round goes on, and a later request learns that the row is
        gone.
        """
        job, result = event.job, event.result if isinstance(event, TaskDone) else None
        match job.split("/")[1]:
            case "read":
                asker, answer = self.reading.pop(job)
                return [Send(asker, answer, Lane.BULK, result)] if isinstance(result, Payload) else []
            case "hold":
                self._lost(frozenset(cast("Iterable[Digest]", result or ())))
                return []
            case _:
                round, rows = self.writing.pop(job)
                if result is not None:
                    self._kept(round, rows, cast("tuple[Digest, ...]", result))
                    return self._remember(round) if "/keep/" in job else self._came(round, rows)
                return []

    def _came(self, round: int, rows: tuple[ArchivedRow, ...]) -> list[Effect]:
        """Rows of others are on this disk. The index is long, so it is not written after each row."""
        search = self.search
        if search is None or search.round != round:
            return self._remember(round)
        for row in rows:
            search.waiting.pop((row.part, row.peer), None)
            search.lacking.pop((row.part, row.peer), None)
        search.came += len(rows)
        return [*(self._remember(round) if search.came % REMEMBERED == 0 else []), *self._go_on(search)]

    def _lost(self, blobs: frozenset[Digest]) -> None:
        for round in [r for r, here in self.here.items() if any(lies.blob in blobs for lies in here.values())]:
            self.here[round] = {place: at for place, at in self.here[round].items() if at.blob not in blobs}


def _signed_by(peer: PeerId, body: VertexBody | None) -> SignedStatement | None:
    return next((signed for signed in body.commits if signed.signer == peer), None) if body is not None else None


_LIES = msgspec.msgpack.Decoder(list[RowLocation])


def _read(data: bytes) -> dict[Place, RowLocation]:
    try:
        lies = _LIES.decode(data)
    except UNREADABLE:
        return {}  # of another version: those rows are gone
    return {(one.part, one.peer): one for one in lies}


ROW_ARCHIVE = Verifier("rows", machine=lambda context: RowArchive(context.me, context.archived_rounds))
"""A machine beside those of checks; it is no check itself."""
