"""Topology of a round, chosen by locations in members' names or by measured links."""

from __future__ import annotations

from dataclasses import replace as copy
from itertools import product
from typing import Literal

import msgspec
import pytest
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.limits import MIB, OWNERS_PER_PART, PART_BYTES_MAX
from atoll.base.machine import Fact
from atoll.crypto.digest import digest
from atoll.peer.events import RoundBegan, RoundClosed, UpdateSharingBegan
from atoll.peer.round.context import context_after
from atoll.peer.round.local_update import LocalUpdate
from atoll.peer.round.topology_choice import TOPOLOGIES, parts_planned, regions_of, way_of
from atoll.peer.settings import PIECES_BY_SIZE, RULES, RunSettings, decode_settings, encode_settings
from atoll.policy.links import TransferRates, report
from atoll.policy.plan import RoundPlan, RoundSettings
from atoll.protocol.allreduce.topology import validate
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement


def plan_of(names: list[str]) -> RoundPlan:
    swarm = VirtualSwarm(1, SwarmKnobs(peers=len(names)))
    swarm.world.run(0.5)
    round = swarm.world.nodes[peer_name(0)].machine.round
    members = tuple(replace(m, name=name) for m, name in zip(round.plan.members, names, strict=True))
    return copy(round.plan, members=members)


def test_names_that_are_paths_make_nested_regions():
    named = {
        PeerId(p): name
        for p, name in {"a": "eu/fra/a", "b": "eu/fra/b", "c": "eu/par/c", "d": "us/d", "e": "e"}.items()
    }
    assert regions_of(named) == ("e", (("a", "b"), "c"), "d")
    assert regions_of({PeerId("a"): "eu/a", PeerId("b"): "eu/b"}) == ("a", "b")
    assert regions_of({PeerId("a"): "/", PeerId("b"): "b/"}) == ("a", "b")


def test_members_in_two_places_reduce_in_a_hierarchy_and_each_part_crosses_once():
    plan = plan_of(["eu/a", "eu/b", "eu/c", "us/d", "us/e", "us/f"])
    topology = way_of(RunSettings(topology="auto"), plan).topology
    place = {m.peer: m.name.split("/")[0] for m in plan.members}
    assert topology.name == "hierarchical" and validate(topology, plan.owners) is None
    for part in topology.parts:
        ups = [(p, part.parent(p)) for p in plan.owners]
        assert sum(place[p] != place[q] for p, q in ups if q is not None) == 1


def test_members_in_one_place_reduce_in_a_butterfly():
    assert way_of(RunSettings(topology="auto"), plan_of(["a", "b", "c"])).topology.name == "butterfly"


def test_owners_that_remember_own_the_same_parts_in_every_round():
    names = ["a", "b", "c", "d", "e"]
    plan = plan_of(names)
    for settings, moves in ((RunSettings(), True), (RunSettings(steady=True), False)):
        owned = {
            tuple(part.owners for part in way_of(settings, copy(plan, head=digest(bytes([r])))).topology.parts)
            for r in range(8)
        }
        assert (len(owned) > 1) == moves


def test_pieces_of_one_owner_pass_to_one_member_each_where_genesis_says_so():
    """Left out, as in every genesis written before: to the one behind it, so that old and new members agree."""
    plan = plan_of(["a", "b", "c", "d"])
    for settings, takers in ((RunSettings(pieces=3), 1), (RunSettings(pieces=3, spread=True), 3)):
        parts = way_of(settings, plan).topology.parts
        for owner in plan.owners:
            assert len({part.owners[1] for part in parts if part.owners[0] == owner}) == takers


def measured(plan: RoundPlan, latency_s, rates: dict[int, TransferRates] | None = None) -> RoundPlan:
    """The same plan with what its members reported; `latency_s(i, j)` one way."""
    peers = [m.peer for m in plan.members]

    def links(i: int) -> bytes:
        near = {peer: latency_s(i, j) for j, peer in enumerate(peers) if j != i}
        return report((rates or {}).get(i, TransferRates()), near, peers)

    return copy(plan, members=tuple(replace(m, links=links(i)) for i, m in enumerate(plan.members)))


