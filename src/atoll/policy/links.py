"""Agreed links: every member's link report at one byte per value, and the links that plans derive from them.

A report is one byte for the member's uplink. For every present member, in the order of the agreed membership,
follow one byte for the latency to it and one for the rate of bulk transfers while more was waiting. If any rate is
known, one byte for the round of measurement ends it. 0 means unknown. Reports are rearranged when the membership
changes, so a run pays only for present members. Steps of a quarter are as fine as such measurements, and keep plans
stable.

Invariants:
- Equal links at every peer and platform: scales are tables of single products, and only the author rounds.
Not responsible for: truth. Plans that would give power by a report need trusted members
(peer/round/topology_choice.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, permutations, repeat
from math import isfinite
from operator import mul

from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import FULL_MESH_MAX
from atoll.policy.topology_cost import AgreedLinks, Group, clusters_by_latency
from atoll.wire.messages.vertex import Member

STEP = 1.25
DOUBT = 2.0  # if half of the members own parts, full downlinks of these may hide half of the others' uplinks
REPORT_BYTES_MAX = 2 + 2 * FULL_MESH_MAX  # in larger runs no member measures all others, and none reports

_STEPS = list(accumulate(repeat(STEP, 53), mul, initial=1.0))
LATENCIES_S = [50e-6 * step for step in _STEPS]  # 50 µs … 6.8 s
RATES_BYTES_S = [1e3 * step for step in _STEPS]  # 1 kB/s … 137 MB/s; above it processors are slower than links


@dataclass(frozen=True)
class TransferRates:
    """Transfer rates seen by a driver: bytes per second while more was waiting to be sent."""

    uplink_bytes_s: float | None = None  # to all peers together; None: never seen at its limit
    to_bytes_s: Mapping[PeerId, float] = field(default_factory=dict[PeerId, float])
    round: int | None = None  # round in which all rates to single peers were measured


def report(rates: TransferRates, latency_s: Mapping[PeerId, Seconds], members: Sequence[PeerId]) -> bytes:
    """The local link report for the next commitment, about present members; empty if they are too many."""
    if len(members) > FULL_MESH_MAX:
        return b""
    found = [_byte(RATES_BYTES_S, rates.uplink_bytes_s)]
    for peer in members:
        found += _byte(LATENCIES_S, latency_s.get(peer)), _byte(RATES_BYTES_S, rates.to_bytes_s.get(peer))
    if rates.to_bytes_s and rates.round is not None:
        found.append(1 + rates.round % len(_STEPS))
    return bytes(found)


def report_flaw(data: bytes) -> str | None:
    """Flaw that no honest report has."""
    if len(data) > REPORT_BYTES_MAX:
        return "reports links to more members than there can be"
    if data and max(data) > len(_STEPS):
        return "reports a link that is not on the scale"
    return None


def rearranged(said: bytes, before: Sequence[PeerId], after: Sequence[PeerId]) -> bytes:
    """The report rearranged for another membership; empty if that is too large for newer reports."""
    if not said or len(after) > FULL_MESH_MAX:
        return b""
    place = {peer: 1 + 2 * i for i, peer in enumerate(before)}
    pairs = (said[place[peer] : place[peer] + 2] if peer in place else b"" for peer in after)
    # round of measurement; only one byte, as a liar's longer report would grow each time
    measured = said[1 + 2 * len(before) :][:1]
    return said[:1] + b"".join(pair.ljust(2, b"\0") for pair in pairs) + measured


def agreed_links(members: Sequence[Member], peers: Sequence[PeerId]) -> AgreedLinks | None:
    """Links between `peers` from the membership; None while a latency between two of them is unknown.

    Of both directions' values the longer one counts, and downlinks count like uplinks. An uplink never seen at its
    limit counts as the fastest known one; while fewer than half are known, as the fastest on the scale. Peers near
    each other are assumed to reach distant ones over one shared link, as sites do: its rate is the largest sum that
    they sent there in one round. Sums over different rounds say less, since each peer may have had the link to
    itself.
    """
    line = {m.peer: m for m in members if m.is_present}
    place = {peer: i for i, peer in enumerate(line)}
    places = tuple(place[peer] for peer in peers)
    return _read(tuple(peers), places, tuple(line[peer].links for peer in peers), len(line))


def agreed_weights(members: Sequence[Member], peers: Sequence[PeerId]) -> dict[PeerId, float] | None:
    """Weights for sharing out work: see `weights_of`, once links are known; None until then."""
    line = {m.peer: m for m in members if m.is_present}
    if len({line[peer].links[:1] for peer in peers}) == 1:
        return None
    links = agreed_links(members, peers)
    return weights_of(links.peers, links.up_bytes_s) if links is not None else None


def weights_of(peers: Sequence[PeerId], up_bytes_s: Sequence[float]) -> dict[PeerId, float] | None:
    """Uplinks as weights, each `DOUBT` times as fast as measured, but not above the fastest; None if all are equal.

    Shares react strongly to small differences: without this they would follow errors of measurement.
    """
    fastest = max(up_bytes_s)
    weights = {peer: min(fastest, DOUBT * rate) for peer, rate in zip(peers, up_bytes_s, strict=True)}
    return weights if len(set(weights.values())) > 1 else None


@lru_cache(maxsize=32)  # reports seldom change between rounds; those of 64 peers take 2 ms to decode
def _read(
    peers: tuple[PeerId, ...], places: tuple[int, ...], said: tuple[bytes, ...], present: int
) -> AgreedLinks | None:
    told = [[_step(LATENCIES_S, data, 1 + 2 * place) for place in places] for data in said]
    rows: list[list[Seconds]] = []
    for i, (there, back) in enumerate(zip(told, zip(*told, strict=True), strict=True)):
        steps = list(map(max, there, back))  # a higher step is a longer latency, and 0 is unknown
        steps[i] = 1
        if not all(steps):
            return None
        rows.append([LATENCIES_S[step - 1] for step in steps])
        rows[i][i] = 0.0
    rates = [_value(RATES_BYTES_S, data, 0) for data in said]
    known = [rate for rate in rates if rate is not None]
    unseen = max(known) if known and 2 * len(known) >= len(rates) else RATES_BYTES_S[-1]
    up_bytes_s = [unseen if rate is None else rate for rate in rates]
    links = AgreedLinks(peers, rows, up_bytes_s, up_bytes_s)
    regions = _regions(links)
    if len(set(regions)) == len(peers):
        return links  # no two peers are near each other
    together: dict[tuple[int, int], dict[bytes, float]] = {}  # by round of measurement
    for i, j in permutations(range(len(peers)), 2):
        rate = _value(RATES_BYTES_S, said[i], 2 + 2 * places[j])
        if rate is not None and regions[i] != regions[j]:
            by_round = together.setdefault((regions[i], regions[j]), {})
            when = said[i][1 + 2 * present :]
            by_round[when] = by_round.get(when, 0.0) + rate
    between = {way: max(by_round.values()) for way, by_round in together.items()}
    return replace(links, regions=regions, wan_bytes_s=between)


def _regions(links: AgreedLinks) -> list[int]:
    """Number of the outermost group of each peer."""
    number: dict[PeerId, int] = {}
    for k, item in enumerate(clusters_by_latency(links)):
        number |= dict.fromkeys(_inside(item) if isinstance(item, tuple) else (item,), k)
    return [number[peer] for peer in links.peers]


def _inside(group: Group) -> tuple[PeerId, ...]:
    found: list[PeerId] = []
    for item in group:
        found += _inside(item) if isinstance(item, tuple) else (item,)
    return tuple(found)


def _byte(scale: Sequence[float], value: float | None) -> int:
    """1 + the index of the first step that is not below the value; 0 without a value."""
    if value is None or not isfinite(value) or value <= 0:
        return 0
    return min(bisect_left(scale, value), len(scale) - 1) + 1


def _step(scale: Sequence[float], said: bytes, at: int) -> int:
    """The byte at this place; 0 if there is none on the scale."""
    return said[at] if at < len(said) and said[at] <= len(scale) else 0


def _value(scale: Sequence[float], said: bytes, at: int) -> float | None:
    step = _step(scale, said, at)
    return scale[step - 1] if step else None
