"""Environment of an all-reduce: keys, commitments and liveness of peers, and durable statements of the local peer.

All are functions or live containers: their values change during an attempt, and are never cached.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from atoll.base.ids import PeerId
from atoll.wire.messages.statements import Commitment

Awaits = Callable[[int, Container[PeerId], Iterable[PeerId] | None], bool]


@dataclass(frozen=True)
class ReduceEnvironment:
    """The round around one attempt."""

    vote_key_of: Callable[[PeerId], bytes | None]
    commitment_of: Callable[[PeerId], Commitment | None]  # the first commitment of a peer in this attempt
    is_awaited: (
        Awaits  # (part, names, among): may a row of `among` (None: all members), not in `names`, still come?
    )
    is_gone: Callable[[PeerId], bool]  # a peer that is not waited for any more
    durable_keys: Container[str] = ()  # storage keys of statements that were durable before a restart
    parts_filled: Callable[[], int | None] = lambda: None  # parts of the longest update; None: not yet known
    is_unheard: Callable[[PeerId], bool] = lambda peer: (
        False
    )  # a peer gone for its silence alone: others may hear it
    has_vote: bool = False  # the local peer votes, so with witnesses it believes no single owner
    equivocators: Container[PeerId] = ()  # peers that committed twice
    can_see_rows: Callable[[PeerId], bool] = lambda peer: True  # a peer that may see rows of others
    refused: Container[
        PeerId
    ] = ()  # authors with rows that are only checked, if others took them, and never combined
    keeps_rows: bool = False  # rows of own results are wanted after the round
