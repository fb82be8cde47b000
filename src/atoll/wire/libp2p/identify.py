"""`/ipfs/id/1.0.0`: who I am, where I listen, what I speak (libp2p/specs identify/README.md).

Whoever is asked sends one message and closes the stream. On the wire a varint length stands before it (every
implementation does so; the page does not say it). Promises: unknown fields and addresses that Atoll cannot dial
are passed over, not punished. Never believes the message: the key that counts is the one of the Noise handshake,
and a caller compares; addresses are hints.
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
LISTED_MAX = 256  # addresses, and protocols: more than anybody has, few enough to keep


class IdentifyMessage(msgspec.Struct, frozen=True, kw_only=True):
    public_key: bytes = b""  # protobuf PublicKey
    listen_addresses: tuple[bytes, ...] = ()
    protocols: tuple[str, ...] = ()
    observed_address: bytes = b""  # how we look from there
    protocol_version: str = ""
    agent_version: str = ""
    signed_peer_record: bytes = b""  # kept as it came: whoever passes it on needs the exact bytes

    def dialable(self) -> tuple[str, ...]:
        """The listen addresses that Atoll can dial, as text."""
        return tuple(text for raw in self.listen_addresses if (text := _readable(raw)))


def encode(message: IdentifyMessage) -> bytes:
    """With its length in front: what goes on the stream."""
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
    """Cuts the stream of an identify answer into messages for `decode`.

    go-libp2p may split a long answer into several: `decode` their concatenation, which protobuf defines as merging.
    """
    return LengthPrefixedFrames(who, limit=MESSAGE_MAX, read_length=varint_length)


def decode(body: Bytes, who: str = "") -> IdentifyMessage:
    """The message without its length. The last value of a field counts, as protobuf says."""
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
        raise PeerFault(who, f"{what} is a number where bytes were promised")
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
