"""Adaptive workload of a round: steps, batch size and time per member.

    time      each member takes the steps that it completes in a given time, at most those of the round
    speed     each member's steps are proportional to its speed relative to the fastest's, so all end together
    samples   all members together take about a given number, for any number of members
    loss      steps fall with the root of the loss (AdaComm, 1810.08313, section 4.2: more frequent agreement)
    batch     x 1.2 while the loss is far above a target, x 0.8 while it is far below

Invariants:
- The numbers are equal at all members: they follow from genesis, the vertex before and the number of members.
- They stay within the bounds of genesis for any content of a vertex.
- The median loss counts, so a lying minority moves it at most to another member's loss.
Not responsible for: clocks, values outside vertices. In `base` because round plans and experiments share it.
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

ZERO_LOSS = 2.0**-100  # a reported loss of 0 as members send it: 0 itself means that a member reported none
ABOVE, BELOW = 1.1, 0.9  # multiples of the target loss, between which the batch stays
FALL_MOST = (
    64.0  # multiple of the current loss; a higher first loss is an outlier or lie that would keep rounds short
)
STEPS_MOST, BATCH_MOST = 2**31 - 1, 2**20

Steps = Annotated[int, Meta(ge=1, le=STEPS_MOST)]
Batch = Annotated[int, Meta(ge=1, le=BATCH_MOST)]


class LossAdaptiveBatchSize(msgspec.Struct, frozen=True):
    """Batch size that follows the loss."""

    target_loss: Positive  # nats, compared with the members' reported training loss
    least: Batch
    most: Batch


class AdaptiveWorkloadPolicy(msgspec.Struct, frozen=True):
    """Rules of the adaptive workload, fixed in genesis. Unset rules do not apply."""

    batch: Batch  # samples per step, at least in the first round
    train_s: Window | UnsetType = UNSET  # training time per round, in seconds
    samples: Annotated[int, Meta(ge=1, lt=2**40)] | UnsetType = UNSET  # samples per round of all members together
    steps_min: Steps = 1  # least steps per round, if samples or losses determine them
    by_loss: bool | UnsetType = UNSET  # whether steps follow the loss
    batches: LossAdaptiveBatchSize | UnsetType = UNSET
    bounded: bool | UnsetType = (
        UNSET  # whether a member's samples count at most as requested, since they move rates
    )
    by_speed: bool | UnsetType = UNSET  # whether each member's steps follow its last reported speed

    @property
    def tracks_progress(self) -> bool:
        """Whether vertices hold an AdaptiveWorkloadState."""
        return self.by_loss is True or self.batches is not UNSET


class AdaptiveWorkloadState(msgspec.Struct, frozen=True, array_like=True):
    """Workload state in a vertex, from which the next round's workload follows."""

    steps: int  # steps of the next round, before the sample limit
    batch: int  # batch of the next round
    before: int  # batch of the round that the vertex closes, in which speeds were measured
    first_loss: float  # loss of the first training round, at most FALL_MOST times a later one; 0: none yet


class RoundWorkload(NamedTuple):
    """Workload of each member in one round."""

    steps: int  # most steps
    batch: int = 0  # samples per step; 0: as in the recipe
    stretch: float = 1.0  # duration of a step relative to the members' last reports


