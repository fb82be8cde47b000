"""Whose turn a part is: its owners', then the reserves', and never a jury's, which only looks after owners."""

from __future__ import annotations

from dataclasses import replace

from atoll.base.ids import PeerId
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.route import Route
from atoll.protocol.reduce.topology import Part, Topology

A, B, C, D = (PeerId(p) for p in "abcd")
PLAN = ReducePlan(3, 0, "", Topology("star", (Part((A, B), 1, {}),)), (A, B, C, D), (6.0, 12.0))


def turn_of(plan: ReducePlan, *gone: PeerId) -> PeerId | None:
    """As D sees it; None: nobody is left."""
    route = Route(plan, D, gone.__contains__)
    return route.owner[0] if route.pass_turn(0, 1.0) else None


def test_a_part_goes_to_the_next_owner_and_where_all_are_gone_to_the_first_reserve_that_is_left():
    plan = replace(PLAN, reserves=(C, D))
    assert [turn_of(plan), turn_of(plan, A), turn_of(plan, A, B), turn_of(plan, A, B, C)] == [A, B, C, D]
    assert turn_of(PLAN, A, B) is None


def test_a_jury_is_not_asked_to_combine_where_all_owners_are_gone():
    plan = replace(PLAN, witnesses=1, juries=((C, D),), verdict=2)
    assert turn_of(plan, A) == B and turn_of(plan, A, B) is None
