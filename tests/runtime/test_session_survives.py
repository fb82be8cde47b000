"""Sessions that survive their connections: control messages arrive exactly once and in order, whatever is cut."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest
from islands import Island, clockwork, closed, pair, story
from memory_transport import MemoryConnection, MemoryNetwork, MemoryTransport

from atoll.base.errors import PeerFault
from atoll.base.machine import LinkUp
from atoll.crypto.noise_pattern import HYBRID, RESUMPTION
from atoll.runtime.network.control_channel import ControlChannel
from atoll.runtime.network.message_log import ACK_MESSAGES, UNACKED_MAX, ResendQueue
from atoll.runtime.network.transport import TransportOptions
from atoll.wire.libp2p.multiaddr import DialAddress

pytestmark = pytest.mark.net

WORDS = [b"%d" % n + bytes(n % 50) for n in range(60)]


class CuttingNetwork(MemoryNetwork):
    """Connections end in the middle of a write, each after its number of bytes both ways; those after them live."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts = deque[int]()
        self.left = dict[MemoryConnection, int]()

    def transport(self, options: TransportOptions) -> MemoryTransport:
        return CuttingTransport(self, options)


class CuttingTransport(MemoryTransport):
    async def dial(
        self, endpoint: DialAddress, may_dial: Callable[[str], bool] = lambda host: True
    ) -> MemoryConnection:
        network = self._network
        assert isinstance(network, CuttingNetwork)
        ours = await super().dial(endpoint, may_dial)
        if network.cuts:
            left = [network.cuts.popleft()]
            for end in (ours, ours.remote):
                end.write = _cut_write(end, end.write, left)
        return ours


def _cut_write(end: MemoryConnection, write: Callable, left: list[int]) -> Callable:
    def cut_write(data: bytes | memoryview) -> None:
        write(bytes(data)[: left[0]])
        left[0] -= min(left[0], len(data))
        if left[0] == 0 and not end.is_closing:
            left[0] = -1
            end._loop.call_soon(end.close)
            end._loop.call_soon(end.remote.close)

    return cut_write


async def acquainted(network: MemoryNetwork) -> tuple[Island, Island]:
    """Each knows the other's address, and one connection stands."""
    ada, bob = (Island(name, transports={"memory": network.transport}) for name in ("ada", "bob"))
    for name, me in (("ada", ada), ("bob", bob)):
        (me.address,) = await me.links.listen([f"/memory/{name}"])
    ada.links.contact(bob.name, (bob.address,))
    await asyncio.gather(ada.up(bob), bob.up(ada))
    bob.links.contact(ada.name, (ada.address,))
    return ada, bob


def control_of(me: Island, other: Island) -> ControlChannel | None:
    return me.links._links[other.name].control


def suite_of(me: Island, other: Island) -> str:
    control = control_of(me, other)
    assert control is not None
    return control.session._connection._established.suite.protocol


def cut(me: Island, other: Island) -> None:
    control = control_of(me, other)
    if control is not None:
        control.connection.abort()


