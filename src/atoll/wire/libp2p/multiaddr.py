"""Multiaddrs: addresses of peers, as text for people and as bytes for the wire (multiformats/multiaddr).

All other code holds text; bytes appear only in identify. The protocols are rows of the standard's table, also ones
that no transport of Atoll dials; peer ids are Ed25519.
Invariants:
- text -> bytes -> text is the identity for canonical text.
- The error for a mistyped address names the correct form.
Not responsible for: which transports exist, resolving names, guessing ports.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple
from urllib.parse import quote, unquote

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import ADDRESS_BYTES_MAX
from atoll.crypto.identity import ED25519_KEY_BYTES, PEER_ID_BYTES, ed25519_of, peer_id_bytes, peer_id_of
from atoll.wire.libp2p import varint
from atoll.wire.libp2p.varint import Bytes

PORT_MAX = 65535
_PORT_NUMBERS = f"; a port is a number from 1 to {PORT_MAX}"
_VARIABLE = -1  # size of a value that its length precedes
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\Z")


class DialAddress(NamedTuple):
    """Parsed address for a dialer: a host and a port, or a place on this computer such as a socket's path."""

    parts: tuple[tuple[str, str], ...]  # (("ip4", "192.0.2.7"), ("tcp", "7071")), without /p2p
    peer: PeerId | None = None  # peer expected there

    @classmethod
    def of_host(cls, host: str, port: int, transport: str = "tcp", peer: PeerId | None = None) -> DialAddress:
        """An IP address or a name, and a port of the first protocol of `transport`."""
        kind = "ip6" if ":" in host else "ip4" if re.fullmatch(r"[0-9.]+", host) else "dns"
        first, *layers = transport.split("/")
        return cls(((kind, host), (first, str(port)), *((layer, "") for layer in layers)), peer)

    @property
    def transport(self) -> str:
        """The protocols without the host: "tcp", "tcp/wss" or "unix". The registry of transports goes by it."""
        return "/".join(name for name, _ in self.parts if name not in _HOSTS)

    @property
    def host(self) -> str:
        """IP address or name; empty for a place on this computer that has none."""
        return next((value for name, value in self.parts if name in _HOSTS), "")

    @property
    def port(self) -> int:
        """0 if the address has none."""
        return next((int(value) for name, value in self.parts if name in _PORTS), 0)

    def with_host(self, host: str) -> DialAddress:
        return DialAddress.of_host(host, self.port, self.transport, self.peer)

    def with_port(self, port: int) -> DialAddress:
        """The same address if it has no port."""
        parts = tuple((name, str(port) if name in _PORTS else value) for name, value in self.parts)
        return self._replace(parts=parts)


# ---- the protocols -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AddressProtocol:
    code: int
    size: int  # bytes of the value, or _VARIABLE
    to_bytes: Callable[[str], bytes]
    to_text: Callable[[bytes], str]
    like: str = ""  # example value for error messages
    bounds: str = ""  # valid values, for error messages


def _ip6_to_bytes(text: str) -> bytes:
    if "%" in text:
        raise ValueError("a zone is valid on one machine only")
    return IPv6Address(text).packed


def _port_to_bytes(text: str) -> bytes:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError("not a number")
    return int(text).to_bytes(2, "big")  # OverflowError above PORT_MAX


def _name_to_bytes(text: str) -> bytes:
    if not _NAME.match(text.lower()):
        raise ValueError("not a host name")
    return text.lower().encode()


def _peer_to_text(raw: bytes) -> str:
    key = raw[-ED25519_KEY_BYTES:]
    if len(raw) != PEER_ID_BYTES or peer_id_bytes(key) != raw:
        raise ValueError("not the id of an Ed25519 key")
    return peer_id_of(key)


def _name(code: int) -> _AddressProtocol:
    return _AddressProtocol(
        code, _VARIABLE, _name_to_bytes, lambda raw: _name_to_bytes(raw.decode()).decode(), "peer.example.org"
    )


def _port(code: int) -> _AddressProtocol:
    return _AddressProtocol(
        code, 2, _port_to_bytes, lambda raw: str(int.from_bytes(raw, "big")), "7071", _PORT_NUMBERS
    )


def _place(code: int, example: str) -> _AddressProtocol:
    """A place on this computer. Its text is percent-encoded, since a path holds slashes."""
    return _AddressProtocol(
        code,
        _VARIABLE,
        lambda text: _printable(unquote(text, errors="strict")).encode(),
        lambda raw: quote(_printable(raw.decode()), safe=""),
        example,
    )


def _printable(place: str) -> str:
    if not place or not place.isprintable():
        raise ValueError("not a name or path")
    return place


def _flag(code: int) -> _AddressProtocol:
    return _AddressProtocol(code, 0, lambda text: b"", lambda raw: "")


_PROTOCOLS = {  # multiformats/multiaddr protocols.csv: code, size
    "ip4": _AddressProtocol(
        4, 4, lambda text: IPv4Address(text).packed, lambda raw: str(IPv4Address(raw)), "192.0.2.7"
    ),
    "tcp": _port(6),
    "ip6": _AddressProtocol(41, 16, _ip6_to_bytes, lambda raw: str(IPv6Address(raw)), "2001:db8::7"),
    "dns": _name(53),
    "dns4": _name(54),
    "dns6": _name(55),
    "udp": _port(273),
    "unix": _place(400, "%2Frun%2Fatoll.sock"),
    "p2p": _AddressProtocol(
        421, _VARIABLE, lambda text: peer_id_bytes(ed25519_of(text)), _peer_to_text, "12D3KooW…"
    ),
    "tls": _flag(448),
    "quic-v1": _flag(461),
    "ws": _flag(477),
    "wss": _flag(478),
    "memory": _place(777, "1"),
}
_BY_CODE = {protocol.code: name for name, protocol in _PROTOCOLS.items()}
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_PORTS = ("tcp", "udp")  # what follows a host
_PLACES = ("unix", "memory")  # what stands alone
_EXAMPLES = "write for example /ip4/192.0.2.7/tcp/7071 or /dns/peer.example.org/tcp/7071"


