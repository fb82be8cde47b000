"""Reduce topologies as data: for each part of an update, its owners and the tree that its rows go up.

Pure functions of the agreed peers, a seed and agreed upload rates, so that every peer computes the same. The root
of a part's tree is its owner: rows go up, relays combine them, and the result comes down the same tree. Parts that
take only some rows, without a common result, exist in `pairs` alone. Specification: specs/topologies.md.

Invariants:
- A tree has each peer once, so no contributor is counted twice.
Not responsible for: tensors, clocks, and trust in relays (policy/topology_cost).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import fsum, gcd, inf, lcm
from typing import TypeAlias

from atoll.base.draw import draw_pairs, shuffled
from atoll.base.ids import PeerId
from atoll.base.limits import FULL_MESH_MAX, OWNERS_PER_PART, PART_BYTES_MAX, PARTS_MAX

SHARE_UNITS = 4096  # shares are whole 4096ths of an update: finer than any measurement of an uplink
FAN = 16  # most children of a cluster's head per part; more would wait for its downlink

# upload rates; only ratios matter. A client has rate zero or infinite, or none
Weights: TypeAlias = Mapping[PeerId, float]
Cluster: TypeAlias = "tuple[PeerId | Cluster, ...]"  # peers and smaller clusters that are near each other


@dataclass(frozen=True)
class PartReductionTree:
    """One slice of every update and the tree over which it is combined."""

    owners: tuple[PeerId, ...]  # the owner, and owners that take over, in order; at most OWNERS_PER_PART
    share: int  # relative size of this part, at least 1
    # Child -> parent on the way up; the first owner is neither. A peer that is not listed sends to the owner.
    # A parent combines its children's rows with its own into one row (weighted mean, summed weight, contributors)
    # and hands it on. Results come down the same tree.
    parents: Mapping[PeerId, PeerId]
    authors: frozenset[PeerId] | None = None  # authors of its rows, with the owner; None: all peers

    def parent(self, peer: PeerId) -> PeerId | None:
        """The peer that gets this peer's row while the first owner is in charge; None for that owner."""
        return None if peer == self.owners[0] else self.parents.get(peer, self.owners[0])

    @cached_property
    def children(self) -> Mapping[PeerId, tuple[PeerId, ...]]:
        """Parent -> children: `parents` inverted, computed once."""
        found: dict[PeerId, list[PeerId]] = {}
        for child, parent in self.parents.items():
            found.setdefault(parent, []).append(child)
        return {parent: tuple(below) for parent, below in found.items()}

    def below(self, peer: PeerId) -> frozenset[PeerId]:
        """All peers with rows that come through this peer; empty for the first owner."""
        found: set[PeerId] = set()
        look = [peer]
        while look:
            new = [child for child in self.children.get(look.pop(), ()) if child not in found]
            found.update(new)
            look += new
        return frozenset(found)


@dataclass(frozen=True)
class ReduceTopology:
    """The trees of all parts of one update."""

    name: str
    parts: tuple[PartReductionTree, ...]

    @property
    def is_direct(self) -> bool:
        """Whether every row reaches its owner as its author wrote it, without relays."""
        return not any(part.parents for part in self.parts)

    @cached_property
    def has_separate_results(self) -> bool:
        """Whether parts take rows of some peers only: there is no common result."""
        return any(part.authors is not None for part in self.parts)

    def parts_taking(self, peer: PeerId) -> int:
        """How many parts take this peer's row."""
        return sum(part.authors is None or peer in part.authors for part in self.parts)


# ---- the topologies ------------------------------------------------------------------------------------------


def star(
    peers: Sequence[PeerId],
    seed: bytes,
    weights: Weights | None = None,
    pieces: int = 1,
    server: PeerId | None = None,
) -> ReduceTopology:
    """One peer owns all parts: the given server, else the fastest. It sends n - 1 updates and receives as many."""
    order = _fastest(_carriers(peers, seed, weights), weights)
    if server is not None:
        if server not in order:
            raise ValueError(
                f"{server} cannot serve: it is no peer here or has no upload rate; name another server"
            )
        order = [server, *(p for p in order if p != server)]
    return ReduceTopology("star", (PartReductionTree(_chain(order, 0), 1, {}),) * _positive(pieces))


