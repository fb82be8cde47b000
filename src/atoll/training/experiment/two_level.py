"""Regions with a server each, and one above them: the upper of HALoS' two levels (2506.04531, algorithms 1 and 2).

Workers of a region send their updates to its server, one by one as they come (`rehearsal` plays that level, as it
plays asynchronous local SGD). After `every` of them the region tells the server above how far it came; that one
moves by its own delayed Nesterov step, and the region takes over a share `pull` of where it stands.
Never waits: no region hears of another's pace. Never trains.
"""

from __future__ import annotations

from torch import Tensor

from atoll.training.recipe.outer import RegionalNesterov, UpdateConditions, fresh_outer, move


class RegionServers:
    def __init__(self, outer: RegionalNesterov, first_F: Tensor, parameters: int) -> None:
        self.outer, self.parameters = outer, parameters
        self.anchor_F = first_F.clone()  # of all regions
        self.state = fresh_outer(outer.above, parameters)
        self.since = [0] * outer.regions  # updates that each region's server took since it last went up
        self.base_F = [first_F.clone() for _ in range(outer.regions)]  # where it stood then

    def region_of(self, worker: int) -> int:
        return worker % self.outer.regions

    def came(self, region: int, anchor_F: Tensor, step: int, last: bool = False) -> bool:
        """One update more is in `anchor_F`, the region's. True if it went up with it; `anchor_F` has moved then.

        `last`: of the run, so that nothing that a region learned is left out.
        """
        self.since[region] += not last
        if not (self.since[region] >= self.outer.every or (last and self.since[region])):
            return False
        self.since[region] = 0
        update_F, cut = self.base_F[region] - anchor_F, self.parameters
        moved_P, self.state = move(
            self.outer.above, self.state, self.anchor_F[:cut], update_F[:cut], UpdateConditions(step)
        )
        self.anchor_F[:cut] = moved_P
        self.anchor_F[cut:] -= update_F[cut:] / self.outer.regions  # buffers are averaged
        anchor_F.mul_(1 - self.outer.pull).add_(self.anchor_F * self.outer.pull)
        self.base_F[region].copy_(anchor_F)
        return True
