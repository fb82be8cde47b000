"""Local anchor of eager updates (2502.12996): applies a round's mean while the next round ends.

The local peer's update counts at its own anchor at once, as its share of the mean. When the mean is agreed, the
rest of it waits until the peer's next update. A whole round of training hides that delay. Local anchors differ
slightly between members. The agreed anchor takes the same means one round earlier; it is the result of the run.
Invariants:
- A local anchor is private and never durable: after a restart the peer begins from the agreed anchor, which lacks
  nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.training.recipe.outer import PLAIN, outer_step


class EagerUpdateAnchor:
    """Begins as the agreed anchor (F,) and outer momentum (P,); neither is changed in place."""

    def __init__(self, anchor_F: Tensor, momentum_P: Tensor) -> None:
        self.anchor_F, self.momentum_P = anchor_F, momentum_P
        self._share_F: Tensor | None = None  # own share in a round that is not agreed yet; already in the anchor
        self._rest_F: Tensor | None = None  # part of the last agreed mean that is not in the anchor yet
        self._before: tuple[Tensor, Tensor, Tensor | None] | None = None  # state before the last send

    def apply_own_share(self, outer: PLAIN, mine_F: Tensor, members: int, step: int) -> None:
        """Apply the own share of an update (F,), as it decodes, sent in a round of `members` members."""
        self._before = self.anchor_F, self.momentum_P, self._rest_F
        share_F = mine_F / members
        self._move(outer, share_F if self._rest_F is None else self._rest_F + share_F, step)
        self._share_F, self._rest_F = share_F, None

    def apply_mean(self, outer: PLAIN, mean_F: Tensor, step: int) -> bool:
        """Take an agreed mean (F,). True if the anchor moved, because no own update was sent in the round."""
        moved = self._share_F is None and self._rest_F is not None
        if moved and self._rest_F is not None:
            self._move(outer, self._rest_F, step)
        # taken back even if it was not counted: error feedback sends it again
        self._rest_F = mean_F if self._share_F is None else mean_F - self._share_F
        self._share_F = self._before = None
        return moved

    def take_back(self) -> bool:
        """Take back the own share after a round without counted updates. True if the anchor moved."""
        if self._before is None:
            return False
        self.anchor_F, self.momentum_P, self._rest_F = self._before
        self._share_F = self._before = None
        return True

    def _move(self, outer: PLAIN, update_F: Tensor, step: int) -> None:
        inside = len(self.momentum_P)
        before_P = self.anchor_F[:inside]
        anchor_P, self.momentum_P = outer_step(outer, before_P, self.momentum_P, update_F[:inside], step)
        self.anchor_F = torch.cat([anchor_P, self.anchor_F[inside:] - update_F[inside:]])


__all__ = ["EagerUpdateAnchor"]
