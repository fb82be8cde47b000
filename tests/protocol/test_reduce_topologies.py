"""Every topology brings every row to its owner once, and costs what the textbook says."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from traffic_counts import traffic_counts

from atoll.base.ids import PeerId
from atoll.base.limits import MIB, OWNERS_PER_PART, PART_BYTES_MAX, PARTS_MAX
from atoll.protocol.allreduce.topology import (
    FAN,
    Cluster,
    PartReductionTree,
    ReduceTopology,
    butterfly,
    candidate_topologies,
    cut_to_frames,
    hierarchical,
    limit_fan,
    pairs,
    peers_in,
    ring,
    star,
    tree,
    validate,
)

SEED = b"head"


def names(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{i}") for i in range(count))


class Reduced:
    """What really moves when the parts of a topology are reduced, hop by hop: rows are lists of contributors."""

    def __init__(self, topology: ReduceTopology, peers: tuple[PeerId, ...]) -> None:
        self.sent: Counter[PeerId] = Counter()  # in shares
        self.received: Counter[PeerId] = Counter()
        self.messages: Counter[PeerId] = Counter()
        self.crossings: list[Counter[tuple[PeerId, PeerId]]] = []  # per part, rows on their way up
        self.combined: list[list[PeerId]] = []
        self.answered: list[Counter[PeerId]] = []
        for part in topology.parts:
            self._reduce(part, peers)
        self.total = sum(part.share for part in topology.parts)

    def _reduce(self, part: PartReductionTree, peers: tuple[PeerId, ...]) -> None:
        rows = {p: [p] for p in peers}
        waits_for = Counter(part.parent(p) for p in peers)
        ready = [p for p in peers if not waits_for[p]]
        crossed: Counter[tuple[PeerId, PeerId]] = Counter()
        for peer in ready:  # grows: a peer with the rows of all its children goes next
            parent = part.parent(peer)
            if parent is not None:
                self._send(peer, parent, part)
                crossed[peer, parent] += 1
                rows[parent] += rows.pop(peer)
                waits_for[parent] -= 1
                if not waits_for[parent]:
                    ready.append(parent)
        self.combined.append(sorted(rows[part.owners[0]]))
        self.crossings.append(crossed)
        answered: Counter[PeerId] = Counter({part.owners[0]: 1})
        for peer in reversed(ready):  # owner first, leaves last
            parent = part.parent(peer)
            if parent is not None:
                assert answered[parent] == 1
                answered[peer] += 1
                self._send(parent, peer, part)
        self.answered.append(answered)

    def _send(self, sender: PeerId, receiver: PeerId, part: PartReductionTree) -> None:
        self.messages[sender] += 1
        self.sent[sender] += part.share
        self.received[receiver] += part.share


def halves(peers: tuple[PeerId, ...]) -> Cluster:
    return peers[: len(peers) // 2], peers[len(peers) // 2 :]


@st.composite
def swarms(draw: st.DrawFn) -> tuple[tuple[PeerId, ...], dict[PeerId, float] | None]:
    """1 to 64 peers, and upload rates of which some may be zero: clients."""
    peers = names(draw(st.integers(1, 64)))
    if draw(st.booleans()):
        return peers, None
    rate = st.one_of(st.just(0.0), st.floats(0.01, 1000))
    rates = draw(st.lists(rate, min_size=len(peers), max_size=len(peers)))
    rates[draw(st.integers(0, len(peers) - 1))] = 1.0
    return peers, dict(zip(peers, rates, strict=True))


@st.composite
def nestings(draw: st.DrawFn) -> Cluster:
    """Clusters of clusters of peers, some empty."""
    left = list(names(draw(st.integers(1, 40))))

    def some(depth: int) -> Cluster:
        items: list[PeerId | Cluster] = []
        for _ in range(draw(st.integers(0, 5))):
            items += [some(depth - 1)] if depth and draw(st.booleans()) else [left.pop()] if left else []
        return tuple(items)

    return (*some(2), *left)


def assert_exactly_once(topology: ReduceTopology, peers: tuple[PeerId, ...]) -> Reduced:
    assert validate(topology, peers) is None
    done = Reduced(topology, peers)
    assert all(combined == sorted(peers) for combined in done.combined)
    assert all(answered == Counter(peers) for answered in done.answered)
    return done


@settings(max_examples=40)
@given(swarms(), st.binary(max_size=4), st.integers(1, 3), st.integers(1, 4))
def test_every_row_reaches_every_owner_once_and_every_answer_everybody_once(swarm, seed, pieces, arity):
    """Rows are carried hop by hop; counts, worked out without carrying anything, must agree with what moved."""
    peers, weights = swarm
    for topology in (
        star(peers, seed, weights, pieces),
        ring(peers, seed, weights, pieces),
        tree(peers, seed, weights, pieces, arity),
        butterfly(peers, seed, weights, pieces),
        hierarchical(halves(peers), seed, weights, pieces),
        hierarchical(limit_fan(peers, seed, 3), seed, weights, pieces),
    ):
        done = assert_exactly_once(topology, peers)
        count = traffic_counts(topology, peers)
        assert done.sent == done.received
        assert count.messages_max == max(done.messages[p] for p in peers)
        assert count.messages_mean == pytest.approx(sum(done.messages.values()) / len(peers))
        assert count.sent_max == pytest.approx(max(done.sent[p] for p in peers) / done.total)
        assert count.sent_mean == pytest.approx(2 * (len(peers) - 1) / len(peers))


@given(nestings(), st.binary(max_size=4))
def test_any_nesting_of_clusters_reaches_everybody(clusters, seed):
    peers = peers_in(clusters)
    assert_exactly_once(hierarchical(clusters, seed), peers)
    assert sorted(peers_in(limit_fan(clusters, seed, 2))) == sorted(peers)


@given(st.integers(1, 64), st.binary(max_size=4))
def test_ring_and_butterfly_send_as_little_as_possible_and_a_star_burdens_its_server(n, seed):
    """2 (n - 1) / n updates per peer (Patarasuk & Yuan 2009); above PARTS_MAX a butterfly's owners send more.

    A ring has no more parts than that either, so beyond it a peer without a part sends up to 2.
    """
    peers, least = names(n), 2 * (n - 1) / n
    assert len(ring(peers, seed).parts) == min(n, PARTS_MAX)
    sent_max = traffic_counts(ring(peers, seed), peers).sent_max
    assert sent_max == pytest.approx(least) or (n > PARTS_MAX and least < sent_max <= 2)
    owners = min(n, PARTS_MAX)
    flat = traffic_counts(butterfly(peers, seed), peers)
    assert flat.sent_max == pytest.approx((owners - 1) / owners + (n - 1) / owners)
    assert flat.sent_max == pytest.approx(least) or n > PARTS_MAX
    served = Reduced(star(peers, seed, server=peers[-1]), peers)
    assert served.sent[peers[-1]] + served.received[peers[-1]] == 2 * (n - 1)
    assert n == 1 or max(served.sent[p] + served.received[p] for p in peers[:-1]) == 2


@given(swarms(), st.binary(max_size=4))
def test_clients_own_nothing_and_nobody_hands_them_a_row(swarm, seed):
    peers, weights = swarm
    able = {p for p in peers if weights is None or weights[p] > 0}
    for topology in candidate_topologies(peers, seed, weights, halves(peers)):
        for part in topology.parts:
            assert able.issuperset(part.owners)
            assert able.issuperset(part.parents.values())
            assert len(part.owners) == min(OWNERS_PER_PART, len(able))


@given(st.lists(st.floats(0.1, 100), min_size=3, max_size=PARTS_MAX), st.data())
def test_no_other_cut_of_the_update_would_free_the_busiest_link_sooner(rates, data):
    """The butterfly's shares against drawn ones. A peer sends 1 + (n - 2) of its share; rows of its part have half
    of that time for its downlink, which is as fast.
    """
    n, peers = len(rates), names(len(rates))
    weights = dict(zip(peers, rates, strict=True))
    mine: Counter[PeerId] = Counter()
    for part in butterfly(peers, SEED, weights).parts:
        mine[part.owners[0]] += part.share
    other = dict(zip(peers, data.draw(st.lists(st.floats(0.001, 1), min_size=n, max_size=n)), strict=True))

    def busy_s(shares: dict[PeerId, float] | Counter[PeerId]) -> float:
        total = sum(shares.values())
        part = {p: shares[p] / total for p in peers}
        return max(max(1 + (n - 2) * part[p], 2 * (n - 1) * part[p]) / weights[p] for p in peers)

    assert busy_s(mine) <= busy_s(other) * 1.02 + 1e-9  # shares are rounded to 4096ths
    ordered = sorted(peers, key=lambda p: weights[p])
    assert all(mine[slow] <= mine[fast] for slow, fast in pairwise(ordered))


def test_equal_uplinks_get_equal_shares_and_a_thin_one_nothing():
    peers = names(4)
    assert {part.share for part in butterfly(peers, SEED, dict.fromkeys(peers, 7.0)).parts} == {1}
    thin = butterfly(peers, SEED, {p: 1.0 if p == "p0" else 100.0 for p in peers})
    assert {part.owners[0] for part in thin.parts} == set(peers) - {"p0"}
    assert {
        part.share for part in butterfly(names(2), SEED, {p: 1.0 if p == "p0" else 100.0 for p in names(2)}).parts
    } == {1}


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 4), st.binary(max_size=4))
def test_in_a_tree_and_a_ring_clients_are_shared_out(able, clients, arity, seed):
    """The fan that a peer has anyway, and its fair share of clients: one row more per part and client."""
    peers = names(able + clients)
    weights = {p: 1.0 for p in peers[:able]}
    fair = -(-clients // able)
    busy = Reduced(tree(peers, seed, weights, arity=arity), peers)
    assert max(busy.sent[p] for p in peers) <= arity + 1 + fair
    busy = Reduced(ring(peers, seed, weights), peers)
    assert max(busy.sent[p] for p in peers) <= busy.total * (2 + fair)


def test_pieces_of_one_owner_pass_to_as_many_members_when_it_dies():
    """One member behind it for all would have to take in and give out alone what the dead one had to."""
    for n, pieces in ((4, 3), (8, 3), (3, 3), (1, 2)):
        peers = names(n)
        parts = butterfly(peers, SEED, pieces=pieces, spread=True).parts
        for owner in peers:
            takers = [part.owners[1:2] for part in parts if part.owners[0] == owner]
            assert len(takers) == pieces and len(set(takers)) == min(pieces, max(1, n - 1))
        assert [part.owners for part in parts[:n]] == [part.owners for part in butterfly(peers, SEED).parts]


def test_above_the_limit_of_parts_the_fastest_own():
    peers = names(40)
    rates = {p: 10.0 if i % 2 else 1.0 for i, p in enumerate(peers)}
    owners = {part.owners[0] for part in butterfly(peers, SEED, rates).parts}
    assert len(owners) == PARTS_MAX
    assert all(rates[p] == 10.0 for p in owners)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.binary(max_size=4), st.integers(1, 3))
def test_a_link_between_clusters_carries_each_part_once(sizes, seed, pieces):
    """With k clusters k - 1 rows leave their cluster per part, however many members there are."""
    peers = names(sum(sizes))
    home = [c for c, size in enumerate(sizes) for _ in range(size)]
    where = dict(zip(peers, home, strict=True))
    clusters = tuple(tuple(p for p in peers if where[p] == c) for c in range(len(sizes)))
    for crossed in Reduced(hierarchical(clusters, seed, pieces=pieces), peers).crossings:
        assert sum(n for (a, b), n in crossed.items() if where[a] != where[b]) == len(sizes) - 1


def test_nested_clusters_cross_each_level_once():
    """Two continents of two sites of three: one row per part crosses the ocean, two more go between sites."""
    peers = names(12)
    sites = [peers[i : i + 3] for i in range(0, 12, 3)]
    topology = hierarchical(((sites[0], sites[1]), (sites[2], sites[3])), SEED)
    site = {p: i // 3 for i, p in enumerate(peers)}
    for crossed in Reduced(topology, peers).crossings:
        between = [(site[a], site[b]) for a, b in crossed if site[a] != site[b]]
        assert len(between) == 3
        assert sum(a // 2 != b // 2 for a, b in between) == 1


@given(st.integers(1, 10), st.integers(1, 10), st.binary(max_size=4))
def test_members_of_a_cluster_take_turns_as_its_head(a, b, seed):
    peers = names(a + b)
    topology = hierarchical((peers[:a], peers[a:]), seed)
    for cluster in (peers[:a], peers[a:]):
        led = Counter(dict.fromkeys(cluster, 0))
        for part in topology.parts:
            outside = [p for p in cluster if part.parent(p) not in cluster]
            assert len(outside) == 1  # the head: all others hand their rows to a peer in the cluster
            led[outside[0]] += 1
        if len(cluster) > 1:
            assert max(led.values()) - min(led.values()) <= 2


def test_a_slow_uplink_heads_its_cluster_less_often():
    peers = names(8)
    slow = PeerId("p1")
    topology = hierarchical(halves(peers), SEED, {p: 1.0 if p == slow else 4.0 for p in peers}, pieces=4)
    busy = Reduced(topology, peers)
    assert busy.sent[slow] < min(busy.sent[p] for p in peers if p != slow)


def test_a_swarm_of_5000_keeps_messages_and_bytes_per_peer_bounded():
    """The hierarchy: 4 hops, some 60 messages, below 4 updates. A butterfly's owners would send 313 updates."""
    peers = names(5000)
    count = traffic_counts(hierarchical(limit_fan(peers, SEED), SEED), peers)
    assert count.hops == 4
    assert count.messages_max <= 4 * PARTS_MAX + PARTS_MAX
    assert count.sent_max < 4
    assert traffic_counts(tree(peers, SEED), peers).messages_max == 3
    assert traffic_counts(butterfly(peers, SEED), peers).sent_max > 300


