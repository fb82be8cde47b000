"""Routing: the turn of a part passes from owners to reserves, never to a jury; and the order of sends."""

from __future__ import annotations

from dataclasses import replace

from atoll.base.ids import PeerId
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.routing import AttemptRouting
from atoll.protocol.allreduce.topology import PartReductionTree, ReduceTopology, butterfly, ring

A, B, C, D = (PeerId(p) for p in "abcd")
PLAN = ReducePlan(3, 0, "", ReduceTopology("star", (PartReductionTree((A, B), 1, {}),)), (A, B, C, D), (6.0, 12.0))


def turn_of(plan: ReducePlan, *gone: PeerId) -> PeerId | None:
    """The peer in charge in the view of D; None if no taker is left."""
    route = AttemptRouting(plan, D, gone.__contains__)
    return route.owner[0] if route.pass_turn(0, 1.0) else None


def test_a_part_goes_to_the_next_owner_and_where_all_are_gone_to_the_first_reserve_that_is_left():
    plan = replace(PLAN, reserves=(C, D))
    assert [turn_of(plan), turn_of(plan, A), turn_of(plan, A, B), turn_of(plan, A, B, C)] == [A, B, C, D]
    assert turn_of(PLAN, A, B) is None


def test_a_jury_is_not_asked_to_combine_where_all_owners_are_gone():
    plan = replace(PLAN, witnesses=1, juries=((C, D),), verdict=2)
    assert turn_of(plan, A) == B and turn_of(plan, A, B) is None


def test_at_no_time_do_two_send_to_the_same_peer():
    """Rows of eight pieces each, then answers: whatever number a sending has, it goes to another peer from each."""
    members = (A, B, C, D)
    plan = replace(PLAN, topology=butterfly(members, b"drawn", pieces=2))
    routes = [AttemptRouting(plan, me, lambda _: False) for me in members]
    owners = [[plan.owners(part)[0] for part in route.parts_in_send_order()] for route in routes]
    assert all(set(sent) == set(members) for sent in zip(*owners, strict=True))
    assert all(len(set(sent)) == 4 for sent in zip(*(route.others() for route in routes), strict=True))


def test_on_a_ring_all_rows_go_to_one_peer_in_the_order_of_their_parts():
    """Who has one to send to keeps the plan's order; its own part comes by itself."""
    plan = replace(PLAN, topology=ring((A, B, C, D), b"drawn"))
    turns = AttemptRouting(plan, B, lambda _: False).parts_in_send_order()
    sent = [part for part in turns if plan.owners(part)[0] != B]
    assert sent == sorted(sent)
