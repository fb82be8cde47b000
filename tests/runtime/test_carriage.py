"""Rates are learned from transfers that had to wait for the network, and from nothing else."""

from __future__ import annotations

from atoll.base.ids import PeerId
from atoll.base.machine import BandwidthMeasured
from atoll.runtime.network.bandwidth import SPANS, BandwidthEstimator

ADA, BOB = PeerId("ada"), PeerId("bob")


def test_only_spans_count_in_which_bulk_was_waiting_from_end_to_end():
    rates = BandwidthEstimator()
    assert rates.look(0.0, {ADA: (0, False)}, 7) is None
    assert rates.look(1.0, {ADA: (500, False)}, 7) is None  # a short transfer inside a span: nothing is known
    assert rates.look(2.0, {ADA: (600, True)}, 7) is None
    assert rates.look(3.0, {ADA: (1600, True)}, 7) == BandwidthMeasured(1000, ((ADA, 1000),), 7)
    assert rates.look(4.0, {ADA: (1700, False)}, 7) is None  # it ended in the middle of this one


def test_my_own_link_carries_what_goes_to_all_but_each_peer_is_known_by_itself():
    rates = BandwidthEstimator()
    rates.look(0.0, {ADA: (0, True), BOB: (0, False)}, 7)
    carried = rates.look(2.0, {ADA: (600, True), BOB: (200, False)}, 7)
    assert carried == BandwidthMeasured(400, ((ADA, 300),), 7)


def test_of_my_own_link_the_fastest_of_the_recent_spans_counts_and_in_time_old_ones_are_forgotten():
    """A span in which only a slow receiver was left says nothing of my own link."""
    rates, acked = BandwidthEstimator(), 0
    for second in range(2 * SPANS):
        carried = rates.look(float(second), {ADA: (acked, True)}, 7)
        acked += 5000 if second < 10 else 100
        if 1 < second < SPANS:
            assert carried is not None and carried.bytes_s == 5000
    assert carried is not None and carried.bytes_s == 100


def test_of_peers_the_mean_over_one_round_counts_and_all_are_of_the_same_round():
    """Whoever has a shared link to itself at the end of a round would seem to have all of it all the time."""
    rates = BandwidthEstimator()
    rates.look(0.0, {ADA: (0, True), BOB: (0, True)}, 7)
    rates.look(1.0, {ADA: (100, True), BOB: (100, True)}, 7)
    carried = rates.look(2.0, {ADA: (600, True), BOB: (100, False)}, 7)
    assert carried is not None and carried.to == ((ADA, 300), (BOB, 100)) and carried.round == 7
    rates.look(3.0, {ADA: (700, False), BOB: (100, True)}, 8)  # nothing was learned in this round so far
    carried = rates.look(4.0, {ADA: (700, False), BOB: (300, True)}, 8)
    assert carried is not None and carried.to == ((BOB, 200),) and carried.round == 8


def test_a_connection_that_ends_takes_its_count_with_it_and_is_no_measurement():
    rates = BandwidthEstimator()
    rates.look(0.0, {ADA: (9000, True)}, 7)
    assert rates.look(1.0, {ADA: (2000, True)}, 7) is None
    assert rates.look(2.0, {ADA: (3000, True)}, 7) == BandwidthMeasured(1000, ((ADA, 1000),), 7)
    assert rates.look(3.0, {BOB: (0, True)}, 7) is None
