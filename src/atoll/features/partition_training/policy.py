"""What members do that are cut off from a quorum: genesis' word on it, and how one knows that it is cut off.

Promises: one word for the whole run, since what comes back is counted by everybody's rules.
Never decides anything that others act on: who is apart knows it by itself, and later says how long it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec

from atoll.base.ids import PeerId
from atoll.base.limits import APART_ROUNDS_MAX


class PartitionPolicy(msgspec.Struct, frozen=True):
    """Members that hear too few to agree train on by themselves; fixed in genesis."""

    then: Literal["merge", "drop"]  # what becomes of these steps when they are back
    rounds: Annotated[int, msgspec.Meta(ge=1, le=APART_ROUNDS_MAX)]  # worth of steps: what drifts farther is stale

    def steps_max(self, inner_steps: int) -> int:
        return self.rounds * inner_steps


def heard(me: PeerId, committee: Sequence[PeerId], gone: Callable[[PeerId], bool]) -> int:
    """Voters that I hear, and I if I am one."""
    return sum(peer == me or not gone(peer) for peer in committee)


def too_few(me: PeerId, committee: Sequence[PeerId], quorum: int, gone: Callable[[PeerId], bool]) -> bool:
    """They cannot agree on anything."""
    return heard(me, committee, gone) < quorum
