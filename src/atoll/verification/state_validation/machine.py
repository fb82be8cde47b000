"""State validation, one peer's side: it evaluates the states that it was drawn for and reports the losses.

    every vertex     draws validators of its state, and settles verdicts (`verification/state_validation/policy.py`)
    validator        `MeasureValidationLoss` ─► losses ─► a signed `HeldOutLossReport` for a later vertex

A validator evaluates one state at a time; if it is slower than the rounds, the newest. A round waits for none of
this. States that the run may roll back to stay on disk.
Not responsible for: verdicts, rollbacks; vertices decide these.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, Seconds
from atoll.base.limits import VALIDATION_OPEN
from atoll.base.machine import Effect, Emit, Fact, RunTask, TaskDone, TaskFailed
from atoll.peer.events import BadStateRolledBack, StateValidationDecided, ValidationLossReported
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import MeasureValidationLoss, PinBlobs, ValidationLosses
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.verification.state_validation.policy import (
    Opinion,
    ValidationCandidate,
    ValidationLedger,
    fixed_point,
    fixed_share,
)
from atoll.verification.state_validation.statistics import refusal_in
from atoll.wire.messages.statements import BaseStatement, HeldOutLossReport
from atoll.wire.messages.vertex import VertexBody


class StateValidationMachine(VerifierMachine):
    def __init__(self, context: VerifierContext) -> None:
        self.me, self.history, self.pool = context.me, context.history, context.pool
        self.looking: ValidationCandidate | None = None  # the state under evaluation
        self.at = self.seen = -2  # newest rounds: state held here, evaluation tried
        self.told: dict[int, Opinion] = {}  # round → opinion last emitted
        self.held: tuple[Digest, ...] = ()

    @property
    def _ledger(self) -> ValidationLedger:
        return self.pool.recent().ledgers.get(ValidationLedger)

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """The process before has emitted the verdicts of known vertices."""
        self._news()
        return self._hold()

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Emit new verdicts and a rollback, and pin the states needed now."""
        return [*self._news(), *self._went_back(body), *self._hold()]

    def on_state(self, round: int) -> list[Effect]:
        """Earlier states that are not removed are here, too."""
        self.at = round
        return self._look()

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        candidate = self.looking
        if candidate is None or event.job != _job(candidate):
            return []
        self.looking = None
        told: list[Effect] = []
        if isinstance(event, TaskDone) and isinstance(event.result, ValidationLosses):
            losses, right = (
                tuple(map(fixed_point, event.result.losses)),
                tuple(map(fixed_share, event.result.right)),
            )
            looked = ValidationLossReported(of=candidate.round, state=candidate.state, losses=losses, right=right)
            told.append(self._fact(looked))
        return told + self._look()

    def _look(self) -> list[Effect]:
        """Evaluate the newest state that the local peer was drawn for; one that fails is skipped."""
        if self.looking is not None:
            return []
        validations = self._ledger
        mine = (c for c in validations.candidates.values() if self.me in c.validators and self.me not in c.said)
        late = validations.head - VALIDATION_OPEN
        open = [c for c in mine if max(self.seen, late) < c.round <= self.at]
        if not open:
            return []
        self.looking = open[-1]
        self.seen = self.looking.round
        return [RunTask(_job(self.looking), MeasureValidationLoss(self.looking.round, self.looking.state))]

    def _hold(self) -> list[Effect]:
        needed = self._ledger.needed_states()
        if needed == self.held:
            return []
        self.held = needed
        return [RunTask("validate/hold", PinBlobs(needed, "validation"))]

    def _news(self) -> list[Effect]:
        """Verdicts that hold since this head. A verdict that changes with the bound is emitted again."""
        effects: list[Effect] = []
        candidates = self._ledger.candidates
        self.told = {round: opinion for round, opinion in self.told.items() if round in candidates}
        for candidate in candidates.values():
            opinion, values = candidate.opinion, candidate.values
            if opinion == "open" or values is None or self.told.get(candidate.round) == opinion:
                continue
            self.told[candidate.round] = opinion
            fact = StateValidationDecided(
                of=candidate.round, opinion=opinion, values=values, bounds=candidate.bounds
            )
            effects.append(self._fact(replace(fact, accuracy=candidate.accuracy)))
        return effects

    def _went_back(self, body: VertexBody) -> list[Effect]:
        found = refusal_in(body, self.history.bodies.values())
        if found is None:
            return []
        back = BadStateRolledBack(back_to=found.back_to, refused=found.refused, contributors=found.contributors)
        return [self._fact(back)]

    def report_of(self, fact: Fact) -> BaseStatement | None:
        if not isinstance(fact, ValidationLossReported):
            return None
        return HeldOutLossReport(fact.of, fact.state, fact.losses, fact.right or UNSET)

    def _fact(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.history.head))


def _ledger_of(settings: RunSettings) -> ValidationLedger | None:
    rule = settings.validated
    return ValidationLedger(rule, settings.round.quorum) if rule is not None else None


STATE_VALIDATION = Verifier(
    "validate",
    _ledger_of,
    lambda context: StateValidationMachine(context) if context.settings.validated is not None else None,
)


def _job(candidate: ValidationCandidate) -> str:
    return f"validate/{candidate.round}"
