"""Topology choice of a round: a pure function of settings, plan and last vertex, equal at every peer.

`auto` uses what is known about the network. A member's name may give its location: `eu/fra/ada` is near
`eu/fra/bob`, and nearer to `eu/par/cleo` than to `us/dan`. Without such names it uses the members' measurements in
the membership (policy/links.py): the planner predicts every topology on those links and takes the simplest one that
no other beats by 10 %. With neither it is a butterfly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import (
    CODEC_EXTRA,
    CONTROL_FRAME_MAX,
    PAIRED_MAX,
    PART_BYTES_AIM,
    PART_BYTES_MAX,
    PARTS_AIM,
    PARTS_MAX,
)
from atoll.peer.settings import RunSettings, TopologyName
from atoll.policy.links import agreed_links, agreed_weights, weights_of
from atoll.policy.plan import RoundPlan
from atoll.policy.topology_cost import AgreedLinks, choose, clusters_by_latency
from atoll.protocol.allreduce.topology import (
    Cluster,
    ReduceTopology,
    Weights,
    butterfly,
    cut_to_frames,
    hierarchical,
    limit_fan,
    pairs,
    ring,
    star,
    tree,
)
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment, SignedStatement
from atoll.wire.messages.vertex import VertexBody

TOPOLOGIES: tuple[TopologyName, ...] = get_args(TopologyName)
PAIRS = "pairs"  # the only topology without a common result


@dataclass(frozen=True)
class TopologyChoice:
    """How a round reduces, and the reason in plain words."""

    topology: ReduceTopology
    why: str


ASKED = "topology="  # prefix of a topology in a caller's options, such as `topology=ring codec=fp16`
STEADY = b"steady"  # seed for owners that stay the same every round


def way_of(settings: RunSettings, plan: RoundPlan, answered_bytes: int = 0) -> TopologyChoice:
    """Topology of a round. Owners and intermediate peers are settled voters.

    Other contributors send to owners directly.

    Where members may lie there are no partial sums, and a claimed fast link gives no larger share: topologies that
    need either become a plain butterfly. `answered_bytes`: size of the combined parts of the last round; 0 if there
    were none or if they do not predict the next round.
    """
    way = _way(settings, plan, answered_bytes or settings.update_bytes)
    why = way.why if len(plan.owners) > 1 else "one member combines alone: nothing travels"
    return TopologyChoice(cut_to_frames(way.topology, settings.update_bytes), why)


def topology_in(asked: str) -> str:
    """The topology named in a caller's options; empty if the caller leaves the choice to genesis."""
    return next((word.removeprefix(ASKED) for word in asked.split() if word.startswith(ASKED)), "")


def asked_in(commits: Sequence[SignedStatement]) -> str:
    """Options that the callers of these updates asked for, from the first one."""
    first = decode_statement(commits[0].body, commits[0].signer) if commits else None
    return first.asked if isinstance(first, Commitment) else ""


def way_asked(settings: RunSettings, plan: RoundPlan, name: str, trained: int) -> TopologyChoice:
    """The topology of this name instead of the one in genesis, after `trained` rounds; PeerFault if unknown."""
    if name == PAIRS:
        settled = tuple(m.peer for m in plan.trainers if m.standing == "member")[:PAIRED_MAX]
        return TopologyChoice(
            pairs(settled or plan.voters, trained, pair_pieces(settings)), "members exchange in pairs"
        )
    if name not in TOPOLOGIES:
        raise PeerFault("", f"no topology {name!r}")
    return way_of(replace(settings, topology=name), plan)


def parts_most(settings: RunSettings, parent: VertexBody) -> int:
    """Upper bound on the parts of an update in the next rounds, from settings and the last vertex."""
    return max(parts_planned(settings), len(parent.parts))


