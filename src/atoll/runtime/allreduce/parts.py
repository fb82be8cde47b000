"""Partition of a call into parts: how many, of which values, with which random seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from atoll.crypto.digest import digest
from atoll.runtime.allreduce.call import SAMPLE_VALUES, Cuts
from atoll.training.codec import Codec
from atoll.training.recipe.update import TensorPlace, part_bounds

PART_VALUES = 2 * 2**20  # values of a part in fp32: while one is combined, the next ones arrive
PART_VALUES_MOST = 4 * 2**20  # values of a part in codecs with fewer bytes: half as many messages for the same work
TURNS = 3  # parts per owner, in fp32: it holds the rows of one part, not of its whole share
# least values of a part in several turns: below it more messages cost more than the memory is worth
TURN_VALUES_LEAST = 2**19
# least values of a part: below it messages cost all members more than the work costs one owner
PART_VALUES_LEAST = 2**16


def seed_of(round: int, part: int) -> bytes:
    """Seed of `randk`: known to all members of a round on every path. Liars know it in advance."""
    return digest(b"atoll/group/seed/1" + round.to_bytes(8, "big") + part.to_bytes(4, "big"))


def part_values(codec: Codec) -> int:
    """Values per part of a large call: as many bytes as in fp32, within a limit on the work."""
    return min(PART_VALUES_MOST, 4 * PART_VALUES * SAMPLE_VALUES // codec.wire_bytes(SAMPLE_VALUES))


def cuts(values: int, shares: Sequence[int], pieces: int, each: int) -> Cuts:
    """[lo, hi) per part, in proportion to the shares, cut between blocks of the codecs.

    The parts are `pieces` turns of all owners, of about `each` values, or fewer to save memory. A small call fills
    only the first turn or a piece of it, and the other parts are empty: every part costs each member a message
    there and back. A single owner would receive and send as much as all together and hold all rows, so all members
    are owners as soon as that pays.
    """
    owners = len(shares) // pieces
    share = values / owners
    turns = min(pieces, max(round(share / each), min(TURNS * PART_VALUES // each, int(share / TURN_VALUES_LEAST))))
    used = turns * owners if turns > 1 else min(owners, max(1, round(values / PART_VALUES_LEAST)))
    filled = part_bounds(values, shares[:used])
    return filled + ((values, values),) * (len(shares) - len(filled))


def paired_cuts(values: int, members: int, pieces: int, each: int) -> Cuts:
    """[lo, hi) per part in pairs: pieces of about `each` values, each repeated as one part per member."""
    filled = part_bounds(values, (1,) * min(pieces, max(1, round(values / each))))
    bounds = filled + ((values, values),) * (pieces - len(filled))
    return tuple(bound for bound in bounds for _ in range(members))


def placed(tensors: Sequence[Tensor], origin: int) -> tuple[TensorPlace, ...]:
    """Places of tensors in the flat vector, counted from `origin`."""
    ends = accumulate(tensor.numel() for tensor in tensors)
    return tuple(
        TensorPlace(end - t.numel() - origin, t.numel(), tuple(t.shape))
        for t, end in zip(tensors, ends, strict=True)
        if t.numel()
    )
