"""Eager updates (2502.12996): a member's own anchor, which takes a round's mean while the next one ends.

What I send counts at my own anchor at once, as my share of the mean; when the mean itself is agreed, the rest of it
waits until my next update, and so hides behind a whole round of training. Anchors differ a little between members;
the one that they agree on takes the very same means, a round earlier, and is what a run hands out.
Private to a peer and never durable: whoever starts anew begins from the agreed anchor, which lacks nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.training.recipe.outer import PLAIN, outer_step


class LocalAnchor:
    """Begins as the agreed anchor (F,) and outer momentum (P,); neither is changed in place."""

    def __init__(self, anchor_F: Tensor, momentum_P: Tensor) -> None:
        self.anchor_F, self.momentum_P = anchor_F, momentum_P
        self._share_F: Tensor | None = None  # of mine in a round that is not agreed yet; the anchor has it already
        self._rest_F: Tensor | None = None  # of the last agreed mean, what the anchor does not have yet
        self._before: tuple[Tensor, Tensor, Tensor | None] | None = None  # what I had before I sent last

    def sent(self, outer: PLAIN, mine_F: Tensor, members: int, step: int) -> None:
        """I sent this (F,), as it decodes, in a round of so many members."""
        self._before = self.anchor_F, self.momentum_P, self._rest_F
        share_F = mine_F / members
        self._move(outer, share_F if self._rest_F is None else self._rest_F + share_F, step)
        self._share_F, self._rest_F = share_F, None

    def agreed(self, outer: PLAIN, mean_F: Tensor, step: int) -> bool:
        """This mean (F,) is agreed. True if the anchor moved: I sent nothing, so it could not move then."""
        moved = self._share_F is None and self._rest_F is not None
        if moved and self._rest_F is not None:
            self._move(outer, self._rest_F, step)
        # taken back even if it was not counted: error feedback sends it again
        self._rest_F = mean_F if self._share_F is None else mean_F - self._share_F
        self._share_F = self._before = None
        return moved

    def rests(self) -> bool:
        """The round counts nobody: what I sent in it is taken back. True if the anchor moved."""
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


__all__ = ["LocalAnchor"]
