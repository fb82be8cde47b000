"""Real sockets on 127.0.0.1: what links promise to the driver of a peer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from islands import PATIENCE_S, Island, clockwork, closed, pair, story, stranger

from atoll.base.errors import NetworkError, RefusedError, UsageError
from atoll.base.ids import PeerId
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, MIB
from atoll.base.machine import Lane, LinkDown, LinkUp
from atoll.runtime.network import connection_manager as links_module
from atoll.runtime.network.addresses import ambiguity_of
from atoll.runtime.network.dialer import DialResult
from atoll.runtime.network.link_settings import LinkSettings
from atoll.runtime.network.tcp import UNPACED
from atoll.runtime.network.unlinked import HALF_OPEN_PER_SOURCE_MAX

pytestmark = pytest.mark.net


# ---- conversations -----------------------------------------------------------------------------------------


@story
async def test_both_lanes_carry_messages_in_both_directions():
    """Control, bulk with payload, bulk without, an empty payload; the side that was dialled sends bulk first."""
    ada, bob = await pair()
    payload = os.urandom(3 * MIB + 17)
    assert ada.links.send(bob.name, b"hello")
    await bob.until(lambda: bob.heard == [(ada.name, b"hello", None)])
    assert bob.links.send(ada.name, b"part", Lane.BULK, payload)
    assert bob.links.send(ada.name, b"word on the bulk lane", Lane.BULK)
    assert bob.links.send(ada.name, b"empty", Lane.BULK, b"")
    await ada.until(lambda: len(ada.heard) == 3)
    assert ada.heard == [
        (bob.name, b"part", len(payload)),
        (bob.name, b"word on the bulk lane", None),
        (bob.name, b"empty", 0),
    ]
    assert ada.payloads[0] == payload
    assert ada.links.send(bob.name, b"x" * CONTROL_FRAME_MAX, Lane.BULK, payload)
    await bob.until(lambda: len(bob.heard) == 2)
    stats = ada.links.stats()[bob.name]
    assert stats.up and stats.bulk_connections == 1
    assert stats.bulk_received_bytes > len(payload) and stats.bulk_sent_bytes > len(payload)
    assert 0 < stats.control_sent_bytes < 20_000  # the handshake, mostly
    if sys.platform == "linux":
        assert stats.rtt_s and stats.congestion == UNPACED  # both are on this computer
    await closed(ada, bob)


@story
async def test_what_goes_to_a_peer_on_this_computer_is_no_link_to_be_measured_unless_a_cap_sets_its_pace():
    """Measured, it would be as fast as the load of the processors allows, and parts would be cut by that."""
    ada, bob = await pair()
    eve, bea = await pair(settings=LinkSettings(upload_bytes_s=64 * MIB))
    for sender, receiver in ((ada, bob), (eve, bea)):
        sender.links.send(receiver.name, b"part", Lane.BULK, bytes(MIB))
        await receiver.until(lambda to=receiver: to.heard)
    assert ada.links.upload_progress() == {}
    assert eve.links.upload_progress()[bea.name][0] > 0
    await closed(ada, bob, eve, bea)


@clockwork
async def test_a_part_that_was_handed_to_its_connection_still_waits_for_the_network():
    """A connection takes half a megabyte at once, however slow it is: small parts would tell nothing of a link."""
    ada, bob = await pair(settings=LinkSettings(upload_bytes_s=256 * 1024))
    ada.links.send(bob.name, b"part", Lane.BULK, b"the first one opens a connection")
    await bob.until(lambda: bob.heard)
    ada.links.send(bob.name, b"part", Lane.BULK, bytes(256 * 1024))
    ada.links.send(bob.name, b"a word that does not wait")
    await bob.until(lambda: len(bob.heard) == 2)
    assert ada.links.upload_progress()[bob.name][1]
    await bob.until(lambda: len(bob.heard) == 3)
    assert not ada.links.upload_progress()[bob.name][1]
    await closed(ada, bob)


@clockwork
async def test_a_burst_larger_than_every_window_arrives_in_order():
    """14 MiB of control messages at once, then goodbye: yamux windows and socket buffers fill several times."""
    ada, bob = await pair()
    burst = [bytes((n,)) * MIB for n in range(14)]
    for message in burst:
        assert ada.links.send(bob.name, message)
    await ada.links.close()
    await bob.until(lambda: len(bob.heard) == 14)
    assert [message for _, message, _ in bob.heard] == burst
    await closed(bob)


@story
async def test_a_frame_striped_over_several_connections_arrives_whole():
    """Four connections, forced: slabs of one payload take different ways and stand in the right places."""
    ada, bob = await pair(settings=LinkSettings(bulk_connections=4))
    payloads = [os.urandom(16 * MIB + n) for n in range(4)]
    for n, payload in enumerate(payloads):
        ada.links.send(bob.name, b"%d" % n, Lane.BULK, payload)
    await bob.until(lambda: len(bob.heard) == 4)
    assert {bytes(p) for p in bob.payloads} == set(payloads)
    assert ada.links.stats()[bob.name].bulk_connections == 4
    await closed(ada, bob)


@story
async def test_bulk_never_delays_control():
    """64 MiB are queued before a heartbeat; the heartbeat is there while most of them are still waiting."""
    ada, bob = await pair()
    for _ in range(4):
        ada.links.send(bob.name, b"bulk", Lane.BULK, bytes(16 * MIB))
    await bob.until(lambda: bob.heard)
    ada.links.send(bob.name, b"heartbeat")
    await bob.until(lambda: len(bob.heard) == 5)
    order = [message for _, message, _ in bob.heard]
    assert order.index(b"heartbeat") <= 2
    await closed(ada, bob)


@story
async def test_what_cannot_be_sent_is_refused_and_counted_but_never_raised():
    ada, bob = await pair()
    assert not ada.links.send(PeerId("nobody"), b"hello")
    assert not ada.links.send(bob.name, bytes(CONTROL_FRAME_MAX + 1))
    assert not ada.links.send(bob.name, b"", Lane.BULK, bytes(BULK_FRAME_MAX + 1))
    assert ada.links.stats()[bob.name].refused_sends == 2
    await closed(ada, bob)


@pytest.mark.parametrize("host", ["ip4/127.0.0.1", "ip4/0.0.0.0", "ip6/::ffff:127.0.0.1", "dns/localhost"])
@pytest.mark.parametrize("listens", [[], ["/ip4/0.0.0.0/tcp/0"]], ids=["a client", "on every interface"])
def test_a_member_sends_no_other_to_services_of_its_own_computer(host: str, listens: list[str]):
    """Eve tells an address that is another computer at every member. A service there has no visit, and Eve none."""

    @story
    async def told() -> None:
        dialed, real = list[str](), links_module.dial_any
        ada, eve = Island("ada"), Island("eve")
        await ada.links.listen(listens)

        async def noted(*how: object) -> DialResult:
            outcome = await real(*how)  # pyright: ignore[reportArgumentType]
            dialed.append(outcome.name)
            ada._news.set()
            return outcome

        with socket.create_server(("127.0.0.1", 0)) as service, patch.object(links_module, "dial_any", noted):
            service.setblocking(False)
            ada.links.contact(eve.name, (f"/{host}/tcp/{service.getsockname()[1]}",))
            await ada.until(lambda: dialed)
            with pytest.raises(BlockingIOError):
                service.accept()
        assert set(dialed) == {"FAILED"}
        await closed(ada, eve)

    told()


@story
async def test_who_dialed_a_ticket_on_this_computer_reaches_other_members_there():
    """A client has no listener. Its user gave it Bob's address, so Bob's and Cyd's computer is its own."""
    ada, bob, cyd = Island("ada"), await Island("bob").open(), await Island("cyd").open()
    await ada.links.dial(bob.address)
    ada.links.contact(cyd.name, (cyd.address,))
    await ada.up(bob, cyd)
    await closed(ada, bob, cyd)


