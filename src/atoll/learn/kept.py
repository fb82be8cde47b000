"""Parameters of a member's own, where rounds agree on a few values at a time (the merge `swap`), not on all.

They are private, and go with the agreed state that they were merged with: whoever has missed rounds takes what has
moved since from the state of today and goes on from its own of all others. Never sent, never hashed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.learn.merge import merge, where_moved
from atoll.learn.tensorfile import dump, load

FORMAT = "atoll/kept/1"


@dataclass(frozen=True)
class Kept:
    x_F: Tensor
    state: Digest  # the agreed state that it was merged with last

    def with_moved(self, before_F: Tensor, after_F: Tensor, state: Digest) -> Kept:
        """After the anchor went from `before_F`, which `self.state` has, to `after_F`, which this state has."""
        x_F = self.x_F.clone()
        merge("swap", x_F, self.x_F, where_moved(before_F, after_F))
        return Kept(x_F, state)


def kept_bytes(kept: Kept) -> bytes:
    """For the peer's private file."""
    return dump({"x": kept.x_F}, {"format": FORMAT, "state": kept.state.hex()})


def kept_from_bytes(data: bytes, floats: int) -> Kept:
    """ValueError if these are not finite parameters of a model of this size."""
    try:
        tensors, metadata = load(data)
    except PeerFault as fault:
        raise ValueError(f"the private file is damaged: {fault.what}") from fault
    x_F, state = tensors.get("x"), bytes.fromhex(metadata.get("state", ""))
    if metadata.get("format") != FORMAT or len(state) != 32 or x_F is None or x_F.shape != (floats,):
        raise ValueError(f"not the parameters of a model of {floats} values")
    if not bool(x_F.isfinite().all()):
        raise ValueError("parameters that are not finite")
    return Kept(x_F.clone(), Digest(state))