def two_places(i: int, j: int) -> float:
    return 0.002 if i // 3 == j // 3 else 0.06


AUTO = RunSettings(topology="auto", update_bytes=8 * MIB)


def test_members_that_measured_two_places_and_a_thin_link_between_reduce_in_a_hierarchy_without_any_names():
    plan = plan_of(["a", "b", "c", "d", "e", "f"])
    assert way_of(AUTO, plan).topology.name == "butterfly" and "not known" in way_of(AUTO, plan).why
    peers = [m.peer for m in plan.members]
    thin = {i: TransferRates(None, {peers[j]: 3e4 for j in range(6) if two_places(i, j) > 0.05}) for i in range(6)}
    way = way_of(AUTO, measured(plan, two_places, thin))
    assert way.topology.name == "hierarchical" and "measured speeds" in way.why
    for part in way.topology.parts:
        ups = [(p, part.parent(p)) for p in plan.owners]
        assert sum(peers.index(p) // 3 != peers.index(q) // 3 for p, q in ups if q is not None) == 1


def test_names_of_what_pairs_hold_say_nothing_of_how_long_the_next_update_is():
    """Among two places with a thin link between: what is long goes by the hierarchy, a few bytes go to all."""
    swarm = VirtualSwarm(1, SwarmKnobs(peers=6))
    swarm.world.run(0.5)
    machine = swarm.world.nodes[peer_name(0)].machine
    peers = [m.peer for m in machine.round.plan.members]
    thin = {i: TransferRates(None, {peers[j]: 3e4 for j in range(6) if two_places(i, j) > 0.05}) for i in range(6)}
    plan = measured(machine.round.plan, two_places, thin)
    answers = tuple(OwnerResult(0, 0, part, 0, ZERO_DIGEST, 16, plan.owners) for part in range(6))

    def topology_after(asked: str) -> str:
        commit = Commitment(0, 0, ZERO_DIGEST, 4, 1, 1, 0.0, 0.0, 1, asked)
        said = [SignedStatement(plan.owners[0], encode(word), b"") for word in (commit, *answers)]
        parent = replace(machine.history.head_body, commits=tuple(said[:1]), parts=tuple(said[1:]), trained=1)
        return context_after(AUTO, plan, parent, machine.known.pool.recent(), machine.run).topology.name

    assert topology_after("") == "butterfly" and topology_after("topology=pairs") == "hierarchical"


@pytest.mark.parametrize("quorum", ["majority", "two-thirds"])
def test_words_of_a_topology_change_nothing_where_it_is_nobodys_choice(quorum, monkeypatch: pytest.MonkeyPatch):
    """One member of five names one in its commitment: once no body with its row was accepted, forever."""
    honest = LocalUpdate.commit

    def commit(mine: LocalUpdate, attempt: int) -> Commitment:
        said = honest(mine, attempt)
        return replace(said, why="topology=star") if mine.me == peer_name(4) and said.parts else said

    monkeypatch.setattr(LocalUpdate, "commit", commit)
    rounds = RoundSettings(inner_steps=20, first_train_s=10, quorum=quorum)
    swarm = VirtualSwarm(3, SwarmKnobs(peers=5, run=RunSettings(topology="butterfly", round=rounds)))
    swarm.world.run(20.0)
    assert min(swarm.heads()) >= 1


def test_a_slow_uplink_owns_less_and_a_very_slow_one_nothing():
    plan = plan_of(["a", "b", "c", "d"])
    flat = RunSettings(topology="butterfly", update_bytes=8 * MIB)
    for rate, least, most in ((4.2e6, 0.25, 0.25), (1.9e6, 0.01, 0.24), (2e4, 0.0, 0.0)):
        known = measured(plan, lambda i, j: 0.01, {i: TransferRates(5e6 if i else rate) for i in range(4)})
        parts = way_of(flat, known).topology.parts
        mine = sum(p.share for p in parts if p.owners[0] == plan.members[0].peer) / sum(p.share for p in parts)
        assert least <= mine <= most


def test_as_long_as_one_pair_is_unknown_nothing_is_planned_on_links():
    plan = measured(plan_of(["a", "b", "c"]), two_places)
    gap = replace(plan.members[0], links=b""), replace(plan.members[1], links=b""), plan.members[2]
    assert "not known" in way_of(AUTO, copy(plan, members=gap)).why


def test_where_settings_name_the_topology_only_uplinks_count_and_only_once_all_links_are_known():
    """Where members are changes nothing; an uplink does, but not while a pair has not met."""
    plan, named = plan_of(["a", "b", "c"]), RunSettings(topology="butterfly", update_bytes=8 * MIB)
    slow = {i: TransferRates(5e6 if i else 1e6) for i in range(3)}
    blank = way_of(named, plan)
    assert way_of(named, measured(plan, two_places)) == way_of(named, measured(plan, lambda i, j: 0.01)) == blank
    known = measured(plan, two_places, slow)
    assert way_of(named, known) != blank
    gap = replace(known.members[0], links=b""), replace(known.members[1], links=b""), known.members[2]
    assert way_of(named, copy(known, members=gap)) == blank


def test_where_members_may_lie_a_fast_link_earns_nobody_more_to_own():
    plan = measured(
        plan_of(["a", "b", "c", "d"]), two_places, {i: TransferRates(1e5 if i else 1e8) for i in range(4)}
    )
    plan = copy(plan, settings=replace(plan.settings, quorum="two-thirds"))
    assert {part.share for part in way_of(AUTO, plan).topology.parts} == {1}


def test_a_swarm_learns_its_links_and_reduces_by_them():
    """Six peers, one behind a thin uplink: after a few rounds all plan by what they measured; it owns nothing."""
    settings = RunSettings(topology="auto", update_bytes=MIB, round=RoundSettings(inner_steps=20, first_train_s=10))
    network = NetworkKnobs(jitter_s=0.0005, uplink_bytes_s=2.5e6)
    swarm = VirtualSwarm(
        7, SwarmKnobs(peers=6, run=settings, network=network, island=WorkerKnobs(update_bytes=MIB))
    )
    names = [peer_name(i) for i in range(6)]
    swarm.world.network.uplink_bytes_s[names[0]] = 5e5
    began: dict[int, set[tuple[str, str]]] = {}

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundBegan):
            began.setdefault(fact.round, set()).add((fact.topology, fact.why))

    swarm.world.watchers.append(watch)
    swarm.world.run(120.0)
    assert min(swarm.heads()) >= 4 and all(len(ways) == 1 for ways in began.values())
    assert all("measured speeds" in why for _, why in began[4])
    machine = swarm.world.nodes[names[3]].machine
    assert machine.round is not None and machine.round.ground.topology is not None
    parts = machine.round.ground.topology.parts
    assert names[0] not in {part.owners[0] for part in parts} | {p for part in parts for p in part.parents.values()}


