"""What the state of one round becomes where a body goes back to an earlier one, as far as that one is here.

Each such state is made once, by a job, from the earlier state and the place in the data that this round reached.
Remembers what is under way and what this disk lacks. Never fetches and never judges: who may send the run back is
said by the body, and the peer looks for what is lacking.
"""

from __future__ import annotations

from atoll.base.ids import Digest
from atoll.base.machine import Effect, RunTask
from atoll.peer.round.candidate import StateStep
from atoll.peer.tasks import RollbackState
from atoll.policy.plan import RoundPlan
from atoll.wire.messages.statements import RollbackOrder


class RollbackJobs:
    def __init__(self, plan: RoundPlan, before: Digest) -> None:
        self.plan, self.before = plan, before
        self.made: dict[str, Digest] = {}  # job -> the state it made
        self.asked: dict[str, Digest] = {}  # job under way -> the earlier state
        self.lacking: dict[str, Digest] = {}  # job that failed -> the earlier state
        self.tried_again: set[str] = set()  # a second failure has another reason, a full disk say, and is final

    def state(self, step: StateStep, back: RollbackOrder) -> Digest | None:
        """What such a body leaves behind; None if that is not known (yet)."""
        return self.made.get(self._job(step, back))

    def lacks(self, step: StateStep, back: RollbackOrder) -> bool:
        """True if it cannot be known before the earlier state was fetched."""
        return self._job(step, back) in self.lacking

    def ask(self, step: StateStep, back: RollbackOrder) -> list[Effect]:
        job = self._job(step, back)
        if job in self.asked or job in self.made:
            return []
        self.asked[job] = back.state
        shards = len(self.plan.trainers)
        return [
            RunTask(
                job, RollbackState(self.plan.round, self.before, back.state, step.steps, shards, self.plan.batch)
            )
        ]

    def done(self, job: str, state: Digest) -> bool:
        """True if this was a job of mine."""
        if self.asked.pop(job, None) is None:
            return False
        self.made[job] = state
        return True

    def failed(self, job: str) -> Digest | None:
        """The earlier state that is not here; None if this was no job of mine."""
        state = self.asked.pop(job, None)
        if state is not None:
            self.lacking[job] = state
        return state

    def found(self, state: Digest) -> bool:
        """It is here now: True if anybody waited for it. Each job is tried again once."""
        waited = [job for job, lacked in self.lacking.items() if lacked == state and job not in self.tried_again]
        self.tried_again.update(waited)
        for job in waited:
            del self.lacking[job]
        return bool(waited)

    def _job(self, step: StateStep, back: RollbackOrder) -> str:
        """One for all bodies that go there: which parts they hold moves nothing."""
        return f"round/{self.plan.round}/back/{step.steps}/{back.state.hex()}"
