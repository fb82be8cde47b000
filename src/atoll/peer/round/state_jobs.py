"""What the state becomes by combined parts: each such step is one job, done once, however many bodies hold it.

Promises: the same step is never computed twice while a body may need it. Never fetches parts and never judges what
comes out: whoever asks has the parts, and compares.
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


class AdvanceJobs:
    """`held`: combined parts by digest, those of any step that is asked for among them."""

    def __init__(self, ground: RoundContext, held: Mapping[Digest, Payload]) -> None:
        self.ground, self.held = ground, held
        self._made: dict[StateStep, Digest | None] = {}  # None while it is computed

    @property
    def busy(self) -> bool:
        """One is computed just now."""
        return None in self._made.values()

    def begun(self, step: StateStep | None) -> bool:
        return step in self._made

    def state(self, step: StateStep) -> Digest | None:
        """What it makes of the state; None if that is not known (yet)."""
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
        """True if this was a job of mine."""
        if not job.startswith(f"round/{self.ground.plan.round}/advance/"):
            return False
        for step in self._made:
            if self._job(step) == job:
                self._made[step] = state
        return True

    def keep_only(self, needed: set[Digest]) -> None:
        """Forget what is made of none of these parts."""
        self._made = {s: state for s, state in self._made.items() if state is None or needed & {*s.parts}}

    def _job(self, step: StateStep) -> str:
        return f"round/{self.ground.plan.round}/advance/{digest(encode(step)).hex()[:16]}"
