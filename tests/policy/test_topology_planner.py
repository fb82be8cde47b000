"""The planner's model agrees with the textbook, and its choices with common sense."""

import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from traffic_counts import traffic_counts

from atoll.base.ids import PeerId
from atoll.policy.topology_cost import (
    GAP,
    NEAR_S,
    AgreedLinks,
    CostedTopology,
    choose,
    clusters_by_latency,
    predict,
)
from atoll.protocol.allreduce.topology import (
    ReduceTopology,
    butterfly,
    candidate_topologies,
    hierarchical,
    limit_fan,
    ring,
    star,
    tree,
)

SEED = b"head"
UPDATE_BYTES = 100_000_000
RATE = 125e6  # bytes per second: 1 Gbit/s


def names(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{i}") for i in range(count))


def lan(n: int, latency_s: float = 0.0005, message_s: float = 0.0) -> AgreedLinks:
    return AgreedLinks(names(n), [[latency_s] * n] * n, [RATE] * n, [RATE] * n, message_s=message_s)


def sites(*sizes: int, wan_rate: float = RATE / 10, far_s: float = 0.04) -> AgreedLinks:
    """Local networks that are joined by one link for each pair of them."""
    where = [site for site, size in enumerate(sizes) for _ in range(size)]
    latency = [[0.0005 if a == b else far_s for b in where] for a in where]
    wan = {(a, b): wan_rate for a in range(len(sizes)) for b in range(len(sizes)) if a != b}
    rates = [RATE] * len(where)
    return AgreedLinks(names(len(where)), latency, rates, rates, regions=where, wan_bytes_s=wan)


def chosen(links: AgreedLinks, update_bytes: int = UPDATE_BYTES) -> CostedTopology[ReduceTopology]:
    rates = dict(zip(links.peers, links.up_bytes_s, strict=True))
    offered = candidate_topologies(links.peers, SEED, rates, clusters_by_latency(links), update_bytes)
    return choose(offered, update_bytes, links)


# ---- the model against formulas ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_on_equal_links_the_schedule_takes_exactly_what_the_formulas_say(n):
    """Thakur et al. 2005 without combining: hops times α, the latency, plus bytes times β, one over the rate."""
    links, alpha, whole_s = lan(n), 0.0005, UPDATE_BYTES / RATE
    shared_s = 2 * (n - 1) / n * whole_s

    def predicted_s(topology: ReduceTopology) -> float:
        return predict(topology, UPDATE_BYTES, links).seconds

    assert predicted_s(butterfly(links.peers, SEED)) == pytest.approx(2 * alpha + shared_s)
    assert predicted_s(ring(links.peers, SEED)) == pytest.approx(2 * (n - 1) * alpha + shared_s)
    # n - 1 rows share the server's downlink, n - 1 answers its uplink
    assert predicted_s(star(links.peers, SEED)) == pytest.approx(2 * alpha + 2 * (n - 1) * whole_s)


@given(st.integers(2, 12), st.integers(1, 32))
def test_pieces_follow_each_other_through_a_chain(n, pieces):
    """A chain of h hops up and h down: one piece takes 2 h turns, each further piece at most two more.

    One more where uplinks are idle (two peers), two where those in the middle send rows up and answers down.
    """
    links, hops = lan(n, latency_s=0.0), n - 1
    predicted = predict(tree(links.peers, SEED, pieces=pieces, arity=1), UPDATE_BYTES, links)
    turns = predicted.seconds / (UPDATE_BYTES / pieces / RATE)
    assert predicted.hops == hops
    most = 2 * hops + (1 if n == 2 else 2) * (pieces - 1)
    assert max(2 * hops + pieces - 1, 2 * pieces if n > 2 else 0) <= turns * (1 + 1e-9)
    assert turns <= most * (1 + 1e-9)


def test_every_message_costs_its_overhead_at_both_ends():
    """Two peers, one owner, bytes of no weight: a message up and one down, overhead twice each (LogP)."""
    links = lan(2, latency_s=0.1, message_s=0.003)
    assert predict(star(links.peers, SEED), 0, links).seconds == pytest.approx(2 * (0.1 + 2 * 0.003))


@pytest.mark.parametrize("far", [0, 1, 2])
def test_answers_wait_for_the_farthest_row_whoever_sends_it(far):
    """Four peers around a server, one of them half a second away: half a second there, half a second back."""
    peers = names(4)
    latency = [[0.5 if far in (i, j) else 0.1 for j in range(4)] for i in range(4)]
    links = replace(lan(4), latency_s=latency)
    assert predict(star(peers, SEED, server=peers[3]), 0, links).seconds == pytest.approx(1.0)


def test_a_row_that_begins_first_may_end_last():
    """1 MB over a thin uplink from near by takes a second, though the fast row from afar is long there."""
    latency = [[0.1 if 2 in (i, j) else 0.0 for j in range(3)] for i in range(3)]
    links = replace(lan(3), latency_s=latency, up_bytes_s=[inf, 1e6, inf], down_bytes_s=[inf] * 3)
    assert predict(star(links.peers, SEED, server=links.peers[0]), 10**6, links).seconds == pytest.approx(1.1)


def test_a_wide_link_between_regions_slows_nobody():
    near = replace(sites(2, 2, wan_rate=inf, far_s=0.0005), down_bytes_s=[inf] * 4)
    apart = replace(near, regions=())
    for topology in candidate_topologies(near.peers, SEED):
        assert predict(topology, UPDATE_BYTES, near).seconds == predict(topology, UPDATE_BYTES, apart).seconds


def test_rows_wait_for_a_thin_downlink_and_answers_for_a_thin_uplink():
    """The server receives two updates of 1 MB at 1 MB/s and sends two answers at 4 MB/s."""
    links = replace(lan(3, 0.0), down_bytes_s=[1e6, inf, inf], up_bytes_s=[4e6, inf, inf])
    assert predict(star(links.peers, SEED, server=links.peers[0]), 10**6, links).seconds == pytest.approx(2.5)


def test_codecs_make_rows_and_answers_smaller():
    links = lan(4, latency_s=0.0)
    topology = star(links.peers, SEED)
    up_s = 3 * UPDATE_BYTES / RATE
    assert predict(topology, UPDATE_BYTES, links, 0.25, 0.5).seconds == pytest.approx(0.25 * up_s + 0.5 * up_s)


def test_a_connection_or_a_link_between_regions_slows_all_that_crosses_it():
    """Two by two peers, a butterfly: four rows, then four answers of a quarter cross each way, one by one."""
    links = sites(2, 2, wan_rate=1e6, far_s=0.0)
    predicted = predict(butterfly(links.peers, SEED), 4_000_000, links)
    assert predicted.wan_bytes == 16 * 1_000_000
    assert predicted.seconds == pytest.approx(8.0, rel=0.01)
    thin = [[1e6] * 4] * 4
    pairwise = replace(lan(4, 0.0), pair_bytes_s=thin)
    # three connections work side by side, each carries a quarter up and a quarter down
    assert predict(butterfly(links.peers, SEED), 4_000_000, pairwise).seconds == pytest.approx(2.0, rel=0.02)


@st.composite
def networks(draw: st.DrawFn) -> AgreedLinks:
    n = draw(st.integers(1, 12))
    rate, latency = st.floats(1e4, 1e9), st.floats(0, 0.3)

    def row(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=n, max_size=n))

    regions = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    wan = {(a, b): draw(rate) for a in range(3) for b in range(3) if a != b}
    pair = [row(rate) for _ in range(n)] if draw(st.booleans()) else ()
    return AgreedLinks(names(n), [row(latency) for _ in range(n)], row(rate), row(rate), pair, regions, wan)


