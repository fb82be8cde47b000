"""State advance jobs: what combined parts make of the state, one job per distinct step.

Invariants:
- A step is never computed twice while a body may need it.
Not responsible for: fetching parts, comparing the result; the caller does both.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.base.ids import Digest
from atoll.base.machine import Effect, Payload, RunTask
from atoll.crypto.digest import digest
from atoll.peer.round.candidate import StateStep
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import AdvanceState
from atoll.wire.codec import encode


class StateAdvanceJobs:
    """`held`: combined parts by digest, including those of any requested step."""

    def __init__(self, ground: RoundContext, held: Mapping[Digest, Payload]) -> None:
        self.ground, self.held = ground, held
        self._made: dict[StateStep, Digest | None] = {}  # None while it is computed

    @property
    def busy(self) -> bool:
        """True while a step is being computed."""
        return None in self._made.values()

    def begun(self, step: StateStep | None) -> bool:
        return step in self._made

    def state(self, step: StateStep) -> Digest | None:
        """The state after this step; None if not known (yet)."""
        return self._made.get(step)

    def ask(self, step: StateStep) -> list[Effect]:
        if step in self._made:
            return []
        self._made[step] = None
        plan = self.ground.plan
        work = AdvanceState(
            plan.round,
            self.ground.parent.state,
            tuple(self.held[d] if d is not None else None for d in step.parts),
            step.steps,
            step.samples,
            len(plan.trainers),
            self.ground.shares,
            batch=plan.batch,
        )
        return [RunTask(self._job(step), work)]

    def done(self, job: str, state: Digest) -> bool:
        """Store a finished job's state; True if the job belongs here."""
        if not job.startswith(f"round/{self.ground.plan.round}/advance/"):
            return False
        for step in self._made:
            if self._job(step) == job:
                self._made[step] = state
        return True

    def keep_only(self, needed: set[Digest]) -> None:
        """Forget steps that use none of these parts."""
        self._made = {s: state for s, state in self._made.items() if state is None or needed & {*s.parts}}

    def _job(self, step: StateStep) -> str:
        return f"round/{self.ground.plan.round}/advance/{digest(encode(step)).hex()[:16]}"
