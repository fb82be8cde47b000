"""Those of a peer that look at what others did: audits and openings, scores of updates, twins, agreed states, and
rows that cannot be read.

Genesis says which there are, the last ones wherever members may lie; elsewhere this room is empty and silent. Each
has jobs of its own, named `audit/`, `score/`, `twins/`, `validate/` and `unreadable/`.
Promises: whatever one of them finds becomes a word for the members here and nowhere else (`word_of`); only a vertex
that holds such words has consequences. Never judges, never signs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import UNSET

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Emit, RunTask, TaskDone, TaskFailed
from atoll.peer.events import AuditEnded, MemberAccused, ScoreTaken, StateEvaluated, TwinsCompared
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.settings import RunSettings
from atoll.protocol.allreduce.buffers import ComputedResult
from atoll.protocol.history.chain import VertexChain
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed
from atoll.protocol.transfer.tasks import DropBlob
from atoll.verification.evidence_store import ROW, EvidenceStore
from atoll.verification.loss_scoring.machine import LossScoring
from atoll.verification.malformed_updates.machine import MalformedUpdates
from atoll.verification.redundant_training.machine import RedundancyCheck
from atoll.verification.replay_audit.machine import ReplayAudits
from atoll.verification.state_validation.machine import StateValidators
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse, MalformedRowShown
from atoll.wire.messages.statements import (
    AuditReport,
    RedundancyReport,
    ScoreReport,
    SignedStatement,
    Statement,
    ValidationReport,
)
from atoll.wire.messages.vertex import VertexBody


class VerifierRegistry:
    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.audits: ReplayAudits | None = None
        self.scoring: LossScoring | None = None
        self.twinning: RedundancyCheck | None = None
        self.validators: StateValidators | None = None
        self.unreadables: MalformedUpdates | None = None
        self.kept = EvidenceStore()

    def appoint(self, settings: RunSettings, history: VertexChain, pool: ReportPool) -> None:
        """Genesis is known."""
        if pool.docket.looks:
            self.audits = ReplayAudits(self.me, settings, history, pool, self.kept)
        if settings.scored_share:
            self.scoring = LossScoring(self.me, settings, history, pool)
        if settings.twinned_share:
            self.twinning = RedundancyCheck(self.me, settings, history, pool)
        if settings.validated is not None:
            self.validators = StateValidators(self.me, history, pool)
        if settings.round.quorum == "two-thirds":
            self.unreadables = MalformedUpdates(self.me, settings, history, pool, self.kept)

    # ---- what they are told --------------------------------------------------------------------------------

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """After a restart; `kept`: what a life before left here."""
        effects = self.kept.start(kept.get(ROW, b""))
        effects += self.audits.resume(kept, now) if self.audits is not None else []
        effects += self.validators.resume() if self.validators is not None else []
        effects += self.twinning.resume(now) if self.twinning is not None else []
        return effects + (self.scoring.resume(now) if self.scoring is not None else [])

    def grew(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """The history has one vertex more."""
        effects = self.audits.grew(body, now) if self.audits is not None else []
        effects += self.validators.grew(body) if self.validators is not None else []
        effects += self.unreadables.grew() if self.unreadables is not None else []
        effects += self.twinning.grew(body, now) if self.twinning is not None else []
        return effects + (self.scoring.grew(body, now) if self.scoring is not None else [])

    def holds(self, round: int) -> list[Effect]:
        """The agreed state of this round is here."""
        return self.validators.holds(round) if self.validators is not None else []

    def closed(
        self,
        body: VertexBody,
        made: Mapping[Digest, ComputedResult],
        seconded: Mapping[int, Sequence[SignedStatement]],
        made_again: Collection[int],
    ) -> list[Effect]:
        """My round is closed: these answers of mine, with their rows, may be asked for; what others signed of
        answers may be held against them; and of parts that I made again nobody need show me anything."""
        if self.audits is None:
            return []
        self.audits.remember(body.round, seconded, made_again)
        return self.audits.lay_open(body, made)

    def heard(self, by: PeerId, said: AuditReport, now: Seconds) -> list[Effect]:
        """A member's word that the next vertex may hold."""
        return self.audits.heard(by, said, now) if self.audits is not None else []

    def shown_unreadable(self, sender: PeerId, told: MalformedRowShown) -> list[Effect]:
        """Somebody says that a row of somebody else's cannot be read."""
        return self.unreadables.hear(sender, told) if self.unreadables is not None else []

    def ask_again(self) -> list[Effect]:
        """With every heartbeat: words may be lost."""
        effects = self.audits.ask_again() if self.audits is not None else []
        effects += self.twinning.ask_again() if self.twinning is not None else []
        return effects + (self.scoring.ask_again() if self.scoring is not None else [])

    def done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """One of their jobs."""
        if event.job.startswith("audit/") and self.audits is not None:
            return self.audits.done(event)
        if event.job.startswith("score/") and self.scoring is not None:
            return self.scoring.done(event, now)
        if event.job.startswith("twins/") and self.twinning is not None:
            return self.twinning.done(event, now)
        if event.job.startswith("unreadable/") and self.unreadables is not None:
            return self.unreadables.done(event)
        return self.validators.done(event) if self.validators is not None else []

    # ---- what is laid out for them -------------------------------------------------------------------------

    def give(self, sender: PeerId, wish: ExhibitRequest) -> list[Effect]:
        """What others were drawn to look at lies with me."""
        room = self._room_of(wish)
        return room.give(sender, wish) if room is not None else []

    def point(
        self, sender: PeerId, told: ExhibitResponse, under_way: Mapping[Digest, BlobDownload], now: Seconds
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """What I was drawn to look at lies with the sender: a download that begins, if it is not under way."""
        room = self._room_of(told)
        return room.point(sender, told, under_way, now) if room is not None else (None, [])

    def _room_of(
        self, word: ExhibitRequest | ExhibitResponse
    ) -> ReplayAudits | LossScoring | RedundancyCheck | None:
        return (self.scoring or self.twinning) if word.update is True else self.audits

    def fetched(self, fact: BlobFetched | FetchFailed) -> list[Effect]:
        effects = self.audits.fetched(fact) if self.audits is not None else []
        effects += self.twinning.fetched(fact) if self.twinning is not None else []
        return effects + (self.scoring.fetched(fact) if self.scoring is not None else [])

    def given_up(self) -> dict[Digest, RunTask]:
        """Downloads that they do not wait for any more, each with the job that drops what has come of it."""
        over = {blob: "audit" for blob in self.audits.given_up()} if self.audits is not None else {}
        over |= {blob: "score" for blob in self.scoring.given_up()} if self.scoring is not None else {}
        over |= {blob: "twins" for blob in self.twinning.given_up()} if self.twinning is not None else {}
        return {blob: RunTask(f"{room}/drop/{blob.hex()}", DropBlob(blob)) for blob, room in over.items()}

    # ---- what they say -------------------------------------------------------------------------------------

    def word_of(self, effect: Effect) -> Statement | None:
        """What the members are to be told, if this effect of theirs is something that they found."""
        if not isinstance(effect, Emit):
            return None
        match effect.fact:
            case MemberAccused(statement=statement):
                return statement
            case AuditEnded(of=of, peer=peer, finding=finding, opening=None, exhibit=exhibit):
                return AuditReport(of, peer, finding, exhibit=exhibit or UNSET)
            case AuditEnded(of=of, peer=peer, finding=finding, opening=int(number), exhibit=exhibit):
                said = AuditReport(of, peer, finding, number, exhibit or UNSET)
                known = self.audits is not None and self.audits.docket.why_not(self.me, said) is None
                return said if known else None
            case ScoreTaken(of=of, peer=peer, falls=falls):
                return ScoreReport(of, peer, falls)
            case TwinsCompared(of=of, peer=peer, apart=apart):
                return RedundancyReport(of, peer, apart)
            case StateEvaluated(of=of, state=state, losses=losses, right=right):
                return ValidationReport(of, state, losses, right or UNSET)
            case _:
                return None
