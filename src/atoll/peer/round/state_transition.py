"""State transition of a round: an advance by combined parts, a rollback to an earlier state, or no change.

Invariants:
- Each state is made once, by one job.
Not responsible for: fetching what a job needs, comparing the result; the caller does both.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.base.ids import Digest
from atoll.base.machine import Effect, Payload
from atoll.peer.round.candidate import StateStep
from atoll.peer.round.context import RoundContext
from atoll.peer.round.state_jobs import StateAdvanceJobs
from atoll.peer.round.state_rollback import RollbackJobs
from atoll.wire.messages.statements import RollbackOrder


class NextStateTasks:
    """`held`: combined parts by digest, including those of any requested step."""

    def __init__(self, ground: RoundContext, held: Mapping[Digest, Payload]) -> None:
        self.before = ground.parent.state
        self.advances = StateAdvanceJobs(ground, held)
        self.back = RollbackJobs(ground.plan, self.before)

    def of(self, step: StateStep, back: RollbackOrder | None) -> Digest | None:
        """The state that a body with this step or rollback leaves behind; None if not known (yet)."""
        if back is not None:
            return self.back.state(step, back)
        return self.advances.state(step) if step.parts else self.before

    def ask(self, step: StateStep, back: RollbackOrder | None) -> list[Effect]:
        return self.advances.ask(step) if back is None else self.back.ask(step, back)

    def lacks(self, step: StateStep, back: RollbackOrder) -> bool:
        """True if the earlier state has to be fetched first."""
        return self.back.lacks(step, back)

    def begun(self, step: StateStep | None) -> bool:
        return self.advances.begun(step)

    @property
    def busy(self) -> bool:
        """True while a state is being made."""
        return self.advances.busy or self.goes_back

    @property
    def goes_back(self) -> bool:
        """True while a rollback state is being made."""
        return bool(self.back.asked)

    def done(self, job: str, state: Digest) -> bool:
        """Store a finished job's state; True if the job belongs here."""
        return self.advances.done(job, state) or self.back.done(job, state)

    def failed(self, job: str) -> Digest | None:
        """The earlier state that is missing here; None if the job is no rollback."""
        return self.back.failed(job)

    def found(self, earlier: Digest) -> bool:
        """Note that the earlier state is stored now; True if a job waited for it."""
        return self.back.found(earlier)

    def keep_only(self, needed: set[Digest]) -> None:
        """Forget steps that use none of these parts."""
        self.advances.keep_only(needed)
