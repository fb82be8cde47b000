r"""multistream-select 1.0: negotiation of the next protocol on a byte stream.

Driving contract: pass received bytes to `receive` until a step has an outcome, and write each `reply` first.
After PeerFault or an outcome, drop the machine.

A message is `<uvarint length><text>\n`, and the length counts the newline (libp2p/specs connections,
"multistream-select"). Both ends first send `/multistream/1.0.0`. The dialer proposes; the listener echoes the
proposal or answers `na`.

Invariants:
- Bytes after the agreement are returned unchanged as `rest`; at most one incomplete message is held.
- No data is sent before the agreement.
- Protocols are never listed: `ls` is answered with `na`.
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
PROPOSALS_MAX = 32  # refused proposals per dialer; more are a scan


class NegotiationStep(NamedTuple):
    """Result of received bytes: the reply, and the outcome if the negotiation has ended."""

    reply: bytes
    agreed: str | None = None
    rest: bytes = b""  # first bytes of the agreed protocol
    refused: bool = False  # the listener speaks none of the dialer's protocols


def message(text: str) -> bytes:
    line = text.encode() + b"\n"
    assert len(line) <= MESSAGE_MAX and text.count("\n") == 0
    return varint.encode(len(line)) + line


class MultistreamDialer:
    """Dialing end: proposes protocols in the order of preference."""

    def __init__(self, protocols: Sequence[str], who: str = "") -> None:
        assert protocols
        self._protocols = list(protocols)
        self._lines = _LineReader(who)
        self._who = who
        self.refusals = 0

    def start(self) -> bytes:
        """Return the header and the first proposal together, which saves a round trip."""
        return message(HEADER) + message(self._protocols[0])

    def receive(self, data: Bytes) -> NegotiationStep:
        reply = b""
        for line in self._lines.feed(data):
            if self._lines.is_header(line):
                continue
            if line == self._protocols[0]:
                return NegotiationStep(reply, agreed=line, rest=self._lines.rest())
            if line != NOT_AVAILABLE:
                raise PeerFault(self._who, "answers a proposal with another protocol", line.encode()[:64])
            self._protocols.pop(0)
            self.refusals += 1
            if not self._protocols:
                return NegotiationStep(reply, refused=True)
            reply += message(self._protocols[0])
        return NegotiationStep(reply)


class MultistreamListener:
    """Listening end: accepts the first proposal with `speaks(protocol)`."""

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
                raise PeerFault(self._who, f"proposes more than {PROPOSALS_MAX} protocols")
            reply += message(NOT_AVAILABLE)
        return NegotiationStep(reply)


class _LineReader:
    """Splitter of one direction into lines; the first line must be the header."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._buffer = bytearray()
        self._greeted = False

    def feed(self, data: Bytes) -> Iterator[str]:
        self._buffer += data
        while (line := self._next()) is not None:
            yield line

    def is_header(self, line: str) -> bool:
        """Whether this is the first line. Raises PeerFault if it is not the header, as the spec requires."""
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
            raise PeerFault(self._who, f"negotiation message of {length} bytes, allowed are 1 to {MESSAGE_MAX}")
        if len(self._buffer) < begin + length:
            return None
        line = bytes(self._buffer[begin : begin + length])
        del self._buffer[: begin + length]
        if not line.endswith(b"\n"):
            raise PeerFault(self._who, "negotiation message without its newline", line[:64])
        try:
            return line[:-1].decode()
        except UnicodeDecodeError:
            raise PeerFault(self._who, "negotiation message is not UTF-8", line[:64]) from None
