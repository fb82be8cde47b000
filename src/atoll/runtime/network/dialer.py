"""Dialing: which addresses can be dialed, which connection comes up first, and the error texts for people.

Not responsible for: retries, state of a link (connection_manager.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache

from atoll.base.errors import NetworkError, PeerFault, RefusedError, UsageError
from atoll.base.ids import PeerId
from atoll.base.limits import ADDRESSES_MAX, PEERS_MAX
from atoll.runtime.network.transport import Connection, Transport
from atoll.runtime.network.transports import TRANSPORTS
from atoll.wire.libp2p.multiaddr import DialAddress, endpoint

log = logging.getLogger(__name__)

NO_LISTENER = "E-NET-12"  # code of a refused connection
NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


class DialResult(Enum):
    """Outcome of dialing all addresses of a peer."""

    UP = auto()
    REFUSED = auto()  # no process listens at any address: the peer's process is gone
    RESET = auto()  # a listener hung up: perhaps a process that is about to end
    FAILED = auto()


class DialRefused(OSError):
    """Refusal by the listener, with its reason."""


async def dial_any(
    endpoints: Sequence[DialAddress],
    transports: Mapping[str, Transport],
    introduce: Callable[[Connection, DialAddress], Awaitable[object]],
    may_dial: Callable[[str], bool],
) -> DialResult:
    """Dial all endpoints at once, then introduce this peer on one connection after the other until one succeeds.

    Endpoints that `may_dial` refuses are left out and do not count in the outcome.
    """
    outcomes: set[DialResult] = set()
    dialed = [where for where in endpoints if may_dial(where.host)]
    dials = {asyncio.create_task(transports[where.transport].dial(where, may_dial)): where for where in dialed}
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
                    log.debug("dialing: %r", why)
                    outcomes.add(DialResult.FAILED)
    finally:
        for dial in dials:
            dial.cancel()
        for unused in await asyncio.gather(*dials, return_exceptions=True):
            if not isinstance(unused, BaseException):
                unused.abort()
    if outcomes == {DialResult.REFUSED}:
        return DialResult.REFUSED
    return DialResult.RESET if DialResult.RESET in outcomes else DialResult.FAILED


# ---- addresses ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=PEERS_MAX)  # called for every member in every round with arguments that rarely change
def endpoints_of(peer: PeerId, addresses: tuple[str, ...], transports: frozenset[str]) -> tuple[DialAddress, ...]:
    """A peer's addresses that these transports can dial and that name no other peer."""
    found: list[DialAddress] = []
    for address in addresses[:ADDRESSES_MAX]:
        try:
            where = endpoint(address)
        except ValueError:
            continue
        if where.transport in transports and where.peer in (None, peer):
            found.append(where)
    return tuple(found)


def endpoint_of(address: str, transports: Collection[str] = TRANSPORTS) -> DialAddress:
    """The endpoint of an address that a person wrote. Raises UsageError."""
    try:
        where = endpoint(address)
    except ValueError as why:
        fix = "an address is written /ip4/192.0.2.7/tcp/7071 or /dns/peer.example.org/tcp/7071"
        raise UsageError("E-NET-10", str(why), fix=fix) from why
    if where.transport not in transports:
        known = ", ".join(transports)
        raise UsageError(
            "E-NET-10", f"{address} needs transport {where.transport}", fix=f"write an address of: {known}"
        )
    return where


def environment_addresses() -> tuple[str, ...]:
    """Listening addresses from ATOLL_LISTEN, separated by spaces; they hold where the call names none."""
    return tuple(os.environ.get("ATOLL_LISTEN", "").split())


# ---- texts -------------------------------------------------------------------------------------------------


def cannot_listen(address: str, why: OSError) -> NetworkError:
    cause = "another program holds this port or path"
    fix = "another port or path, or tcp/0 to let the system choose a port"
    if address in environment_addresses():
        cause += ", perhaps with the same ATOLL_LISTEN: the address is from there"
        fix = f"unset ATOLL_LISTEN, or set it to {fix}"
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
                NO_LISTENER,
                f"no peer listens at {address}: connection refused",
                cause="the peer is not running, or its port changed; the computer itself is there",
                fix="ask a member for a new ticket: atoll invite",
            )
        case DialRefused():
            return RefusedError("E-NET-14", f"the peer at {address} refused: {why}")
        case PeerFault():
            return RefusedError(
                "E-NET-15",
                f"no link with {address}: {why.what}",
                cause="another peer or program uses this address now, or it belongs to another network or version",
                fix="ask a member for a new ticket: atoll invite",
            )
        case OSError(errno=number) if number in NO_ROUTE:
            return NetworkError(
                "E-NET-16",
                f"no route to {address}: {why.strerror}",
                cause="this computer is offline, or the address is of a network that it is not in",
                fix="check the network of this computer; or let the member announce an address that it can reach: "
                "atoll up --announce",
            )
        case TimeoutError():
            return NetworkError(
                "E-NET-13",
                f"no reply from {address}: {_timeout_text(why)}",
                cause="a firewall drops the packets, or the computer is off",
                fix="let the member announce an address that this computer can reach: atoll up --announce",
            )
        case _:
            return NetworkError(
                "E-NET-13",
                f"no reply from {address}: {why.strerror or str(why) or type(why).__name__}",
                cause="the name or the connection failed before a peer answered",
                fix="let the member announce an address that this computer can reach: atoll up --announce",
            )


def _timeout_text(why: TimeoutError) -> str:
    return f"connected, but {why}" if why.args and why.errno is None else "timed out"