@settings(max_examples=30)
@given(networks(), st.integers(1, 10**9))
def test_no_prediction_beats_what_its_links_allow(links, update_bytes):
    """Bytes agree with the counts of the plan, and no link is asked to carry more than its rate."""
    rates = dict(zip(links.peers, links.up_bytes_s, strict=True))
    for topology in candidate_topologies(links.peers, SEED, rates, clusters_by_latency(links)):
        predicted, count = predict(topology, update_bytes, links), traffic_counts(topology, links.peers)
        assert predicted.messages_max == count.messages_max
        assert predicted.sent_max_bytes == pytest.approx(count.sent_max * update_bytes)
        assert predicted.total_bytes == pytest.approx(count.sent_mean * update_bytes * len(links.peers))
        assert predicted.wan_bytes <= predicted.total_bytes * (1 + 1e-9)
        assert predicted.hops == count.hops
        fastest = max(max(links.up_bytes_s), max(links.down_bytes_s))
        assert predicted.seconds >= predicted.sent_max_bytes / fastest * (1 - 1e-9)
        # with twice the rates, half the latency and half the overhead everything takes half the time
        doubled = AgreedLinks(
            links.peers,
            [[s / 2 for s in row] for row in links.latency_s],
            [2 * r for r in links.up_bytes_s],
            [2 * r for r in links.down_bytes_s],
            [[2 * r for r in row] for row in links.pair_bytes_s],
            links.regions,
            {k: 2 * r for k, r in links.wan_bytes_s.items()},
            links.message_s / 2,
        )
        assert predict(topology, update_bytes, doubled).seconds == pytest.approx(predicted.seconds / 2)


