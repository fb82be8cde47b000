"""Review of committed updates: authors show them to drawn judges, and each judge sends a signed report.

    every vertex     the ledger of a check draws cases: updates, and their judges
    author           `BuildUpdateExhibit` ─► a blob ─► its name to each drawn judge that requests it
    judge            `ExhibitRequest` to every author ─► `ExhibitResponse` ─► download ─► a task ─► signed report

A round waits for none of this. A judge handles two cases at a time; all judges take them in one order, so slow
judges handle the same few.

Invariants:
- Memory is bounded by the open cases, a blob by the size of an update in fp32.
- After a restart own updates are lost, but duties as a judge remain.
Not responsible for: judging, acting on a report; vertices do that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec.structs import astuple, replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import MIB, SCORE_OPEN
from atoll.base.machine import Effect, Emit, Fact, RunTask, Send, TaskDone, TaskFailed
from atoll.peer.events import LocalReviewFailed, ReviewDecided, ReviewersDrawn, ReviewReported
from atoll.peer.round.context import RoundContext
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import BuildUpdateExhibit, ExhibitBuilt, PinBlobs
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed
from atoll.verification.evidence_download import EvidenceDownloads, tried
from atoll.verification.review_ledger import DrawnUpdateReview, Key, Numbers, ReviewLedger
from atoll.verification.task_builder import ground_of
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse
from atoll.wire.messages.statements import BaseStatement, CheckReport
from atoll.wire.messages.vertex import VertexBody

AT_ONCE = 2  # cases: one is downloaded while another is judged
GIVE_UP = 6  # rounds without an exhibit after which a judge gives up …
GIVE_UP_S = 10.0  # … and seconds, since rounds may take milliseconds and links may stall …
CLOSING = 2  # … except in the last rounds in which it may still report
NOT_SHOWN = "nothing was shown in time"


class ReviewMethod(ABC):
    """What one check asks of its judges."""

    ledger: ClassVar[type[ReviewLedger[Any]]]
    opens_after = 0  # rounds from the updates to the vertex that opens their case

    @property
    def name(self) -> str:
        """Name of the check, and prefix of its tasks."""
        return self.ledger.check

    @abstractmethod
    def task(self, case: Any, blobs: Sequence[Digest], ground: RoundContext) -> object:
        """The judge's task, for a handler in the check's `worker` file. It follows from vertices.

        The task's result is a struct of two fields: numbers to report, and the reason if there are none.
        """

    @abstractmethod
    def not_shown(self, lacking: Sequence[bool]) -> Numbers:
        """The numbers to report if these updates are lacking."""


def review_verifier(
    method: ReviewMethod, title: str, worker: str, share: Callable[[RunSettings], float] | None = None
) -> Verifier:
    """A check by drawn judges. `share` of the updates; if None, the one that `run.checks` gives its name."""
    of: Callable[[RunSettings], float] = share or (lambda settings: settings.check_share(method.name))
    return Verifier(
        method.name,
        lambda settings: method.ledger(of(settings), settings.round.quorum) if of(settings) else None,
        lambda context: UpdateReviewMachine(context, method) if of(context.settings) else None,
        title,
        worker,
        by_name=share is None,
        updates_kept=2 + method.opens_after,  # rounds: those that can still be requested, and the current one
    )


@dataclass
class WantedUpdate:
    """An update that its author must show to the local peer, maybe for two cases."""

    blob: Digest | None = None  # name of the exhibit; requested again while None
    tries: int = 0
    here: bool = False
    lacks: str = ""  # why the local peer no longer waits for it


@dataclass
class LocalReviewDuty:
    """A case that the local peer must judge."""

    case: DrawnUpdateReview
    rows: dict[Key, WantedUpdate]
    since: int  # head at the first request
    since_s: Seconds
    looking: bool = False
    done: bool = False

    @property
    def waits(self) -> bool:
        """True while the authors may still show an update."""
        return not self.done and not self.looking


class UpdateReviewMachine(VerifierMachine):
    def __init__(self, context: VerifierContext, method: ReviewMethod) -> None:
        self.me, self.settings, self.history = context.me, context.settings, context.history
        self.pool, self.method = context.pool, method
        self.turns: dict[Key, LocalReviewDuty] = {}
        # own round → exhibit; None while it is built, or if it is lost
        self.shown: dict[int, Digest | None] = {}
        self.held: tuple[Digest, ...] = ()
        self.arriving = EvidenceDownloads(method.name)

    @property
    def _ledger(self) -> ReviewLedger[Any]:
        return self.pool.recent().ledgers.get(self.method.ledger)

    @property
    def _cases(self) -> Mapping[Key, DrawnUpdateReview]:
        return self._ledger.cases

    @property
    def _open(self) -> list[LocalReviewDuty]:
        return [turn for turn in self.turns.values() if not turn.done]

    @property
    def _wanted(self) -> dict[Key, WantedUpdate]:
        return {key: row for turn in self._open for key, row in turn.rows.items()}

    # ---- vertices ------------------------------------------------------------------------------------------

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        return self._work(now)

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Emit what the vertex settled and drew, and start the work that it assigns."""
        name = self.method.name
        effects: list[Effect] = [
            self._emit(
                ReviewDecided(
                    check=name,
                    of=verdict.round,
                    peers=verdict.authors,
                    opinion=verdict.opinion,
                    against=verdict.against,
                    hid=verdict.hid,
                    numbers=verdict.numbers,
                )
            )
            for verdict in self._ledger.settled
        ]
        for case in self._cases.values():
            if case.round != body.round - self.method.opens_after:
                continue
            drawn = ReviewersDrawn(check=name, of=case.round, peers=case.authors, reviewers=case.judges)
            effects.append(self._emit(drawn))
            if self.me in case.authors and case.round not in self.shown:
                self.shown[case.round] = None
                effects.append(RunTask(f"{name}/show/{case.round}", BuildUpdateExhibit(case.round)))
        return effects + self._work(now)

    def _work(self, now: Seconds) -> list[Effect]:
        """Start judging drawn cases, and give up those that are overdue."""
        cases, head = self._cases, self.history.head
        self.turns = {key: turn for key, turn in self.turns.items() if key in cases}
        self.shown = {round: blob for round, blob in self.shown.items() if self._judges(round)}
        here = {m.peer for m in self.history.head_body.members if m.is_present}
        effects: list[Effect] = []
        for turn in self.turns.values():
            late = now - turn.since_s >= GIVE_UP_S or head - turn.case.round >= SCORE_OPEN - CLOSING
            if turn.waits and head - turn.since >= GIVE_UP and late and here.issuperset(turn.case.authors):
                for row in turn.rows.values():
                    row.lacks = row.lacks or ("" if row.here else NOT_SHOWN)
                effects += self._look(turn)
        for case in sorted(self._undone(), key=lambda case: case.priority):
            is_here = here.issuperset(case.authors)
            if is_here and len(self._open) < AT_ONCE and case.key not in self.turns:
                keys = [(case.round, author) for author in case.authors]
                rows = {key: self._wanted.get(key) or WantedUpdate() for key in keys}
                self.turns[case.key] = LocalReviewDuty(case, rows, head, now)
                effects += self._ask(self.turns[case.key])
        return [*self._hold(), *effects]

    def _undone(self) -> list[DrawnUpdateReview]:
        """Cases that the local peer was drawn for, and its report is in no vertex."""
        return [c for c in self._cases.values() if self.me in c.judges and self.me not in c.said]

    def _hold(self) -> list[Effect]:
        """Pin own exhibits, received exhibits, and the states that judged rounds began with.

        If cases open later than their round, the newest states and those of waiting cases stay as well.
        """
        rounds = {turn.case.round - 1 for turn in self._open}
        if self.method.opens_after:
            done = {turn.case.key for turn in self.turns.values() if turn.done}
            rounds |= {case.round - 1 for case in self._undone() if case.key not in done}
            rounds |= {self.history.head - back for back in range(self.method.opens_after + 1)}
        names = {body.state for round in rounds if (body := self.history.bodies.get(round)) is not None}
        names |= {blob for blob in self.shown.values() if blob is not None}
        names |= {row.blob for row in self._wanted.values() if row.blob is not None}
        needed = tuple(sorted(names))
        if needed == self.held:
            return []
        self.held = needed
        return [RunTask(f"{self.method.name}/hold", PinBlobs(needed, self.method.name))]

    # ---- showing -------------------------------------------------------------------------------------------

    def _judges(self, round: int) -> list[PeerId]:
        """Judges of the local update of this round."""
        mine = (case for case in self._cases.values() if case.round == round and self.me in case.authors)
        return list(dict.fromkeys(judge for case in mine for judge in case.judges))

    def serve(self, sender: PeerId, request: ExhibitRequest) -> list[Effect]:
        """Only drawn judges get the name of the exhibit."""
        if request.update is not True or sender not in self._judges(request.round):
            return []
        return [Send(sender, ExhibitResponse(request.round, self.shown.get(request.round), update=True))]

    def _laid_out(self, round: int, blob: Digest) -> list[Effect]:
        if not (judges := self._judges(round)):
            return []
        self.shown[round] = blob
        return [*self._hold(), *(Send(peer, ExhibitResponse(round, blob, update=True)) for peer in judges)]

    # ---- judging -------------------------------------------------------------------------------------------

    def retransmit(self) -> list[Effect]:
        """Messages may be lost."""
        return [effect for turn in self.turns.values() if turn.waits for effect in self._ask(turn)]

    def _ask(self, turn: LocalReviewDuty) -> list[Effect]:
        return [
            Send(author, ExhibitRequest(round, update=True))
            for (round, author), row in turn.rows.items()
            if row.blob is None and not row.lacks
        ]

    def on_exhibit(
        self, sender: PeerId, response: ExhibitResponse, under_way: Mapping[Digest, BlobDownload], now: Seconds
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """An author names its exhibit; for a blob that is already under way it is one more source."""
        row = self._wanted.get((response.round, sender)) if response.update is True else None
        if row is None or row.blob is not None or row.lacks or response.blob is None:
            return None, []
        most = self.settings.update_bytes + MIB
        fetch, effects = self.arriving.point(row, response.blob, sender, most, under_way, now)
        return fetch, [*self._hold(), *effects]

    def abandoned(self) -> list[Digest]:
        """Downloads that no open turn needs."""
        return self.arriving.given_up(row.blob for row in self._wanted.values())

    def on_download(self, fact: BlobFetched | FetchFailed) -> list[Effect]:
        if not self.arriving.ended(fact.blob):
            return []
        rows = {key: row for key, row in self._wanted.items() if row.blob == fact.blob and not row.here}
        for row in rows.values():
            if isinstance(fact, BlobFetched):
                row.here = True
            elif tried(row):
                row.lacks = fact.why
        effects = [self.arriving.drop(fact.blob)] if isinstance(fact, FetchFailed) else list[Effect]()
        for turn in self._open:
            effects += self._look(turn) if turn.waits and rows.keys() & turn.rows.keys() else []
        return effects

    def _look(self, turn: LocalReviewDuty) -> list[Effect]:
        """Judge once no update is awaited; nothing if the vertices of the round are not in memory."""
        rows = list(turn.rows.values())
        if not all(row.here or row.lacks for row in rows):
            return []
        if why := next((row.lacks for row in rows if row.lacks), ""):
            return self._end(turn, self.method.not_shown([bool(row.lacks) for row in rows]), why)
        ground = ground_of(turn.case.round, self.history, self.settings)
        blobs = [row.blob for row in rows if row.blob is not None]
        if ground is None or len(blobs) < len(rows):
            return []
        turn.looking = True
        round, author = turn.case.key
        return [RunTask(f"{self.method.name}/take/{round}/{author}", self.method.task(turn.case, blobs, ground))]

    # ---- jobs ----------------------------------------------------------------------------------------------

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """A judge with a failed trainer sends no report: other judges were drawn."""
        _, kind, *names = event.job.split("/")
        if kind == "show":
            round = int(names[0])
            if isinstance(event, TaskFailed):
                return [self._failed(self.me, round, event.why)]
            assert isinstance(event.result, ExhibitBuilt)
            return self._laid_out(round, event.result.blob)
        turn = self.turns.get((int(names[0]), PeerId(names[1]))) if kind == "take" else None
        if turn is None:
            return []
        if isinstance(event, TaskDone):
            return [*self._end(turn, *astuple(event.result)), *self._work(now)]
        turn.looking, turn.done = False, True
        return [self._failed(turn.case.authors[0], turn.case.round, event.why), *self._work(now)]

    def _end(self, turn: LocalReviewDuty, numbers: Numbers, why: str) -> list[Effect]:
        turn.looking, turn.done = False, True
        round, author = turn.case.key
        found = ReviewReported(check=self.method.name, of=round, peer=author, numbers=numbers, why=why)
        return [self._emit(found)]

    def _failed(self, author: PeerId, round: int, why: str) -> Emit:
        return self._emit(LocalReviewFailed(check=self.method.name, of=round, peer=author, why=why))

    def report_of(self, fact: Fact) -> BaseStatement | None:
        if not isinstance(fact, ReviewReported) or fact.check != self.method.name:
            return None
        return CheckReport(fact.check, fact.of, fact.peer, fact.numbers)

    def _emit(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.history.head))
