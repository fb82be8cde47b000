"""Two-level parameter servers: one per region and one above them (HALoS, 2506.04531, algorithms 1 and 2).

Members of a region send updates to its server one by one; `simulator` plays that level like asynchronous local SGD.
After `every` updates the region sends its progress to the upper server. The upper server takes its own delayed
Nesterov step, and the region takes over a share `pull` of the new position.
Invariants:
- No region waits for another.
Not responsible for: training.
"""

from __future__ import annotations

from torch import Tensor

from atoll.training.recipe.outer import OuterStepInputs, RegionalNesterov, fresh_outer, move


class RegionServers:
    def __init__(self, outer: RegionalNesterov, first_F: Tensor, parameters: int) -> None:
        self.outer, self.parameters = outer, parameters
        self.anchor_F = first_F.clone()  # anchor of all regions
        self.state = fresh_outer(outer.above, parameters)
        self.since = [0] * outer.regions  # updates of each region since its last synchronization
        self.base_F = [first_F.clone() for _ in range(outer.regions)]  # its anchor at that time

    def region_of(self, worker: int) -> int:
        return worker % self.outer.regions

    def add_update(self, region: int, anchor_F: Tensor, step: int, last: bool = False) -> bool:
        """Count one update in the region's `anchor_F`. True if the region synchronized, which moves `anchor_F`.

        `last`: end of the run; the region then sends any remaining progress.
        """
        self.since[region] += not last
        if not (self.since[region] >= self.outer.every or (last and self.since[region])):
            return False
        self.since[region] = 0
        update_F, cut = self.base_F[region] - anchor_F, self.parameters
        moved_P, self.state = move(
            self.outer.above, self.state, self.anchor_F[:cut], update_F[:cut], OuterStepInputs(step)
        )
        self.anchor_F[:cut] = moved_P
        self.anchor_F[cut:] -= update_F[cut:] / self.outer.regions  # buffers are averaged
        anchor_F.mul_(1 - self.outer.pull).add_(self.anchor_F * self.outer.pull)
        self.base_F[region].copy_(anchor_F)
        return True
