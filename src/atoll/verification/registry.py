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
from atoll.base.machine import Ask, Done, Effect, Failed, Report
from atoll.peer.events import Accused, AuditEnded, Looked, ScoreTaken, TwinsCompared
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.settings import RunSettings
from atoll.protocol.allreduce.buffers import Made
from atoll.protocol.history.chain import History
from atoll.protocol.transfer.download import Fetch, Fetched, FetchFailed
from atoll.protocol.transfer.tasks import DropBlob
from atoll.verification.evidence_store import ROW, KeptExhibits
from atoll.verification.loss_scoring.machine import Scoring
from atoll.verification.malformed_updates.machine import Unreadables
from atoll.verification.redundant_training.machine import Twinning
from atoll.verification.replay_audit.machine import Audits
from atoll.verification.state_validation.machine import Validators
from atoll.wire.messages.audits import ExhibitIs, Unreadable, WantExhibit
from atoll.wire.messages.statements import Audited, Scored, Signed, Statement, Twinned, Validated
from atoll.wire.messages.vertex import Body


class Inspectors:
    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.audits: Audits | None = None
        self.scoring: Scoring | None = None
        self.twinning: Twinning | None = None
        self.validators: Validators | None = None
        self.unreadables: Unreadables | None = None
        self.kept = KeptExhibits()

    def appoint(self, settings: RunSettings, history: History, pool: ReportPool) -> None:
        """Genesis is known."""
        if pool.docket.looks:
            self.audits = Audits(self.me, settings, history, pool, self.kept)
        if settings.scored_share:
            self.scoring = Scoring(self.me, settings, history, pool)
        if settings.twinned_share:
            self.twinning = Twinning(self.me, settings, history, pool)
        if settings.validated is not None:
            self.validators = Validators(self.me, history, pool)
        if settings.round.quorum == "two-thirds":
            self.unreadables = Unreadables(self.me, settings, history, pool, self.kept)

    # ---- what they are told --------------------------------------------------------------------------------

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """After a restart; `kept`: what a life before left here."""
        effects = self.kept.start(kept.get(ROW, b""))
        effects += self.audits.resume(kept, now) if self.audits is not None else []
        effects += self.validators.resume() if self.validators is not None else []
        effects += self.twinning.resume(now) if self.twinning is not None else []
        return effects + (self.scoring.resume(now) if self.scoring is not None else [])

    def grew(self, body: Body, now: Seconds) -> list[Effect]:
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
        body: Body,
        made: Mapping[Digest, Made],
        seconded: Mapping[int, Sequence[Signed]],
        made_again: Collection[int],
    ) -> list[Effect]:
        """My round is closed: these answers of mine, with their rows, may be asked for; what others signed of
        answers may be held against them; and of parts that I made again nobody need show me anything."""
        if self.audits is None:
            return []
        self.audits.remember(body.round, seconded, made_again)
        return self.audits.lay_open(body, made)

    def heard(self, by: PeerId, said: Audited, now: Seconds) -> list[Effect]:
        """A member's word that the next vertex may hold."""
        return self.audits.heard(by, said, now) if self.audits is not None else []

    def shown_unreadable(self, sender: PeerId, told: Unreadable) -> list[Effect]:
        """Somebody says that a row of somebody else's cannot be read."""
        return self.unreadables.hear(sender, told) if self.unreadables is not None else []

    def ask_again(self) -> list[Effect]:
        """With every heartbeat: words may be lost."""
        effects = self.audits.ask_again() if self.audits is not None else []
        effects += self.twinning.ask_again() if self.twinning is not None else []
        return effects + (self.scoring.ask_again() if self.scoring is not None else [])

    def done(self, event: Done | Failed, now: Seconds) -> list[Effect]:
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

    def give(self, sender: PeerId, wish: WantExhibit) -> list[Effect]:
        """What others were drawn to look at lies with me."""
        room = self._room_of(wish)
        return room.give(sender, wish) if room is not None else []

    def point(
        self, sender: PeerId, told: ExhibitIs, under_way: Mapping[Digest, Fetch], now: Seconds
    ) -> tuple[Fetch | None, list[Effect]]:
        """What I was drawn to look at lies with the sender: a download that begins, if it is not under way."""
        room = self._room_of(told)
        return room.point(sender, told, under_way, now) if room is not None else (None, [])

    def _room_of(self, word: WantExhibit | ExhibitIs) -> Audits | Scoring | Twinning | None:
        return (self.scoring or self.twinning) if word.update is True else self.audits

    def fetched(self, fact: Fetched | FetchFailed) -> list[Effect]:
        effects = self.audits.fetched(fact) if self.audits is not None else []
        effects += self.twinning.fetched(fact) if self.twinning is not None else []
        return effects + (self.scoring.fetched(fact) if self.scoring is not None else [])

    def given_up(self) -> dict[Digest, Ask]:
        """Downloads that they do not wait for any more, each with the job that drops what has come of it."""
        over = {blob: "audit" for blob in self.audits.given_up()} if self.audits is not None else {}
        over |= {blob: "score" for blob in self.scoring.given_up()} if self.scoring is not None else {}
        over |= {blob: "twins" for blob in self.twinning.given_up()} if self.twinning is not None else {}
        return {blob: Ask(f"{room}/drop/{blob.hex()}", DropBlob(blob)) for blob, room in over.items()}

    # ---- what they say -------------------------------------------------------------------------------------

    def word_of(self, effect: Effect) -> Statement | None:
        """What the members are to be told, if this effect of theirs is something that they found."""
        if not isinstance(effect, Report):
            return None
        match effect.fact:
            case Accused(statement=statement):
                return statement
            case AuditEnded(of=of, peer=peer, finding=finding, opening=None, exhibit=exhibit):
                return Audited(of, peer, finding, exhibit=exhibit or UNSET)
            case AuditEnded(of=of, peer=peer, finding=finding, opening=int(number), exhibit=exhibit):
                said = Audited(of, peer, finding, number, exhibit or UNSET)
                known = self.audits is not None and self.audits.docket.why_not(self.me, said) is None
                return said if known else None
            case ScoreTaken(of=of, peer=peer, falls=falls):
                return Scored(of, peer, falls)
            case TwinsCompared(of=of, peer=peer, apart=apart):
                return Twinned(of, peer, apart)
            case Looked(of=of, state=state, losses=losses, right=right):
                return Validated(of, state, losses, right or UNSET)
            case _:
                return None
