"""Members' names say where they are, and a round is reduced accordingly."""

from __future__ import annotations

from dataclasses import replace as copy

import msgspec
import pytest
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import MIB, PART_BYTES_MAX
from atoll.node.settings import RunSettings, decode_settings, encode_settings
from atoll.node.topology import TOPOLOGIES, regions_of, topology_of
from atoll.policy.plan import RoundPlan
from atoll.protocol.reduce.topology import validate
from atoll.sim.swarm import Swarm, SwarmKnobs, peer_name


def plan_of(names: list[str]) -> RoundPlan:
    swarm = Swarm(1, SwarmKnobs(peers=len(names)))
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
    topology = topology_of(RunSettings(topology="auto"), plan)
    place = {m.peer: m.name.split("/")[0] for m in plan.members}
    assert topology.name == "hierarchical" and validate(topology, plan.owners) is None
    for part in topology.parts:
        ups = [(p, part.parent(p)) for p in plan.owners]
        assert sum(place[p] != place[q] for p, q in ups if q is not None) == 1


def test_members_in_one_place_reduce_in_a_butterfly():
    assert topology_of(RunSettings(topology="auto"), plan_of(["a", "b", "c"])).name == "butterfly"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_where_members_may_lie_nobody_hands_on_anothers_row(name: str):
    plan = plan_of(["eu/a", "eu/b", "us/c", "us/d"])
    plan = copy(plan, settings=replace(plan.settings, quorum="two-thirds"))
    assert topology_of(RunSettings(topology=name), plan).direct


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("members", [1, 2, 5])
def test_no_part_outgrows_a_frame_however_few_are_left(name: str, members: int):
    """A group of many was founded with coarse pieces; then most of them left."""
    plan = plan_of([f"eu/{i}" if i % 2 else f"us/{i}" for i in range(members)])
    update_bytes = 256 * MIB
    topology = topology_of(RunSettings(topology=name, pieces=1, update_bytes=update_bytes), plan)
    whole = sum(part.share for part in topology.parts)
    assert max(part.share for part in topology.parts) * update_bytes <= whole * PART_BYTES_MAX


@pytest.mark.parametrize("wrong", [{"topology": "moebius"}, {"pieces": 0}, {"pieces": 10**9}])
def test_a_genesis_with_an_unknown_topology_or_absurd_pieces_is_refused(wrong: dict):
    """Whoever read it as a butterfly would reject every vertex of those who know better."""
    settings = msgspec.msgpack.decode(encode_settings(RunSettings()))
    with pytest.raises(PeerFault, match="not valid"):
        decode_settings(msgspec.msgpack.encode(settings | wrong))
