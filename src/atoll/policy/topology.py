"""Which reduce topology to use: what each would cost on the links that were agreed about, and the cheapest one.

Promises the same choice at every peer that is given the same agreed links, on every platform: plain sums,
products and comparisons in a fixed order, no logarithm, no measurement of its own. Never builds a topology (the
reduce room offers candidates) and never lets a peer hand on sums of others where peers do not trust each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import fsum, inf
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from atoll.base.ids import PeerId, Seconds
from atoll.base.units import bytes_text

Trust: TypeAlias = Literal["private", "community", "open"]
Group: TypeAlias = "tuple[PeerId | Group, ...]"  # peers and smaller groups that are near each other

MARGIN = 0.9  # a less simple topology must promise at least a tenth less time: links are never known that well
GAP = 4.0  # latency to the next group over latency inside it, from which on it is a group of its own
NEAR_S = 0.002  # latencies below this one are alike: what differs there is the scheduler, not the distance


class PartLike(Protocol):
    """What has to be known about a part: protocol/reduce/topology.Part. Rooms of one floor are strangers."""

    @property
    def owners(self) -> tuple[PeerId, ...]: ...
    @property
    def share(self) -> int: ...
    @property
    def parents(self) -> Mapping[PeerId, PeerId]: ...


class TopologyLike(Protocol):
    """A named way to reduce: protocol/reduce/topology.Topology."""

    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> Sequence[PartLike]: ...


T = TypeVar("T", bound=TopologyLike)


@dataclass(frozen=True)
class Links:
    """What was agreed about the network. Rates in bytes per second, all positive; inf where nothing limits."""

    peers: tuple[PeerId, ...]
    latency_s: Sequence[Sequence[Seconds]]  # [i][j]: one way from peer i to peer j
    up_bytes_s: Sequence[float]  # of each peer's own link to the world
    down_bytes_s: Sequence[float]
    pair_bytes_s: Sequence[Sequence[float]] = ()  # [i][j]: of one connection, for all that goes from i to j
    regions: Sequence[int] = ()  # of each peer; bytes between regions are wan bytes
    wan_bytes_s: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    # ^ of the link that all traffic from one region to another shares; unlimited where not named
    message_s: Seconds = 0.0005  # per message at either end: frame, seal, wake up. An assumption, not measured

    def __post_init__(self) -> None:
        n = len(self.peers)
        square = [self.latency_s, *([self.pair_bytes_s] if self.pair_bytes_s else [])]
        lists = [self.up_bytes_s, self.down_bytes_s, *([self.regions] if self.regions else [])]
        if any(len(m) != n or any(len(row) != n for row in m) for m in square) or any(len(v) != n for v in lists):
            raise ValueError(f"links of {n} peers need {n} rates each way and {n} x {n} latencies")
        rates = [*self.up_bytes_s, *self.down_bytes_s, *self.wan_bytes_s.values()]
        if not all(r > 0 for r in rates) or not all(r > 0 for row in self.pair_bytes_s for r in row):
            raise ValueError("every rate must be positive; leave out peers that cannot send")
        if not all(0 <= s < inf for row in self.latency_s for s in row):
            raise ValueError("every latency must be 0 or more seconds")


@dataclass(frozen=True)
class Prediction:
    """What one reduce costs."""

    seconds: Seconds  # until the last peer has the last answer
    sent_max_bytes: float  # by the busiest peer
    total_bytes: float
    wan_bytes: float  # of those, between regions
    messages_max: int  # sent by the busiest peer
    hops: int  # from the farthest row to its owner; the answer takes as many


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The topology to use, what it should cost, and why, in one sentence."""

    topology: T
    prediction: Prediction
    reason: str


# ---- choosing ------------------------------------------------------------------------------------------------


def choose(
    candidates: Sequence[T],
    update_bytes: int,
    links: Links,
    trust: Trust = "private",
    up_ratio: float = 1.0,
    down_ratio: float = 1.0,
) -> Choice[T]:
    """The first of `candidates` (simplest first) that no later one beats by a tenth, see MARGIN.

    Outside `private` only direct topologies count: a sum that somebody handed on hides its rows from robust
    rules and from openings, and its author cannot be held to it. Raises ValueError if no candidate is left.
    """
    direct = [c for c in candidates if not any(part.parents for part in c.parts)]
    fit = list(candidates) if trust == "private" else direct
    if not fit:
        raise ValueError(
            f"no topology to choose from; {trust} trust needs one in which all send to owners directly"
        )
    predicted = [(c, predict(c, update_bytes, links, up_ratio, down_ratio)) for c in fit]
    seconds = [prediction.seconds for _, prediction in predicted]
    best = next(c for k, c in enumerate(predicted) if seconds[k] * MARGIN <= min(seconds[k:]))
    return Choice(*best, _reason(best, predicted, trust if len(fit) < len(candidates) else None))


