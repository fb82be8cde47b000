"""What the state becomes with the vertex of one round: made of combined parts or of an earlier state that the run
goes back to; where nothing was averaged it stays.

Promises: whatever bodies ask for is made once, by one job. Never fetches what a job needs and never judges: whoever
asks has the parts, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.base.ids import Digest
from atoll.base.machine import Effect, Payload
from atoll.peer.round.candidate import StateStep
from atoll.peer.round.context import RoundContext
from atoll.peer.round.state_jobs import AdvanceJobs
from atoll.peer.round.state_rollback import RollbackJobs
from atoll.wire.messages.statements import RollbackOrder


class StateTransition:
    """`held`: combined parts by digest, those of any step that is asked for among them."""

    def __init__(self, ground: RoundContext, held: Mapping[Digest, Payload]) -> None:
        self.before = ground.parent.state
        self.advances = AdvanceJobs(ground, held)
        self.back = RollbackJobs(ground.plan, self.before)

    def of(self, step: StateStep, back: RollbackOrder | None) -> Digest | None:
        """What a body leaves behind that makes this step or goes back; None if that is not known (yet)."""
        if back is not None:
            return self.back.state(step, back)
        return self.advances.state(step) if step.parts else self.before

    def ask(self, step: StateStep, back: RollbackOrder | None) -> list[Effect]:
        return self.advances.ask(step) if back is None else self.back.ask(step, back)

    def lacks(self, step: StateStep, back: RollbackOrder) -> bool:
        """True if it cannot be known before the earlier state was fetched."""
        return self.back.lacks(step, back)

    def begun(self, step: StateStep | None) -> bool:
        return self.advances.begun(step)

    @property
    def busy(self) -> bool:
        """One is made just now."""
        return self.advances.busy or self.goes_back

    @property
    def goes_back(self) -> bool:
        """One is made out of an earlier one just now."""
        return bool(self.back.asked)

    def done(self, job: str, state: Digest) -> bool:
        """True if this was a job of mine."""
        return self.advances.done(job, state) or self.back.done(job, state)

    def failed(self, job: str) -> Digest | None:
        """The earlier state that is not here; None if this was no way back."""
        return self.back.failed(job)

    def found(self, earlier: Digest) -> bool:
        """It is here now: True if anybody waited for it."""
        return self.back.found(earlier)

    def keep_only(self, needed: set[Digest]) -> None:
        """Forget what is made of none of these parts."""
        self.advances.keep_only(needed)
