"""Outer optimizers: the update of the agreed parameters by the members' combined update.

Every peer computes `outer_step` (`SHARED`) itself and must get the same bits. It therefore uses only single-rounded
elementwise operations. `add(alpha=)`, `lerp` and `torch.optim.SGD(nesterov=True)` give other bits on other
instruction sets (measured with torch 2.13). AdamW is in `outer_adamw`. The other kinds (`move`) are for
experiments; real runs refuse them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.base.arguments import Count, Factor, Share, Whole
from atoll.base.limits import AMOUNT_MOST
from atoll.training.codec.blocks import lend_spans, spans_of
from atoll.training.codec.compiled import native
from atoll.training.recipe.inner import AdamW, InnerState, fresh_inner
from atoll.training.recipe.outer_adamw import adamw_step

Tokens = Annotated[int, msgspec.Meta(ge=1, le=AMOUNT_MOST)]


class Nesterov(msgspec.Struct, frozen=True, tag="nesterov"):
    """m <- mu m + d;  anchor <- anchor - lr (d + mu m): DiLoCo (2311.08105, algorithm 1) in PyTorch's form.

    `momentum=0, lr=1` is plain averaging (local SGD).
    """

    lr: Factor = 1.0
    # lr / (1 - momentum) is the effective step: about 2 for 30–50 rounds, 2.5–5 from 100 rounds on
    momentum: Share = 0.6
    floor: Share = 1.0  # share of lr at the end of the run, reached linearly
    settle: Share = (
        0.0  # last share of the run in which the momentum falls to 0, so that the end is plain averaging
    )
    total_steps: Whole = 0  # steps of the run, needed if lr or momentum fall


class SignOuter(msgspec.Struct, frozen=True, tag="sign"):
    """anchor <- anchor - lr sign(d): signSGD on values accumulated by error feedback (DeMo 2411.19870, algorithm
    1).
    """

    lr: Factor = 1e-3
    warmup_steps: Whole = 0
    total_steps: Whole = 0
    floor: Share = 1.0


class DelayedNesterov(msgspec.Struct, frozen=True, tag="delayed"):
    """Delayed Nesterov (2401.09135, algorithm 3), for updates applied on arrival.

    Each update moves the anchor by lr d / every; the momentum is updated and applied with every `every`-th of them.
    If rounds carry the mean of several members, and not always of all, `every` counts the tokens behind them.
    """

    lr: Factor = 0.7
    momentum: Share = 0.9
    every: Tokens = 4  # about the number of workers; in rounds the tokens that all workers learn from in one round


class RegionalNesterov(msgspec.Struct, frozen=True, tag="regional"):
    """HALoS (2506.04531, algorithms 1 and 2): two levels of delayed Nesterov.

    Updates move the anchor of their region on arrival (`below`). After `every` of them the region's progress moves
    the anchor of all (`above`), and the region takes over `pull` of it.
    """

    below: DelayedNesterov = DelayedNesterov(3.2, 0.9, 16)
    above: DelayedNesterov = DelayedNesterov(0.3, 0.5, 2)
    regions: Count = 2
    every: Count = 32
    pull: Share = 0.25


class GossipNesterov(msgspec.Struct, frozen=True, tag="gossip"):
    """NoLoCo (2506.10911, equation 2), for members with anchors of their own:

    m <- mu m - lr d + gamma (mean anchor of the group - anchor);  anchor <- anchor + m.
    """

    lr: Factor = 0.7
    momentum: Share = 0.5
    gamma: Share = 0.7


class AgreementNesterov(msgspec.Struct, frozen=True, tag="agreeing"):
    """Nesterov with a momentum of `momentum` times the agreement of the members' updates, part by part.

    If the updates disagree, the direction of earlier rounds counts less. Part owners measure the agreement
    (`reducer.agreement`).
    """

    lr: Factor = 1.0
    momentum: Share = 0.9


class MomentAverage(msgspec.Struct, frozen=True, tag="moments"):
    """The anchor becomes the mean of the members, and its moments the mean of their inner moments (`moments.py`).

    Moments move only in rounds that average them: DES-LOC (2505.22549, algorithm 1).
    """


Outer = (
    Nesterov
    | SignOuter
    | DelayedNesterov
    | RegionalNesterov
    | GossipNesterov
    | AgreementNesterov
    | MomentAverage
    | AdamW
)
AVERAGE = Nesterov(lr=1.0, momentum=0.0)  # the anchor becomes the mean of the members
PLAIN = Nesterov | SignOuter | AgreementNesterov | MomentAverage  # only single-rounded operations
SHARED = PLAIN | AdamW | DelayedNesterov  # every peer computes the same bits


def momentum_of(outer: Outer) -> float:
    """Outer momentum for codecs that predict from it; 1 makes the prediction zero."""
    if isinstance(outer, AdamW | RegionalNesterov | MomentAverage):
        return 1.0
    return 0.0 if isinstance(outer, SignOuter) else outer.momentum


def rate_of(outer: Nesterov | SignOuter | AgreementNesterov, step: int) -> float:
    """Outer rate at a step of the run. Straight lines only: a cosine differs between machines' libraries."""
    if isinstance(outer, SignOuter) and step < outer.warmup_steps:
        return outer.lr * ((step + 1) / outer.warmup_steps)
    if isinstance(outer, AgreementNesterov) or outer.floor == 1.0 or outer.total_steps <= 0:
        return outer.lr
    return outer.lr * (1.0 - (1.0 - outer.floor) * min(1.0, step / outer.total_steps))


