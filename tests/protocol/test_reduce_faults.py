"""Faults of members anywhere in a topology: deaths, freezes and garbage end with one result at the others."""

from __future__ import annotations

import pytest
from test_reduce import TOPOLOGIES, Group

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Payload, Received, RunTask, TaskDone
from atoll.crypto.digest import digest
from atoll.protocol.allreduce.events import RowDecodeFailed
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined
from atoll.wire.messages.round import PartialSum, PartResult, RowContribution, RowRequest, RowReroutedHint

WITH_PARENTS = ["ring", "tree", "hierarchical"]
COUNT = 7
CHILD = PeerId("p0")
SILENCE_S = 20.0  # after the plan's last deadline


def roles(group: Group) -> dict[str, PeerId]:
    """One member of each kind in the first part: an owner (root or center), a parent, a leaf."""
    tree = group.plan.topology.parts[0]
    found = {"owner": tree.owners[0]}
    found |= {"parent": next(p for p in group.names if p in tree.children)} if tree.parents else {}
    leaves = [p for p in group.names if p != tree.owners[0] and p not in tree.children]
    return found | ({"leaf": leaves[0]} if leaves else {})


FAULTS = [
    (topology, role, way)
    for topology in TOPOLOGIES
    for role in roles(Group(COUNT, topology))
    for way in ("up", "down")
]


def one_result(group: Group, living: set[PeerId]) -> None:
    """All who live hold every part, the same of each, and all of them are in it."""
    group.check()
    for part in range(group.plan.parts):
        held = {group.parts_of(p)[part] for p in living}
        assert len(held) == 1 and living <= set(*held), (part, held)


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize(("topology", "role", "way"), FAULTS)
def test_a_member_that_dies_or_freezes_anywhere_costs_no_other_row(
    topology: str, role: str, way: str, noticed: bool
):
    """Before its first row leaves, or with the first answer on its way. A frozen one is noticed by no refusal: all
    wait for as long as silence takes."""
    group = Group(COUNT, topology, silent=not noticed)
    victim = roles(group)[role]
    if way == "up":
        group.dead.add(victim)
    group.begin()
    while way == "down" and not any(isinstance(send.message, PartResult) for _, send in group.flying):
        group.deliver(0)
    group.flying = [(sender, send) for sender, send in group.flying if sender != victim]
    group.dies(victim)
    group.finish()
    assert group.now < SILENCE_S
    one_result(group, set(group.names) - {victim})


def first_to_a_parent(group: Group) -> tuple[PeerId, PeerId, RowContribution]:
    """(child, parent, message) of a row for a parent."""
    for sender, send in group.flying:
        if isinstance(send.message, RowContribution) and send.message.owner_index < 0:
            return sender, send.to, send.message
    raise AssertionError("no member has a parent")


@pytest.mark.parametrize("topology", WITH_PARENTS)
@pytest.mark.parametrize("what", ["other bytes", "another length", "somebody else's row"])
def test_a_child_whose_row_is_not_what_it_committed_to_is_named_and_waited_for_no_longer(topology: str, what: str):
    group = Group(COUNT, topology).begin()
    child, parent, message = first_to_a_parent(group)
    right = group.updates[child].parts[message.part]
    wrong = {
        "other bytes": Payload(digest(b"other"), right.size_bytes, right.data),
        "another length": Payload(digest(b"longer"), right.size_bytes + 1, right.data),
        "somebody else's row": group.updates[parent].parts[message.part],
    }[what]
    with pytest.raises(PeerFault) as fault:
        group.machines[parent].handle(Received(child, message, wrong), 0.0)
    assert fault.value.who == child
    group.flying = [(s, x) for s, x in group.flying if not (s == child and x.message == message)]
    group.finish()
    assert group.now < SILENCE_S
    group.check()
    held = {group.parts_of(p)[message.part] for p in group.names}
    assert held == {tuple(sorted(set(group.names) - {child}))}


@pytest.mark.parametrize("topology", WITH_PARENTS)
def test_a_sum_of_rows_that_do_not_come_through_its_sender_is_refused(topology: str):
    group = Group(COUNT, topology).begin()
    child, parent, message = first_to_a_parent(group)
    tree = group.plan.topology.parts[message.part]
    stranger = next(p for p in group.names if p != child and p not in tree.below(child))
    for names, weight in (((stranger,), 1), ((child, child), 2), ((), 0), (tuple(tree.below(child)), 99)):
        said = PartialSum(0, 0, "", message.part, -1, weight, tuple(names))
        with pytest.raises(PeerFault) as fault:
            group.machines[parent].handle(Received(child, said, Payload(digest(b"sum"), 8, names)), 0.0)
        assert fault.value.who == child
    around = PartialSum(0, 0, "", message.part, -1, 1, (child,), by=child)
    assert group.machines[parent].handle(Received(stranger, around, Payload(digest(b"x"), 8, (child,))), 0.0) == []
    group.finish()
    one_result(group, set(group.names))


def test_a_sum_goes_to_owners_alone_and_no_other_peer_makes_them_wait():
    """A tree of nine: a member that owns nothing requests a sum from the root, in vain.

    In a butterfly a hint that a peer is heard elsewhere causes no wait.
    """
    group = Group(9, "tree").begin()
    owners = group.plan.owners(0)
    stranger = next(p for p in group.names if p not in owners)
    while not any(held.handed for held in group.machines[owners[0]].accumulators[0].rows.values()):
        group.deliver(0)
    root = group.machines[owners[0]]
    parent = next(p for p, held in root.accumulators[0].rows.items() if held.handed)
    assert root.handle(Received(stranger, RowRequest(0, 0, "", 0, parent), None), 0.0) == []
    direct = Group(4).begin()
    owner, *others = direct.plan.owners(0)
    direct.machines[owner].handle(Received(others[0], RowReroutedHint(0, 0, "", 0, others[1]), None), 0.0)
    assert not direct.machines[owner].reroute.heard_elsewhere


class Garbled(Group):
    """One child's row does not decode; the owner or parent that combines it reports that."""

    def do(self, p: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case RunTask(job, CombineRows() as work) if any(row.peer == CHILD for row in work.rows):
                    rows = [row for row in work.rows if row.peer != CHILD]
                    names = tuple(sorted(name for row in rows for name in row.payload.data))
                    whole = Payload(digest(repr((work.part, names)).encode()), 8, names)
                    good = RowsCombined(whole, tuple(row.peer for row in rows), (CHILD,))
                    done = good if rows else RowsCombined(None, (), (CHILD,), "no row decodes")
                    self.do(p, self.machines[p].handle(TaskDone(job, done), self.now))
                case _:
                    super().do(p, [effect])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rows_that_do_not_decode_are_named_and_those_counted_are_those_that_do(topology: str):
    """Garbage that was committed to. What came through its author is lost with it; who counts is said truly."""
    group = Garbled(COUNT, topology)
    group.begin()
    group.finish()
    group.check()
    assert group.now < SILENCE_S
    named = {fact.peer for facts in group.facts.values() for fact in facts if isinstance(fact, RowDecodeFailed)}
    assert named == {CHILD}
    for part in range(group.plan.parts):
        held = {group.parts_of(p)[part] for p in group.names}
        below = group.plan.topology.parts[part].below(CHILD)
        assert len(held) == 1 and set(group.names) - {CHILD} - below <= set(*held)
