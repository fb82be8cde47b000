"""Links as the members agreed on them: what each measured, in one byte per figure, and what plans make of it.

A member's report is one byte for its uplink, and for every member that is present, in the order of the agreed
membership, one for the latency to it and one for the rate at which bulk went there while more was waiting; then,
if any rate is, one for the round in which they were measured. 0 says "not known". Reports are rewritten when
somebody comes or goes, so that a run pays for those it has. Steps of a quarter are as fine as such measurements
are, and keep plans from changing with every flutter. Promises the same links at every peer on every platform: the
scales are tables of single products, and only the author of a report ever rounds. A report is its author's word;
plans that would give somebody power by it ask for trusted members first (peer/round/topology_choice.py).
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
REPORT_BYTES_MAX = 2 + 2 * FULL_MESH_MAX  # above so many members nobody measures everybody, and no report is given

_STEPS = list(accumulate(repeat(STEP, 53), mul, initial=1.0))
LATENCIES_S = [50e-6 * step for step in _STEPS]  # 50 µs … 6.8 s
RATES_BYTES_S = [1e3 * step for step in _STEPS]  # 1 kB/s … 137 MB/s; beyond it processors are slower than links


@dataclass(frozen=True)
class TransferRates:
    """What a driver learned from the transfers that happened: bytes per second while more was waiting to leave."""

    uplink_bytes_s: float | None = None  # to everybody together; None: never seen at its limit
    to_bytes_s: Mapping[PeerId, float] = field(default_factory=dict[PeerId, float])
    round: int | None = None  # in which those to single peers were learned, all of them


def report(rates: TransferRates, latency_s: Mapping[PeerId, Seconds], members: Sequence[PeerId]) -> bytes:
    """What I measured, for my next commitment, of the members that are present; empty if they are too many."""
    if len(members) > FULL_MESH_MAX:
        return b""
    found = [_byte(RATES_BYTES_S, rates.uplink_bytes_s)]
    for peer in members:
        found += _byte(LATENCIES_S, latency_s.get(peer)), _byte(RATES_BYTES_S, rates.to_bytes_s.get(peer))
    if rates.to_bytes_s and rates.round is not None:
        found.append(1 + rates.round % len(_STEPS))
    return bytes(found)


def report_flaw(data: bytes) -> str | None:
    """What no honest peer reports."""
    if len(data) > REPORT_BYTES_MAX:
        return "reports links to more members than there can be"
    if data and max(data) > len(_STEPS):
        return "reports a link that is not on the scale"
    return None


def rearranged(said: bytes, before: Sequence[PeerId], after: Sequence[PeerId]) -> bytes:
    """The same report among other members; empty once they are so many that there will be no newer one."""
    if not said or len(after) > FULL_MESH_MAX:
        return b""
    place = {peer: 1 + 2 * i for i, peer in enumerate(before)}
    pairs = (said[place[peer] : place[peer] + 2] if peer in place else b"" for peer in after)
    measured = said[1 + 2 * len(before) :][:1]  # in this round; a liar's report may go on, and would grow with each
    return said[:1] + b"".join(pair.ljust(2, b"\0") for pair in pairs) + measured


def agreed_links(members: Sequence[Member], peers: Sequence[PeerId]) -> AgreedLinks | None:
    """Links between `peers` as the membership holds them; None while a latency between two of them is unknown.

    Of the two directions' words the longer one counts. An uplink that nobody has yet seen at its limit counts as
    the fastest there is, and downlinks as fast as uplinks. Peers that are near each other are taken to reach those
    far away over one link, as sites do: it carries the most that all of them together were seen to send there in
    one round. (What they sent in different rounds says less: each may have had the link to itself.)
    """
    line = {m.peer: m for m in members if m.present}
    place = {peer: i for i, peer in enumerate(line)}
    places = tuple(place[peer] for peer in peers)
    return _read(tuple(peers), places, tuple(line[peer].links for peer in peers), len(line))


def agreed_weights(members: Sequence[Member], peers: Sequence[PeerId]) -> dict[PeerId, float] | None:
    """By what the work is shared out: uplinks, as soon as links are known and uplinks differ; None until then."""
    line = {m.peer: m for m in members if m.present}
    if len({line[peer].links[:1] for peer in peers}) == 1:
        return None
    links = agreed_links(members, peers)
    if links is None or len(set(links.up_bytes_s)) == 1:
        return None
    return dict(zip(peers, links.up_bytes_s, strict=True))


@lru_cache(maxsize=32)  # reports seldom change between rounds; those of 64 peers take 2 ms to read
def _read(
    peers: tuple[PeerId, ...], places: tuple[int, ...], said: tuple[bytes, ...], present: int
) -> AgreedLinks | None:
    told = [[_step(LATENCIES_S, data, 1 + 2 * place) for place in places] for data in said]
    rows: list[list[Seconds]] = []
    for i, (there, back) in enumerate(zip(told, zip(*told, strict=True), strict=True)):
        steps = list(map(max, there, back))  # a later step is a longer latency, and 0 is not known
        steps[i] = 1
        if not all(steps):
            return None
        rows.append([LATENCIES_S[step - 1] for step in steps])
        rows[i][i] = 0.0
    rates = [_value(RATES_BYTES_S, data, 0) for data in said]
    up_bytes_s = [RATES_BYTES_S[-1] if rate is None else rate for rate in rates]
    links = AgreedLinks(peers, rows, up_bytes_s, up_bytes_s)
    regions = _regions(links)
    if len(set(regions)) == len(peers):
        return links  # nobody is near anybody
    together: dict[tuple[int, int], dict[bytes, float]] = {}  # by the round in which it was
    for i, j in permutations(range(len(peers)), 2):
        rate = _value(RATES_BYTES_S, said[i], 2 + 2 * places[j])
        if rate is not None and regions[i] != regions[j]:
            by_round = together.setdefault((regions[i], regions[j]), {})
            when = said[i][1 + 2 * present :]
            by_round[when] = by_round.get(when, 0.0) + rate
    between = {way: max(by_round.values()) for way, by_round in together.items()}
    return replace(links, regions=regions, wan_bytes_s=between)


def _regions(links: AgreedLinks) -> list[int]:
    """Number of the outermost group that each peer is in."""
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
    """1 + the place of the first step that is not below the value; 0 if there is no value."""
    if value is None or not isfinite(value) or value <= 0:
        return 0
    return min(bisect_left(scale, value), len(scale) - 1) + 1


def _step(scale: Sequence[float], said: bytes, at: int) -> int:
    """The byte there; 0 if there is none, or none of the scale."""
    return said[at] if at < len(said) and said[at] <= len(scale) else 0


def _value(scale: Sequence[float], said: bytes, at: int) -> float | None:
    step = _step(scale, said, at)
    return scale[step - 1] if step else None
