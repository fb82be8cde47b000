"""Links of the virtual world: which message waits for which."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Payload, Received
from atoll.crypto.digest import digest
from atoll.simulation.network import NetworkKnobs, QueuedMessage, VirtualNetwork
from atoll.wire.messages.round import PartResponse

ADA, BOB, CYD = (PeerId(name) for name in ("ada", "bob", "cyd"))
AT_ONCE = NetworkKnobs(latency_min_s=0, latency_max_s=0, jitter_s=0, uplink_bytes_s=100.0, downlink_bytes_s=100.0)


def sent(network: VirtualNetwork, sender: PeerId, to: PeerId, size: int) -> tuple[Seconds, QueuedMessage]:
    """At time 0: when its first byte is at the receiver's downlink."""
    payload = Payload(digest(f"{sender}>{to}".encode()), size, ())
    said, moments = network.arrivals(0.0, to, Received(sender, PartResponse(0, 0, "", payload.digest), payload))
    return moments[0], said


def test_a_downlink_serves_what_comes_first_not_what_was_sent_first():
    """Ada sends a long payload to Bob and then one to Cyd; meanwhile Bob's comes to Cyd, and waits for nothing."""
    network = VirtualNetwork(AT_ONCE, random.Random(1))
    sent(network, ADA, BOB, 1000)
    from_ada, hers = sent(network, ADA, CYD, 100)
    from_bob, his = sent(network, BOB, CYD, 100)
    assert (from_bob, from_ada) == (0.0, 10.0)
    assert network.through(from_bob, CYD, his) == 1.0
    assert network.through(from_ada, CYD, hers) == 11.0


def test_two_that_come_at_once_share_a_downlink():
    network = VirtualNetwork(AT_ONCE, random.Random(1))
    arrivals = [sent(network, sender, CYD, 100) for sender in (ADA, BOB)]
    assert [network.through(at, CYD, said) for at, said in arrivals] == [1.0, 2.0]


def test_what_is_acknowledged_is_no_more_than_an_uplink_carries_and_in_the_end_all():
    """Ada sends to two; Bob's downlink is a tenth of her uplink, Cyd's is as fast."""
    network = VirtualNetwork(replace(AT_ONCE, measured=True), random.Random(1))
    network.downlink_bytes_s[BOB] = 10.0
    for to in (BOB, CYD):
        at, said = sent(network, ADA, to, 100)
        network.through(at, to, said)
    before = 0
    for second in range(1, 30):
        uploading = network.upload_progress(ADA, second - 1.0, float(second))
        acked = sum(acked for acked, _ in uploading.values())
        assert 0 <= acked - before <= 200
        assert uploading[BOB][1] == (second < 10) and (second < 3 or not uploading[CYD][1])
        before = acked
    assert before == pytest.approx(200, abs=2)