@given(st.integers(1, 300), st.integers(2, FAN), st.binary(max_size=4))
def test_groups_stay_within_their_fan_and_need_no_more_levels_than_that_takes(n, fan, seed):
    def levels(cluster: Cluster) -> int:
        assert len(cluster) <= fan
        return 1 + max((levels(item) for item in cluster if isinstance(item, tuple)), default=0)

    grouped = limit_fan(names(n), seed, fan)
    assert sorted(peers_in(grouped)) == sorted(names(n))
    assert n <= fan ** levels(grouped)
    assert n == 1 or fan ** (levels(grouped) - 1) < n


def test_one_round_of_pairs_leaves_as_much_variance_as_the_formula_says():
    """Eight values, mean 0, over 4000 drawn pairings: (n - 2) / (2 n - 2) = 3/7 of the variance is left."""
    peers = names(8)
    value = dict(zip(peers, (-9.0, -4.0, -1.0, 0.0, 1.0, 2.0, 3.0, 8.0), strict=True))
    before, after = sum(v * v for v in value.values()), 0.0
    for round in range(4000):
        for part in pairs(peers, round).parts:
            after += (sum(value[p] for p in part.authors) / len(part.authors)) ** 2
    assert after / 4000 / before == pytest.approx(3 / 7, rel=0.05)


