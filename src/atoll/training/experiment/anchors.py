"""Anchors of an experiment with their outer optimizers: one for all members, one per region, or one per member.

Invariants:
- `anchors` and `momentum_P` are changed in place, so views of them stay valid.
Not responsible for: members' live parameters (`simulator` merges them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from atoll.training.exchange.layout import ModelLayout
from atoll.training.experiment.two_level import RegionServers
from atoll.training.recipe.local_anchor import EagerUpdateAnchor
from atoll.training.recipe.outer import (
    Outer,
    OuterStepInputs,
    RegionalNesterov,
    agreed_moments,
    fresh_outer,
    move,
)
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.update import Bounds


@dataclass
class InFlightFragment:
    """A fragment between sending and applying."""

    fragment: int
    lo: int
    hi: int
    begun: int  # step of the run before its turn; sets the outer step's rate and momentum, as in real rounds
    lands_at: int
    sent: dict[int, Tensor]  # member -> its live parameters as they were sent
    combined: dict[int, Tensor] = field(default_factory=dict)  # anchor -> update
    mean_anchor: dict[int, Tensor] = field(default_factory=dict)
    agreement: Tensor | float = 1.0
    learned: int = 1  # count for DelayedNesterov: an update, or the tokens behind a round


class AnchorSet:
    def __init__(self, recipe: Recipe, layout: ModelLayout, fragments: Bounds, first_F: Tensor, peers: int) -> None:
        self.layout, self.regions = layout, None
        count = peers if recipe.paired else 1
        if isinstance(recipe.outer, RegionalNesterov):
            count = recipe.outer.regions
            self.regions = RegionServers(recipe.outer, first_F, layout.parameters)
        self.anchors = [first_F.clone() for _ in range(count)]
        self.outers = [[fresh_outer(recipe.outer, self.parameters_in(*f)) for f in fragments] for _ in range(count)]
        self.momentum_P = torch.zeros(layout.parameters, dtype=torch.float32)  # shared knowledge of codecs
        eager = recipe.reducer.own == "fresh"
        self.local = [EagerUpdateAnchor(first_F, self.momentum_P.clone()) for _ in range(peers)] if eager else []

    def parameters_in(self, lo: int, hi: int) -> int:
        """Number of parameters in lo … hi; the other values are buffers."""
        return max(0, min(hi, self.layout.parameters) - lo)

    def index_of(self, peer: int) -> int:
        """Index of the anchor that the peer trains from: that of all, of its region, or its own."""
        if self.regions is not None:
            return self.regions.region_of(peer)
        return peer if len(self.anchors) > 1 else 0

    def anchor_of(self, peer: int) -> Tensor:
        return self.local[peer].anchor_F if self.local else self.anchors[self.index_of(peer)]

    def agreed(self) -> Tensor:
        """The result of the run if it ended now (F,)."""
        return torch.stack(self.anchors).mean(0) if self.regions is None else self.regions.anchor_F

    def rejoin(self, peer: int, present: Sequence[int], paired: bool) -> None:
        """Give a returning peer a current anchor."""
        if paired and present:  # another member's: its own is old
            self.anchors[peer].copy_(self.anchors[present[0]])
        if self.local:
            self.local[peer] = EagerUpdateAnchor(self.anchors[0].clone(), self.momentum_P.clone())

    def take_outer_step(self, flight: InFlightFragment, outer: Outer) -> list[Tensor]:
        """Move every anchor by the flight's update; returns the fragment before it. ValueError if not finite."""
        lo, hi, floats = flight.lo, flight.hi, self.layout.floats
        inside = self.parameters_in(lo, hi)
        before = [anchor_F[lo:hi].clone() for anchor_F in self.anchors]
        for index, combined in flight.combined.items():
            anchor_F, state = self.anchors[index], self.outers[index][flight.fragment]
            mean_anchor = flight.mean_anchor.get(index)
            near = None if mean_anchor is None else mean_anchor[:inside]
            conditions = OuterStepInputs(flight.begun, flight.agreement, near, flight.learned)
            after_P, after = move(outer, state, anchor_F[lo : lo + inside], combined[:inside], conditions)
            if not bool(after_P.isfinite().all()):
                raise ValueError(
                    f"training diverged at step {flight.lands_at}: lower the learning rate or the outer step"
                )
            anchor_F[lo : lo + inside] = after_P
            anchor_F[lo + inside : hi] -= combined[inside : floats - lo]  # buffers are averaged
            if hi > floats:
                moments = agreed_moments(after.momentum_P, after.second_P, combined[floats - lo :])
                after = replace(after, momentum_P=moments[0], second_P=moments[1])
            self.outers[index][flight.fragment] = after
        self.momentum_P[lo : lo + inside] = self.outers[0][flight.fragment].momentum_P
        return before
