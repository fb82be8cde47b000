"""Moments of the members' inner optimizers, where rounds average these, too, on clocks of their own (DES-LOC,
2505.22549).

They travel as they are, behind the parameters: the vector of a run is anchor ‖ first ‖ second, and a round carries
as much of it as is due (`schedule.turn_of`). What was agreed last lies in the shared state, in the places that an
outer optimizer has for its own (`outer.MomentAverage`), so a newcomer begins with moments that fit the parameters.
Bit for bit the same everywhere. Never touches parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.recipe.inner import InnerState, inner_from_bytes, inner_pieces
from atoll.training.recipe.state import SharedState


def behind(x_F: Tensor, inner: InnerState, hi: int) -> Tensor:
    """What a member says up to place `hi`: its parameters and, as far as that reaches, its moments."""
    return torch.cat([x_F, inner.first_P, inner.second_P])[:hi]


def padded(anchor_F: Tensor, hi: int) -> Tensor:
    """What that is the difference from: moments say themselves."""
    return torch.cat([anchor_F, anchor_F.new_zeros(hi - len(anchor_F))])


def take_in(inner: InnerState, agreed: SharedState, count: int) -> None:
    """The first `count` of a member's moments become those that were agreed on; in place."""
    if count:
        inner.first_P.copy_(agreed.momentum_P)
    if count > 1 and agreed.second_P is not None:
        inner.second_P.copy_(agreed.second_P)


def inherited(agreed: SharedState) -> InnerState | None:
    """What a newcomer begins with; None before both were agreed on: a first moment over no second is a leap."""
    if agreed.second_P is None:
        return None
    return InnerState(agreed.momentum_P.clone(), agreed.second_P.clone(), agreed.steps)


def taken_in(data: Buffer, agreed: SharedState, count: int) -> bytes:
    """`take_in` for the bytes of an inner state."""
    inner = inner_from_bytes(data, len(agreed.momentum_P))
    take_in(inner, agreed, count)
    return as_bytes(inner)


def as_bytes(inner: InnerState | None) -> bytes:
    return b"" if inner is None else b"".join(inner_pieces(inner))