@given(st.integers(1, 40), st.integers(0, 2**40))
def test_in_pairs_everybody_owns_a_part_of_its_own_row_and_its_partners(n, round):
    """An odd one is alone; both of a pair mean the same pair; the topology is one that holds."""
    peers = names(n)
    topology = pairs(peers, round)
    assert validate(topology, peers) is None and topology.is_direct and topology.has_separate_results
    taking = {part.owners[0]: part.authors for part in topology.parts}
    assert tuple(taking) == peers and all(len(part.owners) == 1 for part in topology.parts)
    assert all(taking[other] == taken for taken in taking.values() for other in taken)
    assert sorted(len(taken) for taken in taking.values()) == [1] * (n % 2) + [2] * (n - n % 2)
    assert all(topology.parts_taking(peer) == len(taking[peer]) for peer in peers)
    assert pairs(peers, round) == topology
    if n > 8:
        assert pairs(peers, round + 1) != topology


@pytest.mark.parametrize("takes", [{"p0"}, {"p1", "stranger"}])
def test_a_part_that_takes_rows_which_cannot_reach_it_is_refused(takes):
    peers = names(3)
    part = PartReductionTree((peers[1],), 1, {}, frozenset(takes))
    assert "takes rows" in validate(ReduceTopology("pairs", (part,)), peers)


