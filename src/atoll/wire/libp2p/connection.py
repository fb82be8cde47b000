"""libp2p connection as a sans-IO machine: negotiation, Noise handshake, then streams or the bulk lane.

Driving contract: pass received bytes to `receive`, in order and in pieces of any size.
Write what `take_outgoing` returns after creation and after every other call. After an exception, close the socket.

    raw       multistream-select: /atoll/noise-xxhfs/1, or /noise if the run's policy allows foreign peers
              /atoll/resume/1 precedes them if the dialer holds a ticket for the dialed peer; where the listener
              refuses the ticket, the hybrid handshake follows
    Noise     handshake messages, then sealed frames, both with two-byte lengths
    inside    multistream-select: /yamux/1.0.0 and streams, or /atoll/bulk/1 and the caller takes over; skipped
              if both ends announced yamux in the handshake (libp2p/specs inlined-muxer-negotiation)

Invariants:
- `ConnectionReady` precedes any stream.
- For any bytes, `receive` returns events or raises one PeerFault, which ends only this connection.
- One remote can occupy at most a handshake message or a sealed frame (64 KiB), plus the limits of `yamux`.
Not responsible for: clocks (the driver times out half-open handshakes), serving protocols.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Lane
from atoll.crypto import noise
from atoll.crypto.frames import FRAME_PLAIN_MAX, FrameDecoder, framed
from atoll.crypto.identity import Identity, PublicIdentity, no_peer_known
from atoll.crypto.noise import SessionTicket
from atoll.crypto.noise_pattern import CLASSICAL, HYBRID, PREFERENCE, RESUMPTION, HandshakeRole
from atoll.crypto.seal import AeadAlgorithm, ConnectionKeysExhausted, SendingCipher
from atoll.crypto.session_tickets import TicketStore
from atoll.wire.libp2p import multistream, yamux
from atoll.wire.libp2p.events import ConnectionEvent, ConnectionReady
from atoll.wire.libp2p.streams import NegotiatedYamuxSession
from atoll.wire.libp2p.varint import Bytes
from atoll.wire.libp2p.yamux_frame import GO_AWAY, NORMAL, PROTOCOL_ERROR, SESSION, pack

CONTROL_PROTOCOL = "/atoll/control/1"  # stream of messages with `framing.frame`
BULK_PROTOCOL = "/atoll/bulk/1"  # whole connection of records sealed with the bulk keys, without a muxer
TICKET_ID_BYTES = 32
RESUMPTION_FIRST_BYTES = TICKET_ID_BYTES + 48  # ticket id, ephemeral key, tag
OUTGOING_BUDGET = 256 * 1024  # bytes framed per `take_outgoing`; framed bytes cannot be overtaken any more


def speaks_nothing(protocol: str) -> bool:
    return False


@dataclass(frozen=True)
class Libp2pTerms:
    """Settings of all connections of one peer."""

    identity: Identity
    network: bytes  # network name mixed into hybrid handshakes: peers of other networks fail at the first tag
    known: Callable[[PeerId], PublicIdentity | None] = no_peer_known  # the agreed membership
    foreign: bool = False  # whether peers without a post-quantum identity are accepted, by libp2p's own Noise
    speaks: Callable[[str], bool] = speaks_nothing  # whether streams of a protocol are accepted
    aeads: tuple[AeadAlgorithm, ...] = tuple(AeadAlgorithm)  # ciphers for the bulk lane
    tickets: TicketStore | None = None  # None: no session is resumed


class Libp2pConnection:
    """One end of a connection. Call `take_outgoing` after creation and after every other call."""

    def __init__(
        self, role: HandshakeRole, terms: Libp2pTerms, *, lane: Lane = Lane.CONTROL, expected: PeerId | None = None
    ) -> None:
        """Create one end. `lane` and `expected` are set by the dialer: the purpose, and the peer that it dials."""
        self._role, self._terms, self._lane, self._expected = role, terms, lane, expected
        self._suites = self._allowed_suites()
        self._who: str = expected or ""
        self._out: list[Bytes] = []
        self._frames = FrameDecoder(self._who)
        self._handshake: noise.NoiseHandshake | None = None
        self._established: noise.NoiseHandshakeResult | None = None
        self._streams: NegotiatedYamuxSession | None = None
        # the ticket that this dialer presents; used up even if the connection fails
        tickets = terms.tickets if lane is Lane.CONTROL else None
        self._ticket = tickets.take_for(expected) if tickets is not None and expected else None
        spoken = (RESUMPTION.protocol, *self._suites) if tickets is not None else self._suites
        self._select = self._selection(spoken if self._ticket else self._suites, spoken.__contains__)
        self._step = self._select_security
        if isinstance(self._select, multistream.MultistreamDialer):
            self._out.append(self._select.start())

    # ---- streams --------------------------------------------------------------------------------------------
    # A dead connection opens no stream, accepts no data and ignores other calls. Its user learns of the end once,
    # by PeerFault or from the socket.

    def open_stream(self, *protocols: str) -> int | None:
        """See `NegotiatedYamuxSession.open`."""
        return self._streams.open(*protocols) if self._streams else None

    def room(self, stream: int) -> int:
        return self._streams.room(stream) if self._streams else 0

    def send(self, stream: int, data: Bytes) -> bool:
        """See `NegotiatedYamuxSession.send`."""
        return self._streams is not None and self._streams.send(stream, data)

    def close(self, stream: int) -> None:
        """Close the local direction of this stream after the queued data."""
        if self._streams:
            self._streams.close(stream)

    def reset(self, stream: int) -> None:
        """Reset the stream in both directions. Events already returned may still name it."""
        if self._streams:
            self._streams.reset(stream)

    def consumed(self, stream: int, count: int) -> None:
        """Report `count` processed bytes of `StreamData`: the remote may send as many more."""
        if self._streams:
            self._streams.consumed(stream, count)

    def ping(self, value: int) -> None:
        """Send a yamux ping, ahead of all queued data. `PingAnswered(value)` follows."""
        if self._streams:
            self._streams.ping(value)

    def go_away(self, reason: int = NORMAL) -> None:
        """Announce that no more streams are accepted, before closing the socket."""
        if self._streams:
            self._streams.go_away(reason)

    # ---- bytes ----------------------------------------------------------------------------------------------

    def take_outgoing(self, budget: int = OUTGOING_BUDGET) -> list[Bytes]:
        """Return about `budget` bytes to write to the socket. Call it again after the socket has accepted them.

        Like `receive` it raises ConnectionKeysExhausted when the keys are used up (after 2^32 frames): open a new
        connection.
        """
        out, self._out = self._out, []
        if self._streams and self._established and (frames := self._streams.take_outgoing(budget)):
            out += _sealed(self._established.send, frames)
        return out

    def receive(self, data: Bytes) -> list[ConnectionEvent]:
        """Process bytes from the socket, in any pieces; they are copied before this returns.

        A fault discards the events of the same bytes, also those before the fault.
        """
        events: list[ConnectionEvent] = []
        try:
            self._step(data, events)
        except PeerFault:
            self._terminate()
            raise
        return events

    def _select_security(self, data: Bytes, events: list[ConnectionEvent]) -> None:
        step = self._select.receive(data)
        self._out.append(step.reply)
        if step.refused:
            raise PeerFault(self._who, f"remote accepts none of {', '.join(self._suites)}")
        if step.agreed is None:
            return
        if step.agreed == RESUMPTION.protocol:
            if self._ticket is not None:
                self._handshake = self._begin_resumption(self._ticket)
                self._out.append(framed(self._ticket.identifier + self._handshake.start()))
            self._step = self._continue_resumption
            self._continue_resumption(step.rest, events)
        else:
            self._start_handshake(step.agreed, step.rest, events)

    def _start_handshake(self, protocol: str, rest: Bytes, events: list[ConnectionEvent]) -> None:
        self._handshake = self._begin_handshake(protocol)
        if self._role is HandshakeRole.INITIATOR:
            self._out.append(framed(self._handshake.start()))
        self._step = self._continue_handshake
        self._continue_handshake(rest, events)

    def _continue_resumption(self, data: Bytes, events: list[ConnectionEvent]) -> None:
        """Listener: accept or refuse the ticket. Dialer: read which it is."""
        self._frames.feed(data)
        if self._handshake is not None:
            frame = self._frames.next_frame(self._handshake.next_bytes_max)
        else:
            frame = self._frames.next_frame(RESUMPTION_FIRST_BYTES)
        if frame is None:
            return
        if self._handshake is None:
            assert self._terms.tickets is not None
            ticket = self._terms.tickets.find(frame[:TICKET_ID_BYTES])
            if ticket is None:
                self._out.append(framed(b""))
                return self._start_handshake(HYBRID.protocol, b"", events)
            self._handshake = self._begin_resumption(ticket)
            reply = self._handshake.receive(frame[TICKET_ID_BYTES:])
            self._terms.tickets.spend(ticket)
            assert reply is not None
            self._out.append(framed(reply))
        elif not frame:
            return self._start_handshake(HYBRID.protocol, b"", events)
        else:
            self._handshake.receive(frame)
        assert self._handshake.result is not None
        self._begin_inside(self._handshake.result, events)

    def _continue_handshake(self, data: Bytes, events: list[ConnectionEvent]) -> None:
        assert self._handshake is not None
        self._frames.feed(data)
        while self._handshake.result is None:
            frame = self._frames.next_frame(self._handshake.next_bytes_max)
            if frame is None:
                return
            reply = self._handshake.receive(frame)
            if reply is not None:
                self._out.append(framed(reply))
        self._begin_inside(self._handshake.result, events)

    def _begin_inside(self, established: noise.NoiseHandshakeResult, events: list[ConnectionEvent]) -> None:
        self._established, self._who, self._handshake = established, established.peer, None
        if established.muxers:
            # spec: both lists are known to both ends, so the choice is made; without a common one it MUST fail
            if yamux.PROTOCOL not in established.muxers:
                raise PeerFault(self._who, f"remote multiplexes only by {', '.join(established.muxers)[:200]}")
            self._begin_streams(b"", events)
        else:
            hybrid = established.suite is HYBRID
            wished = BULK_PROTOCOL if self._lane is Lane.BULK else yamux.PROTOCOL
            offered = {yamux.PROTOCOL, BULK_PROTOCOL} if hybrid else {yamux.PROTOCOL}
            self._select = self._selection((wished,), offered.__contains__)
            if isinstance(self._select, multistream.MultistreamDialer):
                self._seal(self._select.start())
            self._step = self._select_inside
            self._select_inside(b"", events)

    def _select_inside(self, data: Bytes, events: list[ConnectionEvent]) -> None:
        established = self._established
        assert established is not None
        self._frames.feed(data)
        while (frame := self._frames.next_frame()) is not None:
            step = self._select.receive(established.receive.open(frame))
            self._seal(step.reply)
            if step.refused:
                raise PeerFault(self._who, "remote accepts neither streams nor bulk on this connection")
            if step.agreed == BULK_PROTOCOL:
                if step.rest:
                    raise PeerFault(self._who, "bulk data in a sealed frame of the negotiation")
                self._step = self._ignore
                events.append(ConnectionReady(Lane.BULK, established, self._frames.rest()))
                return
            if step.agreed is not None:
                return self._begin_streams(step.rest, events)

    def _begin_streams(self, rest: bytes, events: list[ConnectionEvent]) -> None:
        assert self._established is not None
        self._streams = NegotiatedYamuxSession(self._role is HandshakeRole.INITIATOR, self._terms.speaks, self._who)
        events.append(ConnectionReady(Lane.CONTROL, self._established))
        events.extend(self._streams.receive(rest))
        self._step = self._receive_sealed
        self._receive_sealed(b"", events)

    def _receive_sealed(self, data: Bytes, events: list[ConnectionEvent]) -> None:
        assert self._established is not None and self._streams is not None
        self._frames.feed(data)
        while (frame := self._frames.next_frame()) is not None:
            events.extend(self._streams.receive(self._established.receive.open(frame)))

    def _ignore(self, data: Bytes, events: list[ConnectionEvent]) -> None:
        """Drop bytes after a fault, or after the caller took over the connection."""

    # ---- setup and end --------------------------------------------------------------------------------------

    def _allowed_suites(self) -> tuple[str, ...]:
        """Suites to offer, best first. Members and bulk lanes never use the classical suite."""
        member = self._expected is not None and self._terms.known(self._expected) is not None
        if self._terms.foreign and not member and self._lane is Lane.CONTROL:
            return PREFERENCE
        return (HYBRID.protocol,)

    def _selection(
        self, wishes: tuple[str, ...], speaks: Callable[[str], bool]
    ) -> multistream.MultistreamDialer | multistream.MultistreamListener:
        if self._role is HandshakeRole.INITIATOR:
            return multistream.MultistreamDialer(wishes, self._who)
        return multistream.MultistreamListener(speaks, self._who)

    def _begin_resumption(self, ticket: SessionTicket) -> noise.NoiseHandshake:
        terms = self._terms
        return noise.resumption(self._role, terms.identity, ticket, network=terms.network, known=terms.known)

    def _begin_handshake(self, protocol: str) -> noise.NoiseHandshake:
        terms = self._terms
        if protocol == CLASSICAL.protocol:
            return noise.classical(
                self._role, terms.identity, expected=self._expected, known=terms.known, muxers=(yamux.PROTOCOL,)
            )
        return noise.hybrid(
            self._role,
            terms.identity,
            network=terms.network,
            expected=self._expected,
            known=terms.known,
            suites=self._suites,
            aeads=terms.aeads,
        )

    def _seal(self, plain: bytes) -> None:
        assert self._established is not None
        self._out += _sealed(self._established.send, [plain])

    def _terminate(self) -> None:
        """End the connection, with a reason if there is a session (spec yamux, "Session termination")."""
        self._step = self._ignore
        if self._streams is not None:
            self._streams = None
            with contextlib.suppress(ConnectionKeysExhausted):
                self._seal(pack(GO_AWAY, 0, SESSION, PROTOCOL_ERROR))


def _sealed(seal: SendingCipher, pieces: list[Bytes]) -> list[Bytes]:
    """Seal pieces, each at most a frame, into Noise frames; a byte is copied once and encrypted once."""
    out: list[Bytes] = []
    group: list[Bytes] = []
    size = 0
    for piece in (*pieces, b""):
        if size and (not piece or size + len(piece) > FRAME_PLAIN_MAX):
            box = seal.seal(b"".join(group))
            out += [len(box).to_bytes(2, "big"), box]
            group, size = [], 0
        group.append(piece)
        size += len(piece)
    return out
