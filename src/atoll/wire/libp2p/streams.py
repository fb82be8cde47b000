"""Stream protocol negotiation: yamux streams with multistream-select at the head of each stream.

Driving contract: pass received bytes to `receive` in order. Then write what `take_outgoing` returns.
After PeerFault the session is over.

(libp2p/specs connections, "Opening New Streams Over a Connection".)
Invariants:
- No data event precedes `StreamOpened` or contains bytes of the negotiation.
- A remote that proposes an unknown protocol is refused and loses only that stream.
- Local data waits for the agreement, one round trip per stream.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import PeerFault
from atoll.wire.libp2p import multistream
from atoll.wire.libp2p.events import (
    StreamData,
    StreamEvent,
    StreamHalfClosed,
    StreamOpened,
    StreamReset,
    UnnegotiatedStreamOpened,
)
from atoll.wire.libp2p.varint import Bytes
from atoll.wire.libp2p.yamux import YamuxMuxer


class NegotiatedYamuxSession:
    """Yamux session with a protocol negotiation per stream."""

    def __init__(self, dialer: bool, speaks: Callable[[str], bool], who: str = "") -> None:
        self._mux, self._speaks, self._who = YamuxMuxer(dialer, who), speaks, who
        self._negotiating: dict[int, multistream.MultistreamDialer | multistream.MultistreamListener] = {}

        # calls that need no negotiation
        self.close, self.consumed = self._mux.close, self._mux.consumed
        self.ping, self.go_away, self.take_outgoing = self._mux.ping, self._mux.go_away, self._mux.take_outgoing

    def open(self, *protocols: str) -> int | None:
        """Open a stream for the first of these protocols that the remote speaks; None: no more streams allowed.

        `StreamOpened` follows when it may be used, `StreamReset` if the remote speaks none of them.
        """
        stream = self._mux.open()
        if stream is not None:
            dialer = multistream.MultistreamDialer(protocols, self._who)
            self._negotiating[stream] = dialer
            self._mux.send(stream, dialer.start())
        return stream

    def room(self, stream: int) -> int:
        """Number of bytes that `send` accepts now."""
        return 0 if stream in self._negotiating else self._mux.room(stream)

    def send(self, stream: int, data: Bytes) -> bool:
        """Queue all of `data` without copying; False if the stream is not open or its remote does not read."""
        return stream not in self._negotiating and self._mux.send(stream, data)

    def reset(self, stream: int) -> None:
        self._negotiating.pop(stream, None)
        self._mux.reset(stream)

    def receive(self, data: Bytes) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        gone: set[int] = set()  # streams dropped below, with possible later events in this batch
        for event in self._mux.receive(data):
            match event:
                case UnnegotiatedStreamOpened(stream):
                    self._negotiating[stream] = multistream.MultistreamListener(self._speaks, self._who)
                case StreamData(stream) | StreamHalfClosed(stream) | StreamReset(stream) if stream in gone:
                    pass
                case StreamData(stream, piece) if stream in self._negotiating:
                    if not self._negotiate(stream, piece, events):
                        gone.add(stream)
                case StreamHalfClosed(stream) | StreamReset(stream) if stream in self._negotiating:
                    self._drop_stream(stream, "the remote ended it before a protocol was agreed", events)
                    gone.add(stream)
                case _:
                    events.append(event)
        return events

    def _negotiate(self, stream: int, data: bytes, events: list[StreamEvent]) -> bool:
        """Advance the negotiation of a stream. Returns False if the stream was dropped."""
        machine = self._negotiating[stream]
        try:
            step = machine.receive(data)
        except PeerFault:
            # go-libp2p sends data right after a proposal that it expects to be accepted. After a refusal that data
            # is noise and costs only the stream. Noise from the start is a fault.
            if not machine.refusals:
                raise
            self._drop_stream(stream, "data followed a refused proposal", events)
            return False
        if step.refused or not self._mux.send(stream, step.reply):
            self._drop_stream(stream, "the remote speaks none of the proposed protocols", events)
            return False
        self._mux.consumed(stream, len(data) - len(step.rest))
        if step.agreed is not None:
            del self._negotiating[stream]
            events.append(
                StreamOpened(stream, step.agreed, by_remote=isinstance(machine, multistream.MultistreamListener))
            )
            if step.rest:
                events.append(StreamData(stream, step.rest))
        return True

    def _drop_stream(self, stream: int, why: str, events: list[StreamEvent]) -> None:
        """Drop a stream; only streams that the caller opened get an event."""
        if isinstance(self._negotiating[stream], multistream.MultistreamDialer):
            events.append(StreamReset(stream, why))
        self.reset(stream)
