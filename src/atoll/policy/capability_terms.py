"""Terms of optional capabilities in genesis, which every member of a run must apply alike.

Invariants:
- A term that genesis does not hold turns its capability off.
Not responsible for: the capabilities themselves (`verification/`, `features/`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.base.arguments import Count
from atoll.base.limits import (
    APART_ROUNDS_MAX,
    CODED_PIECES_MAX,
    LEAF_BYTES_MAX,
    VALIDATION_ROUNDS,
    WINDOW_MOST_S,
)

# share of the blocks of every result: costs at most 1.03 times the bytes, and finds a lie in all blocks at once
OPENED_SHARE = 0.03
VALIDATE_EVERY_MAX = VALIDATION_ROUNDS // 8  # training rounds: the window must hold several candidates
SETS_MAX = 2  # held-out data, and canary data


class SumCheckTerms(msgspec.Struct, frozen=True, array_like=True):
    """How owners open blocks of their results."""

    # of the blocks of a result; their number follows from its length
    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    leaf_bytes: Annotated[int, msgspec.Meta(ge=1, le=LEAF_BYTES_MAX)]


class StateValidationTerms(msgspec.Struct, frozen=True):
    """How members evaluate agreed states."""

    every: Annotated[int, msgspec.Meta(ge=1, le=VALIDATE_EVERY_MAX)] = 1  # training rounds
    margin_percent: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 25  # above the least loss so far
    sets: Annotated[int, msgspec.Meta(ge=1, le=SETS_MAX)] = 1  # sets of data, one loss each


class ErasureParams(msgspec.Struct, frozen=True):
    """How members store older states in pieces; all of them draw the same holders."""

    k: Annotated[int, msgspec.Meta(ge=1, lt=CODED_PIECES_MAX)]  # pieces that rebuild the state
    n: Annotated[int, msgspec.Meta(ge=2, le=CODED_PIECES_MAX)]
    every_rounds: Count = 20  # rounds between two archived states
    # seconds away after which another member makes the holder's pieces again
    lost_s: Annotated[float, msgspec.Meta(ge=0, le=WINDOW_MOST_S)] = 3600.0


class PartitionPolicy(msgspec.Struct, frozen=True):
    """How members with too few reachable voters to agree train on alone."""

    then: Literal["merge", "drop"]  # use of these steps after the partition
    # rounds of steps: work that drifts farther is stale
    rounds: Annotated[int, msgspec.Meta(ge=1, le=APART_ROUNDS_MAX)]

    def steps_max(self, inner_steps: int) -> int:
        return self.rounds * inner_steps
