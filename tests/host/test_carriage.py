"""Rates are learned from transfers that had to wait for the network, and from nothing else."""

from __future__ import annotations

from atoll.base.ids import PeerId
from atoll.base.machine import Carried
from atoll.host.carriage import SPANS, Carriage

ADA, BOB = PeerId("ada"), PeerId("bob")


def test_only_spans_count_in_which_bulk_was_waiting_from_end_to_end():
    rates = Carriage()
    assert rates.look(0.0, {ADA: (0, False)}) is None
    assert rates.look(1.0, {ADA: (500, False)}) is None  # a short transfer inside a span: nothing is known
    assert rates.look(2.0, {ADA: (600, True)}) is None
    assert rates.look(3.0, {ADA: (1600, True)}) == Carried(1000, ((ADA, 1000),))
    assert rates.look(4.0, {ADA: (1700, False)}) is None  # it ended in the middle of this one


def test_my_own_link_carries_what_goes_to_all_but_each_peer_is_known_by_itself():
    rates = Carriage()
    rates.look(0.0, {ADA: (0, True), BOB: (0, False)})
    carried = rates.look(2.0, {ADA: (600, True), BOB: (200, False)})
    assert carried == Carried(400, ((ADA, 300),))


def test_the_fastest_of_the_recent_spans_counts_and_in_time_old_ones_are_forgotten():
    """A span in which only a slow receiver was left says nothing of my own link."""
    rates, acked = Carriage(), 0
    for second in range(2 * SPANS):
        carried = rates.look(float(second), {ADA: (acked, True)})
        acked += 5000 if second < 10 else 100
        if 1 < second < SPANS:
            assert carried == Carried(5000, ((ADA, 5000),))
    assert carried == Carried(100, ((ADA, 100),))


def test_a_connection_that_ends_takes_its_count_with_it_and_is_no_measurement():
    rates = Carriage()
    rates.look(0.0, {ADA: (9000, True)})
    assert rates.look(1.0, {ADA: (2000, True)}) is None
    assert rates.look(2.0, {ADA: (3000, True)}) == Carried(1000, ((ADA, 1000),))
    assert rates.look(3.0, {BOB: (0, True)}) is None