def momentum_at(outer: Nesterov, step: int) -> float:
    """Outer momentum at a step of the run."""
    if outer.settle <= 0.0 or outer.total_steps <= 0:
        return outer.momentum
    return outer.momentum * min(1.0, max(0.0, outer.total_steps - step) / (outer.settle * outer.total_steps))


def outer_step(
    outer: PLAIN,
    anchor_P: Tensor,
    momentum_P: Tensor,
    combined_P: Tensor,
    step: int = 0,
    agreement_P: Tensor | float = 1.0,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(anchor', momentum'), each (P,), bit-identical everywhere; written to `into` if given.

    `agreement_P`: agreement of the updates, 0 … 1, for AgreementNesterov. The other arguments are not changed.
    """
    new_anchor_P, new_momentum_P = into or (torch.empty_like(anchor_P), torch.empty_like(momentum_P))
    if isinstance(outer, MomentAverage):
        torch.sub(anchor_P, combined_P, out=new_anchor_P)
        return new_anchor_P, new_momentum_P.copy_(momentum_P)
    rate = rate_of(outer, step)
    if isinstance(outer, SignOuter):
        torch.sub(anchor_P, combined_P.sign().mul_(rate), out=new_anchor_P)
        return new_anchor_P, new_momentum_P.copy_(momentum_P)
    agreeing = agreement_P if isinstance(outer, AgreementNesterov) else 1.0
    momentum = outer.momentum if isinstance(outer, AgreementNesterov) else momentum_at(outer, step)
    if native.kernels is not None and not isinstance(agreeing, Tensor):
        vectors = (one.numpy() for one in (anchor_P, momentum_P, combined_P))
        news = (one.numpy() for one in (new_anchor_P, new_momentum_P))
        native.kernels.nesterov(*vectors, np.float32(agreeing * momentum), np.float32(rate), *news)
        return new_anchor_P, new_momentum_P
    # all operations while a span is in the cache
    with lend_spans(1) as (room_S,):
        for lo, hi in spans_of(len(anchor_P)):
            here = slice(lo, hi)
            share = (agreeing[here] if isinstance(agreeing, Tensor) else agreeing) * momentum
            momentum_S = torch.mul(momentum_P[here], share, out=new_momentum_P[here]).add_(combined_P[here])
            ahead_S = torch.mul(momentum_S, share, out=room_S[: hi - lo]).add_(combined_P[here]).mul_(rate)
            torch.sub(anchor_P[here], ahead_S, out=new_anchor_P[here])
    return new_anchor_P, new_momentum_P


def delayed_step(
    outer: DelayedNesterov, anchor_P: Tensor, momentum_P: Tensor, combined_P: Tensor, before: int, learned: int
) -> tuple[Tensor, Tensor]:
    """(anchor', momentum'), each (P,), bit-identical everywhere.

    `learned`: count of this update; `before`: count of all earlier ones, both in the unit of `every`. If `learned`
    exceeds `every`, the run has grown, and the step is capped. The momentum sums the updates since its last
    renewal.
    """
    share_P = combined_P * min(1.0, learned / outer.every)
    anchor_P, momentum_P = anchor_P - share_P * outer.lr, momentum_P + share_P
    if (before + learned) // outer.every > before // outer.every:
        anchor_P = anchor_P - momentum_P * (outer.lr * outer.momentum)
        momentum_P = momentum_P * outer.momentum
    return anchor_P, momentum_P


def agreed_moments(first_P: Tensor, second_P: Tensor | None, given_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """The members' mean moments after a round with `given_N` behind the parameters, negated: one vector (P,) or
    two.

    Where a value is zero, there is no result or no information: the old moment stays.
    """
    given = given_N.split(max(1, len(first_P)))
    olds = (first_P, torch.zeros_like(first_P) if second_P is None else second_P)
    means = [torch.where(one_P == 0, old_P, -one_P) for one_P, old_P in zip(given, olds, strict=False)]
    first_P = means[0] if means else first_P
    return first_P, means[1].clamp_(min=0) if len(means) > 1 else second_P


# ---- every kind, for experiments ----------------------------------------------------------------------------


@dataclass(frozen=True)
class OuterState:
    """State of an outer optimizer for one anchor, or one fragment of it."""

    momentum_P: Tensor
    inner: InnerState | None = None  # AdamW: its two moments
    second_P: Tensor | None = None  # MomentAverage: the second of the agreed moments
    steps: int = 0  # number of updates; DelayedNesterov: in the unit of its `every`


@dataclass(frozen=True)
class OuterStepInputs:
    """Further inputs of an outer step."""

    step: int  # step of the run
    agreement_P: Tensor | float = 1.0  # agreement of the updates, 0 … 1
    mean_anchor_P: Tensor | None = None  # mean anchor of the group, if members have anchors of their own
    learned: int = 1  # count of the update for DelayedNesterov


def fresh_outer(outer: Outer, parameters: int) -> OuterState:
    outer = outer.below if isinstance(outer, RegionalNesterov) else outer
    inner = fresh_inner(parameters) if isinstance(outer, AdamW) else None
    return OuterState(torch.zeros(parameters, dtype=torch.float32), inner)


def move(
    outer: Outer, state: OuterState, anchor_P: Tensor, combined_P: Tensor, moment: OuterStepInputs
) -> tuple[Tensor, OuterState]:
    """(anchor', state') after one combined update. The arguments are not changed."""
    momentum_P = state.momentum_P
    match outer:
        case Nesterov() | SignOuter() | AgreementNesterov() | MomentAverage():
            anchor_P, momentum_P = outer_step(
                outer, anchor_P, momentum_P, combined_P, moment.step, moment.agreement_P
            )
        case GossipNesterov(lr, momentum, gamma):
            assert moment.mean_anchor_P is not None
            momentum_P = momentum_P * momentum - combined_P * lr + (moment.mean_anchor_P - anchor_P) * gamma
            anchor_P = anchor_P + momentum_P
        case RegionalNesterov(below):
            return move(below, state, anchor_P, combined_P, moment)
        case DelayedNesterov():
            counted = state.steps, moment.learned
            anchor_P, momentum_P = delayed_step(outer, anchor_P, momentum_P, combined_P, *counted)
            return anchor_P, replace(state, momentum_P=momentum_P, steps=sum(counted))
        case AdamW():
            assert state.inner is not None
            old = state.inner
            anchor_P, first_P, second_P = adamw_step(
                outer, anchor_P, old.first_P, old.second_P, combined_P, moment.step, old.steps
            )
            state = replace(state, inner=InnerState(first_P, second_P, old.steps + 1))
    return anchor_P, replace(state, momentum_P=momentum_P, steps=state.steps + 1)