# ---- text and bytes ----------------------------------------------------------------------------------------


def to_bytes(text: str) -> bytes:
    """Encode a textual multiaddr. Raises ValueError with the correct form if it is invalid."""
    out = bytearray()
    for name, value in _parts(text):
        protocol = _PROTOCOLS[name]
        try:
            raw = protocol.to_bytes(value)
        except (ValueError, OverflowError):
            wrong = f"write /{name}/{protocol.like}, not /{name}/{value[:60]}{protocol.bounds}"
            raise ValueError(f"{text[:99]!r}: {wrong}") from None
        out += varint.encode(protocol.code)
        if protocol.size == _VARIABLE:
            out += varint.encode(len(raw))
        out += raw
    if not 0 < len(out) <= ADDRESS_BYTES_MAX:
        raise ValueError(f"{text[:99]!r} has {len(out)} bytes, allowed are 1 to {ADDRESS_BYTES_MAX}; {_EXAMPLES}")
    return bytes(out)


def from_bytes(data: Bytes, who: str = "") -> str:
    """Decode a multiaddr to text. Raises PeerFault if it is invalid or has an unknown protocol."""
    if not 0 < len(data) <= ADDRESS_BYTES_MAX:
        raise PeerFault(who, f"address of {len(data)} bytes, allowed are 1 to {ADDRESS_BYTES_MAX}")
    text, at = "", 0
    while at < len(data):
        code, at = _varint(data, at, who)
        name = _BY_CODE.get(code)
        if name is None:
            raise PeerFault(who, f"address with an unsupported protocol, code {code}", bytes(data))
        protocol = _PROTOCOLS[name]
        size = protocol.size
        if size == _VARIABLE:
            size, at = _varint(data, at, who)
        raw = bytes(data[at : at + size])
        at += size
        try:
            if len(raw) != size:
                raise ValueError("cut short")
            value = protocol.to_text(raw)
        except ValueError as why:
            raise PeerFault(who, f"address with an invalid /{name}: {why}", bytes(data)) from None
        text += f"/{name}/{value}" if value else f"/{name}"
    return text


def endpoint(text: str) -> DialAddress:
    """Parse a dialable multiaddr. Raises ValueError with the correct form if it cannot be dialed."""
    parts = _parts(from_bytes(to_bytes(text)))  # checks every value
    peer = PeerId(parts.pop()[1]) if parts[-1][0] == "p2p" else None
    names = tuple(name for name, _ in parts)
    has_host = len(names) > 1 and names[0] in _HOSTS and names[1] in _PORTS
    is_place = bool(names) and names[0] in _PLACES
    layers = names[2:] if has_host else names[1:]
    if not (has_host or is_place) or any(_PROTOCOLS[name].size for name in layers):
        raise ValueError(
            f"{text[:99]!r} cannot be dialed; write a host, a port and perhaps the peer, "
            "like /ip4/192.0.2.7/tcp/7071/p2p/12D3KooW… or /dns/peer.example.org/tcp/7071"
        )
    if names[-2:] == ("tls", "ws"):
        parts[-2:] = [("wss", "")]
    return DialAddress(tuple(parts), peer)


def text_of(where: DialAddress) -> str:
    """The canonical multiaddr of an endpoint."""
    text = "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in where.parts)
    text += f"/p2p/{where.peer}" if where.peer else ""
    return from_bytes(to_bytes(text))


def _parts(text: str) -> list[tuple[str, str]]:
    """[("ip4", "192.0.2.7"), ("tcp", "7071"), ("ws", "")]"""
    if not text.strip("/"):
        raise ValueError(f"{text[:99]!r} names no host and no port; {_EXAMPLES}")
    if not text.startswith("/"):
        raise ValueError(f"{text[:99]!r} is not a multiaddr; {_suggest_multiaddr(text)}")
    words = text.removesuffix("/").split("/")[1:]
    parts: list[tuple[str, str]] = []
    while words:
        name = words.pop(0)
        if name not in _PROTOCOLS:
            raise ValueError(f"{text[:99]!r}: /{name[:20]} is not one of /{', /'.join(_PROTOCOLS)}")
        if _PROTOCOLS[name].size and not words:
            raise ValueError(f"{text[:99]!r} ends too early; write /{name}/{_PROTOCOLS[name].like}")
        parts.append((name, words.pop(0) if _PROTOCOLS[name].size else ""))
    return parts


def _suggest_multiaddr(text: str) -> str:
    """Suggest a multiaddr for a URL or host:port."""
    match = re.fullmatch(r"(?:(tcp|ws|wss)://)?\[?([0-9A-Za-z.:_-]+?)\]?:([0-9]{1,5})/?", text)
    if match is None:
        return _EXAMPLES
    if int(match[3]) > PORT_MAX:
        return f"{_EXAMPLES}{_PORT_NUMBERS}"
    layers = "tcp" if match[1] in (None, "tcp") else f"tcp/{match[1]}"
    try:
        return f"write {text_of(DialAddress.of_host(match[2], int(match[3]), layers))}"
    except ValueError:
        return _EXAMPLES


def _varint(data: Bytes, at: int, who: str) -> tuple[int, int]:
    found = varint.decode(data, at, who)
    if found is None:
        raise PeerFault(who, "address ends inside a number", bytes(data))
    return found