@pytest.mark.parametrize("seed", [3, 5, 6])
def test_where_all_six_owners_of_everything_are_killed_the_seven_that_are_left_still_have_their_mean(seed: int):
    """A star of thirteen, at the moment when a peer begins to share: the remaining members of the plan answer at
    once, in the same attempt, and voters accept that as a result. Also where a message of the dead comes late.
    """
    settings = RunSettings(topology="star", round=RoundSettings(inner_steps=20, first_train_s=10))
    swarm = VirtualSwarm(seed, SwarmKnobs(peers=13, run=settings))
    doomed, closed = set[PeerId](), list[RoundClosed]()

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        match fact:
            case UpdateSharingBegan(round=1) if not doomed:
                assert node.machine.round is not None
                doomed.update(node.machine.round.ground.owners[0])
                assert len(doomed) == OWNERS_PER_PART
                for name in sorted(doomed):
                    swarm.world.at(now, lambda name=name: swarm.world.crash(name))
            case RoundClosed(round=1) if node.name not in doomed:
                closed.append(fact)
            case _:
                pass

    swarm.world.watchers.append(watch)
    swarm.world.run(300.0, stop=lambda: len(closed) >= 7)
    assert {fact.id for fact in closed} == {closed[0].id} and len(closed) == 7
    (signed,) = closed[0].body.parts
    assert signed is not None and signed.signer not in doomed and closed[0].body.attempt == 0
    answered = decode_statement(signed.body, signed.signer)
    assert isinstance(answered, OwnerResult) and answered.owner_index >= OWNERS_PER_PART
    assert len(set(answered.contributors) - doomed) == 7 and closed[0].body.time_s < 10


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_where_members_may_lie_nobody_hands_on_anothers_row(name: str):
    plan = plan_of(["eu/a", "eu/b", "us/c", "us/d"])
    plan = copy(plan, settings=replace(plan.settings, quorum="two-thirds"))
    assert way_of(RunSettings(topology=name), plan).topology.is_direct


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("members", [1, 2, 5])
def test_no_part_outgrows_a_frame_however_few_are_left(name: str, members: int):
    """A group of many was founded with coarse pieces; then most of them left."""
    plan = plan_of([f"eu/{i}" if i % 2 else f"us/{i}" for i in range(members)])
    update_bytes = 256 * MIB
    topology = way_of(RunSettings(topology=name, pieces=1, update_bytes=update_bytes), plan).topology
    whole = sum(part.share for part in topology.parts)
    assert max(part.share for part in topology.parts) * update_bytes <= whole * PART_BYTES_MAX


