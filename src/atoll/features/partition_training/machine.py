"""Partition training, one peer's side: a member cut off from a quorum trains on and later settles that work.

Begins when an attempt has failed with too few voters reachable, and requests one round's steps at a time. It ends
with the round, or when the worker reports that the bound is reached (specs/apart.md).

Invariants:
- The round's own update stays the same: every attempt shares it again.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, RunTask
from atoll.features.partition_training.policy import heard, too_few
from atoll.peer.events import TrainedApart
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import RoundSettlement, TrainApart, TrainingResult
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, LateShare, OwnerResult
from atoll.wire.messages.vertex import VertexBody


class PartitionTraining:
    def __init__(self, ground: RoundContext, me: PeerId, gone: Callable[[PeerId], bool]) -> None:
        self.ground, self.me, self.gone = ground, me, gone
        self.job = f"round/{ground.plan.round}/apart"
        self.under_way = self.spent = False

    def go_on(self) -> list[Effect]:
        """Request the next steps, if the local peer is cut off."""
        plan, terms = self.ground.plan, self.ground.apart
        if terms is None or self.under_way or self.spent:
            return []
        if not too_few(self.me, plan.committee, plan.quorum, self.gone):
            return []
        self.under_way = True
        (shard, shards), train_max_s = plan.shard(self.me), plan.settings.train_max_s
        steps_max, merge = terms.steps_max(plan.steps), terms.then == "merge"
        return [RunTask(self.job, TrainApart(plan.round, plan.steps, steps_max, train_max_s, shard, shards, merge))]

    def took(self, trained: TrainingResult) -> TrainedApart:
        plan = self.ground.plan
        self.under_way, self.spent = False, trained.steps == 0
        voters = heard(self.me, plan.committee, self.gone)
        return TrainedApart(steps=trained.steps, loss=trained.loss, heard=voters, quorum=plan.quorum)

    def failed(self) -> list[Effect]:
        """The trainer failed: the next failed attempt repeats the request."""
        self.under_way = False
        return []


def left_open(me: PeerId, parts: int, body: VertexBody | None) -> RoundSettlement:
    """How this body counted the local update of `parts` parts for its round; None: unknown."""
    if body is None:
        return RoundSettlement((True,) * parts or None, late=True)
    answers = (statement_in(signed) if signed is not None else None for signed in body.parts)
    counted = tuple(isinstance(said, OwnerResult) and me in said.contributors for said in answers)
    return RoundSettlement((counted or (False,) * parts) if parts else None, late_of(body).get(me) is not None)


def late_of(body: VertexBody) -> dict[PeerId, LateShare]:
    """Late work that this vertex counted, by author."""
    said = ((signed.signer, statement_in(signed)) for signed in body.commits)
    return {peer: c.late for peer, c in said if isinstance(c, Commitment) and c.late is not None}