def workload_of(
    effort: AdaptiveWorkloadPolicy | UnsetType,
    inner_steps: int,
    reached: AdaptiveWorkloadState | UnsetType,
    members: int,
) -> RoundWorkload:
    """Workload of the round after a vertex with `reached`. `members`: members with rows of nonzero weight."""
    if effort is UNSET:
        return RoundWorkload(inner_steps)
    now = initial_progress(effort, inner_steps) if reached is UNSET else reached
    steps = _within(now.steps, min(effort.steps_min, inner_steps), inner_steps)
    batch = effort.batch
    if effort.batches is not UNSET:
        batch = _within(now.batch, effort.batches.least, effort.batches.most)
    if effort.samples is not UNSET:
        of_a_step = batch * max(1, members)
        steps = _within((effort.samples + of_a_step // 2) // of_a_step, min(effort.steps_min, steps), steps)
    return RoundWorkload(steps, batch, max(1.0, batch / max(1, now.before)))


def fastest_of(steps_s: Sequence[Seconds], liars: int) -> Seconds | None:
    """Step time in seconds that shares are relative to; None while most members' times are unknown (0).

    It is the fastest after skipping `liars` members: among `liars` + 1 members one is honest. So no claim of liars
    gives any member fewer steps than relative to the fastest honest one. With a median, the faster half would wait.
    """
    known = sorted(step_s for step_s in steps_s if step_s > 0)
    return known[liars] if len(known) > max(liars, len(steps_s) // 2) else None


def steps_at(step_s: Seconds, fastest_s: Seconds, steps: int, least: int) -> int:
    """Steps of a member with step time `step_s` in a round of `steps`: floor(steps x fastest_s / step_s).

    All steps while its speed is unknown (0). Computed in whole nanoseconds, so equal on every machine.
    """
    share = steps * round(fastest_s * 1e9) // max(1, round(step_s * 1e9)) if step_s > 0 else steps
    return _within(share, min(least, steps), steps)


def initial_progress(effort: AdaptiveWorkloadPolicy, inner_steps: int) -> AdaptiveWorkloadState:
    """Workload state before the first training round."""
    return AdaptiveWorkloadState(inner_steps, effort.batch, effort.batch, 0.0)


def progress_after(
    effort: AdaptiveWorkloadPolicy,
    inner_steps: int,
    before: AdaptiveWorkloadState | UnsetType,
    losses: Sequence[float],
) -> AdaptiveWorkloadState | UnsetType:
    """Workload state after a round with these reported losses; unset if no rule follows losses.

    Steps: AdaComm's rule in its plain form, ceil(sqrt(loss / first loss) x the first round's steps).
    """
    if not effort.tracks_progress:
        return UNSET
    now = initial_progress(effort, inner_steps) if before is UNSET else before
    loss = max(0.0, median(losses)) if losses else 0.0
    if loss <= ZERO_LOSS:
        return AdaptiveWorkloadState(now.steps, now.batch, now.batch, now.first_loss)
    first_loss = min(now.first_loss, FALL_MOST * loss) if now.first_loss > 0 else loss
    steps, batch = now.steps, now.batch
    if effort.by_loss is True:
        share = min(1.0, loss / first_loss)
        steps = _within(ceil(sqrt(share) * inner_steps), min(effort.steps_min, inner_steps), inner_steps)
    if effort.batches is not UNSET:
        batch = next_batch(effort.batches, batch, loss)
    return AdaptiveWorkloadState(steps, batch, now.batch, first_loss)


def next_batch(rule: LossAdaptiveBatchSize, batch: int, loss: float) -> int:
    """Next batch size, rounded up when it grows and down when it shrinks, so that small batches change too."""
    if loss > ABOVE * rule.target_loss:
        batch = -(-6 * batch // 5)
    elif loss < BELOW * rule.target_loss:
        batch = 4 * batch // 5
    return _within(batch, rule.least, rule.most)


def effort_problem(effort: AdaptiveWorkloadPolicy, inner_steps: int) -> str:
    """Describe settings that contradict each other; empty if none do."""
    if effort.steps_min > inner_steps:
        return f"a round of at least {effort.steps_min} steps cannot have at most {inner_steps}"
    if effort.by_speed is True and effort.samples is not UNSET:
        return "with steps by each member's own speed a round has fewer samples than its setting demands"
    rule = effort.batches
    if rule is not UNSET and not rule.least <= effort.batch <= rule.most:
        return f"a batch of {effort.batch} is not within {rule.least} … {rule.most}"
    return ""


def _within(value: int, least: int, most: int) -> int:
    return min(max(least, value), most)
