"""The cap on what a peer uploads: real sockets, and a clock that moves only when nothing is left to do."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from islands import ClockworkLoop, Island, clockwork, closed, pair

from atoll.base.limits import MIB
from atoll.base.machine import BandwidthMeasured, Lane
from atoll.peer.settings import RunSettings
from atoll.runtime.bootstrap import ListenOptions, TicketTerms, found_run, training_peer_factory
from atoll.runtime.network.link_settings import LinkSettings
from atoll.runtime.network.upload_limiter import BURST_S, DEBT_MAX_S, QUANTUM_MIN_BYTES, QUANTUM_S, UploadLimiter
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.recipe.recipes import diloco

pytestmark = pytest.mark.net


async def sent_bytes_each(period_s: float, periods: int, island: Island) -> list[int]:
    """Bytes on the sockets of this island in so many periods from now on."""
    out: list[int] = []
    for _ in range(periods):
        before = island.links.traffic()[0]
        await asyncio.sleep(period_s)
        out.append(island.links.traffic()[0] - before)
    return out


def test_a_peer_takes_its_link_to_carry_what_was_seen_and_no_more_than_its_cap(tmp_path: Path):
    """Its rows are packed for that."""
    beginning = founding_blobs(start_of_built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())
    where = ListenOptions(("/ip4/127.0.0.1/tcp/0",), upload_bytes_s=3_000_000)

    async def story() -> None:
        host, _ = await found_run(
            tmp_path, beginning, "ada", where, TicketTerms(), training_peer_factory(1, lambda _: None)
        )
        rate = host.island.mine.uplink_bytes_s
        assert rate() == 3_000_000
        for seen, carried in ((2e6, 2e6), (9e6, 3e6)):
            host.machine.handle(BandwidthMeasured(seen, (), 0), 0.0)
            assert rate() == carried
        await host.stop(farewell=False)

    asyncio.run(story())


@clockwork
async def test_no_two_seconds_differ_from_the_cap_by_more_than_five_percent():
    """3 MB/s, ten seconds of 40 MB in frames of all sizes: every 2 s window carries 6 MB, also the first."""
    ada, bob = await pair(settings=LinkSettings(upload_bytes_s=3_000_000))
    for size in (1, 70_000, 16 * MIB, 900, 3 * MIB, 16 * MIB, 5 * MIB):
        ada.links.send(bob.name, b"part", Lane.BULK, os.urandom(size))
    halves = await sent_bytes_each(0.5, 20, ada)
    for four in zip(halves, halves[1:], halves[2:], halves[3:], strict=False):
        assert sum(four) == pytest.approx(6_000_000, rel=0.05)
    await closed(ada, bob)


@clockwork
async def test_links_of_one_peer_share_its_cap_fairly():
    """Ada sends to bob and to cyd: together 2 MB/s, each about half, though bob has four connections."""
    ada, bob = await pair(settings=LinkSettings(upload_bytes_s=2_000_000))
    cyd = await Island("cyd").open()
    ada.links.contact(cyd.name, (cyd.address,))
    await ada.up(cyd)
    for other in (bob, cyd):
        ada.links.send(other.name, b"part", Lane.BULK, bytes(40 * MIB))
    assert sum(await sent_bytes_each(5, 1, ada)) == pytest.approx(10_000_000, rel=0.05)
    stats = ada.links.stats()
    assert stats[bob.name].bulk_sent_bytes == pytest.approx(stats[cyd.name].bulk_sent_bytes, rel=0.05)
    await closed(ada, bob, cyd)


@clockwork
async def test_a_control_message_counts_but_does_not_wait():
    """Behind 30 MB that take 30 s ada says 2 MB of small words: they are there at once, the bulk pays for them."""
    ada, bob = await pair(settings=LinkSettings(upload_bytes_s=1_000_000))
    ada.links.send(bob.name, b"part", Lane.BULK, bytes(30 * MIB))
    await asyncio.sleep(3)
    now, before = asyncio.get_running_loop().time(), ada.links.traffic()[0]
    for _ in range(32):
        ada.links.send(bob.name, bytes(MIB // 16))
    await bob.until(lambda: len(bob.heard) == 32)
    assert asyncio.get_running_loop().time() - now < QUANTUM_S
    bulk_before = ada.links.stats()[bob.name].bulk_sent_bytes
    await asyncio.sleep(32 * MIB / 16 / 1_000_000 - 0.2)
    assert ada.links.stats()[bob.name].bulk_sent_bytes - bulk_before < 1_000_000 * BURST_S
    await asyncio.sleep(4)
    passed_s = asyncio.get_running_loop().time() - now
    assert ada.links.traffic()[0] - before == pytest.approx(passed_s * 1_000_000, rel=0.05)
    await closed(ada, bob)


@clockwork
async def test_without_a_cap_nobody_waits_for_a_clock():
    """40 MB leave and arrive while no time passes."""
    ada, bob = await pair()
    ada.links.send(bob.name, b"warm", Lane.BULK)
    await bob.until(lambda: bob.heard)
    now = asyncio.get_running_loop().time()
    ada.links.send(bob.name, b"part", Lane.BULK, bytes(40 * MIB))
    await bob.until(lambda: len(bob.heard) == 2)
    assert asyncio.get_running_loop().time() == now
    await closed(ada, bob)


@clockwork
async def test_a_record_that_takes_longer_than_the_stall_limit_still_arrives():
    """At 10 kB/s half a megabyte takes 52 s; frames are given up after 30 s without a byte, not a record."""
    ada, bob = await pair(settings=LinkSettings(upload_bytes_s=10_000))
    payload = os.urandom(600_000)
    ada.links.send(bob.name, b"part", Lane.BULK, payload)
    await asyncio.sleep(62)
    assert bob.heard == [(ada.name, b"part", len(payload))] and bob.payloads == [payload]
    await closed(ada, bob)


@clockwork
async def test_a_capped_connection_that_breaks_frees_its_place_in_the_queue():
    """Bob's connection is cut while it waits for its turn: cyd then has all of the cap."""
    ada, bob = await pair(settings=LinkSettings(upload_bytes_s=1_000_000))
    cyd = await Island("cyd").open()
    ada.links.contact(cyd.name, (cyd.address,))
    await ada.up(cyd)
    for other in (bob, cyd):
        ada.links.send(other.name, b"part", Lane.BULK, bytes(20 * MIB))
    await asyncio.sleep(1)
    await bob.links.close()
    before = ada.links.stats()[cyd.name].bulk_sent_bytes
    await asyncio.sleep(4)
    assert ada.links.stats()[cyd.name].bulk_sent_bytes - before == pytest.approx(4_000_000, rel=0.05)
    await closed(ada, cyd)


