"""Proposer turns, and the voting committee where a run has too many voters.

Turns go round a circle of all voters, ordered by the run's id and their names. The next proposer is the same
whatever the last one wrote, so liars propose their share of rounds.

The committee is drawn from the head's id, by reputation where the run keeps it. Without reputation every voter is
equally likely. With it a voter's chance is its share of all scores, capped at 1.5 times an equal share. So
newcomers vote less often, and no reputation buys more than that.

Invariants:
- Every present voter has one turn per circle.
- The committee is equal at every peer (integers only).
- Of n voters and m places, at most min(1, 3m / 2n) of all draws include one given voter.
- No newcomer has the best chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from atoll.base.draw import draw_below, draw_bytes, shuffled
from atoll.base.ids import Digest, PeerId
from atoll.policy.reputation import FLOOR, cut_to_share

CIRCLE_ROUNDS = 256
"""Rounds until the order of the circle changes. Names can be chosen so that friends are neighbors in some circles,
but not in all of a long run; in 256 rounds even a hundred voters get their turns more than twice."""


def whose_turn(run: Digest, round: int, since: Mapping[PeerId, int], wrote: PeerId) -> PeerId:
    """The next voter on the circle after `wrote`, the proposer of the last vertex. `since`: round of each
    voter's entry.

    A voter has no turn until it has been present for as many rounds as there are voters. Otherwise new names,
    chosen to follow the proposer that admits them, would get all turns. If that excludes all voters, none is
    excluded.
    """
    settled = {peer for peer, came in since.items() if round - came > len(since)} or set(since)
    circle = on_circle(run, round, settled | {wrote})
    after = circle.index(wrote) + 1
    return next(peer for peer in (*circle[after:], *circle) if peer in settled)


def on_circle(run: Digest, round: int, voters: Iterable[PeerId]) -> list[PeerId]:
    """Voters in the order of this round's circle, from an arbitrary start."""
    return sorted(voters, key=lambda peer: _place(run, round // CIRCLE_ROUNDS, peer))


@lru_cache(maxsize=4096)
def _place(run: Digest, circle: int, peer: PeerId) -> bytes:
    return draw_bytes(run, f"turn {circle} {peer}", 16)


def draw_committee(
    head: Digest, voters: Sequence[PeerId], most: int, scores: Mapping[PeerId, int]
) -> tuple[PeerId, ...]:
    """All voters, or `most` of them, sorted by name. `scores` is empty where the run keeps no reputation."""
    chosen = list(voters)
    if len(voters) > most:
        order = shuffled(head, "committee", voters)
        chosen = _spread(head, chances(voters, most, scores), order, most) if scores else order[:most]
    return tuple(sorted(chosen))


def chances(voters: Sequence[PeerId], places: int, scores: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Weight of each voter in the draw: at most 1 / `places` of the sum, and at most 3 / (2n)."""
    known = {peer: scores.get(peer, FLOOR) for peer in voters}
    if 2 * len(voters) < 3 * places:
        return cut_to_share(known, 1, places)
    return cut_to_share(known, 3, 2 * len(voters))


def _spread(head: Digest, weights: Mapping[PeerId, int], order: Sequence[PeerId], places: int) -> list[PeerId]:
    """Systematic sampling (Madow 1949).

    Voters in a drawn order cover a line, each with the length `places` · weight. Points on it, from a drawn one on,
    are the sum of weights apart. No voter is longer than that distance, so none is hit twice, and each is hit with
    a probability of exactly `places` · weight / sum. Draws one by one without replacement have no such simple
    probability.
    """
    total = sum(weights.values())
    point, end = draw_below(head, "committee/start", total), 0
    chosen: list[PeerId] = []
    for peer in order:
        end += places * weights[peer]
        if point < end:
            chosen.append(peer)
            point += total
    assert len(chosen) == places
    return chosen
