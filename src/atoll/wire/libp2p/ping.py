"""Ping protocol `/ipfs/ping/1.0.0`: echo of 32-byte payloads (libp2p/specs ping/ping.md).

Invariants: only whole payloads are echoed, unchanged, however the stream was cut.
Not responsible for: sending pings.
"""

from __future__ import annotations

from atoll.wire.libp2p.varint import Bytes

PROTOCOL = "/ipfs/ping/1.0.0"
PAYLOAD_BYTES = 32
STREAMS_MAX = 2  # "The listening peer SHOULD accept at most two streams per peer"


class PingResponder:
    """The listening side of one stream."""

    def __init__(self) -> None:
        self._part = bytearray()

    def receive(self, data: Bytes) -> bytes:
        """Return the reply: every whole payload, in order."""
        self._part += data
        whole = len(self._part) // PAYLOAD_BYTES * PAYLOAD_BYTES
        answer = bytes(self._part[:whole])
        del self._part[:whole]
        return answer