def _reason(best: tuple[T, Prediction], predicted: Sequence[tuple[T, Prediction]], limited_by: Trust | None) -> str:
    chosen, cost = best
    others = sorted((p.seconds, t.name, p.wan_bytes) for t, p in predicted if t.name != chosen.name)
    words = f"{chosen.name}: {cost.seconds:.3g} s predicted"
    if others:
        seconds, name, wan_bytes = others[0]
        words += f", {name} {seconds:.3g} s"
        if wan_bytes > cost.wan_bytes:
            words += f" with {bytes_text(wan_bytes)} between regions instead of {bytes_text(cost.wan_bytes)}"
    if limited_by:
        words += f"; with {limited_by} trust nobody hands on sums of others"
    return words


# ---- predicting ----------------------------------------------------------------------------------------------


def predict(
    topology: TopologyLike, update_bytes: int, links: Links, up_ratio: float = 1.0, down_ratio: float = 1.0
) -> Prediction:
    """Cost of one reduce of a dense update of `update_bytes`; rows are `up_ratio`, answers `down_ratio` as large.

    A schedule of all transfers in the α-β model (Hockney 1994; for collectives Thakur, Rabenseifner & Gropp 2005
    and Chan, Heimlich, Purkayastha & van de Geijn 2007), with per-message overhead o as in LogP (Culler et al.
    1993). A row may leave when all rows below it have arrived, answers when the owner has all rows.
    A transfer crosses up to four links: sender's uplink, connection, link between regions, receiver's downlink;
    each works off its bytes first come, first served, and begins with the first byte (cut-through); latency delays
    but occupies nothing. What becomes ready together goes to the peers behind the sender in their order, so that
    not all besiege one owner at a time: what fair sharing between connections comes to.

    Limits: combining and codecs take no time, and a combined row is as large as a single one; nothing is lost;
    congestion control is in `pair_bytes_s` or nowhere; a link that waits for a slower one before it counts as free
    for others, so times are a little low; everybody is alive and honest. Takes O(peers x parts x log) time; the
    topology's peers must be those of `links`.
    """
    net = _Net(links)
    n, parts = len(links.peers), topology.parts
    index = {peer: i for i, peer in enumerate(links.peers)}
    total = sum(part.share for part in parts)
    sizes = [update_bytes * part.share / total for part in parts]
    ups = [_parents(part, links.peers, index) for part in parts]  # [part][peer]: parent, -1 for the owner
    downs = [_children(up) for up in ups]
    missing = [[len(below) for below in down] for down in downs]  # rows still awaited
    ready = [[0.0] * n for _ in parts]  # when the last of them arrived
    # (ready, how many parts of the same owner go first, receiver's distance from sender in the list, …)
    owned: Counter[PeerId] = Counter()
    piece: list[int] = []
    for part in parts:
        piece.append(owned[part.owners[0]])
        owned[part.owners[0]] += 1
    queue = [
        (0.0, piece[j], (up[i] - i) % n, j, i, up[i])
        for j, up in enumerate(ups)
        for i in range(n)
        if not missing[j][i] and up[i] >= 0
    ]
    heapify(queue)
    end = 0.0
    while queue:
        begin, _, _, j, sender, receiver = heappop(queue)
        if ups[j][sender] == receiver:  # a row on its way up
            arrival = net.transfer(sender, receiver, sizes[j] * up_ratio, begin)
            ready[j][receiver] = max(ready[j][receiver], arrival)
            missing[j][receiver] -= 1
            if missing[j][receiver]:
                continue
            parent, arrival = ups[j][receiver], ready[j][receiver]
            if parent >= 0:
                heappush(queue, (arrival, piece[j], (parent - receiver) % n, j, receiver, parent))
                continue
        else:  # an answer on its way down
            arrival = net.transfer(sender, receiver, sizes[j] * down_ratio, begin)
            end = max(end, arrival)
        for child in downs[j][receiver]:
            heappush(queue, (arrival, piece[j], (child - receiver) % n, j, receiver, child))
    assert all(not any(row) for row in missing), "a topology that goes round in a circle was predicted"
    return Prediction(
        end, max(net.sent), fsum(net.sent), net.wan, max(net.messages), max((_hops(up) for up in ups), default=0)
    )


