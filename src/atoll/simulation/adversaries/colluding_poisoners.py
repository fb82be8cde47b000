"""Colluding poisoners with shared memory: they know every honest row of a round before they commit.

No real liar knows as much, since a row is shown only to members that have committed: a rule that withstands this
withstands real liars. Their rows are those of `training/robust/attacks`, made once per round for all of them.
Values that no codec would encode are committed to and sent anyway.

Invariants:
- The same seed gives the same lies.
- Random draws of honest workers stay untouched: the look-ahead uses a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import torch
from torch import Tensor

from atoll.base.ids import PeerId
from atoll.simulation.tensors import TensorWorker
from atoll.simulation.worker import WorkerKnobs
from atoll.training.robust.attacks import ATTACKS, OPTIMISED, Rule, attack_rows, constant, stale

LARGEST = 1e17  # largest value that a codec accepts
GANGS = (*ATTACKS, *OPTIMISED, "largest", "stale")  # attacks by name


@dataclass
class PoisonerGang:
    attack: str
    liars: frozenset[PeerId]
    rule: Rule  # combining rule of the run
    crowd: dict[PeerId, TensorWorker] = field(default_factory=dict[PeerId, TensorWorker])  # honest workers
    said: dict[int, dict[PeerId, Tensor]] = field(default_factory=dict[int, dict[PeerId, Tensor]])
    """By round, what everybody sent; of honest ones who have not yet, what they will."""
    anchors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # round → anchor that it begins with

    def islands(self) -> Callable[[PeerId, WorkerKnobs, Random], TensorWorker]:
        def make(me: PeerId, knobs: WorkerKnobs, draw: Random) -> TensorWorker:
            island = TensorWorker(me, knobs, draw, sends=partial(self.sends, me))
            if me not in self.liars:
                self.crowd[me] = island
            return island

        return make

    def sends(self, me: PeerId, round: int, anchor_V: Tensor, learnt_V: Tensor) -> Tensor:
        """(V,) update that this peer sends in this round instead of the learned one."""
        self.anchors[round] = anchor_V
        said = self.said.setdefault(round, {})
        if me not in self.liars:
            said[me] = learnt_V
        elif me not in said:
            said |= zip(sorted(self.liars), self._lies(round, said), strict=True)
        return said[me]

    def _lies(self, round: int, said: dict[PeerId, Tensor]) -> Iterable[Tensor]:
        anchor_V, f = self.anchors[round], len(self.liars)
        rows = (
            said[peer] if peer in said else island.ahead(anchor_V) for peer, island in sorted(self.crowd.items())
        )
        honest_HV = torch.stack(tuple(rows))
        match self.attack:
            case "largest":
                return constant(honest_HV, f, LARGEST)
            case "stale":
                return stale(honest_HV, f, self.anchors.get(round - 1, anchor_V) - anchor_V)
            case _:
                return attack_rows(self.attack, honest_HV, f, self.rule)
