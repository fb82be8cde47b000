"""Addresses: which ones to advertise, how far away each can be dialed, and which ports to reuse.

Listening everywhere (0.0.0.0) is advertised as the addresses of the interfaces, since 0.0.0.0 cannot be dialed.
An address without a host (a socket's path) is a place on this computer.

Not responsible for: external addresses behind a router; --announce sets them.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Literal

from atoll.runtime.network.dialer import endpoint_of, environment_addresses
from atoll.wire.libp2p.multiaddr import DialAddress, endpoint, text_of

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
Ambiguity = Literal["", "loopback", "link", "place"]
INTERFACES_MAX = 3  # advertised per unspecified address: a ticket has little room


def listening(given: tuple[str, ...]) -> tuple[str, ...]:
    """Listening addresses: those given, else those in ATOLL_LISTEN, else loopback."""
    return given or environment_addresses() or LOOPBACK


def advertised(bound: list[str]) -> tuple[str, ...]:
    """Addresses to advertise: the bound ones, with those of the interfaces in place of 0.0.0.0 and ::."""
    out: list[str] = []
    for address in bound:
        where = endpoint(address)
        found = [where]
        if (ip := _ip(where)) is not None and ip.is_unspecified:
            found = [where.with_host(host) for host in _interfaces(ip.version)] or [where]
        out += [text_of(e) for e in found]
    return tuple(dict.fromkeys(out))


def with_free_ports(addresses: tuple[str, ...]) -> list[str]:
    """Replace port 0 by a free port, so that addresses can be advertised before they are bound."""
    out: list[str] = []
    for address in addresses:
        where = endpoint_of(address)
        ip = _ip(where)
        if where.port == 0 and ip is not None:
            family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
            with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
                probe.bind((where.host, 0))
                where = where.with_port(probe.getsockname()[1])
        out.append(text_of(where))
    return out


def as_last_time(asked: list[str], last: list[str]) -> list[str]:
    """Replace port 0 by the port bound last time, so that tickets and members' address books stay valid."""
    before = {(e.host, e.transport): e.port for e in map(endpoint_of, last)}
    wheres = [endpoint_of(address) for address in asked]
    return [text_of(e.with_port(e.port or before.get((e.host, e.transport), 0))) for e in wheres]


def scope_of(address: str) -> str:
    """ "computer", "network" or "internet": the range from which this address can be dialed; "" if invalid."""
    try:
        where = endpoint(address)
    except ValueError:
        return ""
    if not where.host:
        return "computer"
    ip = _ip(where)
    if ip is None:
        return "internet"  # a host name is trusted
    if ip.is_loopback or ip.is_unspecified:
        return "computer"
    return "internet" if ip.is_global else "network"


def ambiguity_of(host: str) -> Ambiguity:
    """ "loopback", "link" or "place" for an address that means another one on every computer or link; else empty.

    The kernel treats the unspecified address as loopback. A host name has to be resolved first.
    """
    if not host:
        return "place"
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    return "loopback" if ip.is_loopback or ip.is_unspecified else "link" if ip.is_link_local else ""


def is_everywhere(host: str) -> bool:
    """True for 0.0.0.0 and ::, which listen on every interface."""
    return host != "" and ipaddress.ip_address(host).is_unspecified


def only_here(address: str) -> bool:
    """True for the loopback address, the default. Only this computer can dial it."""
    return endpoint(address).host == "127.0.0.1"


def _ip(where: DialAddress) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(where.host)
    except ValueError:
        return None


def _interfaces(version: int) -> list[str]:
    """Addresses of this computer, the most widely reachable first; loopback if there are no others."""
    import psutil

    family = socket.AF_INET if version == 4 else socket.AF_INET6
    found: list[tuple[int, str]] = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for a in addresses:
            if a.family != family or "%" in a.address:
                continue
            ip = ipaddress.ip_address(a.address)
            if ip.is_link_local:
                continue
            virtual = name.startswith(("docker", "br-", "veth", "virbr"))
            rank = 3 if ip.is_loopback else 2 if virtual else 0 if ip.is_global else 1
            found.append((rank, a.address))
    real = [a for rank, a in sorted(found) if rank < 3] or [a for _, a in sorted(found)]
    return real[:INTERFACES_MAX]
