"""What a reduce asks of the round around it: who is who, who is there, what was said before a restart.

Questions, not values: answers change while an attempt lasts, and are never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from atoll.base.ids import PeerId
from atoll.wire.messages.statements import Commitment

Awaits = Callable[[int, Container[PeerId], Iterable[PeerId] | None], bool]


@dataclass(frozen=True)
class ReduceEnvironment:
    vote_key_of: Callable[[PeerId], bytes | None]
    commit_of: Callable[[PeerId], Commitment | None]  # what a peer committed to in this attempt
    awaits: Awaits  # (part, names, among): may somebody of these (None: anybody) still come who is not named?
    gone: Callable[[PeerId], bool]  # nobody waits for it any more
    said: Container[str] = ()  # names of what I durably said before a restart
    filled: Callable[[], int | None] = lambda: None  # parts of the longest update; None: that cannot be known yet
    unheard: Callable[[PeerId], bool] = lambda peer: False  # gone for its silence alone: others may hear it
    judges: bool = False  # I vote, so I believe no single owner where there are witnesses
    two_faced: Container[PeerId] = ()  # who committed twice
    may_see: Callable[[PeerId], bool] = lambda peer: True  # may it be shown rows of others?
    refused: Container[PeerId] = ()  # whose rows are not taken, only looked at where others took them
    keeps_rows: bool = False  # I want the rows of my answers when the round is over
