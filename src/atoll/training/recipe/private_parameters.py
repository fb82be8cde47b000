"""Parameters of a member's own, where rounds agree on a few values at a time (the merge `swap`), not on all.

They are private, and go with the agreed state that they were merged with: whoever has missed rounds takes what has
moved since from the state of today and goes on from its own of all others. Never sent, never hashed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atoll.base.ids import Digest
from atoll.training.recipe.merge import merge, where_moved


@dataclass(frozen=True)
class PrivateParameters:
    x_F: Tensor
    state: Digest  # the agreed state that it was merged with last

    def with_moved(self, before_F: Tensor, after_F: Tensor, state: Digest) -> PrivateParameters:
        """After the anchor went from `before_F`, which `self.state` has, to `after_F`, which this state has."""
        x_F = self.x_F.clone()
        merge("swap", x_F, self.x_F, where_moved(before_F, after_F))
        return PrivateParameters(x_F, state)