def butterfly(
    peers: Sequence[PeerId], seed: bytes, weights: Weights | None = None, pieces: int = 1, spread: bool = False
) -> ReduceTopology:
    """Each peer owns a part, up to PARTS_MAX owners, and sends directly: reduce-scatter, then all-gather.

    Up to PARTS_MAX equal peers each send 2 (n - 1) / n updates, the least possible (Patarasuk & Yuan 2009).
    With `weights` the parts balance the uplinks (`_shares`), and beyond PARTS_MAX the fastest own. `spread`: if an
    owner dies, its pieces pass to one member each, and not all to the member behind it.
    """
    order = _fastest(_carriers(peers, seed, weights), weights)
    owners = order[:PARTS_MAX]
    shares = [1] * len(owners) if weights is None else _shares([weights[p] for p in owners], len(peers))
    turns = range(_positive(pieces))
    owned = [(first, share) for first, share in enumerate(shares) if share]
    chains = [[_chain(order, first, turn if spread else 0) for first, _ in owned] for turn in turns]
    parts = (
        PartReductionTree(chain, share, {})
        for turn in chains
        for chain, (_, share) in zip(turn, owned, strict=True)
    )
    return ReduceTopology("butterfly", tuple(parts))


def ring(peers: Sequence[PeerId], seed: bytes, weights: Weights | None = None, pieces: int = 1) -> ReduceTopology:
    """Part j goes once around the ring and ends at its j-th peer; the result goes back (Patarasuk & Yuan 2009).

    Each peer sends 2 (n - 1) / n updates to two neighbors only, beyond PARTS_MAX peers at most 2. `weights` change
    no share: they name the clients, which hand their rows to peers on the ring. A part takes 2 (n - 1) hops, and
    one silent peer cuts every part: for few peers on good links.
    """
    circle = _carriers(peers, seed, weights)
    n = len(circle)
    successors = {circle[j - 1]: circle[j] for j in range(n)} if n > 1 else {}
    successors |= _clients(peers, circle)
    # the peer before the owner holds all rows except the owner's: no other peer can take over sooner
    last = range(min(n, PARTS_MAX))
    turn = [PartReductionTree(_chain(circle[::-1], n - 1 - j), 1, _RingView(successors, circle[j])) for j in last]
    return ReduceTopology("ring", tuple(turn) * _positive(pieces))


