"""Local update of a round: a trained and encoded update, or a pass with its reason.

There is one update per round, whatever attempts share it, so the commitments of all attempts agree.

Invariants:
- The commitment stands for what was trained, late work included.
Not responsible for: training and encoding, which jobs do; sending.
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
from atoll.peer.tasks import EncodeUpdate, EndTrainingEarly, TrainingResult, TrainRound, UpdateEncoded
from atoll.policy.data.positions import shards_of
from atoll.policy.plan import HAND_OVER_S
from atoll.wire.data_ranges import claim_bytes
from atoll.wire.messages.statements import Commitment, SealedDraw, StepsTakenWhilePartitioned

NOT_LATE = StepsTakenWhilePartitioned(0, 0, 0)


class LocalUpdate:
    def __init__(
        self,
        ground: RoundContext,
        me: PeerId,
        measured: Callable[[], LocalMeasurements],
        secret: Callable[[int], bytes],
    ) -> None:
        """`secret`: per round, the secret that selects the member to take samples from."""
        self.ground, self.me, self.measured, self.secret = ground, me, measured, secret
        self.trained: TrainingResult | None = None
        self.training = False  # a training job is running
        self.encoding = False  # an encoding job was started
        self.encoded: tuple[Payload, ...] | None = None
        self.told = False  # a commitment to the encoded update was made and may have been received
        self.claim: Digest | None = None  # claim about how it was trained
        self.late: StepsTakenWhilePartitioned | None = None  # work done while partitioned that this update carries
        self.passes: str | None = None  # reason for a pass

    @property
    def ready(self) -> bool:
        """True if there is something to commit to."""
        return self.encoded is not None or self.passes is not None

    def train(self, left_s: Seconds) -> list[Effect]:
        """Start training for at most `left_s` seconds."""
        plan, assigned = self.ground.plan, self.ground.work_of(self.me)
        index, count = plan.shard(self.taken_from)
        time_s, self.training = max(0.0, left_s - HAND_OVER_S), True
        where = index, count, assigned.batch, assigned.limit_s, shards_of(self.ground.parent, self.me)
        work = TrainRound(plan.round, assigned.steps, time_s, *where)
        return [RunTask(f"round/{plan.round}/train", work)]

    @cached_property
    def taken_from(self) -> PeerId:
        """Member that provides the samples: the local one, or a drawn one that shall not know it before it has
        committed.
        """
        plan, twins = self.ground.plan, self.ground.twins
        host = twins.host(self.me, self.secret(plan.round)) if twins is not None else None
        return host if host is not None and host in plan.givers else self.me

    def hand_over(self) -> list[Effect]:
        """End training at its next step, if it still runs, with the steps taken so far."""
        if self.trained is not None or self.passes is not None:
            return []
        round = self.ground.plan.round
        return [RunTask(f"round/{round}/hand-over", EndTrainingEarly(round))]

    def takes(self, trained: TrainingResult) -> str | None:
        """Store the training result; returns why no update can be made of it, or None."""
        self.training = False
        if trained.steps == 0:
            return "its time was over before the first inner step"
        if not isfinite(trained.loss):
            return f"its training loss is {trained.loss}"
        self.trained = trained
        return None

    def encode(self) -> list[Effect]:
        """Start encoding, once, unless this round is passed."""
        if self.encoding or self.passes is not None:
            return []
        self.encoding = True
        round = self.ground.plan.round
        work = EncodeUpdate(round, self._way.shares, self.ground.takes_late(self.me))
        return [RunTask(f"round/{round}/encode", work)]

    def encodes(self, encoded: UpdateEncoded) -> str | None:
        """Store the encoded parts; returns why they may not be sent, or None."""
        assert 0 < len(encoded.parts) <= len(self._way.owners)
        if self.ground.trust.audited and encoded.claim is None:
            return "it cannot show how it trained, and rounds of this run are audited"
        self.encoded, self.claim, self.late = encoded.parts, encoded.claim, encoded.late
        return None

    @property
    def _way(self) -> RoundContext:
        """The context with the topology that the caller asked for."""
        return self.ground if self.trained is None else self.ground.with_topology(self.trained.asked)

    def said(self) -> tuple[Payload, ...] | None:
        """Note that the commitment is being sent; returns the parts that it stands for, None for a pass."""
        self.told |= self.encoded is not None
        return self.encoded

    def commit(self, attempt: int) -> Commitment:
        """The commitment to this attempt."""
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
            weight=row_weight(self.ground, self.me, t.steps, t.samples),  # weight 0 for a newcomer
            why=t.asked,
            offset_s=measured.offset_s,
            values=t.values,
            links=measured.links,
            claim=self.claim or self.late or self._draws() or (UNSET if t.data is None else claim_bytes(t.data)),
        )

    def _draws(self) -> SealedDraw | None:
        twins, round = self.ground.twins, self.ground.plan.round
        return twins.seal(self.me, round, self.secret) if twins is not None else None
