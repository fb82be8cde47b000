"""Merging a new anchor into a worker's live parameters. The anchor itself is never changed here.

`replace` starts the next round from the anchor. `delta` keeps the steps taken while the update was in flight
(LOSCAR-SGD 2605.20866, the delay-corrected merge); use it if a round overlaps training. `MixMerge` keeps a share of
the worker's own parameters (Streaming DiLoCo 2501.18512, equation 3). `swap` is `delta` where the anchor moved
(`where_moved`), and changes nothing else. It is for recipes that agree on a few values at a time, while members
keep their own of all others (`private_parameters.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor

from atoll.base.arguments import Share


class MixMerge(msgspec.Struct, frozen=True, tag="mix"):
    own: Share = 0.5  # alpha: share of the worker's own parameters that stays


Merge = Literal["replace", "delta", "swap"] | MixMerge


def where_moved(before_F: Tensor, after_F: Tensor) -> Tensor:
    """The new anchor (F,) in the form for `swap`: NaN, which no anchor holds, where it did not move."""
    return torch.where(after_F == before_F, torch.nan, after_F)


def merge(how: Merge, x_F: Tensor, sent_F: Tensor, anchor_F: Tensor) -> None:
    """Merge the new anchor into the live x (F,), in place; `sent_F` is the x that was encoded.

    For `swap` the anchor is in the form of `where_moved`.
    """
    match how:
        case "replace":
            x_F.copy_(anchor_F)
        case "delta":
            x_F.sub_(sent_F).add_(anchor_F)
        case "swap":
            x_F.copy_(torch.where(anchor_F.isnan(), x_F, anchor_F + (x_F - sent_F)))
        case MixMerge(own):
            x_F.mul_(own).add_(anchor_F * (1 - own))
