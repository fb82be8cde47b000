"""Who is spoken to again now, where many speak to many and some are silent: in a large swarm the next few, in turn.

A word that was lost is said again each second to whoever does not answer. Where a third of a hundred members never
answers, that is the square of the swarm every second, and it tells the other two thirds nothing.
Promises: everybody silent is spoken to in time, and in a small swarm at once. Never draws, never remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from atoll.base.limits import COMMITTEE_MAX

AT_ONCE = 16  # two thirds of a hundred are spoken to in five seconds, each by a fifth of all others every second

T = TypeVar("T")


def in_turn(silent: Sequence[T], swarm: int, turn: int) -> Sequence[T]:
    """Of those who are silent in a swarm of this size, whom to speak to in this turn: 0, 1, …"""
    if swarm <= COMMITTEE_MAX or len(silent) <= AT_ONCE:
        return silent
    first = turn * AT_ONCE % len(silent)
    return [*silent, *silent][first : first + AT_ONCE]
