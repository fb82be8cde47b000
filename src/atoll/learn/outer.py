"""The outer step: how the agreed parameters move when the members' combined update is known.

Every peer takes this step for itself and must end with the same bits, so only single-rounded elementwise
operations appear: `add(alpha=)`, `lerp` and `torch.optim.SGD(nesterov=True)` give other bits on other
instruction sets (measured with torch 2.13).
"""

from __future__ import annotations

import msgspec
from torch import Tensor


class Nesterov(msgspec.Struct, frozen=True, tag="nesterov"):
    """m <- mu m + d;  anchor <- anchor - lr (d + mu m): DiLoCo (2311.08105, algorithm 1) in PyTorch's form.

    `momentum=0, lr=1` is plain averaging (local SGD).
    """

    lr: float = 1.0
    # lr / (1 - momentum) is the effective step: about 2 for 30–50 rounds, 2.5–5 from 100 rounds on
    momentum: float = 0.6


def outer_step(outer: Nesterov, anchor_P: Tensor, momentum_P: Tensor, combined_P: Tensor) -> tuple[Tensor, Tensor]:
    """(anchor', momentum'), each (P,). The arguments are left alone."""
    momentum_P = momentum_P * outer.momentum
    momentum_P.add_(combined_P)
    ahead_P = momentum_P * outer.momentum
    ahead_P.add_(combined_P)
    ahead_P.mul_(outer.lr)
    return anchor_P - ahead_P, momentum_P