def tree(
    peers: Sequence[PeerId], seed: bytes, weights: Weights | None = None, pieces: int = 1, arity: int = 2
) -> ReduceTopology:
    """One tree with `arity` children per peer, fastest on top; the pieces follow each other through it.

    A peer sends at most arity + 1 updates, and log_arity(n) hops are the fewest for that fan.
    """
    if arity < 1:
        raise ValueError(f"a tree needs at least 1 child per peer, got {arity}")
    order = _fastest(_carriers(peers, seed, weights), weights)
    parents = {order[i]: order[(i - 1) // arity] for i in range(1, len(order))}
    parents |= _clients(peers, order[::-1])  # leaves have an idle uplink
    root = order[0]
    part = PartReductionTree(_chain(order, 0), 1, {child: p for child, p in parents.items() if p != root})
    return ReduceTopology("tree", (part,) * _positive(pieces))


def hierarchical(clusters: Cluster, seed: bytes, weights: Weights | None = None, pieces: int = 1) -> ReduceTopology:
    """In every cluster, at every level, one head gathers a part for all; the head of heads is the owner.

    A link between two clusters carries each part once up and once down, not once per member. For each part the head
    is the member with the uplink that would finish first, so a slow uplink owns and hands on less. A cluster
    without a possible head is dissolved into the cluster around it.
    """
    peers = peers_in(clusters)
    rank = {p: i for i, p in enumerate(_carriers(peers, seed, weights))}
    count = min(len(rank), PARTS_MAX) * _positive(pieces)
    sends = dict.fromkeys(rank, count)  # parts sent so far; each peer sends each part once, up or to itself
    tidy = _tidy(clusters, rank)
    parts: list[PartReductionTree] = []
    for _ in range(count):
        parents: dict[PeerId, PeerId] = {}
        owner = _head(tidy, rank, sends, weights, parents)
        fan = Counter(parents.values())
        near = sorted((p for p in rank if parents.get(p) == owner), key=lambda p: (-fan[p], rank[p]))
        # the peer with the most rows takes over first; then all others, in the drawn order
        chain = list(dict.fromkeys([owner, *near[:OWNERS_PER_PART], *list(rank)[:OWNERS_PER_PART]]))
        handed = {child: parent for child, parent in parents.items() if parent != owner}
        parts.append(PartReductionTree(tuple(chain[:OWNERS_PER_PART]), 1, handed))
    return ReduceTopology("hierarchical", tuple(parts))


def pairs(peers: Sequence[PeerId], round: int, pieces: int = 1) -> ReduceTopology:
    """Gossip: each peer owns a part, of its own row and the row of the peer that it is paired with.

    With `pieces` each row is cut into that many equal pieces, and all first pieces come first.

    There is no common result: a part is the row that its owner ends with, and no other peer can take over. One
    round leaves (n - 2) / (2 n - 2) of the variance between n peers in expectation: two centred values drawn
    without replacement have E[((a + b) / 2)²] = σ² / 2 · (1 - 1 / (n - 1)) (compare Boyd et al. 2006).
    """
    drawn = {peer: frozenset(pair) for pair in draw_pairs(round, peers) for peer in pair}
    return ReduceTopology(
        "pairs", tuple(PartReductionTree((peer,), 1, {}, drawn[peer]) for peer in peers) * _positive(pieces)
    )


def candidate_topologies(
    peers: Sequence[PeerId],
    seed: bytes,
    weights: Weights | None = None,
    clusters: Cluster | None = None,
    update_bytes: int = 0,
) -> tuple[ReduceTopology, ...]:
    """The topologies with one common result that are worth predicting, simplest first, cut to fit frames.

    `clusters` holds the same peers, grouped by nearness. Above FULL_MESH_MAX peers there is no ring: one of them is
    always silent. `update_bytes` is the size limit of an encoded update.
    """
    near = clusters or tuple(peers)
    nests = [near, limit_fan(near, seed)] if len(peers) <= FULL_MESH_MAX else [limit_fan(near, seed)]
    nested = [nest for nest in dict.fromkeys(nests) if any(isinstance(item, tuple) for item in nest)]
    found = [star(peers, seed, weights), butterfly(peers, seed, weights)]
    found += [star(peers, seed, weights, 16), butterfly(peers, seed, weights, 4)]
    found += [hierarchical(nest, seed, weights, pieces) for nest in nested for pieces in (1, 4)]
    found += [tree(peers, seed, weights, pieces) for pieces in (4, 16)]
    if len(peers) <= FULL_MESH_MAX:
        found.append(ring(peers, seed, weights))
    return tuple(cut_to_frames(topology, update_bytes) for topology in found)


def cut_to_frames(topology: ReduceTopology, update_bytes: int) -> ReduceTopology:
    """The same topology, with each part cut into pieces of at most PART_BYTES_MAX of an encoded update.

    Each part is cut by its own share, so that an update has at most one piece more per part than it fills: a vertex
    lists the contributors of each piece. First pieces come first, so that parts fill from the front.
    """
    total = sum(part.share for part in topology.parts)
    pieces = [max(1, -(-update_bytes * part.share // (total * PART_BYTES_MAX))) for part in topology.parts]
    if len(set(pieces)) == 1:
        return ReduceTopology(topology.name, topology.parts * pieces[0])
    finer = lcm(*pieces)  # shares stay whole and exact
    cut = [replace(part, share=part.share * finer // n) for part, n in zip(topology.parts, pieces, strict=True)]
    divisor = gcd(*(part.share for part in cut))
    cut = [replace(part, share=part.share // divisor) for part in cut]
    turns = range(max(pieces))
    return ReduceTopology(topology.name, tuple(p for k in turns for p, n in zip(cut, pieces, strict=True) if k < n))


def limit_fan(cluster: Cluster, seed: bytes, fan: int = FAN) -> Cluster:
    """The same nesting, cut finer: no cluster has more than `fan` (at least 2) elements.

    A larger cluster is drawn into groups of near-equal size, in as few levels as `fan` allows.
    """
    if fan < 2:
        raise ValueError(f"a group needs at least 2 elements, got fan = {fan}")
    items = tuple(limit_fan(item, seed, fan) if isinstance(item, tuple) else item for item in cluster)
    if len(items) <= fan:
        return items
    levels = next(k for k in range(1, len(items)) if fan**k >= len(items))
    width = next(w for w in range(2, fan + 1) if w**levels >= len(items))
    return _split(shuffled(seed, "groups", items), width)


def peers_in(cluster: Cluster) -> tuple[PeerId, ...]:
    """All peers in a cluster and in the clusters inside it, in order."""
    found: list[PeerId] = []
    for item in cluster:
        found += peers_in(item) if isinstance(item, tuple) else (item,)
    return tuple(found)


# ---- validity of a topology ---------------------------------------------------------------------------


def validate(topology: ReduceTopology, peers: Sequence[PeerId]) -> str | None:
    """None if every part reaches its owner from every peer, else a text that says what is wrong."""
    here = set(peers)
    if not topology.parts:
        return "it has no parts"
    for j, part in enumerate(topology.parts):
        if part.share < 1:
            return f"part {j} has share {part.share}; shares start at 1"
        if not 1 <= len(part.owners) <= OWNERS_PER_PART or len(set(part.owners)) < len(part.owners):
            return f"part {j} needs 1 to {OWNERS_PER_PART} different owners"
        if not here.issuperset(part.owners):
            return f"part {j} has an owner that is no peer"
        if not (here.issuperset(part.parents) and here.issuperset(part.parents.values())):
            return f"part {j} has a parent or child that is no peer"
        if part.owners[0] in part.parents:
            return f"part {j} is handed on by its owner"
        if part.owners[0] in part.parents.values():
            return f"part {j} lists its owner as a parent; peers that send to the owner are not listed"
        if part.authors is not None and (part.parents or not {*part.owners} <= part.authors <= here):
            return f"part {j} takes rows that cannot reach it"
        if hops_of(part) is None:
            return f"part {j} goes round in a circle"
    return None


# ---- helpers -------------------------------------------------------------------------------------------------


class _RingView(Mapping[PeerId, PeerId]):
    """Child -> parent on the ring toward one owner. A view: n parts of n hops cost O(n) memory, not O(n²)."""

    def __init__(self, successors: Mapping[PeerId, PeerId], owner: PeerId) -> None:
        self._successors, self._owner = successors, owner

    def __getitem__(self, peer: PeerId) -> PeerId:
        successor = self._successors[peer]
        if self._owner in (peer, successor):
            raise KeyError(peer)
        return successor

    def __iter__(self) -> Iterator[PeerId]:
        owner = self._owner
        return (p for p, successor in self._successors.items() if owner != p and owner != successor)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<ring that ends at {self._owner}>"


def _carriers(peers: Sequence[PeerId], seed: bytes, weights: Weights | None) -> list[PeerId]:
    """Peers that may own parts and relay rows, in a drawn order. Raises ValueError if there are none."""
    able = [p for p in shuffled(seed, "owners", peers) if weights is None or 0 < weights.get(p, 0) < inf]
    if not able:
        raise ValueError("no peer can own a part: at least one peer needs a positive upload rate")
    return able


def _clients(peers: Sequence[PeerId], carriers: Sequence[PeerId]) -> dict[PeerId, PeerId]:
    """Client -> carrier that gets its rows: the carriers in turn."""
    able = set(carriers)
    rest = [p for p in peers if p not in able]
    return {p: carriers[i % len(carriers)] for i, p in enumerate(rest)}


def _fastest(order: list[PeerId], weights: Weights | None) -> list[PeerId]:
    """Fastest first; equal peers stay in the drawn order, so that they alternate from round to round."""
    return order if weights is None else sorted(order, key=lambda p: -weights[p])


def _chain(order: Sequence[PeerId], first: int, skipped: int = 0) -> tuple[PeerId, ...]:
    """An owner and the peers behind it, in circular order, with the first `skipped` of these last."""
    n = len(order)
    behind = ((skipped + k) % (n - 1) for k in range(min(OWNERS_PER_PART, n) - 1))
    return (order[first], *(order[(first + 1 + k) % n] for k in behind))


def _positive(pieces: int) -> int:
    if pieces < 1:
        raise ValueError(f"a part cannot be cut into {pieces} pieces; use 1 or more")
    return pieces


def _shares(rates: Sequence[float], peers: int) -> list[int]:
    """Shares with which the busiest link is free soonest, in SHARE_UNITS over their common divisor; may be 0.

    A peer with share s of the update sends 1 - s of it to other owners and s to peers - 1 listeners, so its
    uplink is busy for (1 + (peers - 2) s) / rate. Its downlink takes the rows of its part in the first half of that
    time, for which it is busy for (peers - 1) s / rate. So at the level t, s is at most (t rate - 1) / (peers - 2)
    and t rate / (2 (peers - 1)), and the least level at which shares add up to 1 counts: water-filling (Boyd &
    Vandenberghe 2004, example 5.2). Two peers each send one update with any shares: theirs are equal.
    """
    if peers <= 2:
        return [1] * len(rates)

    def cuts(level: float) -> list[float]:
        filled = (min((level * rate - 1) / (peers - 2), level * rate / (2 * (peers - 1))) for rate in rates)
        return [max(0.0, part) for part in filled]

    # between two of these levels every share is linear: a peer starts to own, or its downlink becomes the limit
    bends = sorted({bend / rate for rate in rates for bend in (1.0, 2 * (peers - 1) / peers)})
    # fsum, not sum: the rounding of sum differs between Python versions, and every peer must cut alike
    low = max(bend for bend in bends if fsum(cuts(bend)) <= 1)
    high = next((bend for bend in bends if bend > low), 2 * low)
    below, above = fsum(cuts(low)), fsum(cuts(high))
    units = [round(part * SHARE_UNITS) for part in cuts(low + (high - low) * (1 - below) / (above - below))]
    divisor = gcd(*units)
    return [u // divisor for u in units]


def _tidy(cluster: Cluster, able: Mapping[PeerId, int]) -> Cluster:
    """The cluster without empty clusters, and with those without a possible head dissolved."""
    items: list[PeerId | Cluster] = []
    for item in cluster:
        if not isinstance(item, tuple):
            items.append(item)
        elif able.keys().isdisjoint(peers_in(item)):
            items += peers_in(item)
        else:
            items.append(_tidy(item, able))
    return tuple(items)


def _head(
    cluster: Cluster,
    rank: Mapping[PeerId, int],
    sends: dict[PeerId, int],
    weights: Weights | None,
    parents: dict[PeerId, PeerId],
) -> PeerId:
    """Choose the head that gathers this part, add its children to `parents`, and count its sends."""
    heads = [_head(item, rank, sends, weights, parents) if isinstance(item, tuple) else item for item in cluster]
    answers = len(heads) - 1

    def free_at(p: PeerId) -> tuple[float, int]:
        return (sends[p] + answers) / (1.0 if weights is None else weights[p]), rank[p]

    head = min((p for p in heads if p in rank), key=free_at)
    sends[head] += answers
    parents.update((p, head) for p in heads if p != head)
    return head


def _split(items: Sequence[PeerId | Cluster], width: int) -> Cluster:
    if len(items) <= width:
        return tuple(items)
    cuts = [len(items) * k // width for k in range(width + 1)]
    groups = [items[a:b] for a, b in pairwise(cuts)]
    return tuple(group[0] if len(group) == 1 else _split(group, width) for group in groups)


def hops_of(part: PartReductionTree) -> int | None:
    """Hops of the longest path to the owner over listed peers, 0 if none is listed; None if a path never ends."""
    owner = part.owners[0]
    hops = {owner: 0}
    for start in part.parents:
        way: dict[PeerId, None] = {}
        peer = start
        while peer not in hops:
            if peer in way:
                return None
            way[peer] = None
            peer = part.parents.get(peer, owner)
        hops |= zip(reversed(way), range(hops[peer] + 1, hops[peer] + 1 + len(way)), strict=True)
    return max(hops.values())
