"""libp2p security: every connection is authenticated and encrypted, post-quantum between members.

A control connection carries one `/atoll/control/1` stream, opened by the dialer. Its bytes are frames behind
four-byte lengths. Beside it, registered protocols are served (stream_handlers.py). A bulk connection is handed over
after its handshake, with keys of its own.

Invariants:
- A peer without a post-quantum identity is a `ServedNonMember` and never more.
- Nothing that identify reports is believed.
Not responsible for: sockets, other outgoing streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Lane
from atoll.crypto.identity import Identity, PublicIdentity, libp2p_public_key, no_peer_known
from atoll.crypto.noise_pattern import HandshakeRole
from atoll.crypto.session_tickets import TicketStore
from atoll.runtime.network.secure_channel import (
    FRAME_MAX,
    ChannelOpened,
    RecordOpener,
    RecordSealer,
    ServedNonMember,
)
from atoll.runtime.network.stream_handlers import (
    IncomingStream,
    ServedStream,
    ServedStreams,
    StreamHandler,
    StreamHandlers,
)
from atoll.wire.libp2p import identify, multiaddr
from atoll.wire.libp2p.connection import CONTROL_PROTOCOL, Libp2pConnection, Libp2pTerms
from atoll.wire.libp2p.events import (
    ConnectionEvent,
    ConnectionReady,
    GoAwayReceived,
    PingAnswered,
    StreamData,
    StreamHalfClosed,
    StreamOpened,
    StreamReset,
)
from atoll.wire.libp2p.framing import LengthPrefixedFrames, frame
from atoll.wire.libp2p.yamux import QUEUED_STREAM_MAX

IDENTIFY_STREAMS_MAX = 2  # per connection; each is closed after its reply
AGENT = "atoll"


class Libp2pSecurity:
    """`network` is what all members know (a genesis digest); `known` is the agreed membership."""

    def __init__(
        self,
        identity: Identity,
        network: bytes,
        *,
        known: Callable[[PeerId], PublicIdentity | None] = no_peer_known,
        foreign: bool = False,
    ) -> None:
        self.handlers = StreamHandlers()
        self.handlers.register(identify.PROTOCOL, StreamHandler(self._serve_identify, IDENTIFY_STREAMS_MAX))
        self.tickets = TicketStore(time.monotonic)
        self._terms = Libp2pTerms(
            identity, network, known=known, foreign=foreign, speaks=self._is_served, tickets=self.tickets
        )
        self._addresses: tuple[bytes, ...] = ()

    def listening(self, addresses: list[str]) -> None:
        self._addresses = tuple(multiaddr.to_bytes(address) for address in addresses)

    def dialing(self, lane: Lane, expected: PeerId | None) -> _Libp2pSession:
        return _Libp2pSession(
            Libp2pConnection(HandshakeRole.INITIATOR, self._terms, lane=lane, expected=expected),
            self.handlers,
            self.tickets,
        )

    def accepting(self) -> _Libp2pSession:
        return _Libp2pSession(Libp2pConnection(HandshakeRole.RESPONDER, self._terms), self.handlers, self.tickets)

    def forget(self, peer: PeerId) -> None:
        self.tickets.discard(peer)

    def _is_served(self, protocol: str) -> bool:
        return protocol == CONTROL_PROTOCOL or protocol in self.handlers

    def _serve_identify(self, request: IncomingStream) -> ServedStream:
        message = identify.IdentifyMessage(
            public_key=libp2p_public_key(self._terms.identity.public.ed25519),
            listen_addresses=self._addresses,
            protocols=(CONTROL_PROTOCOL, *self.handlers.protocols),
            observed_address=multiaddr.to_bytes(request.remote_address) if request.remote_address else b"",
            protocol_version="atoll/1",
            agent_version=AGENT,
        )
        return ServedStream(identify.encode(message), None)


class _Libp2pSession:
    def __init__(self, connection: Libp2pConnection, handlers: StreamHandlers, tickets: TicketStore) -> None:
        self._connection, self._tickets = connection, tickets
        self._served = ServedStreams(handlers)
        self._remote_address = ""
        self._ready: ConnectionReady | None = None
        self._dialed_stream: int | None = None  # the control stream while it is negotiated
        self._control: int | None = None
        self._frames = LengthPrefixedFrames(limit=FRAME_MAX)

    # ---- what the control channel uses ----

    def start(self, remote_address: str) -> None:
        self._remote_address = remote_address  # the connection has its first bytes ready from the beginning

    def receive(self, data: memoryview) -> list[ChannelOpened | ServedNonMember | bytes]:
        items: list[ChannelOpened | ServedNonMember | bytes] = []
        for event in self._connection.receive(data):
            self._on_event(event, items)
        return items

    def send(self, message: bytes) -> None:
        assert self._control is not None
        sent = self._connection.send(self._control, frame(message, limit=FRAME_MAX))
        assert sent, "callers check `waiting_bytes` first"

    def outgoing(self) -> bytes:
        return b"".join(self._connection.take_outgoing())

    @property
    def waiting_bytes(self) -> int:
        return QUEUED_STREAM_MAX - self._connection.room(self._control) if self._control is not None else 0

    @property
    def session_id(self) -> bytes:
        assert self._ready is not None
        return self._ready.established.handshake_hash

    def keep_tickets(self) -> None:
        assert self._ready is not None and self._ready.established.identity is not None
        self._tickets.keep(self._ready.established)

    def boxes(self) -> tuple[RecordSealer, RecordOpener, bytes]:
        assert self._ready is not None and self._ready.lane is Lane.BULK
        established = self._ready.established
        return established.bulk_send, established.bulk_receive, self._ready.rest

    # ---- events of the connection ----

    def _on_event(self, event: ConnectionEvent, items: list[ChannelOpened | ServedNonMember | bytes]) -> None:
        match event:
            case ConnectionReady(lane, established):
                self._ready = event
                if lane is Lane.BULK:
                    items.append(ChannelOpened(established.peer, Lane.BULK))
                elif established.identity is None:
                    items.append(ServedNonMember(established.peer))
                elif established.role is HandshakeRole.INITIATOR:
                    self._dialed_stream = self._connection.open_stream(CONTROL_PROTOCOL)
            case StreamOpened(stream, protocol):
                if protocol == CONTROL_PROTOCOL:
                    self._on_control_stream(stream, items)
                else:
                    self._serve(stream, protocol)
            case StreamData(stream, data):
                self._connection.consumed(stream, len(data))
                if stream == self._control:
                    items.extend(self._frames.receive(data))
                elif (reply := self._served.receive(stream, data)) and not self._connection.send(stream, reply):
                    self._reset(stream)  # no room: the remote sends faster than it reads the replies
            case StreamHalfClosed(stream) | StreamReset(stream):
                if stream in (self._control, self._dialed_stream):
                    raise ConnectionResetError("the control stream ended")
                self._served.discard(stream)
                self._connection.close(stream)
            case GoAwayReceived() | PingAnswered():
                pass  # existing streams go on; this peer sends no pings

    def _on_control_stream(self, stream: int, items: list[ChannelOpened | ServedNonMember | bytes]) -> None:
        """The dialer opens it, once; a foreign peer never does."""
        assert self._ready is not None
        established = self._ready.established
        if stream == self._dialed_stream:
            self._dialed_stream = None
        elif (
            self._control is not None or established.identity is None or established.role is HandshakeRole.INITIATOR
        ):
            raise PeerFault(established.peer, "opened a control stream without the right to")
        self._control = stream
        items.append(ChannelOpened(established.peer, Lane.CONTROL))

    def _serve(self, stream: int, protocol: str) -> None:
        assert self._ready is not None
        established = self._ready.established
        request = IncomingStream(established.peer, established.identity is not None, self._remote_address)
        served = self._served.open(stream, protocol, request)
        if served is None or (served.first and not self._connection.send(stream, served.first)):
            self._reset(stream)
        elif served.receive is None:
            self._connection.close(stream)

    def _reset(self, stream: int) -> None:
        self._served.discard(stream)
        self._connection.reset(stream)