@pytest.mark.parametrize("members", [1, 2, 5, 8, 20])
def test_parts_of_large_updates_overlap_and_are_never_more_than_planned(members: int):
    """While an owner answers one part it receives the next; a vertex has room for all of them."""
    plan = plan_of([str(i) for i in range(members)])
    for name, megabytes in product(TOPOLOGIES, [0, 1, 40, 130, 900, 10**4]):
        settings = RunSettings(topology=name, update_bytes=megabytes * MIB, pieces=PIECES_BY_SIZE)
        parts = len(way_of(settings, plan).topology.parts)
        assert parts <= parts_planned(settings)
        if name == "butterfly" and 2 <= members <= 8 and megabytes >= 64:
            assert parts >= 4 * members


@pytest.mark.parametrize(
    ("quorum", "update_bytes", "many"),
    [
        ("majority", 64 * MIB, True),
        ("majority", MIB, False),
        ("two-thirds", 64 * MIB, False),
    ],
)
def test_owners_have_several_parts_only_of_large_updates_among_members_that_do_not_lie(
    quorum: Literal["majority", "two-thirds"], update_bytes: int, many: bool
):
    """A part is late by other waits then; among liars they would make honest owners look guilty."""
    settings = RunSettings(update_bytes=update_bytes, pieces=PIECES_BY_SIZE, round=RoundSettings(quorum=quorum))
    swarm = VirtualSwarm(1, SwarmKnobs(peers=4, run=settings))
    swarm.world.run(0.5)
    ground = swarm.world.nodes[peer_name(0)].machine.round.ground
    assert (len(ground.topology.parts) > 4) == many
    assert ground.has_pieces == many


@pytest.mark.parametrize("wrong", [{"topology": "moebius"}, {"pieces": -1}, {"pieces": 10**9}])
def test_a_genesis_with_an_unknown_topology_or_absurd_pieces_is_refused(wrong: dict):
    """A reader that took it for a butterfly would reject every vertex of better informed members."""
    settings = msgspec.msgpack.decode(encode_settings(RunSettings()))
    with pytest.raises(PeerFault, match="invalid settings"):
        decode_settings(msgspec.msgpack.encode(settings | wrong))


@pytest.mark.parametrize("rules", [None, RULES + 1])
def test_a_run_that_follows_other_rules_is_told_so(rules: int | None):
    """Begun before rules were numbered, or by a newer program: its vertices would look forged to this one."""
    settings = msgspec.msgpack.decode(encode_settings(RunSettings()))
    settings["rules"] = rules
    if rules is None:
        del settings["rules"]
    with pytest.raises(PeerFault, match=r"begun with another version of atoll.*atoll up"):
        decode_settings(msgspec.msgpack.encode(settings))
    assert decode_settings(encode_settings(RunSettings())) == RunSettings()