async def talk(ada: Island, bob: Island, *cuts: Callable[[], None]) -> None:
    """Both send all words, with the cuts in between; each must hear all, once, in order."""
    at = {len(WORDS) * (n + 1) // (len(cuts) + 1): act for n, act in enumerate(cuts)}
    for n, word in enumerate(WORDS):
        if n in at:
            at[n]()
        assert ada.links.send(bob.name, word) and bob.links.send(ada.name, word)
        if n % 5 == 0:
            await asyncio.sleep(0)
    for me in (ada, bob):
        await me.until(lambda me=me: len(me.heard) >= len(WORDS))
    await asyncio.sleep(0.5)
    for me in (ada, bob):
        assert [word for _, word, _ in me.heard] == WORDS
        assert next(iter(me.links.stats().values())).control_dropped == 0


@pytest.mark.parametrize("first", [*range(1, 120, 17), *range(120, 2600, 101)])
def test_a_connection_may_break_at_any_byte(first: int):
    """The replacement breaks after `first` bytes: in its negotiation, handshake, welcome, repeats or messages."""

    async def told() -> None:
        network = CuttingNetwork()
        ada, bob = await acquainted(network)
        network.cuts.extend([first, first])  # both redial
        await talk(ada, bob, lambda: cut(ada, bob))
        await closed(ada, bob)

    told.__name__ = "told"
    clockwork(told)()


@clockwork
async def test_a_session_survives_many_connections():
    ada, bob = await acquainted(MemoryNetwork())
    await talk(ada, bob, *(lambda n=n: cut(*((ada, bob), (bob, ada))[n % 2]) for n in range(6)))
    await closed(ada, bob)


@clockwork
async def test_another_address_takes_over_a_live_session():
    """Ada dials again while the first connection stands: no message waits for its end, and none comes twice."""
    ada, bob = await acquainted(MemoryNetwork())
    tasks = list[asyncio.Task]()
    redial = lambda: tasks.append(asyncio.ensure_future(ada.links.dial(bob.address, bob.name)))  # noqa: E731
    await talk(ada, bob, redial)
    assert await tasks[0] == bob.name
    assert suite_of(ada, bob) == RESUMPTION.protocol
    assert (ada.events, bob.events) == ([LinkUp(bob.name)], [LinkUp(ada.name)])
    await closed(ada, bob)


@clockwork
async def test_a_peer_without_the_session_begins_a_new_one():
    """Bob's process ends and another one of the same identity stands: nothing of the old session reaches it."""
    network = MemoryNetwork()
    ada, bob = await acquainted(network)
    assert ada.links.send(bob.name, b"before")
    await bob.until(lambda: bob.heard)
    await closed(bob)
    again = Island("bob", transports={"memory": network.transport})
    (again.address,) = await again.links.listen(["/memory/bob"])
    ada.links.contact(bob.name, (again.address,))
    await ada.until(lambda: len(ada.events) == 3)
    assert ada.links.send(bob.name, b"after")
    await again.until(lambda: again.heard)
    assert [word for _, word, _ in again.heard] == [b"after"]
    assert suite_of(ada, again) == HYBRID.protocol
    await closed(ada, again)


@story
async def test_a_session_survives_on_real_sockets():
    ada, bob = await pair()
    bob.links.contact(ada.name, (ada.address,))
    await talk(ada, bob, lambda: cut(ada, bob), lambda: cut(bob, ada))
    await ada.links.dial(bob.address, bob.name)
    assert suite_of(ada, bob) == RESUMPTION.protocol
    assert ada.links.send(bob.name, b"last")
    await bob.until(lambda: bob.heard[-1][1] == b"last")
    assert len(bob.heard) == len(WORDS) + 1
    await closed(ada, bob)


# ---- the log -----------------------------------------------------------------------------------------------


def test_what_is_acknowledged_is_released_and_the_rest_is_repeated():
    log = ResendQueue(b"session", 1000)
    for n in range(5):
        log.push(b"%d" % n)
    assert [log.take() for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    log.acknowledge(2)
    log.acknowledge(1)  # an older one, on another connection
    assert list(log.repeat_from(3)) == [b"3"] and list(log.waiting) == [b"4"]
    with pytest.raises(ConnectionResetError):
        log.repeat_from(2)
    with pytest.raises(PeerFault):
        log.acknowledge(5)


def test_a_log_is_bounded():
    """Waiting messages are dropped, oldest first; a remote that never acknowledges costs the session its future."""
    log = ResendQueue(b"session", UNACKED_MAX)
    for _ in range(3):
        log.push(bytes(UNACKED_MAX // 2))
    assert log.dropped == 1 and len(log.waiting) == 2
    log.take()
    log.push(b"1")
    log.take()
    log.take()
    assert not log.can_continue
    with pytest.raises(ConnectionResetError):
        log.repeat_from(0)


def test_an_acknowledgment_is_due_after_many_messages_or_bytes():
    log = ResendQueue(b"session", 1000)
    due = [number for number in range(200) if log.accept(number, 1) and log.take_due_ack()]
    assert due == [ACK_MESSAGES - 1, 2 * ACK_MESSAGES - 1, 3 * ACK_MESSAGES - 1]
    assert not log.accept(7, 1)  # again, on another connection
    assert log.accept(200, 1 << 20) and log.take_due_ack() == (201).to_bytes(8, "big")