@story
async def test_who_listens_on_every_interface_reaches_members_that_came_from_this_computer():
    """Bob's connection shows that members are here: after it, Ada dials those that only listen here.

    Eve's connection, before Bob's, shows nothing: Ada never got her address from a vertex.
    """
    ada, bob, cyd = Island("ada"), await Island("bob").open(), await Island("cyd").open()
    (ada.address,) = await ada.links.listen(["/ip4/0.0.0.0/tcp/0"])
    here, eve = ada.address.replace("0.0.0.0", "127.0.0.1"), Island("eve")
    await eve.links.dial(here)
    await ada.up(eve)
    ada.links.contact(cyd.name, (cyd.address,))
    assert not ada.links._may_dial("127.0.0.1")
    bob.links.contact(ada.name, (here,))
    ada.links.contact(bob.name, (bob.address,))
    await ada.up(bob, cyd, eve)
    await closed(ada, bob, cyd, eve)


@pytest.mark.parametrize(
    ("host", "means"),
    [
        ("127.9.9.9", "loopback"),
        ("::1", "loopback"),
        ("::", "loopback"),
        ("::ffff:169.254.169.254", "link"),
        ("169.254.1.1", "link"),
        ("fe80::7%eth0", "link"),
        ("10.0.0.5", ""),
        ("192.0.2.7", ""),
        ("peer.example.org", ""),
        ("", "place"),
    ],
)
def test_which_numbers_mean_another_place_at_every_computer(host: str, means: str):
    assert ambiguity_of(host) == means