# ---- the choice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_on_a_uniform_local_network_it_is_the_butterfly(n):
    assert chosen(lan(n)).topology.name == "butterfly"


def test_one_peer_needs_nothing():
    only = chosen(lan(1))
    assert only.prediction.seconds == 0.0
    assert only.topology.parts[0].owners == names(1)


def test_a_star_when_one_peer_alone_has_bandwidth():
    """Eight peers, one of them with a thousand times the uplink of the others: it serves."""
    rich, rates = PeerId("p5"), [RATE if i == 5 else RATE / 1000 for i in range(8)]
    choice = chosen(replace(lan(8), up_bytes_s=rates, down_bytes_s=rates), 10_000_000)
    assert choice.topology.name == "star"
    assert {part.owners[0] for part in choice.topology.parts} == {rich}


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (3, 8), (8, 8), (5, 5, 5), (20, 20)])
def test_sites_on_thin_links_aggregate_at_home_first(sizes):
    """At least one and a half times as fast as any flat topology, with the fewest bytes between sites."""
    links = sites(*sizes)
    choice = chosen(links)
    assert choice.topology.name == "hierarchical"
    for flat in (star, butterfly):
        assert predict(flat(links.peers, SEED), UPDATE_BYTES, links).seconds >= 1.5 * choice.prediction.seconds
    assert choice.prediction.wan_bytes == pytest.approx(2 * (len(sizes) - 1) * UPDATE_BYTES)
    assert "between regions" in choice.reason


def test_a_simpler_topology_stays_unless_another_is_a_tenth_faster():
    """Star and butterfly of two peers, as drawn out as to differ by little, then by much."""
    links = lan(2, latency_s=10.0)
    offered = [star(links.peers, SEED), butterfly(links.peers, SEED)]
    assert choose(offered, UPDATE_BYTES, links).topology.name == "star"
    assert choose(offered, 100 * UPDATE_BYTES, links).topology.name == "butterfly"


def test_a_hundred_peers_are_put_in_groups():
    links = lan(100)
    choice = chosen(links, 10_000_000)
    assert choice.topology.name == "hierarchical"
    flat = predict(butterfly(links.peers, SEED), 10_000_000, links)
    assert choice.prediction.seconds * 2 < flat.seconds
    assert choice.prediction.sent_max_bytes < 3 * 10_000_000


