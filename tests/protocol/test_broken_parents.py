"""Broken links: two members do not hear each other, and all others hear both, anywhere in a topology."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from test_reduce import TOPOLOGIES, Group

NO_DEADLINE_S = 1.0  # the plan's first, a third of a window, is at 2


def all_hold_all(group: Group) -> None:
    group.check()
    for p in group.names:
        assert group.parts_of(p) == dict.fromkeys(range(group.plan.parts), tuple(sorted(group.names))), p


def while_time_stands(group: Group) -> None:
    """Deliver messages and short timers, without the end of any window."""
    while group.flying or any(at < NO_DEADLINE_S for at in group.timers.values()):
        if group.flying:
            group.deliver(0)
        else:
            group.tick()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 8])
def test_no_link_of_a_topology_is_needed(topology: str, count: int):
    """Each pair in turn, known before anything is sent: all rows count everywhere, and no window ends."""
    for one, other in combinations(Group(count, topology).names, 2):
        group = Group(count, topology, broken={frozenset((one, other))}).begin()
        while_time_stands(group)
        all_hold_all(group)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(20))
def test_a_link_may_break_at_any_moment(topology: str, seed: int):
    """While rows go up or answers come down, in any order."""
    draw = random.Random(seed)
    group = Group(draw.randrange(3, 9), topology).begin()
    breaks_after = draw.randrange(1 + 4 * group.plan.parts * group.count)
    while group.flying:
        if breaks_after == 0:
            group.breaks(*draw.sample(group.names, 2))
        breaks_after -= 1
        group.deliver(draw.randrange(len(group.flying)))
    while_time_stands(group)
    all_hold_all(group)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rows_behind_a_member_that_passes_are_waited_for(topology: str):
    """One of five commits to nothing, any pair does not hear each other: who hands on nothing of its own is no sign
    that nothing comes through it."""
    names = Group(5, topology).names
    for one, other in combinations(names, 2):
        for passing in names:
            group = Group(5, topology, broken={frozenset((one, other))}, passing={passing}).begin()
            while_time_stands(group)
            giving = tuple(name for name in names if name != passing)
            for p in giving:
                assert group.parts_of(p) == dict.fromkeys(range(group.plan.parts), giving), (one, other, passing, p)
