"""Which addresses others can dial, as far as this computer can tell without asking anybody.

Listening everywhere (0.0.0.0) becomes the addresses of the interfaces, since nobody can dial 0.0.0.0. Never asks
an outside service what our address is: behind a router one says so with --announce.
"""

from __future__ import annotations

import ipaddress
import socket

from atoll.wire.libp2p.multiaddr import Endpoint, endpoint, text_of

INTERFACES_MAX = 3  # addresses told per unspecified one: a ticket has room for a few


def dialable(bound: list[str]) -> tuple[str, ...]:
    """What to tell others: bound addresses, with the interfaces' own in place of 0.0.0.0 and ::."""
    out: list[str] = []
    for address in bound:
        where = endpoint(address)
        found = [where]
        if _ip(where) is not None and _ip(where).is_unspecified:
            version = _ip(where).version
            found = [where._replace(host=host) for host in _interfaces(version)] or [where]
        out += [text_of(e) for e in found]
    return tuple(dict.fromkeys(out))


def scope_of(address: str) -> str:
    """ "computer", "network" or "internet": from how far away this address can be dialled, going by its numbers."""
    ip = _ip(endpoint(address))
    if ip is None:
        return "internet"  # a name: whoever gave it knows
    if ip.is_loopback or ip.is_unspecified:
        return "computer"
    return "internet" if ip.is_global else "network"


def _ip(where: Endpoint) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(where.host)
    except ValueError:
        return None


def _interfaces(version: int) -> list[str]:
    """Addresses of this computer, the most widely reachable first; loopback if there is nothing else."""
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
