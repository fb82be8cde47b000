"""Partition training, one peer's side: a member cut off from a quorum trains on and later settles that work.

Begins when an attempt has failed with too few voters reachable, and requests one round's steps at a time. It ends
with the round, or when the worker reports that the bound is reached (specs/apart.md).

Invariants:
- The round's own update stays the same: every attempt shares it again.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Emit, RunTask, TaskDone, TaskFailed
from atoll.features.partition_training.policy import heard, too_few
from atoll.peer.events import TrainedWithoutQuorum
from atoll.peer.round.context import RoundContext
from atoll.peer.round_extension import RoundHooks
from atoll.peer.tasks import TrainingResult, TrainWithoutQuorum


class DisconnectedTraining(RoundHooks):
    def __init__(self, ground: RoundContext, me: PeerId, gone: Callable[[PeerId], bool]) -> None:
        super().__init__(ground, me, gone)
        self.job = f"round/{ground.plan.round}/apart"
        self.under_way = self.spent = False

    def on_attempt_failed(self, is_idle: bool) -> list[Effect]:
        """Request the next steps, if the local peer is cut off."""
        plan, terms = self.ground.plan, self.ground.apart
        if terms is None or self.under_way or self.spent or not is_idle:
            return []
        if not too_few(self.me, plan.committee, plan.quorum, self.gone):
            return []
        self.under_way = True
        (shard, shards), train_max_s = plan.shard(self.me), plan.settings.train_max_s
        steps_max, merge = terms.steps_max(plan.steps), terms.then == "merge"
        return [
            RunTask(
                self.job, TrainWithoutQuorum(plan.round, plan.steps, steps_max, train_max_s, shard, shards, merge)
            )
        ]

    def on_task_done(self, event: TaskDone | TaskFailed, is_idle: bool) -> list[Effect] | None:
        """Report these steps and request the next ones. After a failure the next failed attempt requests them."""
        if event.job != self.job:
            return None
        self.under_way = False
        if isinstance(event, TaskFailed):
            return []
        trained, plan = event.result, self.ground.plan
        assert isinstance(trained, TrainingResult)
        self.spent = trained.steps == 0
        fact = TrainedWithoutQuorum(
            steps=trained.steps,
            loss=trained.loss,
            heard=heard(self.me, plan.committee, self.gone),
            quorum=plan.quorum,
            round=plan.round,
            trace=plan.trace,
        )
        return [Emit(fact), *self.on_attempt_failed(is_idle)]
