r"""multistream-select 1.0: two ends of a byte stream agree on the protocol spoken next.

A message is `<uvarint length><text>\n`, the length counting the newline (libp2p/specs connections, "multistream-
select"). Both ends first say `/multistream/1.0.0`; the dialer proposes, the listener echoes or answers `na`.
Promises: bytes after the agreement come back untouched as `rest`; at most one incomplete message is held.
Never speaks optimistically (no data before the agreement), never lists its protocols: `ls` is answered with `na`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from atoll.base.errors import PeerFault
from atoll.wire.libp2p import varint
from atoll.wire.libp2p.varint import Bytes

HEADER = "/multistream/1.0.0"
NOT_AVAILABLE = "na"
MESSAGE_MAX = 1024  # bytes; the bound of go-multistream and js-libp2p, a protocol id is about 20
PROPOSALS_MAX = 32  # a dialer that guesses longer than this is scanning


class NegotiationStep(NamedTuple):
    """What came of some bytes: what to answer, and the end of the negotiation if it was reached."""

    reply: bytes
    agreed: str | None = None
    rest: bytes = b""  # what came behind the agreement: the first bytes of the agreed protocol
    refused: bool = False  # the listener speaks none of the dialer's protocols


def message(text: str) -> bytes:
    line = text.encode() + b"\n"
    assert len(line) <= MESSAGE_MAX and text.count("\n") == 0
    return varint.encode(len(line)) + line


class MultistreamDialer:
    """Proposes protocols in the order of preference."""

    def __init__(self, protocols: Sequence[str], who: str = "") -> None:
        assert protocols
        self._protocols = list(protocols)
        self._lines = _LineReader(who)
        self._who = who
        self.refusals = 0

    def start(self) -> bytes:
        """The header and the first proposal in one flight: this saves a round trip."""
        return message(HEADER) + message(self._protocols[0])

    def receive(self, data: Bytes) -> NegotiationStep:
        reply = b""
        for line in self._lines.feed(data):
            if self._lines.is_header(line):
                continue
            if line == self._protocols[0]:
                return NegotiationStep(reply, agreed=line, rest=self._lines.rest())
            if line != NOT_AVAILABLE:
                raise PeerFault(self._who, "answered a proposal with another protocol", line.encode()[:64])
            self._protocols.pop(0)
            self.refusals += 1
            if not self._protocols:
                return NegotiationStep(reply, refused=True)
            reply += message(self._protocols[0])
        return NegotiationStep(reply)


class MultistreamListener:
    """Accepts the first proposal that `speaks` holds for."""

    def __init__(self, speaks: Callable[[str], bool], who: str = "") -> None:
        self._speaks = speaks
        self._lines = _LineReader(who)
        self._who = who
        self.refusals = 0

    def receive(self, data: Bytes) -> NegotiationStep:
        reply = b""
        for line in self._lines.feed(data):
            if self._lines.is_header(line):
                reply += message(HEADER)  # at once: a dialer may wait for it before it proposes
                continue
            if self._speaks(line):
                return NegotiationStep(reply + message(line), agreed=line, rest=self._lines.rest())
            self.refusals += 1
            if self.refusals > PROPOSALS_MAX:
                raise PeerFault(self._who, f"proposed more than {PROPOSALS_MAX} protocols")
            reply += message(NOT_AVAILABLE)
        return NegotiationStep(reply)


class _LineReader:
    """Cuts one direction into its lines, of which the first must be the header."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._buffer = bytearray()
        self._greeted = False

    def feed(self, data: Bytes) -> Iterator[str]:
        self._buffer += data
        while (line := self._next()) is not None:
            yield line

    def is_header(self, line: str) -> bool:
        """True for the first line. Spec: whoever begins with anything else is not spoken to."""
        if self._greeted:
            return False
        if line != HEADER:
            raise PeerFault(self._who, "does not speak multistream-select 1.0", line.encode()[:64])
        self._greeted = True
        return True

    def rest(self) -> bytes:
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _next(self) -> str | None:
        head = varint.decode(self._buffer, 0, self._who)
        if head is None:
            return None
        length, begin = head
        if not 0 < length <= MESSAGE_MAX:
            raise PeerFault(self._who, f"a negotiation message of {length} bytes, allowed are 1 to {MESSAGE_MAX}")
        if len(self._buffer) < begin + length:
            return None
        line = bytes(self._buffer[begin : begin + length])
        del self._buffer[: begin + length]
        if not line.endswith(b"\n"):
            raise PeerFault(self._who, "a negotiation message without its newline", line[:64])
        try:
            return line[:-1].decode()
        except UnicodeDecodeError:
            raise PeerFault(self._who, "a negotiation message is not UTF-8", line[:64]) from None