@settings(max_examples=30)
@given(networks(), st.integers(1, 10**9))
def test_the_choice_is_the_same_for_the_same_links_and_within_a_tenth_of_the_best(links, update_bytes):
    choice = chosen(links, update_bytes)
    assert choice == chosen(links, update_bytes)
    rates = dict(zip(links.peers, links.up_bytes_s, strict=True))
    offered = candidate_topologies(links.peers, SEED, rates, clusters_by_latency(links), update_bytes)
    best_s = min(predict(topology, update_bytes, links).seconds for topology in offered)
    assert choice.prediction.seconds * 0.9 <= best_s * (1 + 1e-9)


def test_a_nested_hierarchy_in_64_parts_sends_what_the_plan_counts():
    """Sixteen peers in groups of four: 15 updates go up and 15 come down, whatever the pieces."""
    links = lan(16)
    topology = hierarchical(limit_fan(links.peers, SEED, 4), SEED, pieces=4)
    assert len(topology.parts) == 64
    predicted = predict(topology, UPDATE_BYTES, links)
    assert predicted.total_bytes == pytest.approx(2 * 15 * UPDATE_BYTES)
    assert predicted.messages_max == traffic_counts(topology, links.peers).messages_max


# ---- proximity -----------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.data())
def test_sites_are_found_whatever_the_order_of_peers(data):
    """2 to 5 sites of 2 to 6 peers, latencies inside far below those between, peers in drawn order."""
    sizes = data.draw(st.lists(st.integers(2, 6), min_size=2, max_size=5))
    home = data.draw(st.permutations([site for site, size in enumerate(sizes) for _ in range(size)]))
    near, far = st.floats(0, NEAR_S), st.floats(NEAR_S * GAP, NEAR_S * GAP * 2)
    latency = [[data.draw(near if a == b else far) for b in home] for a in home]
    links = AgreedLinks(names(len(home)), latency, [1.0] * len(home), [1.0] * len(home))
    found = clusters_by_latency(links)
    assert found == clusters_by_latency(links)
    expected = {frozenset(p for p, h in zip(links.peers, home, strict=True) if h == site) for site in set(home)}
    assert {frozenset(group) for group in found} == expected


def test_sites_on_two_continents_are_groups_of_groups_and_a_loner_stays_alone():
    where = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 2), (1, 2), (1, 3), (1, 3), (2, 4)]

    def latency_s(a: tuple[int, int], b: tuple[int, int]) -> float:
        return 0.15 if a[0] != b[0] else 0.01 if a[1] != b[1] else 0.0003

    rates = [1.0] * len(where)
    links = AgreedLinks(names(len(where)), [[latency_s(a, b) for b in where] for a in where], rates, rates)
    p = links.peers
    assert clusters_by_latency(links) == (((p[0], p[1]), (p[2], p[3])), ((p[4], p[5]), (p[6], p[7])), p[8])


def test_a_long_line_of_peers_is_no_group_of_near_ones():
    """Twice eight peers 3 ms apart from the next with 15 ms between: those at its ends are no neighbours."""
    place_ms = [3 * i + (12 if i >= 8 else 0) for i in range(16)]
    links = replace(lan(16), latency_s=[[abs(a - b) / 1000 for b in place_ms] for a in place_ms])
    assert sorted(clusters_by_latency(links)) == sorted(links.peers)


@given(st.integers(0, 20), st.floats(0, 1))
def test_where_nobody_stands_apart_there_are_no_groups(n, latency_s):
    assert sorted(clusters_by_latency(lan(n, latency_s))) == sorted(names(n))


@pytest.mark.parametrize(
    "change",
    [
        {"latency_s": [[0.0]]},
        {"latency_s": [[0.0, -1.0], [0.0, 0.0]]},
        {"latency_s": [[0.0, inf], [0.0, 0.0]]},
        {"up_bytes_s": [1.0]},
        {"up_bytes_s": [1.0, 0.0]},
        {"down_bytes_s": [1.0, -1.0]},
        {"pair_bytes_s": [[1.0, 1.0]]},
        {"pair_bytes_s": [[1.0, 0.0], [1.0, 1.0]]},
        {"regions": [0]},
        {"wan_bytes_s": {(0, 1): 0.0}},
    ],
)
def test_links_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError):
        replace(lan(2), **change)
