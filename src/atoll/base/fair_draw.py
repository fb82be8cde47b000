"""Fair draw of participants: fewest turns first, balanced over groups, random among equals.

A *credit* is the lag of a member behind the member with the most turns, in quarters of a turn. Each member has a
credit inside its group, and each group has one among groups; a member without a group is a group of its own. A draw
repeatedly takes the group with the highest credit, and in it the member with the highest. Each pick counts as a
whole turn at once, so two groups that are always present never differ by more than one turn.

Invariants:
- Integers only, so the result is equal at every peer and in every experiment.
- A credit stays within 0 … CREDIT_MAX, which bounds how long a returning member is preferred.
Not responsible for: members, rounds, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from atoll.base.draw import shuffled

TURN_COST = 4  # cost of taking part, in quarters of a turn
ABSENT_COST = 1  # cost of a draw without taking part: an absent member is drawn at most four times as often
CREDIT_MAX = 16 * TURN_COST

Credit: TypeAlias = "tuple[int, int]"  # (credit in its group, credit of its group)


def draw_sample(seed: bytes, groups: Sequence[str], credits: Sequence[Credit], count: int) -> list[int]:
    """Draw at most `count` of the candidates; returns their indices in ascending order."""
    rank = {place: k for k, place in enumerate(shuffled(seed, "sample", range(len(groups))))}
    queues: dict[str, list[int]] = {}
    for place in sorted(range(len(groups)), key=lambda p: (credits[p][0], -rank[p])):
        queues.setdefault(groups[place], []).append(place)  # drawn from the end
    names = shuffled(seed, "sample/groups", sorted(queues))
    level = [(-credits[queues[name][0]][1], k, name) for k, name in enumerate(names)]
    heapify(level)
    drawn: list[int] = []
    while level and len(drawn) < count:
        had, k, name = heappop(level)
        drawn.append(queues[name].pop())
        if queues[name]:
            heappush(level, (had + TURN_COST, k, name))
    return sorted(drawn)


def credits_after(groups: Sequence[str], credits: Sequence[Credit], costs: Sequence[int]) -> list[Credit]:
    """Credits after each candidate paid its cost in quarters of a turn, 0 if it was not drawn."""
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
