"""Partition policy: what genesis lets a member do while it is cut off from a quorum, and how it detects that.

One policy holds for the whole run, since all members count late work by the same rules. Not responsible for:
decisions that other members act on. A partitioned member detects it alone, and later reports how long it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.ids import PeerId


def heard(me: PeerId, committee: Sequence[PeerId], gone: Callable[[PeerId], bool]) -> int:
    """Number of reachable voters, including the local peer if it is one."""
    return sum(peer == me or not gone(peer) for peer in committee)


def too_few(me: PeerId, committee: Sequence[PeerId], quorum: int, gone: Callable[[PeerId], bool]) -> bool:
    """True if the reachable voters cannot agree on anything."""
    return heard(me, committee, gone) < quorum
