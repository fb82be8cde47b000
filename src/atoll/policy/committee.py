"""Who votes where there are too many voters: drawn from the head's id, by records where the run keeps them.

Without records every voter is as likely as any other. With them a voter's chance is its share of all scores, cut so
that nobody's is more than half as much again as an equal one: whoever has no record yet votes less often, and no
record, however long, buys more than that.

Promises: the same committee at every peer (integers only); of n voters and m places exactly min(1, 3m / 2n) at most
of all draws hold any one of them; a newcomer's chance is nobody's best. Never looks at anything but its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.base.draw import draw_below, shuffled
from atoll.base.ids import Digest, PeerId
from atoll.policy.reputation import FLOOR, cut_to_share


def draw_committee(
    head: Digest, voters: Sequence[PeerId], most: int, scores: Mapping[PeerId, int]
) -> tuple[PeerId, ...]:
    """All voters, or `most` of them, in the order of their names. `scores`: none where nobody keeps records."""
    chosen = list(voters)
    if len(voters) > most:
        order = shuffled(head, "committee", voters)
        chosen = _spread(head, chances(voters, most, scores), order, most) if scores else order[:most]
    return tuple(sorted(chosen))


def chances(voters: Sequence[PeerId], places: int, scores: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """What each voter weighs in the draw: nobody more than 1 / `places` of all, nor than 3 / (2n)."""
    known = {peer: scores.get(peer, FLOOR) for peer in voters}
    if 2 * len(voters) < 3 * places:
        return cut_to_share(known, 1, places)
    return cut_to_share(known, 3, 2 * len(voters))


def _spread(head: Digest, weights: Mapping[PeerId, int], order: Sequence[PeerId], places: int) -> list[PeerId]:
    """Systematic sampling (Madow 1949): voters in a drawn order on a line, each as long as `places` times its
    weight, and the points on it that are the sum of weights apart, from a drawn one on.

    Nobody is longer than the distance of two points, so nobody is hit twice, and everybody is hit with a chance of
    exactly `places` · weight / sum; draws one after the other without replacement have no such simple chances.
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
