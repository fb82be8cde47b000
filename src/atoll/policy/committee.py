"""Whose turn it is to propose, and who votes where there are too many voters.

Turns go round a circle of all voters, whose order follows from the run's id and their names: each proposer is
followed by the next one. So the same voter comes after it whatever it writes, and liars propose their share of
rounds.

Who votes is drawn from the head's id, by records where the run keeps them. Without records every voter is as
likely as any other. With them a voter's chance is its share of all scores, cut so that nobody's is more than
half as much again as an equal one: whoever has no record yet votes less often, and no record, however long,
buys more than that.

Promises: everybody here has one turn in each time round; the same committee at every peer (integers only); of n
voters and m places exactly min(1, 3m / 2n) at most of all draws hold any one of them; a newcomer's chance is
nobody's best. Never looks at anything but its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from atoll.base.draw import draw_below, draw_bytes, shuffled
from atoll.base.ids import Digest, PeerId
from atoll.policy.reputation import FLOOR, cut_to_share

CIRCLE_ROUNDS = 256
"""For which the circle stays as it is. Names can be chosen so that friends sit side by side in some circles, not in
all of a long run; and in so many rounds even a hundred voters come to their turns more than twice."""


def whose_turn(run: Digest, round: int, since: Mapping[PeerId, int], wrote: PeerId) -> PeerId:
    """The next voter on the circle after `wrote`, who wrote the last vertex. `since`: when each voter came in.

    Who has not been here for as many rounds as there are voters has no turn yet: else new names, chosen to lie just
    behind whoever writes the vertex that lets them in, would have all of them. While that is everybody, all have.
    """
    settled = {peer for peer, came in since.items() if round - came > len(since)} or set(since)
    circle = on_circle(run, round, settled | {wrote})
    after = circle.index(wrote) + 1
    return next(peer for peer in (*circle[after:], *circle) if peer in settled)


def on_circle(run: Digest, round: int, voters: Iterable[PeerId]) -> list[PeerId]:
    """In the order of this round's circle, from an end that means nothing."""
    return sorted(voters, key=lambda peer: _place(run, round // CIRCLE_ROUNDS, peer))


@lru_cache(maxsize=4096)
def _place(run: Digest, circle: int, peer: PeerId) -> bytes:
    return draw_bytes(run, f"turn {circle} {peer}", 16)


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
