"""Rates are learned from transfers that had to wait for the network, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.ids import PeerId
from atoll.base.machine import BandwidthMeasured
from atoll.peer.bandwidth import SPAN_S, BandwidthEstimator

ADA, BOB, CYD = PeerId("ada"), PeerId("bob"), PeerId("cyd")
EVERY_S = 0.5  # between two samples of a real peer
PER_SPAN = round(SPAN_S / EVERY_S)


class Uploads:
    """One estimator, and the links that it samples."""

    def __init__(self, peers: Sequence[PeerId] = (ADA, BOB, CYD)) -> None:
        self.estimator, self.peers, self.now = BandwidthEstimator(), peers, 0.0
        self.acked = dict.fromkeys(peers, 1)
        self.round = 0

    def send(self, rate: float, to: Sequence[PeerId], samples: int, end: bool = True) -> float | None:
        """So many samples at this rate, evenly to these peers, after one where nothing waits; the known uplink."""
        if end:
            self.sample(0.0, ())
        for _ in range(samples + end):
            self.sample(rate, to)
        return self.estimator.uplink_bytes_s

    def sample(self, rate: float, to: Sequence[PeerId]) -> BandwidthMeasured | None:
        self.now += EVERY_S
        for peer in to:
            self.acked[peer] += round(rate * EVERY_S / len(to))
        uploading = {peer: (self.acked[peer], peer in to) for peer in self.peers}
        return self.estimator.sample(self.now, uploading, self.round)


def test_only_spans_count_in_which_bulk_was_waiting_from_end_to_end():
    """A short transfer, again and again, is no measurement, however much it carries."""
    uploads = Uploads()
    for _ in range(10):
        assert uploads.send(9e6, uploads.peers, PER_SPAN - 1) is None
    assert uploads.send(6e6, uploads.peers, PER_SPAN) == pytest.approx(6e6)


def test_what_waits_for_few_peers_lowers_no_rate_that_their_full_downlinks_would_explain():
    """A member without a part sends to owners that have full downlinks: once it took its own link for slow."""
    uploads = Uploads()
    assert uploads.send(6e6, uploads.peers, PER_SPAN) == pytest.approx(6e6)
    for uploads.round in range(1, 20):
        assert uploads.send(2.1e6, [ADA], 40) == pytest.approx(6e6)
    uploads.round = 20
    assert uploads.send(9e6, [ADA], 40) == pytest.approx(9e6)
    for uploads.round in (21, 22):
        known = uploads.send(1e6, [ADA], 40)
    assert known == pytest.approx(3e6)


def test_a_member_that_only_ever_sends_to_few_has_a_rate_as_well():
    """In a tree a row goes to one peer. Slow uplinks are as much slower than others' as they are."""
    uploads = Uploads()
    for uploads.round in range(9):
        known = uploads.send(6e5, [uploads.peers[uploads.round % 3]], PER_SPAN)
    assert known == pytest.approx(3 * 6e5)


def test_peers_that_never_got_bulk_are_not_counted():
    uploads = Uploads([*(PeerId(f"observer {k}") for k in range(9)), ADA, BOB])
    uploads.acked = {peer: int(peer in (ADA, BOB)) for peer in uploads.peers}
    assert uploads.send(6e6, [ADA, BOB], PER_SPAN) == pytest.approx(6e6)


@given(
    st.floats(1e4, 1e8),
    st.lists(st.floats(0, 1), min_size=40, max_size=40),
    st.sampled_from([(ADA,), (ADA, BOB, CYD)]),
)
def test_whatever_the_bursts_of_acknowledgments_a_rate_is_known_to_twenty_percent(rate, bursts, peers):
    """Up to 0.3 s of the link's bytes are in queues on both ways and still unacknowledged at any sample."""
    uploads, known = Uploads(peers), None
    uploads.acked = dict.fromkeys(peers, int(rate))
    before = rate
    for step, burst in enumerate(bursts, start=1):
        uploads.round = step // 20
        acked = max(before, rate + rate * (step * EVERY_S - 0.3 * burst))
        uploads.sample((acked - before) / EVERY_S, peers)
        known, before = uploads.estimator.uplink_bytes_s, acked
    assert known == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize("slower", [1 / 8, 8.0])
def test_a_link_that_changes_is_known_in_the_second_round_and_a_single_odd_round_changes_nothing(slower: float):
    uploads = Uploads()
    for uploads.round in range(8):
        odd = uploads.round == 4
        known = uploads.send(6e6 * (slower if odd else 1), uploads.peers, 3 * PER_SPAN)
        assert known == pytest.approx(6e6)
    for uploads.round in (8, 9):
        known = uploads.send(6e6 * slower, uploads.peers, 3 * PER_SPAN)
    assert known == pytest.approx(6e6 * slower)


def test_of_one_round_the_fastest_span_counts():
    """At its end only slow receivers are left."""
    for left in ([ADA], [ADA, BOB]):
        uploads = Uploads()
        uploads.send(6e6, uploads.peers, PER_SPAN)
        assert uploads.send(1e6, left, 20 * PER_SPAN) == pytest.approx(6e6)


def test_of_peers_the_mean_over_one_round_counts_and_all_are_of_the_same_round():
    """A peer that has a shared link to itself at the end of a round would seem to have all of it all the time."""
    rates = BandwidthEstimator()
    rates.sample(0.0, {ADA: (1000, True), BOB: (1000, True)}, 7)
    rates.sample(1.0, {ADA: (1100, True), BOB: (1100, True)}, 7)
    carried = rates.sample(2.0, {ADA: (1600, True), BOB: (1100, False)}, 7)
    assert carried is not None and carried.to == ((ADA, 300), (BOB, 100)) and carried.round == 7
    rates.sample(3.0, {ADA: (1700, False), BOB: (1100, True)}, 8)  # nothing was learned in this round so far
    carried = rates.sample(4.0, {ADA: (1700, False), BOB: (1300, True)}, 8)
    assert carried is not None and carried.to == ((BOB, 200),) and carried.round == 8


def test_a_connection_that_ends_takes_its_count_with_it_and_adds_nothing():
    rates = BandwidthEstimator()
    rates.sample(0.0, {ADA: (9000, True)}, 7)
    rates.sample(1.0, {ADA: (2000, True)}, 7)
    carried = rates.sample(2.0, {ADA: (3000, True)}, 7)
    assert carried == BandwidthMeasured(500, ((ADA, 500),), 7)
    assert rates.sample(3.0, {BOB: (1, True)}, 7) is None


def test_a_transport_that_cannot_tell_what_was_acknowledged_measures_nothing():
    rates = BandwidthEstimator()
    assert all(rates.sample(float(at), {ADA: (0, True)}, 7) is None for at in range(9))
