"""Round-robin retransmission: picks the unresponsive peers to contact next, at most 16 per turn in a large swarm.

A lost message is sent again each second to every unresponsive peer. If a third of a hundred members never responds,
that would be the square of the swarm every second, without use for the others.
Invariants: every unresponsive peer is contacted in time, and in a small swarm in every turn.
Not responsible for: randomness, memory; the caller counts turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from atoll.base.limits import COMMITTEE_MAX

AT_ONCE = (
    16  # peers per turn: two thirds of a hundred take 5 turns, and a fifth of all others contact each per turn
)

T = TypeVar("T")


def round_robin(silent: Sequence[T], swarm: int, turn: int) -> Sequence[T]:
    """The unresponsive peers in `silent` to contact in this turn (0, 1, …), in a swarm of `swarm` members."""
    if swarm <= COMMITTEE_MAX or len(silent) <= AT_ONCE:
        return silent
    first = turn * AT_ONCE % len(silent)
    return [*silent, *silent][first : first + AT_ONCE]
