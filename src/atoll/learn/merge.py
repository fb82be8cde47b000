"""How a worker's live parameters take in the new anchor. The anchor itself is never touched here.

`replace` starts the next round from the anchor. `delta` keeps the steps taken while the message was under way
(LOSCAR-SGD 2605.20866, the delay-corrected merge) and is the one to use when a round overlaps training. `Mix`
keeps a share of the worker's own parameters (Streaming DiLoCo 2501.18512, equation 3). `swap` takes what everybody
said in the place of what I said, and leaves the rest alone: for recipes that send a few values at a time.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from torch import Tensor


class Mix(msgspec.Struct, frozen=True, tag="mix"):
    own: float = 0.5  # alpha: share of the worker's own parameters that stays


Merge = Literal["replace", "delta", "swap"] | Mix


def merge(how: Merge, x_F: Tensor, sent_F: Tensor, anchor_F: Tensor, swapped_F: Tensor | None = None) -> None:
    """The live x (F,) takes in the new anchor, in place; `sent_F` is the x that was encoded.

    `swapped_F`, for `swap` alone: what others make of this worker's message, its own minus the combined one.
    """
    match how:
        case "replace":
            x_F.copy_(anchor_F)
        case "delta":
            x_F.sub_(sent_F).add_(anchor_F)
        case "swap":
            assert swapped_F is not None
            x_F.add_(swapped_F)
        case Mix(own):
            x_F.mul_(own).add_(anchor_F * (1 - own))
