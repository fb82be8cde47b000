"""Private parameters of a member, for rounds that agree on a few values at a time (the merge `swap`).

They belong to the agreed state of their last merge. A member that missed rounds takes the values that moved since
from the current state, and keeps its own of all others.
Invariants:
- Private parameters are never sent and never hashed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atoll.base.ids import Digest
from atoll.training.recipe.merge import merge, where_moved


@dataclass(frozen=True)
class PrivateModelCopy:
    x_F: Tensor
    state: Digest  # agreed state of the last merge

    def with_moved(self, before_F: Tensor, after_F: Tensor, state: Digest) -> PrivateModelCopy:
        """The parameters after the anchor moved from `before_F` (that of `self.state`) to `after_F` (that of
        `state`).
        """
        x_F = self.x_F.clone()
        merge("swap", x_F, self.x_F, where_moved(before_F, after_F))
        return PrivateModelCopy(x_F, state)