@settings(max_examples=20)
@given(swarms())
def test_the_same_agreed_inputs_give_the_same_topologies(swarm):
    peers, weights = swarm
    first, again = (candidate_topologies(peers, SEED, weights, halves(peers)) for _ in range(2))
    assert first == again
    if len(peers) > 8:
        assert ring(peers, SEED) != ring(peers, b"another head")


def test_the_peer_with_the_most_rows_takes_over():
    """A ring of 5: the last peer before the owner holds all rows except the owner's."""
    peers = names(5)
    for part in ring(peers, SEED).parts:
        assert part.parent(part.owners[1]) == part.owners[0]
        assert len(_below(part, part.owners[1], peers)) == len(peers) - 1
    for part in hierarchical(halves(peers), SEED).parts:
        assert len(_below(part, part.owners[1], peers)) > 1


def test_an_update_that_frames_could_not_carry_is_cut_finer():
    peers = names(4)
    for update_bytes in (0, 1, 400 * MIB, 3000 * MIB):
        for topology in candidate_topologies(
            peers, SEED, {p: float(i) for i, p in enumerate(peers)}, None, update_bytes
        ):
            total = sum(part.share for part in topology.parts)
            assert all(update_bytes * part.share <= PART_BYTES_MAX * total for part in topology.parts)
    assert cut_to_frames(star(peers, SEED), 48 * MIB) == star(peers, SEED)


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=40), st.integers(0, 2000), st.integers(1, 4))
def test_unequal_shares_are_cut_each_by_its_own_length(rates, full_parts, pieces):
    """An update that fills N parts has at most N + 1 more than its topology has; shares stay what they were."""
    peers = names(len(rates))
    whole = butterfly(peers, SEED, dict(zip(peers, rates, strict=True)), pieces)
    update_bytes = full_parts * PART_BYTES_MAX + 1
    finer = cut_to_frames(whole, update_bytes)
    assert len(finer.parts) <= len(whole.parts) + full_parts + 1
    total, before = sum(p.share for p in finer.parts), sum(p.share for p in whole.parts)
    assert all(update_bytes * p.share <= PART_BYTES_MAX * total for p in finer.parts)
    for owner in {p.owners for p in whole.parts}:
        share = sum(p.share for p in finer.parts if p.owners == owner)
        assert share * before == sum(p.share for p in whole.parts if p.owners == owner) * total