def pair_pieces(settings: RunSettings) -> int:
    """Parts per member where members exchange in pairs."""
    return max(settings.pieces, -(-settings.update_bytes // PART_BYTES_MAX), 1)


def part_bytes_most(update_bytes: int) -> int:
    """Largest payload in bytes for an update of this size without a codec (0: unknown). Bodies always fit in."""
    part = min(PART_BYTES_MAX, update_bytes or PART_BYTES_MAX)
    return part + part // CODEC_EXTRA + CONTROL_FRAME_MAX


def parts_planned(settings: RunSettings) -> int:
    """Upper bound on parts over all topologies of these settings: `fitting` adds less than one full part each."""
    at_once = PARTS_MAX * settings.pieces or max(PARTS_MAX, min(PARTS_AIM, settings.update_bytes // PART_BYTES_AIM))
    return at_once - (-settings.update_bytes // PART_BYTES_MAX)


def _pieces_of_share(settings: RunSettings, plan: RoundPlan) -> int:
    """Pieces per owner's share in a round of members that do not lie.

    An owner answers a piece while it still receives the next. So uplinks do not wait for the end of the rows, and
    all parts together take little longer than their bytes.
    """
    parts = min(PARTS_AIM, settings.update_bytes // PART_BYTES_AIM)
    return settings.pieces or max(1, parts // max(1, len(plan.owners)))


def _way(settings: RunSettings, plan: RoundPlan, wire_bytes: int) -> TopologyChoice:
    wanted, peers = settings.topology, plan.owners
    seed, spread = STEADY if settings.steady is True else plan.head, settings.spread is True
    if plan.settings.quorum != "majority" or settings.statistic != "mean":  # partial sums cannot be sorted
        name, pieces = "star" if wanted == "star" else "butterfly", settings.pieces or 1
        return TopologyChoice(_built(name, peers, seed, None, peers, pieces, spread), "sent there directly")
    weights, pieces = agreed_weights(plan.members, peers), _pieces_of_share(settings, plan)
    if wanted not in ("auto", "hierarchical"):  # distances between members then do not matter
        return TopologyChoice(
            _built(wanted, peers, seed, weights, peers, pieces, spread), "as the run's settings say"
        )
    links = agreed_links(plan.members, peers)
    named = regions_of({peer: plan.by_peer[peer].name for peer in peers})
    measured = clusters_by_latency(links) if links is not None else peers
    near = named if any(isinstance(item, tuple) for item in named) else measured
    if wanted != "auto":
        return TopologyChoice(
            _built(wanted, peers, seed, weights, near, pieces, spread), "as the run's settings say"
        )
    if near is named:
        return TopologyChoice(
            _built("hierarchical", peers, seed, weights, near, pieces, spread),
            "names say which peers are near each other",
        )
    if links is None or not wire_bytes:
        return TopologyChoice(
            _built("butterfly", peers, seed, weights, near, pieces, spread), "links are not known yet"
        )
    rows, between = tuple(tuple(row) for row in links.latency_s), tuple(sorted(links.wan_bytes_s.items()))
    known = rows, tuple(links.up_bytes_s), tuple(links.regions), between
    name, why = _cheapest(*known, 1 << (wire_bytes - 1).bit_length(), pieces)
    return TopologyChoice(_built(name, peers, seed, weights, near, pieces, spread), why)


def _built(
    name: str,
    peers: tuple[PeerId, ...],
    seed: bytes,
    weights: Weights | None,
    near: Cluster,
    pieces: int,
    spread: bool = False,
) -> ReduceTopology:
    match name:
        case "star":
            return star(peers, seed, weights, pieces)
        case "ring":
            return ring(peers, seed, weights, pieces)
        case "tree":
            return tree(peers, seed, weights, pieces)
        case "hierarchical":
            return hierarchical(limit_fan(near, seed), seed, weights, pieces)
        case _:
            return butterfly(peers, seed, weights, pieces, spread)


# rounds follow each other on the same links, and a prediction for 64 peers takes 0.5 s
@lru_cache(maxsize=32)
def _cheapest(
    latency_s: tuple[tuple[Seconds, ...], ...],
    rates: tuple[float, ...],
    regions: tuple[int, ...],
    between: tuple[tuple[tuple[int, int], float], ...],
    wire_bytes: int,
    pieces: int,
) -> tuple[str, str]:
    """The planner's choice among the topologies of `_built`, and its reason.

    Called without names and with one seed: the choice shall not change with the draw of a round.
    """
    peers, seed = tuple(PeerId(f"{i:04}") for i in range(len(rates))), b"planner"
    links = AgreedLinks(peers, latency_s, rates, rates, regions=regions, wan_bytes_s=dict(between))
    weights = weights_of(peers, rates)
    near = clusters_by_latency(links)
    names = ["butterfly", "star", "tree", "ring"]  # the first shares the work of combining as well
    if any(isinstance(item, tuple) for item in near):
        names.insert(2, "hierarchical")
    choice = choose([_built(name, peers, seed, weights, near, pieces) for name in names], wire_bytes, links)
    return choice.topology.name, choice.reason


def regions_of(names: dict[PeerId, str]) -> Cluster:
    """Peers grouped by the paths in their names; a region of one peer or of all peers is no group."""
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
