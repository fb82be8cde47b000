"""Who takes part where not everybody does: whoever had the fewest turns, group by group, drawn among equals.

A *credit* says by how many quarters of a turn somebody is behind the one that had the most. Everybody has one
inside its group, and every group has one among groups; who is in no group is one by itself. A draw takes the group
with the most credit, and in it the member with the most, again and again; each taken counts as a whole turn at
once, so that two groups that are always there never come to differ by more than one turn.

Promises: integers only, so the same at every peer and in every experiment; a credit stays within 0 … CREDIT_MAX, so
whoever was away for long is caught up with for so long and no longer. Never knows a member, a round or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from atoll.base.draw import shuffled

TURN = 4  # quarters: what taking part costs
CALL = 1  # what being drawn in vain costs: so nobody who never comes is drawn more than four times as often
CREDIT_MAX = 16 * TURN

Credit: TypeAlias = "tuple[int, int]"  # (in its group, of its group), the same second one in the whole group


def draw_sample(seed: bytes, groups: Sequence[str], credits: Sequence[Credit], count: int) -> list[int]:
    """Who of so many candidates take part: their places, in order; all of them if they are no more than `count`."""
    rank = {place: k for k, place in enumerate(shuffled(seed, "sample", range(len(groups))))}
    queues: dict[str, list[int]] = {}
    for place in sorted(range(len(groups)), key=lambda p: (credits[p][0], -rank[p])):
        queues.setdefault(groups[place], []).append(place)  # the last one is taken first
    names = shuffled(seed, "sample/groups", sorted(queues))
    level = [(-credits[queues[name][0]][1], k, name) for k, name in enumerate(names)]
    heapify(level)
    drawn: list[int] = []
    while level and len(drawn) < count:
        had, k, name = heappop(level)
        drawn.append(queues[name].pop())
        if queues[name]:
            heappush(level, (had + TURN, k, name))
    return sorted(drawn)


def credits_after(groups: Sequence[str], credits: Sequence[Credit], costs: Sequence[int]) -> list[Credit]:
    """The same after these paid for their turns, 0 for who was not drawn."""
    paid, had = dict[str, int](), list[int]()
    for name, (own, group), cost in zip(groups, credits, costs, strict=True):
        paid[name] = paid.get(name, -group) + cost
        had.append(cost - own)
    most: dict[str, int] = {}
    for name, level in zip(groups, had, strict=True):
        most[name] = max(level, most.get(name, level))
    top = max(paid.values(), default=0)
    return [
        (min(most[name] - level, CREDIT_MAX), min(top - paid[name], CREDIT_MAX))
        for name, level in zip(groups, had, strict=True)
    ]
