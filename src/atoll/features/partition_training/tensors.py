"""Late work: steps that a member took while partitioned, and the part of them that one update may carry.

Steps of k rounds in about one direction are some k updates long (measured: 10 after ten rounds away, 18 after
twenty), while the others went most of that way themselves. Sent whole, or as a mean with the old model, they throw
the agreed model back (bench/apart.py). So they count as one more update, as in staleness-weighted methods (FedBuff,
2106.06639: the staler, the less), but by length instead of a formula. Then no peer needs the others' progress, and
a row is at most twice as long as an ordinary one after any absence.

Invariants:
- Arguments are never changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.training.exchange.tensorfile import dump, load

FORMAT = "atoll/late/1"


@dataclass(frozen=True)
class UpdateWithoutQuorum:
    """A pseudo-gradient that no vertex has counted, and the steps that made it."""

    delta_F: Tensor
    since: int  # the round that could not be closed
    steps: int
    samples: int

    def plus(self, other: UpdateWithoutQuorum) -> UpdateWithoutQuorum:
        return UpdateWithoutQuorum(
            self.delta_F + other.delta_F,
            min(self.since, other.since),
            self.steps + other.steps,
            self.samples + other.samples,
        )


def carried(late: UpdateWithoutQuorum, fresh_F: Tensor) -> Tensor:
    """(F,): the late pseudo-gradient that joins this round's own, never longer than that."""
    length, fresh = float(late.delta_F.norm()), float(fresh_F.norm())
    return late.delta_F * min(1.0, fresh / length) if length else torch.zeros_like(late.delta_F)


def late_bytes(late: UpdateWithoutQuorum) -> bytes:
    """Contents of the peer's private file."""
    counts = {"since": str(late.since), "steps": str(late.steps), "samples": str(late.samples)}
    return dump({"late": late.delta_F}, {"format": FORMAT} | counts)


def late_from_bytes(data: bytes, floats: int) -> UpdateWithoutQuorum:
    """ValueError if the file is not the late work of a model of this size."""
    try:
        tensors, metadata = load(data)
    except PeerFault as fault:
        raise ValueError(f"the private file is damaged: {fault.what}") from fault
    delta_F = tensors.get("late")
    if (
        metadata.get("format") != FORMAT
        or delta_F is None
        or delta_F.shape != (floats,)
        or delta_F.dtype != torch.float32
        or not bool(delta_F.isfinite().all())
    ):
        raise ValueError(f"the private file holds no late work of a model of {floats} values")
    since, steps, samples = (int(metadata.get(name, -1)) for name in ("since", "steps", "samples"))
    if since < 0 or steps <= 0 or samples <= 0:  # values that voters refuse
        raise ValueError(f"the private file holds late work of {steps} steps, {samples} samples, since {since}")
    return UpdateWithoutQuorum(delta_F.clone(), since, steps, samples)