# ---- the bucket alone --------------------------------------------------------------------------------------


@dataclass
class Sender:
    """Wants to send for ever, in pieces of one size."""

    cap: UploadLimiter
    piece_bytes: int
    sent_bytes: int = 0

    def pump(self) -> None:
        while size := self.cap.acquire(self.piece_bytes, self.pump):
            self.cap.count(size)
            self.sent_bytes += size


@given(
    bytes_s=st.integers(10_000, 5 * 10**7),
    pieces=st.lists(st.integers(20_000, MIB), min_size=1, max_size=5),
    spoken=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 0.2)), max_size=5),
    busy=st.sets(st.integers(0, 8)),
)
def test_the_promise_of_the_bucket_holds_for_any_rate_and_any_senders(
    bytes_s: int, pieces: list[int], spoken: list[tuple[float, float]], busy: set[int]
):
    """Greedy senders, control messages of up to a fifth of a second's bytes, and a loop that now and then computes
    for 70 ms: never above, hardly below."""

    async def run() -> None:
        cap = UploadLimiter(bytes_s)
        senders = [Sender(cap, piece) for piece in pieces]
        for sender in senders:
            sender.pump()
        for at, share_s in spoken:
            loop.call_at(at, cap.count, int(share_s * bytes_s))
        for turn in busy:
            loop.call_at(0.4 * turn, loop.compute, 0.07)
        await asyncio.sleep(4)
        total = sum(sender.sent_bytes for sender in senders) + sum(int(s * bytes_s) for _, s in spoken)
        burst_s = max(BURST_S, 2 * QUANTUM_MIN_BYTES / bytes_s)
        longest_s = max(QUANTUM_S, QUANTUM_MIN_BYTES / bytes_s)
        assert total <= bytes_s * (4 + burst_s) + 1
        assert total >= bytes_s * (4 - longest_s) - len(pieces) - 1
        cap.close()

    loop = ClockworkLoop(kernel_s=0)  # no sockets here
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())


@clockwork
async def test_a_flood_of_control_messages_holds_bulk_up_for_a_bounded_time():
    """An hour's worth of bytes was spoken; bulk goes on after five seconds, and a closed cap calls nobody."""
    cap = UploadLimiter(1_000_000)
    sender = Sender(cap, 10_000)
    cap.count(3600 * 1_000_000)
    sender.pump()
    await asyncio.sleep(DEBT_MAX_S - 0.1)
    assert sender.sent_bytes == 0
    await asyncio.sleep(0.2)
    assert sender.sent_bytes > 0
    cap.close()
    sent_bytes = sender.sent_bytes
    await asyncio.sleep(1)
    assert sender.sent_bytes == sent_bytes
