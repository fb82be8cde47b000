"""Identify `/ipfs/id/1.0.0`: identity, addresses and protocols of a peer (libp2p/specs identify/README.md).

The responder sends one message and closes the stream. A varint length precedes the message: every implementation
sends it, although the page does not mention it.
Invariants: unknown fields, and addresses that Atoll cannot dial, are skipped without a fault.
Not responsible for: trust. The caller compares the key with that of the Noise handshake; addresses are hints.
"""

from __future__ import annotations

import msgspec

from atoll.base.errors import PeerFault
from atoll.crypto.protobuf import protobuf_field, protobuf_fields
from atoll.wire.libp2p import multiaddr
from atoll.wire.libp2p.framing import LengthPrefixedFrames, varint_frame, varint_length
from atoll.wire.libp2p.varint import Bytes

PROTOCOL = "/ipfs/id/1.0.0"
MESSAGE_MAX = 8192  # bytes; the bound of go-libp2p without signed records, and js-libp2p's default
LISTED_MAX = 256  # addresses, and protocols: more than any peer has, few enough to store


class IdentifyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Decoded identify message."""

    public_key: bytes = b""  # protobuf PublicKey
    listen_addresses: tuple[bytes, ...] = ()
    protocols: tuple[str, ...] = ()
    observed_address: bytes = b""  # the local address as the remote sees it
    protocol_version: str = ""
    agent_version: str = ""
    signed_peer_record: bytes = b""  # exact bytes, as needed for forwarding

    def dialable(self) -> tuple[str, ...]:
        """The listen addresses of a form that can be dialed, as text."""
        return tuple(text for raw in self.listen_addresses if (text := _readable(raw)))


def encode(message: IdentifyMessage) -> bytes:
    """Encode the message with its length, as sent on the stream."""
    fields = [
        (1, message.public_key),
        *((2, address) for address in message.listen_addresses),
        *((3, protocol.encode()) for protocol in message.protocols),
        (4, message.observed_address),
        (5, message.protocol_version.encode()),
        (6, message.agent_version.encode()),
        (8, message.signed_peer_record),
    ]
    return varint_frame(b"".join(protobuf_field(number, value) for number, value in fields if value))


def frames(who: str = "") -> LengthPrefixedFrames:
    """Splitter of an identify response into messages for `decode`.

    go-libp2p may split a long response: `decode` the concatenation, which protobuf defines as merging.
    """
    return LengthPrefixedFrames(who, limit=MESSAGE_MAX, read_length=varint_length)


def decode(body: Bytes, who: str = "") -> IdentifyMessage:
    """Decode a message without its length. The last value of a field counts, as in protobuf.

    Raises PeerFault if it is malformed or lists too many addresses or protocols.
    """
    try:
        fields = protobuf_fields(bytes(body))
    except ValueError as why:
        raise PeerFault(who, str(why)) from None
    values: dict[int, bytes] = {}
    texts: dict[int, str] = {}
    addresses: list[bytes] = []
    protocols: list[str] = []
    for number, value in fields:
        match number:
            case 1 | 4 | 8:
                values[number] = _bytes(value, f"identify field {number}", who)
            case 2:
                addresses.append(_bytes(value, "a listen address", who))
            case 3:
                protocols.append(_text(value, "a protocol id", who))
            case 5 | 6:
                texts[number] = _text(value, f"identify field {number}", who)
            case _:
                pass
    if len(addresses) > LISTED_MAX or len(protocols) > LISTED_MAX:
        raise PeerFault(who, f"identify lists more than {LISTED_MAX} addresses or protocols")
    return IdentifyMessage(
        public_key=values.get(1, b""),
        listen_addresses=tuple(addresses),
        protocols=tuple(protocols),
        observed_address=values.get(4, b""),
        protocol_version=texts.get(5, ""),
        agent_version=texts.get(6, ""),
        signed_peer_record=values.get(8, b""),
    )


def _bytes(value: int | bytes, what: str, who: str) -> bytes:
    if isinstance(value, int):
        raise PeerFault(who, f"{what} is a number in place of bytes")
    return value


def _text(value: int | bytes, what: str, who: str) -> str:
    raw = _bytes(value, what, who)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise PeerFault(who, f"{what} is not UTF-8", raw[:64]) from None


def _readable(raw: bytes) -> str:
    try:
        text = multiaddr.from_bytes(raw)
        multiaddr.endpoint(text)
    except (PeerFault, ValueError):
        return ""
    return text
