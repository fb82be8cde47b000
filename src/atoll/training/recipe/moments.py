"""Averaging of the members' inner moments, on clocks of their own (DES-LOC, 2505.22549).

Moments travel unencoded, behind the parameters: the vector of a run is anchor ‖ first ‖ second, and a round carries
as much of it as is due (`schedule.turn_of`). The last agreed moments lie in the shared state, in the fields of an
outer optimizer's own moments (`outer.MomentAverage`). A joiner therefore begins with moments that fit the
parameters.
Invariants:
- Every peer computes the same bits.
- Parameters are never changed here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.recipe.inner import InnerState, inner_from_bytes, inner_pieces
from atoll.training.recipe.state import SharedState


def behind(x_F: Tensor, inner: InnerState, hi: int) -> Tensor:
    """A member's vector up to position `hi`: its parameters, then its moments as far as `hi` reaches."""
    return torch.cat([x_F, inner.first_P, inner.second_P])[:hi]


def padded(anchor_F: Tensor, hi: int) -> Tensor:
    """The vector that `behind` is subtracted from; zero for moments, which travel as they are."""
    return torch.cat([anchor_F, anchor_F.new_zeros(hi - len(anchor_F))])


def adopt_moments(inner: InnerState, agreed: SharedState, count: int) -> None:
    """Replace the first `count` of a member's moments by the agreed ones, in place."""
    if count:
        inner.first_P.copy_(agreed.momentum_P)
    if count > 1 and agreed.second_P is not None:
        inner.second_P.copy_(agreed.second_P)


def joiner_state(agreed: SharedState) -> InnerState | None:
    """Inner state of a joiner. None until both moments are agreed: a first moment without a second causes a huge
    step.
    """
    if agreed.second_P is None:
        return None
    return InnerState(agreed.momentum_P.clone(), agreed.second_P.clone(), agreed.steps)


def adopt_moments_bytes(data: Buffer, agreed: SharedState, count: int) -> bytes:
    """`take_in` for the bytes of an inner state."""
    inner = inner_from_bytes(data, len(agreed.momentum_P))
    adopt_moments(inner, agreed, count)
    return as_bytes(inner)


def as_bytes(inner: InnerState | None) -> bytes:
    return b"" if inner is None else b"".join(inner_pieces(inner))