@story
async def test_a_mesh_that_starts_at_once_has_one_link_per_pair():
    """Eight peers, each contacts all others at the same time; every ordered pair exchanges a word and a payload."""
    islands = [await Island(f"island {n}").open() for n in range(8)]
    for me in islands:
        for other in islands:
            me.links.contact(other.name, (other.address,))
    for me in islands:
        await me.up(*(other for other in islands if other is not me))
    for me in islands:
        for other in islands:
            if other is not me:
                assert me.links.send(other.name, b"word")
                assert me.links.send(other.name, b"part", Lane.BULK, bytes(100_000))
    for me in islands:
        await me.until(lambda me=me: len(me.heard) == 14)
        assert len(me.events) == 7
        assert len(set(me.heard)) == 14
    await closed(*islands)


# ---- who may connect ---------------------------------------------------------------------------------------


@story
async def test_a_simultaneous_dial_leaves_one_connection_and_loses_no_message():
    """Both dial at once, 30 times, and both talk as soon as they can; each message arrives, each LinkUp once."""
    everything = {b"%d" % n for n in range(20)}
    for _ in range(30):
        ada, bob = await Island("ada").open(), await Island("bob").open()
        ada.links.contact(bob.name, (bob.address,))
        bob.links.contact(ada.name, (ada.address,))
        for me, other in ((ada, bob), (bob, ada)):
            await me.up(other)
            for message in everything:
                assert me.links.send(other.name, message)
        for me in (ada, bob):
            await me.until(lambda me=me: {message for _, message, _ in me.heard} == everything)
        assert (ada.events, bob.events) == ([LinkUp(bob.name)], [LinkUp(ada.name)])
        assert len(ada.heard) == len(bob.heard) == 20
        await closed(ada, bob)


@story
async def test_another_peer_at_the_address_is_refused():
    ada, bob, eve = await Island("ada").open(), Island("bob"), await Island("eve").open()
    with pytest.raises(RefusedError, match=f"{eve.name} answered where {bob.name} was expected"):
        await ada.links.dial(eve.address, bob.name)
    with pytest.raises(RefusedError, match=f"{eve.name} answered where {bob.name} was expected"):
        await ada.links.dial(f"{eve.address}/p2p/{bob.name}")
    assert not ada.events
    await closed(ada, bob, eve)


@story
async def test_a_dial_says_why_it_failed():
    """Nobody there, a bad address, oneself, somebody who does not admit us."""
    ada = await Island("ada").open()
    bob = await Island("bob", allow=lambda peer: peer != ada.name).open()
    other_network = await Island("bob", network=b"another").open()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # ours, so that nobody else may listen there
        with pytest.raises(NetworkError, match="E-NET-12 no peer listens at"):
            await ada.links.dial(f"/ip4/127.0.0.1/tcp/{port}")
    with pytest.raises(UsageError, match=r"write /ip4/.*/tcp/7070"):
        await ada.links.dial("127.0.0.1:7070")
    with pytest.raises(RefusedError, match="the remote is the local peer itself"):
        await ada.links.dial(ada.address)
    with pytest.raises(RefusedError, match="does not admit you"):
        await ada.links.dial(bob.address)
    with pytest.raises(RefusedError, match="another network"):
        await ada.links.dial(other_network.address)
    assert await bob.links.dial(ada.address) == ada.name
    assert ada.events == [LinkUp(bob.name)]
    await closed(ada, bob, other_network)


# ---- trouble -----------------------------------------------------------------------------------------------

