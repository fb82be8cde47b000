"""Which topology a round uses: a pure function of the run's settings, the plan and the last vertex, the same at
every peer.

`auto` goes by what is known of the network. Where a member is, its name may say: `eu/fra/ada` is near
`eu/fra/bob`, and nearer to `eu/par/cleo` than to `us/dan`. Without such names it goes by what members have
measured and the membership holds (policy/links.py): the planner predicts every topology on those links and
takes the simplest one that no other beats by a tenth. As long as neither is known it is a butterfly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import CODEC_EXTRA, CONTROL_FRAME_MAX, PAIRED_MAX, PART_BYTES_MAX, PARTS_MAX
from atoll.peer.settings import RunSettings, TopologyName
from atoll.policy.links import agreed_links, agreed_weights
from atoll.policy.plan import RoundPlan
from atoll.policy.topology_cost import AgreedLinks, choose, clusters_by_latency
from atoll.protocol.allreduce.topology import (
    Cluster,
    ReduceTopology,
    Weights,
    butterfly,
    fanned,
    fitting,
    hierarchical,
    pairs,
    ring,
    star,
    tree,
)
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment, SignedStatement
from atoll.wire.messages.vertex import VertexBody

TOPOLOGIES: tuple[TopologyName, ...] = get_args(TopologyName)
PAIRS = "pairs"  # the one that has no common result


@dataclass(frozen=True)
class TopologyChoice:
    """How a round reduces, and why, in words for people."""

    topology: ReduceTopology
    why: str


ASKED = "topology="  # how a caller names one in what it asks for, such as `topology=ring codec=fp16`
STEADY = b"steady"  # what owners are drawn by where they are the same every round


def way_of(settings: RunSettings, plan: RoundPlan, answered_bytes: int = 0) -> TopologyChoice:
    """Owners and those on the way are settled voters; whoever else contributes sends to owners directly.

    Where members may lie there are no partial sums, and nobody gets more to own because it says that its link is
    fast: whatever would need them is a plain butterfly. `answered_bytes` of combined parts were agreed on in the
    last round; 0 if none were, or if that tells nothing about the next round.
    """
    way = _way(settings, plan, answered_bytes or settings.update_bytes)
    return TopologyChoice(fitting(way.topology, settings.update_bytes), way.why)


def topology_in(asked: str) -> str:
    """The name in what a caller asks for; nothing where it leaves the choice to genesis."""
    return next((word.removeprefix(ASKED) for word in asked.split() if word.startswith(ASKED)), "")


def asked_in(commits: Sequence[SignedStatement]) -> str:
    """What the callers of these updates asked for, by the first of them."""
    first = decode_statement(commits[0].body, commits[0].signer) if commits else None
    return first.asked if isinstance(first, Commitment) else ""


def way_asked(settings: RunSettings, plan: RoundPlan, name: str, trained: int) -> TopologyChoice:
    """By this name instead of genesis's; `trained` rounds were before. PeerFault if there is none."""
    if name == PAIRS:
        settled = tuple(m.peer for m in plan.trainers if m.standing == "member")[:PAIRED_MAX]
        return TopologyChoice(
            pairs(settled or plan.voters, trained, pair_pieces(settings)), "members exchange in pairs"
        )
    if name not in TOPOLOGIES:
        raise PeerFault("", f"no topology {name!r}")
    return way_of(replace(settings, topology=name), plan)


def parts_most(settings: RunSettings, parent: VertexBody) -> int:
    """How many parts an update may have in the next rounds, for all that settings and the last vertex tell."""
    return max(parts_planned(settings), len(parent.parts))


def pair_pieces(settings: RunSettings) -> int:
    """How many parts a member has of its own where members exchange in pairs."""
    return max(settings.pieces, -(-settings.update_bytes // PART_BYTES_MAX))


def part_bytes_most(update_bytes: int) -> int:
    """Of one payload, where an update is so large without a codec; 0: nobody knows. Bodies fit in always."""
    part = min(PART_BYTES_MAX, update_bytes or PART_BYTES_MAX)
    return part + part // CODEC_EXTRA + CONTROL_FRAME_MAX


def parts_planned(settings: RunSettings) -> int:
    """The most that any topology makes of these settings: `fitting` adds less than what fills a part each."""
    return PARTS_MAX * settings.pieces - (-settings.update_bytes // PART_BYTES_MAX)


def _way(settings: RunSettings, plan: RoundPlan, wire_bytes: int) -> TopologyChoice:
    wanted, peers, pieces = settings.topology, plan.owners, settings.pieces
    seed, spread = STEADY if settings.steady is True else plan.head, settings.spread is True
    if plan.settings.quorum != "majority" or settings.statistic != "mean":  # nobody can sort partial sums
        name = "star" if wanted == "star" else "butterfly"
        return TopologyChoice(
            _built(name, peers, seed, None, peers, pieces, spread), "every row goes to its owner directly"
        )
    weights = agreed_weights(plan.members, peers)
    if wanted not in ("auto", "hierarchical"):  # who is near whom is then nobody's question
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
            _built("hierarchical", peers, seed, weights, near, pieces, spread), "names say who is near whom"
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
            return hierarchical(fanned(near, seed), seed, weights, pieces)
        case _:
            return butterfly(peers, seed, weights, pieces, spread)


# rounds follow each other on the same links, and a prediction for 64 peers takes half a second
@lru_cache(maxsize=32)
def _cheapest(
    latency_s: tuple[tuple[Seconds, ...], ...],
    rates: tuple[float, ...],
    regions: tuple[int, ...],
    between: tuple[tuple[tuple[int, int], float], ...],
    wire_bytes: int,
    pieces: int,
) -> tuple[str, str]:
    """The planner's choice among the topologies that `_built` makes, and its reason.

    Asked for peers without names and with one seed: the choice shall not change because the draw of a round does.
    """
    peers, seed = tuple(PeerId(f"{i:04}") for i in range(len(rates))), b"planner"
    links = AgreedLinks(peers, latency_s, rates, rates, regions=regions, wan_bytes_s=dict(between))
    weights = dict(zip(peers, rates, strict=True)) if len(set(rates)) > 1 else None
    near = clusters_by_latency(links)
    names = ["butterfly", "star", "tree", "ring"]  # the first shares the work of combining as well
    if any(isinstance(item, tuple) for item in near):
        names.insert(2, "hierarchical")
    choice = choose([_built(name, peers, seed, weights, near, pieces) for name in names], wire_bytes, links)
    return choice.topology.name, choice.reason


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