class _Net:
    """Links with their queues: when each has worked off what it was given so far."""

    def __init__(self, links: Links) -> None:
        n = len(links.peers)
        self.links = links
        self.up_free, self.down_free = [0.0] * n, [0.0] * n
        self.shared_free: dict[tuple[str, int, int], Seconds] = {}
        self.sent, self.messages, self.wan = [0.0] * n, [0] * n, 0.0

    def transfer(self, sender: int, receiver: int, size: float, begin: Seconds) -> Seconds:
        """When the last byte has arrived, if the first may leave at `begin`."""
        links = self.links
        overhead, latency = links.message_s, links.latency_s[sender][receiver]
        self.sent[sender] += size
        self.messages[sender] += 1
        first = max(begin, self.up_free[sender]) + overhead
        last = self.up_free[sender] = first + size / links.up_bytes_s[sender]
        if links.pair_bytes_s:
            last = self._shared(("pair", sender, receiver), links.pair_bytes_s[sender][receiver], size, first, last)
        if links.regions and (here := links.regions[sender]) != (there := links.regions[receiver]):
            self.wan += size
            rate = links.wan_bytes_s.get((here, there), inf)
            last = self._shared(("wan", here, there), rate, size, first, last)
        own = max(first + latency, self.down_free[receiver]) + overhead + size / links.down_bytes_s[receiver]
        self.down_free[receiver] = own
        return max(last + latency + overhead, own)

    def _shared(
        self, link: tuple[str, int, int], rate: float, size: float, first: Seconds, last: Seconds
    ) -> Seconds:
        free = self.shared_free[link] = max(first, self.shared_free.get(link, 0.0)) + size / rate
        return max(last, free)


def _parents(part: PartLike, peers: Sequence[PeerId], index: Mapping[PeerId, int]) -> list[int]:
    owner = index[part.owners[0]]
    found = [owner] * len(peers)
    found[owner] = -1
    for child, parent in part.parents.items():
        found[index[child]] = index[parent]
    return found


def _children(parents: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in parents]
    for child, parent in enumerate(parents):
        if parent >= 0:
            found[parent].append(child)
    return found


def _hops(parents: Sequence[int]) -> int:
    hops = {-1: -1}
    for start in range(len(parents)):
        way: list[int] = []
        while start not in hops:
            way.append(start)
            start = parents[start]
        hops |= {peer: hops[start] + k for k, peer in enumerate(reversed(way), start=1)}
    return max(hops.values())


# ---- who is near whom ----------------------------------------------------------------------------------------


def clusters_by_latency(links: Links, gap: float = GAP, near_s: Seconds = NEAR_S) -> Group:
    """Groups whose members are near each other, groups of groups and so on; flat if nobody stands apart.

    Complete linkage (the distance of two groups is the largest latency between them, either way), by chains of
    nearest neighbours in O(n²) (Murtagh 1983; Müllner 2011). Merged groups melt into one, but for one
    whose inside is `gap` times as near as the merge: that one stays a group. Ties go to the peer listed first.
    """
    n = len(links.peers)
    far = [[max(links.latency_s[i][j], links.latency_s[j][i], near_s) for j in range(n)] for i in range(n)]
    found = {i: _Near(near_s, (links.peers[i],)) for i in range(n)}
    chain: list[int] = []
    while len(found) > 1:
        chain = chain or [min(found)]
        here = chain[-1]
        nearest = min((j for j in found if j != here), key=lambda j: (far[here][j], j not in chain[-2:-1], j))
        if chain[-2:-1] != [nearest]:
            chain.append(nearest)
            continue
        keep, gone = sorted((here, nearest))
        found[keep] = _merged(found[keep], found.pop(gone), far[keep][gone], gap)
        for j in found:
            far[keep][j] = far[j][keep] = max(far[keep][j], far[gone][j])
        del chain[-2:]
    return found[0].items if found else ()


@dataclass(frozen=True)
class _Near:
    width_s: Seconds  # largest latency inside
    items: Group


def _merged(a: _Near, b: _Near, width_s: Seconds, gap: float) -> _Near:
    items: list[PeerId | Group] = []
    for side in (a, b):
        apart = len(side.items) > 1 and width_s >= gap * side.width_s
        items += [side.items] if apart else side.items
    return _Near(width_s, tuple(items))
