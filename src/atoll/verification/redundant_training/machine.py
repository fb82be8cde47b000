"""Twin comparison, one peer's side: it shows its update as a twin, and compares two updates as a referee.

    every vertex     twins of the round before, and their referees (`verification/redundant_training/policy.py`)
    both twins       `ShowUpdate` ─► a blob ─► its name to each referee that requests it
    referee          `ExhibitRequest` to both ─► two `ExhibitResponse` ─► download ─► `ReplayBoth` ─► signed
                     `RedundancyReport`

The messages are those of loss scores, which no run has beside twins. A round waits for none of this. A referee
handles two pairs at a time, not counting pairs with unreachable twins.

Invariants:
- Memory is bounded by the open cases, a blob by the size of an update in fp32.
- Data that a case needs stays on disk until no case can be opened on it.
- The host of the local member stays in `peer/round/local_update.py`; this file sends it to no peer.
Not responsible for: judging, acting on a comparison; vertices do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import MIB, SCORE_OPEN
from atoll.base.machine import Effect, Emit, Fact, RunTask, Send, TaskDone, TaskFailed
from atoll.peer.events import TwinsCompared, TwinsFound, TwinsJudged, TwinsMissed
from atoll.peer.governance.settings_change import plan_after
from atoll.peer.round.context import ground_after
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import ExhibitBuilt, PinBlobs, ReplayBoth, ShowUpdate, TwinUpdate, UpdateDistances
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed
from atoll.verification.evidence_download import EvidenceDownloads, tried
from atoll.verification.loss_scoring.machine import AT_ONCE, CLOSING, GIVE_UP, GIVE_UP_S
from atoll.verification.redundant_training.policy import APART_MOST, Key, RedundancyCase, RedundancyLedger
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse
from atoll.wire.messages.statements import RedundancyReport, Statement
from atoll.wire.messages.vertex import VertexBody

NOT_SHOWN = "nothing was shown in time"


@dataclass
class WantedUpdate:
    """An update that a twin must show to the local peer, maybe for two cases: a host may have two guests."""

    blob: Digest | None = None  # name of the exhibit; requested again while None
    tries: int = 0
    here: bool = False
    lacks: str = ""  # why the local peer no longer waits for it


@dataclass
class RedundancyTurn:
    """A pair that the local peer must compare."""

    case: RedundancyCase
    since: int  # head at the first request
    since_s: Seconds
    looking: bool = False
    done: bool = False

    @property
    def rows(self) -> tuple[Key, Key]:
        return (self.case.round, self.case.guest), (self.case.round, self.case.host)

    @property
    def waits(self) -> bool:
        """True while the authors may still show an update."""
        return not self.done and not self.looking


class RedundancyCheck(VerifierMachine):
    def __init__(self, context: VerifierContext) -> None:
        self.me, self.settings, self.history = context.me, context.settings, context.history
        self.pool = context.pool
        self.turns: dict[Key, RedundancyTurn] = {}
        self.wanted: dict[Key, WantedUpdate] = {}  # by round and author
        # own round → exhibit; None while it is built, or if it is lost
        self.shown: dict[int, Digest | None] = {}
        self.held: tuple[Digest, ...] = ()
        self.arriving = EvidenceDownloads("twins")

    @property
    def _cases(self) -> Mapping[Key, RedundancyCase]:
        return self._ledger.cases

    @property
    def _ledger(self) -> RedundancyLedger:
        return self.pool.recent().ledgers.get(RedundancyLedger)

    @property
    def _mine(self) -> list[RedundancyCase]:
        """Cases that the local peer was drawn for and has not compared."""
        undone = (c for c in self._cases.values() if self.me in c.referees and self.me not in c.said)
        return [c for c in undone if c.key not in self.turns or not self.turns[c.key].done]

    # ---- vertices ------------------------------------------------------------------------------------------

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """After a restart results of comparisons are lost, but duties as a referee remain."""
        return self._work(now)

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Emit what the vertex settled and drew, and start the work that it assigns."""
        effects: list[Effect] = []
        for verdict in self._ledger.settled:
            judged = TwinsJudged(
                peer=verdict.guest,
                host=verdict.host,
                of=verdict.round,
                opinion=verdict.word,
                strayed=verdict.strayed,
                hid=verdict.hid,
            )
            effects.append(self._fact(judged))
        for case in self._cases.values():
            if case.round != body.round - 1:
                continue
            found = TwinsFound(peer=case.guest, host=case.host, of=case.round, referees=case.referees)
            effects.append(self._fact(found))
            if self.me in case.peers and case.round not in self.shown:
                self.shown[case.round] = None
                effects.append(RunTask(f"twins/show/{case.round}", ShowUpdate(case.round)))
        return effects + self._work(now)

    def _work(self, now: Seconds) -> list[Effect]:
        """Start drawn comparisons, and give up those that are overdue."""
        cases, head = self._cases, self.history.head
        self.turns = {key: turn for key, turn in self.turns.items() if key in cases}
        self._forget()
        self.shown = {round: blob for round, blob in self.shown.items() if self._askers(round)}
        here = {m.peer for m in self.history.head_body.members if m.present}
        effects: list[Effect] = []
        for turn in self.turns.values():
            late = now - turn.since_s >= GIVE_UP_S or head - turn.case.round >= SCORE_OPEN - CLOSING
            if turn.waits and head - turn.since >= GIVE_UP and late and here.issuperset(turn.case.peers):
                for key in turn.rows:
                    row = self.wanted[key]
                    row.lacks = row.lacks or ("" if row.here else NOT_SHOWN)
                effects += self._look(turn)
        for case in sorted(self._mine, key=lambda case: case.priority):
            open = (turn for turn in self.turns.values() if not turn.done)
            busy = sum(turn.looking or here.issuperset(turn.case.peers) for turn in open) >= AT_ONCE
            if busy or case.key in self.turns or not here.issuperset(case.peers):
                continue
            turn = self.turns[case.key] = RedundancyTurn(case, head, now)
            for key in turn.rows:
                self.wanted.setdefault(key, WantedUpdate())
            effects += self._ask(turn)
        return [*self._hold(), *effects]

    def _forget(self) -> None:
        rows = {key for turn in self.turns.values() if not turn.done for key in turn.rows}
        self.wanted = {key: row for key, row in self.wanted.items() if key in rows}

    def _hold(self) -> list[Effect]:
        """Pin own exhibits, received exhibits, and the states that drawn rounds began with.

        The last two states stay as well: a case opens one round after its own.
        """
        head = self.history.head
        rounds = {head, head - 1, *(case.round - 1 for case in self._mine)}
        names = {body.state for round in rounds if (body := self.history.bodies.get(round)) is not None}
        names |= {blob for blob in self.shown.values() if blob is not None}
        names |= {row.blob for row in self.wanted.values() if row.blob is not None}
        needed = tuple(sorted(names))
        if needed == self.held:
            return []
        self.held = needed
        return [RunTask("twins/hold", PinBlobs(needed, "twins"))]

    # ---- showing -------------------------------------------------------------------------------------------

    def _askers(self, round: int) -> set[PeerId]:
        """Referees of the local update of this round."""
        mine = (case for case in self._cases.values() if case.round == round and self.me in case.peers)
        return {referee for case in mine for referee in case.referees}

    def serve(self, sender: PeerId, request: ExhibitRequest) -> list[Effect]:
        """Only drawn referees get the name of the exhibit."""
        if request.update is not True or sender not in self._askers(request.round):
            return []
        return [Send(sender, ExhibitResponse(request.round, self.shown.get(request.round), update=True))]

    def _laid_out(self, round: int, blob: Digest) -> list[Effect]:
        if not (askers := self._askers(round)):
            return []
        self.shown[round] = blob
        return [*self._hold(), *(Send(peer, ExhibitResponse(round, blob, update=True)) for peer in sorted(askers))]

    # ---- comparing -----------------------------------------------------------------------------------------

    def retransmit(self) -> list[Effect]:
        """Messages may be lost; sent with every heartbeat."""
        return [effect for turn in self.turns.values() if turn.waits for effect in self._ask(turn)]

    def _ask(self, turn: RedundancyTurn) -> list[Effect]:
        lacking = ((key, self.wanted[key]) for key in turn.rows)
        return [
            Send(peer, ExhibitRequest(round, update=True))
            for (round, peer), row in lacking
            if row.blob is None and not row.lacks
        ]

    def on_exhibit(
        self, sender: PeerId, response: ExhibitResponse, under_way: Mapping[Digest, BlobDownload], now: Seconds
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """A twin names its exhibit; for a blob that is already under way it is one more source."""
        row = self.wanted.get((response.round, sender)) if response.update is True else None
        if row is None or row.blob is not None or row.lacks or response.blob is None:
            return None, []
        most = self.settings.update_bytes + MIB
        fetch, effects = self.arriving.point(row, response.blob, sender, most, under_way, now)
        return fetch, [*self._hold(), *effects]

    def abandoned(self) -> list[Digest]:
        """Downloads that no open turn needs."""
        return self.arriving.given_up(row.blob for row in self.wanted.values())

    def on_download(self, fact: BlobFetched | FetchFailed) -> list[Effect]:
        if not self.arriving.ended(fact.blob):
            return []
        rows = [(key, row) for key, row in self.wanted.items() if row.blob == fact.blob and not row.here]
        effects: list[Effect] = []
        for _, row in rows:
            if isinstance(fact, BlobFetched):
                row.here = True
            elif tried(row):
                row.lacks = fact.why
        if isinstance(fact, FetchFailed):
            effects.append(self.arriving.drop(fact.blob))
        settled = {key for key, row in rows if row.here or row.lacks}
        for turn in self.turns.values():
            effects += self._look(turn) if turn.waits and settled.intersection(turn.rows) else []
        return effects

    def _look(self, turn: RedundancyTurn) -> list[Effect]:
        """Compare once neither update is awaited. A single update gets no report: its twin owes the other one."""
        guest, host = (self.wanted[key] for key in turn.rows)
        if not all(row.here or row.lacks for row in (guest, host)):
            return []
        if guest.lacks or host.lacks:
            apart = tuple(APART_MOST if row.lacks else 0 for row in (guest, host))
            return self._end(turn, (apart[0], apart[1]), guest.lacks or host.lacks)
        work = self._again(turn.case, guest, host)
        if work is None:
            return []
        turn.looking = True
        return [RunTask(f"twins/take/{turn.case.round}/{turn.case.guest}", work)]

    def _again(self, case: RedundancyCase, guest: WantedUpdate, host: WantedUpdate) -> ReplayBoth | None:
        """The twins' assignment, from vertices, equal at every referee; None if they are not in memory."""
        history = self.history
        parent, head = history.bodies.get(case.round - 1), history.ids.get(case.round - 1)
        if parent is None or head is None or guest.blob is None or host.blob is None:
            return None
        plan = plan_after(self.settings, head, parent)
        ground = ground_after(self.settings, plan, parent, self.pool.recent(), history.notary.run)
        shard, shards = plan.shard(case.host)
        rows = tuple(
            TwinUpdate(peer, blob, commit.root, min(commit.steps, plan.steps_of(peer)))
            for peer, blob, commit in zip(case.peers, (guest.blob, host.blob), case.commits, strict=True)
        )
        return ReplayBoth(
            round=case.round,
            before=parent.state,
            shard=shard,
            shards=shards,
            shares=ground.shares,
            rows=(rows[0], rows[1]),
            batch=plan.batch,
        )

    # ---- jobs ----------------------------------------------------------------------------------------------

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """A referee with a failed trainer sends no report: other referees were drawn."""
        match event:
            case TaskDone(job, ExhibitBuilt(blob)) if job.startswith("twins/show/"):
                return self._laid_out(int(job.rsplit("/", 1)[1]), blob)
            case TaskDone(job, UpdateDistances(apart, why)) if (turn := self._turn_of(job)) is not None:
                return [*self._end(turn, apart, why), *self._work(now)]
            case TaskFailed(job, why) if job.startswith("twins/show/"):
                return [self._fact(TwinsMissed(peer=self.me, of=int(job.rsplit("/", 1)[1]), why=why))]
            case TaskFailed(job, why) if (turn := self._turn_of(job)) is not None:
                turn.looking, turn.done = False, True
                missed = TwinsMissed(peer=turn.case.guest, of=turn.case.round, why=why)
                return [self._fact(missed), *self._work(now)]
            case _:
                return []

    def _turn_of(self, job: str) -> RedundancyTurn | None:
        if not job.startswith("twins/take/"):
            return None
        _, _, round, peer = job.split("/")
        return self.turns.get((int(round), PeerId(peer)))

    def _end(self, turn: RedundancyTurn, apart: tuple[int, int], why: str) -> list[Effect]:
        turn.looking, turn.done = False, True
        return [self._fact(TwinsCompared(peer=turn.case.guest, of=turn.case.round, apart=apart, why=why))]

    def report_of(self, fact: Fact) -> Statement | None:
        return RedundancyReport(fact.of, fact.peer, fact.apart) if isinstance(fact, TwinsCompared) else None

    def _fact(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.history.head))


def _ledger_of(settings: RunSettings) -> RedundancyLedger | None:
    share = settings.twinned_share
    return RedundancyLedger(share, settings.round.quorum) if share else None


REDUNDANT_TRAINING = Verifier(
    "twins", _ledger_of, lambda context: RedundancyCheck(context) if context.settings.twinned_share else None
)