a, b, c, d = names(4)
MANY = tuple(names(OWNERS_PER_PART + 1))
GOOD = PartReductionTree((a, b), 1, {c: b})


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (replace(GOOD, share=0), "share"),
        (replace(GOOD, owners=()), "different owners"),
        (replace(GOOD, owners=(a, a)), "different owners"),
        (replace(GOOD, owners=MANY), "different owners"),
        (replace(GOOD, owners=(PeerId("stranger"),)), "no peer"),
        (replace(GOOD, parents={c: PeerId("stranger")}), "no peer"),
        (replace(GOOD, parents={PeerId("stranger"): b}), "no peer"),
        (replace(GOOD, parents={a: b}), "by its owner"),
        (replace(GOOD, parents={c: a}), "not listed"),
        (replace(GOOD, parents={b: c, c: d, d: b}), "circle"),
        (replace(GOOD, parents={b: b}), "circle"),
    ],
)
def test_what_is_wrong_with_a_topology_is_said(part, why):
    assert validate(ReduceTopology("mine", (GOOD,)), (a, b, c, d)) is None
    assert why in (validate(ReduceTopology("mine", (GOOD, part)), (a, b, c, d)) or "")


def test_a_topology_without_parts_is_none():
    assert validate(ReduceTopology("mine", ()), (a, b)) == "it has no parts"


@pytest.mark.parametrize(
    "wish",
    [
        lambda: butterfly((a, b), SEED, {a: 0.0}),
        lambda: star((), SEED),
        lambda: star((a, b), SEED, server=c),
        lambda: star((a, b), SEED, {a: 1.0}, server=b),
        lambda: ring((a, b), SEED, pieces=0),
        lambda: tree((a, b), SEED, arity=0),
        lambda: limit_fan((a, b), SEED, fan=1),
    ],
)
def test_the_impossible_is_refused_with_what_to_change(wish):
    with pytest.raises(ValueError, match=r"needs|cannot"):
        wish()


def _below(part: PartReductionTree, peer: PeerId, peers: tuple[PeerId, ...]) -> set[PeerId]:
    """Authors of the rows that this peer holds when it hands its own on."""
    found = {peer}
    for _ in peers:
        found |= {p for p in peers if part.parent(p) in found}
    return found
