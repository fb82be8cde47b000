"""Why a peer cannot be reached: each kind of failure in its own words, and no wait without a line."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from islands import Island, clockwork, closed
from memory_transport import MemoryConnection, MemoryNetwork, MemoryTransport

from atoll.base.errors import NetworkError
from atoll.base.machine import LinkDown, LinkUp
from atoll.runtime.network.transport import TransportOptions
from atoll.runtime.reachability import JoinProgress, unanswered_text, why_paused
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.wire.libp2p.multiaddr import DialAddress

FAILURES = [
    (TimeoutError(), "E-NET-13", "timed out", "a firewall drops the packets"),
    (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "E-NET-12", "connection refused", "is not running"),
    (OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)), "E-NET-16", "Network is unreachable", "offline"),
    (OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)), "E-NET-16", "No route to host", "offline"),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "E-NET-13", "Name or service", "the name"),
    (ConnectionResetError(), "E-NET-13", "ConnectionResetError", "before a peer answered"),
]


class FirewalledNetwork(MemoryNetwork):
    """A network whose firewall answers all dials from `failure` on."""

    failure: OSError | None = None

    def transport(self, options: TransportOptions) -> MemoryTransport:
        return _FirewalledTransport(self, options)


class _FirewalledTransport(MemoryTransport):
    async def dial(
        self, endpoint: DialAddress, may_dial: Callable[[str], bool] = lambda host: True
    ) -> MemoryConnection:
        assert isinstance(self._network, FirewalledNetwork)
        if self._network.failure is not None:
            raise self._network.failure
        return await super().dial(endpoint, may_dial)


async def firewalled(name: str, network: FirewalledNetwork) -> Island:
    island = Island(name, transports={"memory": network.transport})
    (island.address,) = await island.links.listen([f"/memory/{name}"])
    return island


@clockwork
async def test_each_kind_of_failed_dial_is_named_with_its_likely_cause():
    """Timed out, refused and no route are different things to look for; no reason is empty."""
    network = FirewalledNetwork()
    ada = await firewalled("ada", network)
    for failure, code, words, cause in FAILURES:
        network.failure = failure
        with pytest.raises(NetworkError, match=f"{code} .*{words}") as failed:
            await ada.links.dial("/memory/empty")
        assert cause in failed.value.cause and failed.value.fix
    await closed(ada)


@clockwork
async def test_a_refused_redial_is_reported_also_after_the_link_was_down():
    """The host is unreachable at first, so the link is down; then it answers that no process listens."""
    network = FirewalledNetwork()
    ada, bob = await firewalled("ada", network), await firewalled("bob", network)
    ada.links.contact(bob.name, (bob.address,))
    await ada.up(bob)
    network.failure = TimeoutError()
    await bob.links.close()
    await ada.until(lambda: LinkDown(bob.name, refused=False) in ada.events)
    network.failure = None
    await ada.until(lambda: len(ada.events) == 3)
    assert ada.events == [LinkUp(bob.name), LinkDown(bob.name, refused=False), LinkDown(bob.name, refused=True)]
    await closed(ada)


def unreachable(address: str, why: str, cause: str = "", code: str = "E-NET-13") -> dict[str, str]:
    return {"fact": "Unreachable", "address": address, "why": why, "cause": cause, "code": code}


def unlinked() -> SimpleNamespace:
    """A machine that knows no run and has no link."""
    return SimpleNamespace(history=None, linked=set())


@clockwork
async def test_a_ticket_whose_addresses_all_refuse_fails_soon():
    """No process listens at the first address; the second one refuses too, or a firewall drops the packets."""
    first, second = "/ip4/192.0.2.7/tcp/7071", "/ip4/192.0.2.8/tcp/7071"
    host = SimpleNamespace(bootstrap=((first, None), (second, None)), machine=unlinked())
    for code, wait_s in (("E-NET-12", 10), ("E-NET-13", 60)):
        join, began = JoinProgress(host, list[str]().append), asyncio.get_running_loop().time()
        join.entry(unreachable(first, "refused", code="E-NET-12"))
        join.entry(unreachable(second, "the reason", code=code))
        failure = await join.failure()
        assert failure is not None and failure.what.startswith(f"no member of this run answered within {wait_s} s:")
        assert asyncio.get_running_loop().time() - began == pytest.approx(wait_s, abs=0.1)


@clockwork
async def test_a_member_that_refused_at_first_and_then_connects_gets_its_time_to_answer():
    """It had just started; the error does not repeat the old refusal."""
    address, clock = "/ip4/192.0.2.7/tcp/7071", asyncio.get_running_loop().time
    host = SimpleNamespace(bootstrap=((address, None),), machine=SimpleNamespace(history=None, linked={"ada"}))
    join, began = JoinProgress(host, list[str]().append), clock()
    join.entry(unreachable(address, "refused", code="E-NET-12"))
    failure = await join.failure()
    assert failure is not None and failure.what == "no member of this run answered within 60 s"
    assert failure.cause.endswith("does not answer") and clock() - began == pytest.approx(60, abs=0.1)


@clockwork
async def test_a_peer_that_cannot_join_says_what_it_tries_why_that_fails_and_then_gives_up():
    """Its address at once, each new reason once, a line every few seconds; the end has the newest reason."""
    host = SimpleNamespace(bootstrap=(("/ip4/192.0.2.7/tcp/7071", None),), machine=unlinked())
    told: list[str] = []
    join = JoinProgress(host, told.append)
    for why in ("no reply: timed out", "no reply: timed out", "refused"):
        join.entry(unreachable(host.bootstrap[0][0], why, "a firewall"))
    assert told == ["not joined yet: no reply: timed out (a firewall)", "not joined yet: refused (a firewall)"]
    failure = await join.failure()
    assert told[2] == "trying /ip4/192.0.2.7/tcp/7071 …"
    assert told[3:] == [f"still trying: no member has answered for {t} s" for t in range(8, 60, 8)]
    assert failure is not None and (failure.code, failure.cause) == ("E-NET-01", "a firewall")
    assert "refused" in failure.what

    host.machine.history = object()
    join.entry(unreachable("/ip4/192.0.2.8/tcp/7071", "refused"))
    assert told.pop() == "no connection yet: refused"  # of a member that came back
    assert await join.failure() is None


def test_a_member_without_a_link_since_its_start_reads_that_the_run_may_be_over():
    """All three stop, one starts again. With the others it trains; once they are gone again, it is paused."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    world, me, others = swarm.world, swarm.founders[0], swarm.founders[1:]
    world.run(20)
    for peer in swarm.founders:
        world.crash(peer)
    world.start(me)
    world.run(20 + 15)
    node = world.nodes[me]
    host = SimpleNamespace(
        me=me,
        machine=node.machine,
        clock=SimpleNamespace(now=lambda: node.clock.local(world.now)),
        progress=SimpleNamespace(name_of=str),
    )
    body = node.machine.history.head_body
    told = why_paused(host, may_recover=True, has_authority=True)
    assert told == unanswered_text(body.trained, node.machine.settings.rounds, "atoll recover")
    for peer in others:
        world.start(peer)
    world.run(1e3, stop=lambda: node.machine.history.head > body.round)
    assert why_paused(host, may_recover=True, has_authority=True) is None
    for peer in others:
        world.crash(peer)
    world.run(world.now + 15)
    told = why_paused(host, may_recover=False, has_authority=True)
    assert told is not None and told.startswith("paused: 1 of 3 voters") and "founder's folder" in told