VICTIM = """
import asyncio, sys
from atoll.runtime.network.connection_manager import ConnectionManager
from atoll.runtime.network.libp2p import Libp2pSecurity
from atoll.runtime.network.link_settings import LinkCallbacks
from atoll.crypto.identity import Identity
async def main():
    identity = Identity.generate()
    print(identity.peer, flush=True)
    callbacks = LinkCallbacks(lambda e: None, lambda *m: None)
    links = ConnectionManager(identity.peer, Libp2pSecurity(identity, b"a test"), callbacks)
    print((await links.listen(["/ip4/127.0.0.1/tcp/0"]))[0], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def victim() -> Iterator[subprocess.Popen[str]]:
    """Another process with links, which says its name and its address."""
    with subprocess.Popen([sys.executable, "-c", VICTIM], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def known_as(process: subprocess.Popen[str], island: Island) -> PeerId:
    """Its name, once the island has a link with it."""
    assert process.stdout
    name = PeerId((await asyncio.to_thread(process.stdout.readline)).strip())
    island.links.contact(name, ((await asyncio.to_thread(process.stdout.readline)).strip(),))
    await island.until(lambda: LinkUp(name) in island.events)
    return name


@story
async def test_a_killed_process_is_reported_as_gone_at_once():
    """SIGKILL: the kernel resets the connection, the redial is refused; that is the answer, no clock's."""
    ada = await Island("ada").open()
    with victim() as process, patch.object(links_module, "LINK_DOWN_DELAY_S", 2 * PATIENCE_S):
        name = await known_as(process, ada)
        ada.links.send(name, b"part", Lane.BULK, bytes(MIB))
        process.send_signal(signal.SIGKILL)
        await ada.until(lambda: ada.events[-1] == LinkDown(name, refused=True))
    # a busy kernel takes its time to close the port, and until then redials are reset
    assert ada.events[:1] + ada.events[-1:] == [LinkUp(name), LinkDown(name, refused=True)]
    assert ada.events[1:-1] in ([], [LinkDown(name, refused=False)])
    await closed(ada)


@story
async def test_a_peer_that_comes_back_is_linked_again():
    ada, bob = await pair()
    port = bob.address.rsplit("/", 1)[1]
    await bob.links.close()
    await ada.until(lambda: LinkDown(bob.name, refused=True) in ada.events)
    again = Island("bob")
    await again.links.listen([f"/ip4/127.0.0.1/tcp/{port}"])
    await ada.until(lambda: len(ada.events) == 3)
    assert ada.events[2] == LinkUp(bob.name)
    await closed(ada, again)


@story
async def test_who_only_dialled_us_cannot_be_redialled():
    ada, bob = await pair()  # bob knows no address of ada
    await ada.links.close()
    await bob.until(lambda: len(bob.events) == 2)
    assert bob.events == [LinkUp(ada.name), LinkDown(ada.name, refused=False)]
    assert not bob.links.send(ada.name, b"hello")
    await closed(bob)


@story
async def test_what_a_link_carried_stays_counted_once_it_is_gone():
    """Two dial bob and one of them leaves: bob's traffic is both's as before, the other's counted once."""
    (ada, bob), eve = await pair(), await Island("eve").open()
    await eve.links.dial(bob.address)
    await bob.up(eve)
    ada.links.send(bob.name, bytes(CONTROL_FRAME_MAX))
    await bob.until(lambda: bob.heard)
    both = bob.links.traffic()
    await ada.links.close()
    await bob.until(lambda: ada.name not in bob.links.stats() and LinkDown(ada.name, refused=False) in bob.events)
    after = bob.links.traffic()
    for before, now in zip(both, after, strict=True):
        assert before <= now < before + 1000  # last words
    await closed(bob, eve)


@story
async def test_a_suspected_link_is_made_anew():
    """The heartbeat is overdue, the connection is given up; the peer lives, so a new one stands at once."""
    ada, bob = await pair()
    ada.links.suspect(bob.name)
    await ada.until(lambda: len(ada.events) == 3)
    assert ada.events == [LinkUp(bob.name), LinkDown(bob.name, refused=False), LinkUp(bob.name)]
    await closed(ada, bob)


@story
async def test_a_forgotten_peer_is_let_go_and_what_its_link_carried_stays_counted():
    ada, bob = await pair()
    carried = ada.links.traffic()
    ada.links.forget(bob.name)
    assert ada.events[1:] == [LinkDown(bob.name, refused=False)]
    assert ada.links.traffic() >= carried > (0, 0)
    await bob.until(lambda: len(bob.events) == 2)
    assert ada.links.stats() == {} and ada.links.traffic() >= carried
    await closed(ada, bob)


@story
async def test_a_frozen_process_is_given_up_in_time():
    """SIGSTOP: the kernel accepts, nobody answers. The driver suspects it: a second later the link is down."""
    ada = await Island("ada").open()
    with victim() as process:
        name = await known_as(process, ada)
        process.send_signal(signal.SIGSTOP)
        ada.links.suspect(name)
        await ada.until(lambda: len(ada.events) == 2)
        assert ada.events[1] == LinkDown(name, refused=False)
        assert not ada.links.send(name, b"are you there?")
        process.send_signal(signal.SIGCONT)
        await ada.until(lambda: len(ada.events) == 3)
        assert ada.events[2] == LinkUp(name)
        await closed(ada)


