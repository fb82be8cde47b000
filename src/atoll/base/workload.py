"""How much a round asks of each member where that follows from the run: steps, samples of a step, time.

    time      each member takes the steps that it manages in so many seconds, at most those of the round
    speed     each member takes the share of a round's steps that its speed is of the fastest's, so all end together
    samples   all members together take about so many, however many members there are
    loss      steps fall with the root of the loss (AdaComm, 1810.08313, section 4.2: more often agreed, the nearer)
    batch     x 1.2 while the loss is far above a target, x 0.8 while it is far below

Promises: the same numbers at everybody, since they follow from genesis, from the vertex before and from the number
of members; within the bounds of genesis whatever stands in a vertex. The median loss decides, so that a minority
that lies about its own moves it no further than to another member's. Never looks at a clock, nor at anything that
no vertex holds. Here and not on a floor above, since plans of rounds and experiments go by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from statistics import median
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from atoll.base.arguments import Positive, Window
from atoll.base.ids import Seconds

ABOVE, BELOW = 1.1, 0.9  # times the target loss, between which the batch stays
FALL_MOST = 64.0  # times the loss of now: a first one above is an outlier or a lie, and kept rounds short for ever
STEPS_MOST, BATCH_MOST = 2**31 - 1, 2**20

Steps = Annotated[int, Meta(ge=1, le=STEPS_MOST)]
Batch = Annotated[int, Meta(ge=1, le=BATCH_MOST)]


class BatchGrowth(msgspec.Struct, frozen=True):
    """The samples of a step follow the loss."""

    target_loss: Positive  # nats, as members report it of their steps
    least: Batch
    most: Batch


class WorkloadPolicy(msgspec.Struct, frozen=True):
    """What of a round's work follows the run; fixed in genesis. Left out: it does not."""

    batch: Batch  # samples of a step, of the first round at least
    train_s: Window | UnsetType = UNSET  # of training in a round
    samples: Annotated[int, Meta(ge=1, lt=2**40)] | UnsetType = UNSET  # of a round, all members together
    steps_min: Steps = 1  # of a round, where samples or losses decide
    by_loss: bool | UnsetType = UNSET  # steps follow it
    batches: BatchGrowth | UnsetType = UNSET
    bounded: bool | UnsetType = UNSET  # samples move rates: nobody's count for more than the round asked of it
    by_speed: bool | UnsetType = UNSET  # each member's steps follow its own speed, as it last reported it

    @property
    def learns(self) -> bool:
        """Vertices hold how far it has come."""
        return self.by_loss is True or self.batches is not UNSET


class WorkloadProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far it has come, in a vertex: what the round after it goes by."""

    steps: int  # of that round, before its samples bound them
    batch: int  # of that round
    before: int  # the batch of the round that the vertex closes, in which speeds were measured
    first_loss: float  # of the first round that trained, at most FALL_MOST times a later one's; 0: none has


class RoundWorkload(NamedTuple):
    """What one round asks of each member."""

    steps: int  # at most
    batch: int = 0  # samples of each; 0: as the recipe has it
    stretch: float = 1.0  # a step takes so many times as long as when members last reported theirs


def quota_of(
    effort: WorkloadPolicy | UnsetType, inner_steps: int, reached: WorkloadProgress | UnsetType, members: int
) -> RoundWorkload:
    """Of the round after a vertex that holds `reached`, for so many members whose rows weigh something."""
    if effort is UNSET:
        return RoundWorkload(inner_steps)
    now = begun(effort, inner_steps) if reached is UNSET else reached
    steps = _within(now.steps, min(effort.steps_min, inner_steps), inner_steps)
    batch = effort.batch
    if effort.batches is not UNSET:
        batch = _within(now.batch, effort.batches.least, effort.batches.most)
    if effort.samples is not UNSET:
        of_a_step = batch * max(1, members)
        steps = _within((effort.samples + of_a_step // 2) // of_a_step, min(effort.steps_min, steps), steps)
    return RoundWorkload(steps, batch, max(1.0, batch / max(1, now.before)))


def fastest_of(steps_s: Sequence[Seconds], liars: int) -> Seconds | None:
    """Of members' times for a step (0: unknown) the one that shares go by; None while that of most is unknown.

    That of the fastest but `liars`: one of so many and one more is honest, so whatever liars claim, nobody is asked
    for fewer steps than by the fastest honest member. A median would leave the faster half waiting for the slower.
    """
    known = sorted(step_s for step_s in steps_s if step_s > 0)
    return known[liars] if len(known) > max(liars, len(steps_s) // 2) else None


def steps_at(step_s: Seconds, fastest_s: Seconds, steps: int, least: int) -> int:
    """Of a round of so many, for a member that takes `step_s` for one of them: floor(steps x fastest_s / step_s).

    All of them while nothing is known of its speed (0). In whole nanoseconds: the same number on every machine.
    """
    share = steps * round(fastest_s * 1e9) // max(1, round(step_s * 1e9)) if step_s > 0 else steps
    return _within(share, min(least, steps), steps)


def begun(effort: WorkloadPolicy, inner_steps: int) -> WorkloadProgress:
    """Before any round has trained."""
    return WorkloadProgress(inner_steps, effort.batch, effort.batch, 0.0)


def reached_after(
    effort: WorkloadPolicy, inner_steps: int, before: WorkloadProgress | UnsetType, losses: Sequence[float]
) -> WorkloadProgress | UnsetType:
    """After a round whose members reported these losses of their steps; left out where it follows nothing.

    Steps: AdaComm's rule in its plain form, ceil(sqrt(loss / first loss) x the first round's steps).
    """
    if not effort.learns:
        return UNSET
    now = begun(effort, inner_steps) if before is UNSET else before
    loss = max(0.0, median(losses)) if losses else 0.0
    if loss == 0.0:
        return WorkloadProgress(now.steps, now.batch, now.batch, now.first_loss)
    first_loss = min(now.first_loss, FALL_MOST * loss) if now.first_loss > 0 else loss
    steps, batch = now.steps, now.batch
    if effort.by_loss is True:
        share = min(1.0, loss / first_loss)
        steps = _within(ceil(sqrt(share) * inner_steps), min(effort.steps_min, inner_steps), inner_steps)
    if effort.batches is not UNSET:
        batch = next_batch(effort.batches, batch, loss)
    return WorkloadProgress(steps, batch, now.batch, first_loss)


def next_batch(rule: BatchGrowth, batch: int, loss: float) -> int:
    """In whole samples, up to the next and down to the last, so that small batches move too."""
    if loss > ABOVE * rule.target_loss:
        batch = -(-6 * batch // 5)
    elif loss < BELOW * rule.target_loss:
        batch = 4 * batch // 5
    return _within(batch, rule.least, rule.most)


def effort_problem(effort: WorkloadPolicy, inner_steps: int) -> str:
    """Which of its numbers do not fit each other; empty if all do."""
    if effort.steps_min > inner_steps:
        return f"a round of at least {effort.steps_min} steps cannot have at most {inner_steps}"
    if effort.by_speed is True and effort.samples is not UNSET:
        return "steps by each member's own speed leave a round fewer samples than it is to have"
    rule = effort.batches
    if rule is not UNSET and not rule.least <= effort.batch <= rule.most:
        return f"a batch of {effort.batch} is not within {rule.least} … {rule.most}"
    return ""


def _within(value: int, least: int, most: int) -> int:
    return min(max(least, value), most)
