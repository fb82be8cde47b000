"""Loss statistics of one peer, and the commitments that they are computed from.

Not responsible for: verdicts. A coincidence is reported as one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.base.ids import PeerId
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import VertexBody


class LossSuspicion(msgspec.Struct, frozen=True):
    """How one peer's rounds differ from the others'. None: there is nothing to compare with."""

    peer: PeerId
    name: str
    rounds: int  # rounds in which it counted
    excess: float | None  # its reported loss minus the mean of the others in the same rounds
    worst: float | None  # the largest such difference, and its round
    worst_round: int | None
    rise: float | None  # mean change of the others' loss into the round after it counted
    rise_without: float | None  # the same after rounds in which it did not count


def commitments_to_updates(body: VertexBody) -> dict[PeerId, Commitment]:
    """Commitments to counted updates, by author. `atoll verify` reports those that do not decode."""
    read = ((signed.signer, statement_in(signed)) for signed in body.commits)
    return {peer: commit for peer, commit in read if isinstance(commit, Commitment) and commit.parts > 0}


def names_among(peers: Iterable[PeerId], names: dict[PeerId, str]) -> tuple[str, ...]:
    return tuple(sorted(names.get(p, p) for p in peers))
