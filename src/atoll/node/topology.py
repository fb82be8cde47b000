"""Which topology a round uses: a pure function of the run's settings and of the plan, the same at every peer."""

from __future__ import annotations

from atoll.node.settings import RunSettings
from atoll.policy.plan import RoundPlan
from atoll.protocol.reduce.topology import Topology, butterfly, fitting, ring, star, tree

TOPOLOGIES = ("auto", "butterfly", "ring", "tree", "star")


def topology_of(settings: RunSettings, plan: RoundPlan) -> Topology:
    """Owners and those on the way are settled voters; whoever else contributes sends to owners directly."""
    peers, seed, pieces = plan.owners, plan.head, settings.pieces
    match settings.topology:
        case "ring":
            topology = ring(peers, seed, pieces=pieces)
        case "tree":
            topology = tree(peers, seed, pieces=pieces)
        case "star":
            topology = star(peers, seed, pieces=pieces)
        case _:
            topology = butterfly(peers, seed, pieces=pieces)
    return fitting(topology, settings.update_bytes)
