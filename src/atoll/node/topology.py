"""Which topology a round uses: a pure function of the run's settings and of the plan, the same at every peer.

Where a member is, its name says: `eu/fra/ada` is near `eu/fra/bob`, and nearer to `eu/par/cleo` than to `us/dan`.
"""

from __future__ import annotations

from typing import get_args

from atoll.base.ids import PeerId
from atoll.node.settings import RunSettings, TopologyName
from atoll.policy.plan import RoundPlan
from atoll.protocol.reduce.topology import (
    Cluster,
    Topology,
    butterfly,
    fanned,
    fitting,
    hierarchical,
    ring,
    star,
    tree,
)

TOPOLOGIES: tuple[TopologyName, ...] = get_args(TopologyName)


def topology_of(settings: RunSettings, plan: RoundPlan) -> Topology:
    """Owners and those on the way are settled voters; whoever else contributes sends to owners directly.

    `auto` is a hierarchy where members are in several places, else a butterfly. Where members may lie there are no
    partial sums: whatever would need them is a butterfly too.
    """
    peers, seed, pieces = plan.owners, plan.head, settings.pieces
    regions = regions_of({peer: plan.by_peer[peer].name for peer in peers})
    several = any(isinstance(item, tuple) for item in regions)
    trusted = plan.settings.quorum == "majority"
    match settings.topology:
        case "star":
            topology = star(peers, seed, pieces=pieces)
        case "ring" if trusted:
            topology = ring(peers, seed, pieces=pieces)
        case "tree" if trusted:
            topology = tree(peers, seed, pieces=pieces)
        case "hierarchical" | "auto" if trusted and (several or settings.topology == "hierarchical"):
            topology = hierarchical(fanned(regions, seed), seed, pieces=pieces)
        case _:
            topology = butterfly(peers, seed, pieces=pieces)
    return fitting(topology, settings.update_bytes)


def regions_of(names: dict[PeerId, str]) -> Cluster:
    """Peers grouped by the paths in their names; a region of one, or one that holds everybody, is no group."""
    by_region: dict[str, dict[PeerId, str]] = {}
    here: list[PeerId] = []
    for peer, name in sorted(names.items()):
        first, slash, rest = name.partition("/")
        if slash and rest:
            by_region.setdefault(first, {})[peer] = rest
        else:
            here.append(peer)
    groups = [regions_of(inside) for _, inside in sorted(by_region.items())]
    if len(groups) == 1 and not here:
        return groups[0]
    found: list[PeerId | Cluster] = list(here)
    for group in groups:
        found += [group] if len(group) > 1 else list(group)
    return tuple(found)
