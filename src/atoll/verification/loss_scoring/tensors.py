"""Loss score of an update: the losses before and after a step along it, on its author's samples and on others.

    x := anchor − update     the whole update: the author's claimed position at the end of the round
    own       samples dealt to the author in this round: an author that learned from them improves more on these …
    others    samples not dealt yet: … than on these, which any honest work improves a little

Works where steps cannot be replayed: on bf16, compiled models, other devices, with any inner optimizer, with
overlap and fragments. A score is a statistic and proves nothing. Loss scores: Gauntlet (Lidin et al. 2025,
2505.21684, section 3); differences: specs/scoring.md.

Invariants:
- The samples follow from the vertex that closed the round, so no author knew them in time, and all scorers use the
  same ones.
Not responsible for: what a score means for a member (`verification/loss_scoring/policy.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from atoll.base.draw import draw_below
from atoll.base.ids import Digest
from atoll.training.codec.chain import NICKNAMES
from atoll.training.models import scores_of
from atoll.training.recipe.inner import GradientSumOptimizer
from atoll.training.recipe.recipes import Recipe

SAMPLES = 128  # of each kind: an honest gpt-tiny is then some three standard errors from one that learned elsewhere
LOOKED_AT_ONCE = 16  # samples of one batch: a round waits for one batch at most


class LossDrops(NamedTuple):
    """Decrease of the loss, in nats per token or image."""

    own: float
    others: float
    error: float  # standard error of own − others


# ---- which samples ------------------------------------------------------------------------------------------


def dealt(drawn: Digest, shard: int, shards: int, cursor: int, samples: int) -> tuple[int, ...]:
    """Positions of SAMPLES of a peer's samples, evenly spread from a drawn place.

    The peer took `samples` from `cursor` on. All of them, if they are fewer.
    """
    count = min(SAMPLES, samples)
    if count < 1:
        return ()
    first = draw_below(drawn, "own samples", samples)
    taken = ((first + at * samples // count) % samples for at in range(count))
    return tuple((cursor + index) * shards + shard for index in taken)


def undealt(drawn: Digest, first: int, epoch: int, count: int) -> tuple[int, ...]:
    """Positions of `count` samples after position `first`, before which everything is dealt out.

    From the rest of the epoch, as long as that is large: the model has not seen those samples.
    """
    left = epoch - first % epoch
    room = left if left >= 2 * count else epoch
    return tuple(first + draw_below(drawn, f"other sample {at}", room) for at in range(count))


# ---- the measure -------------------------------------------------------------------------------------------


@torch.no_grad()
def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[float]:
    """The loss of every sample in nats, (B,): over the tokens of a text, or of one image."""
    inputs, targets = batch
    scores = scores_of(model, inputs).float()
    each = nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1), reduction="none")
    return each.view(len(inputs), -1).mean(1).tolist()


def falls_of(before: Sequence[float], after: Sequence[float], own: int) -> LossDrops:
    """Decreases from the losses of samples before and after a step; `own` of them come first.

    One sample says little about an update. The measure is the distance of the two means, in units of its chance
    deviation (Welch 1947). A loss that is not finite means that the update ruins the model.
    """
    fell = np.asarray(before, dtype=np.float64) - np.asarray(after, dtype=np.float64)
    mine, others = fell[:own], fell[own:]
    if not np.isfinite(fell).all() or min(len(mine), len(others)) < 2:
        return LossDrops(-float("inf"), 0.0, 0.0)
    error = sqrt(mine.var(ddof=1) / len(mine) + others.var(ddof=1) / len(others))
    return LossDrops(float(mine.mean()), float(others.mean()), error)


def fixed_point(falls: LossDrops, unit: int, most: int) -> tuple[int, ...]:
    """Wire form: whole numbers of 1/unit nats, always limited to −most…most."""
    return tuple(max(-most, min(most, round(fall * unit))) if isfinite(fall) else -most for fall in falls)


# ---- where it works ----------------------------------------------------------------------------------------


def codec_leaves_out(name: str) -> bool:
    """True if the codec sends few values of an update: places, or a few directions. sparseloco leaves 1/13 of the
    gap.
    """
    stages = [stage for word in name.split("+") for stage in NICKNAMES.get(word, word).split("+")]
    return any(stage.partition(":")[0] in ("topk", "topk-rice", "randk", "lowrank", "dct") for stage in stages)


def scoring_problem(recipe: Recipe) -> str:
    """Why single updates of this recipe cannot be scored; empty if they can."""
    if recipe.model == "attached":
        return "members train a model of their own on data of their own, which no other member can read"
    if isinstance(recipe.inner, GradientSumOptimizer):
        return "updates are sums of gradients, which say a direction and not how far to go"
    if recipe.own_anchors:
        return "members have anchors of their own, which no other member holds"
    if any(recipe.schedule.moments):
        return "moments travel behind updates, and no loss can be looked at along them"
    if codec_leaves_out(recipe.coding.up):
        return (
            f"sync.up = {recipe.coding.up!r} leaves most of an update to later rounds, and what is scored with it"
        )
    if recipe.batch * recipe.schedule.inner_steps // recipe.schedule.fragments < 2:
        return "a round has one sample per member, and a score needs two"
    return ""
