"""Messages and bytes that a topology lets each peer send, counted without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.base.ids import PeerId
from atoll.protocol.allreduce.topology import ReduceTopology, hops_of


@dataclass(frozen=True)
class TrafficCounts:
    """Traffic of one reduce: peers receive as much as they send. In dense updates, before any codec."""

    parts: int
    hops: int  # from the farthest author to the owner
    messages_max: int
    messages_mean: float
    sent_max: float  # updates sent by the busiest peer
    sent_mean: float


def traffic_counts(topology: ReduceTopology, peers: Sequence[PeerId]) -> TrafficCounts:
    """Traffic of the busiest and the mean peer, for a valid topology with one common result.

    Per part each peer except the owner sends one row up, and each parent one result down per child.
    """
    messages, shares = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
    total, hops = 0, 0
    for part in topology.parts:
        sends = Counter(part.parents.values())
        sends[part.owners[0]] += len(peers) - 1 - len(part.parents) - 1  # results to its children, but no row
        for peer, more in sends.items():
            messages[peer] += more
            shares[peer] += more * part.share
        total += part.share
        hops = max(hops, hops_of(part) or 0, min(1, len(peers) - 1))
    rows = len(topology.parts)  # one per part, sent by every peer
    return TrafficCounts(
        rows,
        hops,
        rows + max(messages.values()),
        rows + sum(messages.values()) / len(peers),
        1 + max(shares.values()) / total,
        1 + sum(shares.values()) / total / len(peers),
    )