async def hung_up_on(ada: Island, junk: bytes) -> None:
    """A stranger says this, and then listens until it is hung up on."""
    reader, writer = await stranger(ada)
    writer.write(junk)
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
    writer.close()


@story
async def test_strangers_cost_only_their_own_connection():
    """Garbage, an endless hello, an oversized frame, a word out of turn: each is hung up on, ada stays up."""
    ada, bob = await pair(plain=True)
    hello = b"atoll/plain/1" + bytes((Lane.CONTROL, 3)) + b"eve"
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(100_000),
        hello + (2**31).to_bytes(4, "big") + b"x" * 100,
        hello + (1).to_bytes(4, "big") + b"\xff",
        hello + (0).to_bytes(4, "big"),
        hello + (1).to_bytes(4, "big") + b"\x01",
        b"atoll/plain/1" + bytes((Lane.BULK, 3)) + b"eve",
        b"atoll/plain/1" + bytes((Lane.BULK, 3)) + b"bob" + b"\x01\0\0\0" + b"\xff" * 20,
        b"atoll/plain/1" + bytes((7, 3)) + b"eve",
    ):
        await hung_up_on(ada, junk)
    assert bob.links.send(ada.name, b"still here")
    await ada.until(lambda: ada.heard == [("bob", b"still here", None)])
    assert LinkDown(bob.name, refused=False) not in ada.events
    await closed(ada, bob)


@clockwork
async def test_garbage_instead_of_a_handshake_is_hung_up_on():
    """At once where it cannot become a handshake any more, at the deadline where it still could."""
    ada, bob = await pair()
    for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(100_000), b"\x13/multistream/1.0.0\n" + os.urandom(5000)):
        await hung_up_on(ada, junk)
    assert bob.links.send(ada.name, b"still here")
    await ada.until(lambda: ada.heard == [(bob.name, b"still here", None)])
    await closed(ada, bob)


@clockwork
async def test_silent_strangers_are_few_and_hung_up_on():
    """More half-open connections than one source may have: the surplus is closed at once, the rest in time."""
    ada = await Island("ada").open()
    strangers = [await stranger(ada) for _ in range(HALF_OPEN_PER_SOURCE_MAX + 8)]
    async with asyncio.timeout(PATIENCE_S):
        for reader, writer in strangers:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    bob = Island("bob")
    assert await bob.links.dial(ada.address) == ada.name
    await closed(ada, bob)


@story
async def test_an_overflowing_queue_drops_the_oldest_and_counts():
    """A remote that reads nothing: both queues stay below their bounds, what was dropped is counted."""
    settings = LinkSettings(control_queue_bytes=MIB, bulk_queue_bytes=80 * MIB)
    ada = await Island("ada", plain=True, settings=settings).open()
    _, writer = await stranger(ada)
    writer.write(b"atoll/plain/1" + bytes((Lane.CONTROL, 3)) + b"eve")
    await ada.until(lambda: ada.events)
    for _ in range(60):
        assert ada.links.send(PeerId("eve"), bytes(MIB // 4))
        assert ada.links.send(PeerId("eve"), b"part", Lane.BULK, bytes(10 * MIB))
        await asyncio.sleep(0)
    stats = ada.links.stats()[PeerId("eve")]
    assert stats.bulk_queued_bytes <= 80 * MIB and stats.bulk_dropped == 60 - 7
    assert stats.control_dropped > 10
    writer.close()
    await ada.until(lambda: len(ada.events) == 2)
    await closed(ada)


@clockwork
async def test_close_leaves_nothing_behind():
    """In the middle of dialling, sending and a handshake: no task, no traceback, no event after the fact."""
    ada, bob = await pair()
    ada.links.contact(PeerId("nobody"), ("/ip4/127.0.0.1/tcp/1",))
    _, writer = await stranger(ada)
    for _ in range(3):
        ada.links.send(bob.name, b"part", Lane.BULK, bytes(BULK_FRAME_MAX))
    ada.links.send(bob.name, b"last words")
    await ada.links.close()
    await bob.until(lambda: (ada.name, b"last words", None) in bob.heard)
    assert ada.events == [LinkUp(bob.name)]
    await bob.links.close()
    writer.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
