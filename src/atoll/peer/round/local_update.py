"""What I give to a round: an update that was trained, then encoded, or a pass and its reason.

One update per round, whatever attempts share it, so each attempt's commitment says the same of it. Promises: what
is committed to is what was trained, also with late work in it. Never trains or encodes (jobs do), never sends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import isfinite

from msgspec import UNSET

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Payload, RunTask
from atoll.crypto.digest import merkle_root
from atoll.peer.round.candidate import LocalMeasurements
from atoll.peer.round.commit_reveal import passing
from atoll.peer.round.commitment_rules import row_weight
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import EncodeUpdate, HandOver, TrainingResult, TrainRound, UpdateEncoded
from atoll.policy.plan import HAND_OVER_S
from atoll.verification.redundant_training.policy import seal_of
from atoll.wire.messages.statements import Commitment, LateShare, SealedDraw

NOT_LATE = LateShare(0, 0, 0)


class LocalUpdate:
    def __init__(
        self,
        ground: RoundContext,
        me: PeerId,
        measured: Callable[[], LocalMeasurements],
        secret: Callable[[int], bytes],
    ) -> None:
        """`secret`: what decides whose samples I take in this round."""
        self.ground, self.me, self.measured, self.secret = ground, me, measured, secret
        self.trained: TrainingResult | None = None
        self.training = False  # I was asked to, and that is not over
        self.encoding = False  # what I trained is, or was
        self.encoded: tuple[Payload, ...] | None = None
        self.told = False  # somebody may have heard that it is encoded
        self.claim: Digest | None = None  # of how I trained for it
        self.late: LateShare | None = None  # of what I did apart and send with it
        self.passes: str | None = None  # why I give nothing

    @property
    def ready(self) -> bool:
        """There is something to commit to."""
        return self.encoded is not None or self.passes is not None

    def train(self, left_s: Seconds) -> list[Effect]:
        """For it, so long before sharing begins."""
        plan = self.ground.plan
        index, count = plan.shard(self.taken_from)
        time_s, self.training = max(0.0, left_s - HAND_OVER_S), True
        work = TrainRound(plan.round, plan.steps_of(self.me), time_s, index, count, plan.batch, plan.limit_s)
        return [RunTask(f"round/{plan.round}/train", work)]

    @cached_property
    def taken_from(self) -> PeerId:
        """Whose samples I take: my own, or those of a member that shall not know it before it has committed."""
        plan, twins = self.ground.plan, self.ground.twins
        host = twins.host(self.me, self.secret(plan.round)) if twins is not None else None
        return host if host is not None and host in plan.givers else self.me

    def hand_over(self) -> list[Effect]:
        """What there is by now, if it is still trained for."""
        if self.trained is not None or self.passes is not None:
            return []
        round = self.ground.plan.round
        return [RunTask(f"round/{round}/hand-over", HandOver(round))]

    def takes(self, trained: TrainingResult) -> str | None:
        """The trainer is done; why nothing can be made of it, if so."""
        self.training = False
        if trained.steps == 0:
            return "its time was over before the first inner step"
        if not isfinite(trained.loss):
            return f"its training loss is {trained.loss}"
        self.trained = trained
        return None

    def encode(self) -> list[Effect]:
        """Once, and not what I have said that I do not give."""
        if self.encoding or self.passes is not None:
            return []
        self.encoding = True
        round = self.ground.plan.round
        work = EncodeUpdate(round, self._way.shares, self.ground.takes_late(self.me))
        return [RunTask(f"round/{round}/encode", work)]

    def encodes(self, encoded: UpdateEncoded) -> str | None:
        """Its parts are here; why they may not be sent, if so."""
        assert 0 < len(encoded.parts) <= len(self._way.owners)
        if self.ground.audited and encoded.claim is None:
            return "it cannot show how it trained, and rounds of this run are audited"
        self.encoded, self.claim, self.late = encoded.parts, encoded.claim, encoded.late
        return None

    @property
    def _way(self) -> RoundContext:
        """As its caller asked for it to be reduced."""
        return self.ground if self.trained is None else self.ground.by(self.trained.asked)

    def said(self) -> tuple[Payload, ...] | None:
        """My commitment is on its way: the parts that it is about, if it is no pass."""
        self.told |= self.encoded is not None
        return self.encoded

    def commit(self, attempt: int) -> Commitment:
        """What I commit to in this attempt."""
        round = self.ground.plan.round
        if self.encoded is None or self.trained is None:
            return passing(round, attempt, self.passes or "")
        t, root, measured = self.trained, merkle_root(tuple(p.digest for p in self.encoded)), self.measured()
        late = self.late or NOT_LATE
        return Commitment(
            round=round,
            attempt=attempt,
            root=root,
            parts=len(self.encoded),
            steps=t.steps + late.steps,
            samples=t.samples + late.samples,
            loss=t.loss,
            step_s=t.step_s,
            weight=row_weight(self.ground, self.me, t.steps, t.samples),  # a newcomer's moves nothing yet
            why=t.asked,
            offset_s=measured.offset_s,
            values=t.values,
            links=measured.links,
            claim=self.claim or self.late or self._draws() or UNSET,
        )

    def _draws(self) -> SealedDraw | None:
        """What decided whose samples I took before this round, and the name of what decides it after."""
        twins, round = self.ground.twins, self.ground.plan.round
        if twins is None:
            return None
        owes = twins.owed is not None and self.me in twins.owed
        return SealedDraw(self.secret(round - 1) if owes else b"", seal_of(self.secret(round + 1)))
