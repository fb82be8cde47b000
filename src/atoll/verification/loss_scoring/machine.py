"""Loss scoring, one peer's side: it shows its drawn updates and scores those that it was drawn for.

    every vertex     draws updates and their scorers (`verification/loss_scoring/policy.py`)
    author           `ShowUpdate` ─► a blob ─► its name to each drawn scorer that requests it
    scorer           `ExhibitRequest` ─► `ExhibitResponse` ─► download ─► `ScoreUpdate` ─► signed `ScoreReport`

The messages are those of audits, with `update` set. A round waits for none of this. A scorer handles two updates
at a time; all scorers take them in one order, so slow scorers score the same few.

Invariants:
- Memory is bounded by the open cases, a blob by the size of an update in fp32.
Not responsible for: judging, acting on a score; vertices do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.base.draw import draw_bytes
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, Seconds
from atoll.base.limits import MIB, SCORE_OPEN
from atoll.base.machine import Effect, Emit, Fact, RunTask, Send, TaskDone, TaskFailed
from atoll.peer.events import ScoreDrawn, ScoreMissed, ScoreTaken, UpdateScored
from atoll.peer.governance.settings_change import plan_after
from atoll.peer.round.context import ground_after
from atoll.peer.tasks import ExhibitBuilt, PinBlobs, ScoreResult, ScoreUpdate, ShowUpdate
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed
from atoll.verification.evidence_download import EvidenceDownloads, tried
from atoll.verification.loss_scoring.policy import Falls, Key, ScoreLedger, ScoringCase
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse
from atoll.wire.messages.statements import ScoreReport, Statement
from atoll.wire.messages.vertex import VertexBody

AT_ONCE = 2  # updates: one is downloaded while another is scored
GIVE_UP = 6  # rounds without an exhibit after which a scorer gives up …
GIVE_UP_S = 10.0  # … and seconds, since rounds may take milliseconds and links may stall …
CLOSING = 2  # … except in the last rounds in which it may still report


@dataclass
class ScoringTurn:
    """An update that the local peer must score."""

    case: ScoringCase
    since: int  # head at the first request
    since_s: Seconds
    blob: Digest | None = None  # name of the exhibit; requested again while None
    tries: int = 0
    looking: bool = False
    done: bool = False

    @property
    def waits(self) -> bool:
        """The author has not shown the update yet."""
        return not self.done and not self.looking


class LossScoring(VerifierMachine):
    def __init__(self, context: VerifierContext) -> None:
        self.me, self.settings, self.history = context.me, context.settings, context.history
        self.pool = context.pool
        self.turns: dict[Key, ScoringTurn] = {}
        # own round → exhibit; None while it is built, or if it is lost
        self.shown: dict[int, Digest | None] = {}
        self.held: tuple[Digest, ...] = ()
        self.arriving = EvidenceDownloads("score")

    @property
    def _ledger(self) -> ScoreLedger:
        return self.pool.recent().ledgers.get(ScoreLedger)

    # ---- vertices ------------------------------------------------------------------------------------------

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """After a restart own updates are lost, but duties as a scorer remain."""
        return self._work(now)

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Emit what the vertex settled and drew, and start the work that it assigns."""
        effects: list[Effect] = []
        scores = self._ledger
        for score in scores.settled:
            fact = UpdateScored(peer=score.peer, of=score.round, opinion=score.opinion, falls=score.falls)
            effects.append(self._fact(fact))
        for case in scores.cases.values():
            if case.round != body.round:
                continue
            effects.append(self._fact(ScoreDrawn(peer=case.peer, scorers=case.scorers)))
            if case.peer == self.me:
                self.shown[case.round] = None
                effects.append(RunTask(f"score/show/{case.round}", ShowUpdate(case.round)))
        return effects + self._work(now)

    def _work(self, now: Seconds) -> list[Effect]:
        """Start scoring drawn updates, and give up those that are overdue."""
        cases, head = self._ledger.cases, self.history.head
        self.turns = {key: turn for key, turn in self.turns.items() if key in cases}
        self.shown = {round: blob for round, blob in self.shown.items() if (round, self.me) in cases}
        here = {m.peer for m in self.history.head_body.members if m.present}
        effects: list[Effect] = []
        for turn in self.turns.values():
            late = now - turn.since_s >= GIVE_UP_S or head - turn.case.round >= SCORE_OPEN - CLOSING
            if turn.waits and head - turn.since >= GIVE_UP and late and turn.case.peer in here:
                effects += self._end(turn, (), "nothing was shown in time")
        mine = [c for c in cases.values() if self.me in c.scorers and self.me not in c.said and c.peer in here]
        for case in sorted(mine, key=lambda case: case.priority):
            if sum(not turn.done for turn in self.turns.values()) < AT_ONCE and case.key not in self.turns:
                self.turns[case.key] = ScoringTurn(case, head, now)
                effects += self._ask(self.turns[case.key])
        return [*self._hold(), *effects]

    def _hold(self) -> list[Effect]:
        """Pin own exhibits, received exhibits, and the states that scored rounds began with."""
        open = [turn for turn in self.turns.values() if not turn.done]
        begins = (self.history.bodies.get(turn.case.round - 1) for turn in open)
        names = {body.state for body in begins if body is not None}
        names |= {blob for blob in self.shown.values() if blob is not None}
        names |= {turn.blob for turn in open if turn.blob is not None}
        needed = tuple(sorted(names))
        if needed == self.held:
            return []
        self.held = needed
        return [RunTask("score/hold", PinBlobs(needed, "scores"))]

    # ---- showing -------------------------------------------------------------------------------------------

    def serve(self, sender: PeerId, request: ExhibitRequest) -> list[Effect]:
        """Only drawn scorers get the name of the exhibit."""
        case = self._ledger.cases.get((request.round, self.me))
        if request.update is not True or case is None or sender not in case.scorers:
            return []
        return [Send(sender, ExhibitResponse(request.round, self.shown.get(request.round), update=True))]

    def _laid_out(self, round: int, blob: Digest) -> list[Effect]:
        case = self._ledger.cases.get((round, self.me))
        if case is None:
            return []
        self.shown[round] = blob
        return [*self._hold(), *(Send(peer, ExhibitResponse(round, blob, update=True)) for peer in case.scorers)]

    # ---- scoring -------------------------------------------------------------------------------------------

    def retransmit(self) -> list[Effect]:
        """Messages may be lost."""
        return [e for turn in self.turns.values() if turn.waits for e in self._ask(turn)]

    def _ask(self, turn: ScoringTurn) -> list[Effect]:
        return [Send(turn.case.peer, ExhibitRequest(turn.case.round, update=True))] if turn.blob is None else []

    def on_exhibit(
        self, sender: PeerId, response: ExhibitResponse, under_way: Mapping[Digest, BlobDownload], now: Seconds
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """The author names its exhibit."""
        turn = self.turns.get((response.round, sender)) if response.update is True else None
        if turn is None or turn.blob is not None or turn.done or response.blob is None:
            return None, []
        most = self.settings.update_bytes + MIB
        fetch, effects = self.arriving.point(turn, response.blob, sender, most, under_way, now)
        return fetch, [*self._hold(), *effects]

    def abandoned(self) -> list[Digest]:
        """Downloads that no open turn needs."""
        return self.arriving.given_up(turn.blob for turn in self.turns.values() if not turn.done)

    def on_download(self, fact: BlobFetched | FetchFailed) -> list[Effect]:
        if not self.arriving.ended(fact.blob):
            return []
        turn = next((turn for turn in self.turns.values() if turn.waits and turn.blob == fact.blob), None)
        if isinstance(fact, FetchFailed):
            no_more = turn is not None and tried(turn)
            ended = self._end(turn, (), fact.why) if turn is not None and no_more else []
            return [self.arriving.drop(fact.blob), *ended]
        work = None if turn is None else self._look(turn.case, fact.blob)
        if turn is None or work is None:
            return []
        turn.looking = True
        return [RunTask(f"score/take/{turn.case.round}/{turn.case.peer}", work)]

    def _look(self, case: ScoringCase, blob: Digest) -> ScoreUpdate | None:
        """The author's assignment, from vertices, equal at every scorer; None if they are not in memory."""
        history = self.history
        parent, head = history.bodies.get(case.round - 1), history.ids.get(case.round - 1)
        if parent is None or head is None:
            return None
        plan = plan_after(self.settings, head, parent)
        ground = ground_after(self.settings, plan, parent, self.pool.recent(), history.notary.run)
        shard, shards = plan.shard(case.peer)
        return ScoreUpdate(
            blob=blob,
            round=case.round,
            peer=case.peer,
            before=parent.state,
            shard=shard,
            shards=shards,
            shares=ground.shares,
            steps=min(case.commit.steps, plan.steps_of(case.peer)),
            steps_max=plan.steps,
            root=case.commit.root,
            drawn=Digest(draw_bytes(case.vertex, f"samples of {case.peer}", DIGEST_BYTES)),
            batch=plan.batch,
        )

    # ---- jobs ----------------------------------------------------------------------------------------------

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """A scorer with a failed trainer sends no report: other scorers were drawn."""
        match event:
            case TaskDone(job, ExhibitBuilt(blob)) if job.startswith("score/show/"):
                return self._laid_out(int(job.rsplit("/", 1)[1]), blob)
            case TaskDone(job, ScoreResult(falls, why)) if (turn := self._turn_of(job)) is not None:
                return [*self._end(turn, falls, why), *self._work(now)]
            case TaskFailed(job, why) if job.startswith("score/show/"):
                return [self._fact(ScoreMissed(peer=self.me, of=int(job.rsplit("/", 1)[1]), why=why))]
            case TaskFailed(job, why) if (turn := self._turn_of(job)) is not None:
                turn.looking, turn.done = False, True
                missed = ScoreMissed(peer=turn.case.peer, of=turn.case.round, why=why)
                return [self._fact(missed), *self._work(now)]
            case _:
                return []

    def _turn_of(self, job: str) -> ScoringTurn | None:
        if not job.startswith("score/take/"):
            return None
        _, _, round, peer = job.split("/")
        return self.turns.get((int(round), PeerId(peer)))

    def _end(self, turn: ScoringTurn, falls: Falls, why: str) -> list[Effect]:
        turn.looking, turn.done = False, True
        case = turn.case
        return [self._fact(ScoreTaken(peer=case.peer, of=case.round, falls=falls, why=why))]

    def report_of(self, fact: Fact) -> Statement | None:
        return ScoreReport(fact.of, fact.peer, fact.falls) if isinstance(fact, ScoreTaken) else None

    def _fact(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.history.head))


LOSS_SCORING = Verifier(
    "score",
    lambda settings: ScoreLedger(settings.scored_share, settings.round.quorum) if settings.scored_share else None,
    lambda context: LossScoring(context) if context.settings.scored_share else None,
)
