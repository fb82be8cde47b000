"""The security of the real world: every connection is libp2p, post-quantum between members.

A control connection carries one `/atoll/control/1` stream, opened by the dialer, whose bytes are frames behind
four-byte lengths. Beside it we answer `identify` and `ping`, as any libp2p peer may ask. A bulk connection is
handed over after its handshake, with keys of its own.
Promises: a peer without a post-quantum identity is a `ForeignPeer` and never more.
Never does I/O; never opens other streams, never believes what identify says.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Lane
from atoll.crypto.identity import Identity, PublicIdentity, libp2p_public_key, nobody_known
from atoll.crypto.noise_pattern import HandshakeRole
from atoll.runtime.network.secure_channel import FRAME_MAX, ChannelOpened, ForeignPeer, RecordOpener, RecordSealer
from atoll.wire.libp2p import identify, multiaddr, ping
from atoll.wire.libp2p.connection import CONTROL_PROTOCOL, Libp2pConnection, Libp2pTerms
from atoll.wire.libp2p.events import (
    ConnectionEvent,
    ConnectionReady,
    GoneAway,
    PingAnswered,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamReset,
)
from atoll.wire.libp2p.framing import LengthPrefixedFrames, frame
from atoll.wire.libp2p.yamux import QUEUED_STREAM_MAX

SPOKEN = (CONTROL_PROTOCOL, identify.PROTOCOL, ping.PROTOCOL)
AGENT = "atoll"


class Libp2pSecurity:
    """`network` is what all members know (a genesis digest); `known` is the agreed membership."""

    def __init__(
        self,
        identity: Identity,
        network: bytes,
        *,
        known: Callable[[PeerId], PublicIdentity | None] = nobody_known,
        foreign: bool = False,
    ) -> None:
        self._terms = Libp2pTerms(identity, network, known=known, foreign=foreign, speaks=SPOKEN.__contains__)
        self._addresses: tuple[bytes, ...] = ()

    def listening(self, addresses: list[str]) -> None:
        self._addresses = tuple(multiaddr.to_bytes(address) for address in addresses)

    def dialing(self, lane: Lane, expected: PeerId | None) -> _Libp2pSession:
        return _Libp2pSession(
            Libp2pConnection(HandshakeRole.INITIATOR, self._terms, lane=lane, expected=expected), self._introduction
        )

    def accepting(self) -> _Libp2pSession:
        return _Libp2pSession(Libp2pConnection(HandshakeRole.RESPONDER, self._terms), self._introduction)

    def _introduction(self, seen_at: str) -> bytes:
        return identify.encode(
            identify.IdentifyMessage(
                public_key=libp2p_public_key(self._terms.identity.public.ed25519),
                listen_addresses=self._addresses,
                protocols=SPOKEN,
                observed_address=multiaddr.to_bytes(seen_at) if seen_at else b"",
                protocol_version="atoll/1",
                agent_version=AGENT,
            )
        )


class _Libp2pSession:
    def __init__(self, connection: Libp2pConnection, introduction: Callable[[str], bytes]) -> None:
        self._connection, self._introduction = connection, introduction
        self._seen_at = ""
        self._ready: ConnectionReady | None = None
        self._dialled_stream: int | None = None  # on its way to be the control stream
        self._control: int | None = None
        self._frames = LengthPrefixedFrames(limit=FRAME_MAX)
        self._echoes: dict[int, ping.PingResponder] = {}

    # ---- what links use ----

    def start(self, seen_at: str) -> None:
        self._seen_at = seen_at  # the connection has its first words ready from the beginning

    def receive(self, data: memoryview) -> list[ChannelOpened | ForeignPeer | bytes]:
        came: list[ChannelOpened | ForeignPeer | bytes] = []
        for event in self._connection.receive(data):
            self._on(event, came)
        return came

    def send(self, message: bytes) -> None:
        assert self._control is not None
        sent = self._connection.send(self._control, frame(message, limit=FRAME_MAX))
        assert sent, "who sends asks for `waiting_bytes` first"

    def outgoing(self) -> bytes:
        return b"".join(self._connection.take_outgoing())

    @property
    def waiting_bytes(self) -> int:
        return QUEUED_STREAM_MAX - self._connection.room(self._control) if self._control is not None else 0

    def boxes(self) -> tuple[RecordSealer, RecordOpener, bytes]:
        assert self._ready is not None and self._ready.lane is Lane.BULK
        established = self._ready.established
        return established.bulk_send, established.bulk_receive, self._ready.rest

    # ---- what the connection tells ----

    def _on(self, event: ConnectionEvent, came: list[ChannelOpened | ForeignPeer | bytes]) -> None:
        match event:
            case ConnectionReady(lane, established):
                self._ready = event
                if lane is Lane.BULK:
                    came.append(ChannelOpened(established.peer, Lane.BULK))
                elif established.identity is None:
                    came.append(ForeignPeer(established.peer))
                elif established.role is HandshakeRole.INITIATOR:
                    self._dialled_stream = self._connection.open_stream(CONTROL_PROTOCOL)
            case StreamOpened(stream, protocol):
                self._on_opened(stream, protocol, came)
            case StreamData(stream, data):
                self._connection.consumed(stream, len(data))
                if stream == self._control:
                    came.extend(self._frames.receive(data))
                elif (echo := self._echoes.get(stream)) and not self._connection.send(stream, echo.receive(data)):
                    self._echoes.pop(stream)  # no room: it asks faster than it reads the answers
                    self._connection.reset(stream)
            case StreamClosed(stream) | StreamReset(stream):
                if stream in (self._control, self._dialled_stream):
                    raise ConnectionResetError("the control stream ended")
                self._echoes.pop(stream, None)
                self._connection.close(stream)
            case GoneAway() | PingAnswered():
                pass  # streams that exist go on; we ask no pings

    def _on_opened(self, stream: int, protocol: str, came: list[ChannelOpened | ForeignPeer | bytes]) -> None:
        assert self._ready is not None
        established = self._ready.established
        match protocol:
            case _ if stream == self._dialled_stream:
                self._dialled_stream, self._control = None, stream
                came.append(ChannelOpened(established.peer, Lane.CONTROL))
            case identify.PROTOCOL:
                self._connection.send(stream, self._introduction(self._seen_at))
                self._connection.close(stream)
            case ping.PROTOCOL if len(self._echoes) < ping.STREAMS_MAX:
                self._echoes[stream] = ping.PingResponder()
            case ping.PROTOCOL:
                self._connection.reset(stream)
            case _:  # the control stream, which the dialer opens, once, and no guest
                if (
                    self._control is not None
                    or established.identity is None
                    or established.role is HandshakeRole.INITIATOR
                ):
                    raise PeerFault(established.peer, "opened a control stream that is not theirs to open")
                self._control = stream
                came.append(ChannelOpened(established.peer, Lane.CONTROL))
