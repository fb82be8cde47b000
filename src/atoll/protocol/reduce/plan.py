"""Reduce plans as data: which part goes to whom, and who answers when the first owner is silent.

Pure functions of the agreed membership and a seed, so that every peer computes the same plan. Never knows a
tensor, a size or a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.draw import shuffled
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import OWNERS_PER_PART, PART_BYTES_MAX, PARTS_MAX


@dataclass(frozen=True)
class ReducePlan:
    """A butterfly: part j is gathered by owners[j][0], or by owners[j][1] if that one is silent, and so on."""

    round: int
    attempt: int
    trace: str
    owners: tuple[tuple[PeerId, ...], ...]
    listeners: tuple[PeerId, ...]  # who gets the answers: every member and observer, in plan order
    answer_until: tuple[Seconds, ...]  # run time by which owner 0, 1, … must have answered

    @property
    def parts(self) -> int:
        return len(self.owners)


def butterfly_owners(
    peers: tuple[PeerId, ...], seed: bytes, update_bytes: int = 0
) -> tuple[tuple[PeerId, ...], ...]:
    """Up to PARTS_MAX parts, one first owner each, drawn from the seed; the next owners follow in the same order.

    Above PARTS_MAX peers only PARTS_MAX of them own a part in a given round: a member sends at most PARTS_MAX
    contributions however large the swarm is, an owner receives one from each member. An update that would not
    fit the frames of so many parts (`update_bytes`, the most that an encoded one can have) is cut finer; then
    an owner has several parts.
    """
    order = shuffled(seed, "owners", peers)
    parts = max(min(len(order), PARTS_MAX), -(-update_bytes // PART_BYTES_MAX))
    chain = min(OWNERS_PER_PART, len(order))
    return tuple(tuple(order[(j + k) % len(order)] for k in range(chain)) for j in range(parts))
