"""`/ipfs/ping/1.0.0`: 32 bytes there, the same 32 bytes back (libp2p/specs ping/ping.md).

Promises: an answer is compared byte by byte with what was asked. Never measures time and never draws its own
payload: the host does both, and hands the payload in.
"""

from __future__ import annotations

from atoll.base.errors import PeerFault
from atoll.wire.libp2p.varint import Bytes

PROTOCOL = "/ipfs/ping/1.0.0"
PAYLOAD_BYTES = 32
STREAMS_MAX = 2  # "The listening peer SHOULD accept at most two streams per peer"


class Echo:
    """The listening side of one stream."""

    def __init__(self) -> None:
        self._part = bytearray()

    def receive(self, data: Bytes) -> bytes:
        """What to send back: every whole payload, in order."""
        self._part += data
        whole = len(self._part) // PAYLOAD_BYTES * PAYLOAD_BYTES
        answer = bytes(self._part[:whole])
        del self._part[:whole]
        return answer


class Pinger:
    """The dialing side of one stream: one question at a time."""

    def __init__(self, who: str = "") -> None:
        self._who = who
        self._asked = b""
        self._part = bytearray()

    def ask(self, payload: bytes) -> bytes:
        """What to send."""
        assert len(payload) == PAYLOAD_BYTES and not self._asked
        self._asked = payload
        return payload

    def receive(self, data: Bytes) -> bool:
        """True when the answer is complete."""
        self._part += data
        if len(self._part) > len(self._asked) or not self._asked.startswith(self._part):
            raise PeerFault(self._who, "answered a ping with other bytes", bytes(self._part[:PAYLOAD_BYTES]))
        if len(self._part) < len(self._asked):
            return False
        self._asked = b""
        self._part.clear()
        return True
