"""State rollback jobs: the state of a round with a body that goes back to an earlier one.

One job makes each such state from the earlier state and the position in the data that this round reached.

Not responsible for: fetching the earlier state, which the peer does; judging the order, which the body carries.
"""

from __future__ import annotations

from atoll.base.ids import Digest
from atoll.base.machine import Effect, RunTask
from atoll.peer.round.candidate import StateStep
from atoll.peer.tasks import RestoreEarlierState
from atoll.policy.plan import RoundPlan
from atoll.wire.messages.statements import RollbackOrder


class RollbackJobs:
    def __init__(self, plan: RoundPlan, before: Digest) -> None:
        self.plan, self.before = plan, before
        self.made: dict[str, Digest] = {}  # job → the state it made
        self.asked: dict[str, Digest] = {}  # running job → the earlier state
        self.lacking: dict[str, Digest] = {}  # failed job → the earlier state
        # jobs retried once: a second failure has another reason, such as a full disk, and is final
        self.tried_again: set[str] = set()

    def state(self, step: StateStep, back: RollbackOrder) -> Digest | None:
        """The state that such a body leaves behind; None if not known (yet)."""
        return self.made.get(self._job(step, back))

    def lacks(self, step: StateStep, back: RollbackOrder) -> bool:
        """True if the earlier state has to be fetched first."""
        return self._job(step, back) in self.lacking

    def ask(self, step: StateStep, back: RollbackOrder) -> list[Effect]:
        job = self._job(step, back)
        if job in self.asked or job in self.made:
            return []
        self.asked[job] = back.state
        shards = len(self.plan.trainers)
        return [
            RunTask(
                job,
                RestoreEarlierState(self.plan.round, self.before, back.state, step.steps, shards, self.plan.batch),
            )
        ]

    def done(self, job: str, state: Digest) -> bool:
        """Store a finished job's state; True if the job belongs here."""
        if self.asked.pop(job, None) is None:
            return False
        self.made[job] = state
        return True

    def failed(self, job: str) -> Digest | None:
        """The earlier state that is missing here; None if the job does not belong here."""
        state = self.asked.pop(job, None)
        if state is not None:
            self.lacking[job] = state
        return state

    def found(self, state: Digest) -> bool:
        """Note that the earlier state is stored now; True if a job waited for it. Each job is retried once."""
        waited = [job for job, lacked in self.lacking.items() if lacked == state and job not in self.tried_again]
        self.tried_again.update(waited)
        for job in waited:
            del self.lacking[job]
        return bool(waited)

    def _job(self, step: StateStep, back: RollbackOrder) -> str:
        """One job name for all bodies with this target: their parts do not change the result."""
        return f"round/{self.plan.round}/back/{step.steps}/{back.state.hex()}"
