"""Topology cost: predicts the cost of each reduce topology on the agreed links and picks the cheapest.

Invariants:
- Equal links give an equal choice at every peer and platform: only sums, products and comparisons in a fixed order.
Not responsible for: measuring links, building topologies. Where peers may lie the caller offers none with partial
sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import fsum, inf
from typing import Generic, Protocol, TypeAlias, TypeVar

from atoll.base.ids import PeerId, Seconds
from atoll.base.units import bytes_text

Group: TypeAlias = "tuple[PeerId | Group, ...]"  # peers and smaller groups near each other

MARGIN = 0.9  # a less simple topology must save at least 10 % of the time, as links are never known that well
GAP = 4.0  # ratio of the latency to the next group to that inside, from which on a group stands alone
NEAR_S = 0.002  # seconds; smaller latencies are equal, as they show the scheduler and not the distance


class PartLike(Protocol):
    """What a part has to provide, as protocol/allreduce/topology.PartReductionTree does.

    Packages of one layer do not import each other.
    """

    @property
    def owners(self) -> tuple[PeerId, ...]: ...
    @property
    def share(self) -> int: ...
    @property
    def parents(self) -> Mapping[PeerId, PeerId]: ...


class TopologyLike(Protocol):
    """A named way to reduce, such as protocol/allreduce/topology.ReduceTopology."""

    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> Sequence[PartLike]: ...


T = TypeVar("T", bound=TopologyLike)


@dataclass(frozen=True)
class AgreedLinks:
    """The agreed network. Rates in bytes per second, all positive; inf where nothing limits."""

    peers: tuple[PeerId, ...]
    latency_s: Sequence[Sequence[Seconds]]  # [i][j]: one way from peer i to peer j
    up_bytes_s: Sequence[float]  # of each peer's own link
    down_bytes_s: Sequence[float]
    pair_bytes_s: Sequence[Sequence[float]] = ()  # [i][j]: of one connection, for all traffic from i to j
    regions: Sequence[int] = ()  # of each peer; bytes between regions are wan bytes
    wan_bytes_s: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    # ^ of the link that all traffic between two regions shares; unlimited where not listed
    message_s: Seconds = 0.0005  # per message at either end: framing, sealing, wake-up; assumed, not measured

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
class ReduceCost:
    """Cost of one reduce."""

    seconds: Seconds  # until the last peer has the last result
    sent_max_bytes: float  # by the busiest peer
    total_bytes: float
    wan_bytes: float  # part of `total_bytes` between regions
    messages_max: int  # sent by the busiest peer
    hops: int  # from the farthest row to its owner; the result takes as many


@dataclass(frozen=True)
class CostedTopology(Generic[T]):
    """The chosen topology, its predicted cost, and the reason in one sentence."""

    topology: T
    prediction: ReduceCost
    reason: str


# ---- choosing ------------------------------------------------------------------------------------------------


def choose(candidates: Sequence[T], update_bytes: int, links: AgreedLinks) -> CostedTopology[T]:
    """The first of `candidates` (simplest first) that no later one beats by 10 %, see MARGIN."""
    predicted = [(c, predict(c, update_bytes, links)) for c in candidates]
    seconds = [prediction.seconds for _, prediction in predicted]
    best = next(c for k, c in enumerate(predicted) if seconds[k] * MARGIN <= min(seconds[k:]))
    return CostedTopology(*best, _reason(best, predicted))


def _reason(best: tuple[T, ReduceCost], predicted: Sequence[tuple[T, ReduceCost]]) -> str:
    chosen, cost = best
    others = sorted((p.seconds, t.name, p.wan_bytes) for t, p in predicted if t.name != chosen.name)
    words = f"about {cost.seconds:.3g} s at the measured speeds"
    if others:
        seconds, name, wan_bytes = others[0]
        words += f"; {name}: {seconds:.3g} s"
        if wan_bytes > cost.wan_bytes:
            words += f" with {bytes_text(wan_bytes)} between regions instead of {bytes_text(cost.wan_bytes)}"
    return words


# ---- predicting ----------------------------------------------------------------------------------------------


def predict(
    topology: TopologyLike, update_bytes: int, links: AgreedLinks, up_ratio: float = 1.0, down_ratio: float = 1.0
) -> ReduceCost:
    """Cost of one reduce of a dense update of `update_bytes`.

    Rows are `up_ratio`, results `down_ratio` as large.

    A schedule of all transfers in the α-β model (Hockney 1994; for collectives Thakur, Rabenseifner & Gropp 2005
    and Chan, Heimlich, Purkayastha & van de Geijn 2007), with per-message overhead o as in LogP (Culler et al.
    1993). A row may leave when all rows below it have arrived, results when the owner has all rows. A transfer
    crosses up to four links: the sender's uplink, the connection, the link between regions, the receiver's
    downlink. Each link serves bytes first come, first served, and begins with the first byte (cut-through); latency
    delays but occupies nothing. Transfers that become ready together go to the peers after the sender in their
    order, so that not all load one owner at a time, which approximates fair sharing between connections.

    Limits: combining and codecs take no time, and a combined row is as large as a single one. Nothing is lost.
    Congestion control is in `pair_bytes_s` or nowhere, and costs most where many connections crowd a thin link. A
    link that waits for a slower one counts as free for others. So times are slightly low and meant for comparison.
    All members are present and honest. The topology's peers must be those of `links`. Takes O(peers x parts x log)
    time.
    """
    schedule = _TransferSchedule(topology.parts, links, update_bytes * up_ratio, update_bytes * down_ratio)
    seconds = schedule.run()
    hops = max(_hops(up) for up in schedule.ups)
    busiest_bytes, busiest = max(schedule.sent), max(schedule.messages)
    return ReduceCost(seconds, busiest_bytes, fsum(schedule.sent), schedule.wan, busiest, hops)


# A transfer on its way: arrival of its first byte at the next link, that link, priority among equals (piece, then
# the receiver's distance from the sender in the list), part, sender, receiver, and when its last byte left the link
# before.
_Transfer: TypeAlias = tuple[Seconds, int, int, int, int, int, int, Seconds]
_UPLINK, _BETWEEN, _DOWNLINK = range(3)


class _TransferSchedule:
    """All transfers of one reduce, each link with its queue. Peers are numbers, in the order of the links."""

    def __init__(
        self, parts: Sequence[PartLike], links: AgreedLinks, row_bytes: float, answer_bytes: float
    ) -> None:
        n, total = len(links.peers), sum(part.share for part in parts)
        index = {peer: i for i, peer in enumerate(links.peers)}
        self.links = links
        self.row_bytes = [row_bytes * part.share / total for part in parts]
        self.answer_bytes = [answer_bytes * part.share / total for part in parts]
        self.ups = [_parents(part, links.peers, index) for part in parts]  # [part][peer]: parent; owner: -1
        self.downs = [_children(up) for up in self.ups]
        self.missing = [[len(below) for below in down] for down in self.downs]  # rows still awaited
        self.complete = [[0.0] * n for _ in parts]  # arrival of the last awaited row
        self.piece: list[int] = []  # number of parts of the same owner that go first
        owned: Counter[PeerId] = Counter()
        for part in parts:
            self.piece.append(owned[part.owners[0]])
            owned[part.owners[0]] += 1
        self.queue: list[_Transfer] = []
        self.up_free, self.down_free = [0.0] * n, [0.0] * n  # when a link has sent all bytes given to it
        self.between_free: dict[tuple[str, int, int], Seconds] = {}
        self.sent, self.messages, self.wan = [0.0] * n, [0] * n, 0.0

    def run(self) -> Seconds:
        """Time at which the last result arrives."""
        for j, up in enumerate(self.ups):
            for peer, parent in enumerate(up):
                if parent >= 0 and not self.missing[j][peer]:
                    self._send(j, peer, parent, 0.0)
        end = 0.0
        while self.queue:
            transfer = heappop(self.queue)
            _, link, _, _, j, sender, receiver, _ = transfer
            rising = self.ups[j][sender] == receiver
            size = self.row_bytes[j] if rising else self.answer_bytes[j]
            if link != _DOWNLINK:
                heappush(self.queue, (self._leave if link == _UPLINK else self._cross)(transfer, size))
                continue
            arrival = self._arrive(transfer, size)
            if rising:
                self._collect(j, receiver, arrival)
            else:
                end = max(end, arrival)
                self._answer(j, receiver, arrival)
        assert not any(any(row) for row in self.missing), "a topology that goes round in a circle was predicted"
        return end

    def _send(self, j: int, sender: int, receiver: int, ready: Seconds) -> None:
        distance = (receiver - sender) % len(self.sent)
        heappush(self.queue, (ready, _UPLINK, self.piece[j], distance, j, sender, receiver, ready))

    def _collect(self, j: int, peer: int, arrival: Seconds) -> None:
        self.complete[j][peer] = max(self.complete[j][peer], arrival)
        self.missing[j][peer] -= 1
        if self.missing[j][peer]:
            return
        parent = self.ups[j][peer]
        if parent >= 0:
            self._send(j, peer, parent, self.complete[j][peer])
        else:
            self._answer(j, peer, self.complete[j][peer])

    def _answer(self, j: int, peer: int, ready: Seconds) -> None:
        for child in self.downs[j][peer]:
            self._send(j, peer, child, ready)

    def _leave(self, transfer: _Transfer, size: float) -> _Transfer:
        ready, _, piece, distance, j, sender, receiver, _ = transfer
        self.sent[sender] += size
        self.messages[sender] += 1
        first = max(ready, self.up_free[sender]) + self.links.message_s
        last = self.up_free[sender] = first + size / self.links.up_bytes_s[sender]
        return first, _BETWEEN, piece, distance, j, sender, receiver, last

    def _cross(self, transfer: _Transfer, size: float) -> _Transfer:
        first, _, piece, distance, j, sender, receiver, last = transfer
        links, shared = self.links, list[tuple[tuple[str, int, int], float]]()
        if links.pair_bytes_s:
            shared.append((("pair", sender, receiver), links.pair_bytes_s[sender][receiver]))
        if links.regions and (way := (links.regions[sender], links.regions[receiver])) and way[0] != way[1]:
            self.wan += size
            shared.append((("wan", *way), links.wan_bytes_s.get(way, inf)))
        for link, rate in shared:
            self.between_free[link] = max(first, self.between_free.get(link, 0.0)) + size / rate
            last = max(last, self.between_free[link])
        latency = links.latency_s[sender][receiver]
        return first + latency, _DOWNLINK, piece, distance, j, sender, receiver, last + latency

    def _arrive(self, transfer: _Transfer, size: float) -> Seconds:
        first, _, _, _, _, _, receiver, last = transfer
        overhead = self.links.message_s
        begin = max(first, self.down_free[receiver]) + overhead
        self.down_free[receiver] = begin + size / self.links.down_bytes_s[receiver]
        return max(last + overhead, self.down_free[receiver])


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


# ---- proximity -----------------------------------------------------------------------------------------------


def clusters_by_latency(links: AgreedLinks) -> Group:
    """Nested groups of members that are near each other; flat if there are no groups.

    Complete linkage (the distance of two groups is the largest latency between them, either way), by chains of
    nearest neighbors in O(n²) (Murtagh 1983; Müllner 2011). Merged groups become one, except that a group with an
    inside GAP times as near as the merge stays a group. Ties go to the peer listed first.
    """
    n = len(links.peers)
    if max(map(max, links.latency_s), default=0.0) <= NEAR_S:
        return links.peers
    far = [[max(links.latency_s[i][j], links.latency_s[j][i], NEAR_S) for j in range(n)] for i in range(n)]
    found = {i: _NearestIndex(NEAR_S, (links.peers[i],)) for i in range(n)}
    chain: list[int] = []
    while len(found) > 1:
        chain = chain or [min(found)]
        here = chain[-1]
        nearest = min((j for j in found if j != here), key=lambda j: (far[here][j], j not in chain[-2:-1], j))
        if chain[-2:-1] != [nearest]:
            chain.append(nearest)
            continue
        keep, gone = sorted((here, nearest))
        found[keep] = _merged(found[keep], found.pop(gone), far[keep][gone])
        for j in found:
            far[keep][j] = far[j][keep] = max(far[keep][j], far[gone][j])
        del chain[-2:]
    return found[0].items if found else ()


@dataclass(frozen=True)
class _NearestIndex:
    width_s: Seconds  # largest latency inside
    items: Group


def _merged(a: _NearestIndex, b: _NearestIndex, width_s: Seconds) -> _NearestIndex:
    items: list[PeerId | Group] = []
    for side in (a, b):
        apart = len(side.items) > 1 and width_s >= GAP * side.width_s
        items += [side.items] if apart else side.items
    return _NearestIndex(width_s, tuple(items))
