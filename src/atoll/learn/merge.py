"""How a worker's live parameters take in the new anchor. The anchor itself is never touched here.

`replace` starts the next round from the anchor. `delta` keeps the steps taken while the message was under way
(LOSCAR-SGD 2605.20866, the delay-corrected merge) and is the one to use when a round overlaps training.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Merge = Literal["replace", "delta"]


def merge(how: Merge, x_F: Tensor, sent_F: Tensor, anchor_F: Tensor) -> Tensor:
    """x' (F,) from the live x, the x that was encoded, and the new anchor."""
    if how == "replace":
        return anchor_F.clone()
    return anchor_F + (x_F - sent_F)
