"""From addresses to a connection: which can be dialled, who answers first, and what to tell people if nobody does.

Never holds state, never decides whether to try again: `links.py` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from functools import lru_cache
from socket import socket

from atoll.base.errors import NetworkError, PeerFault, RefusedError, UsageError
from atoll.base.ids import PeerId
from atoll.base.limits import ADDRESSES_MAX, PEERS_MAX
from atoll.runtime.network.tcp import connect
from atoll.wire.libp2p.multiaddr import DialEndpoint, endpoint

log = logging.getLogger(__name__)


class DialResult(Enum):
    """What came of dialling all addresses of a peer."""

    UP = auto()
    REFUSED = auto()  # at every address nobody listens: the process is gone
    RESET = auto()  # somebody listened and hung up: perhaps a process that is just dying
    FAILED = auto()


class DialRefused(OSError):
    """The listener said no, in words."""


async def dial_any(
    endpoints: Sequence[DialEndpoint],
    congestion: str,
    introduce: Callable[[socket, DialEndpoint], Awaitable[object]],
    may_dial: Callable[[str], bool],
) -> DialResult:
    """Connect to all at once, introduce ourselves on one connection after the other until one succeeds.

    Endpoints whose numbers `may_dial` refuses are left out, and say nothing about the others.
    """
    outcomes: set[DialResult] = set()
    dialed = [where for where in endpoints if may_dial(where.host)]
    dials = {asyncio.create_task(connect(where, congestion, may_dial)): where for where in dialed}
    pending = set(dials)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for dial in done:
                try:
                    await introduce(dial.result(), dials.pop(dial))
                    return DialResult.UP
                except ConnectionRefusedError:
                    outcomes.add(DialResult.REFUSED)
                except ConnectionError:
                    outcomes.add(DialResult.RESET)
                except (OSError, PeerFault) as why:
                    log.debug("dialling: %r", why)
                    outcomes.add(DialResult.FAILED)
    finally:
        for dial in dials:
            dial.cancel()
        for unused in await asyncio.gather(*dials, return_exceptions=True):
            if isinstance(unused, socket):
                unused.close()
    if outcomes == {DialResult.REFUSED}:
        return DialResult.REFUSED
    return DialResult.RESET if DialResult.RESET in outcomes else DialResult.FAILED


# ---- addresses ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=PEERS_MAX)  # a round asks for those of every member, and they hardly ever change
def endpoints_of(peer: PeerId, addresses: tuple[str, ...]) -> tuple[DialEndpoint, ...]:
    """Those of a peer's addresses that we can dial and that are not somebody else's."""
    found: list[DialEndpoint] = []
    for address in addresses[:ADDRESSES_MAX]:
        try:
            where = endpoint(address)
        except ValueError:
            continue
        if where.transport == "tcp" and where.peer in (None, peer):
            found.append(where)
    return tuple(found)


def endpoint_of(address: str) -> DialEndpoint:
    """An address that a person gave us. Raises UsageError."""
    try:
        where = endpoint(address)
    except ValueError as why:
        fix = "an address is written /ip4/192.0.2.7/tcp/7071 or /dns/peer.example.org/tcp/7071"
        raise UsageError("E-NET-10", str(why), fix=fix) from why
    if where.transport != "tcp":
        raise UsageError("E-NET-10", f"{address} is for browsers", fix="write the peer's tcp address")
    return where


def named_by_environment() -> tuple[str, ...]:
    """Where peers listen whose call does not say it: ATOLL_LISTEN, addresses with spaces between."""
    return tuple(os.environ.get("ATOLL_LISTEN", "").split())


# ---- texts -------------------------------------------------------------------------------------------------


def cannot_listen(address: str, why: OSError) -> NetworkError:
    cause, fix = "another program holds this port", "another port, or tcp/0 to let the system choose one"
    if address in named_by_environment():
        cause += ", perhaps one that was told the same: the address is from ATOLL_LISTEN"
        fix = f"unset ATOLL_LISTEN, or say in it {fix}"
    return NetworkError(
        "E-NET-11",
        f"cannot listen on {address}: {why.strerror or why}",
        cause=f"{cause}; or this address is not this computer's",
        fix=fix,
    )


def cannot_dial(address: str, why: OSError | PeerFault) -> NetworkError | RefusedError:
    match why:
        case ConnectionRefusedError():
            return NetworkError(
                "E-NET-12",
                f"nobody listens at {address}",
                cause="the peer is not running, or its port changed",
                fix="ask for a fresh ticket",
            )
        case DialRefused():
            return RefusedError("E-NET-14", f"the peer at {address} refused: {why}")
        case PeerFault():
            return RefusedError(
                "E-NET-15",
                f"no link with {address}: {why.what}",
                cause="another peer or program answers there now, or it belongs to another network or version",
                fix="ask for a fresh ticket",
            )
        case _:
            return NetworkError(
                "E-NET-13",
                f"no answer from {address}: {why or type(why).__name__}",
                cause="a firewall drops the packets, or the computer is off",
                fix="atoll doctor",
            )
